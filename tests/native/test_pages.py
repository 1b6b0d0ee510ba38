"""Pieces of large pages: apart, aligned, given out again, and no larger than what is asked for."""

from __future__ import annotations

import gc
import itertools
import random
import threading

import numpy as np
import pytest

from soapstone.native import pages
from soapstone.native.arrays import mapping
from soapstone.native.memory import CHECKED, aligned


@pytest.fixture(autouse=True)
def _own_chunks(monkeypatch):
    gc.collect()
    monkeypatch.setattr(pages, "_CHUNKS", [])
    monkeypatch.setattr(pages, "_LARGE", [])


def place(piece):
    return piece.ctypes.data


def test_pieces_lie_apart_on_bounds_of_cache_lines():
    sizes = [pages.LEAST, pages.LEAST + 1, 100_000, pages.MOST - 1, 1 << 20] * 6
    pieces = [pages.piece(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.nbytes == sizes[number]
        assert place(piece) % pages.LINE == 0
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    ends = sorted((place(piece), piece.nbytes) for piece in pieces)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))


def test_what_nobody_has_is_given_out_again():
    first = pages.piece(300_000)
    where, part = place(first), first[100:200]
    del first
    gc.collect()
    assert place(pages.piece(300_000)) != where  # a view of it is there still
    del part
    gc.collect()
    assert place(pages.piece(300_000)) == where


def test_pieces_side_by_side_become_one():
    pieces = [pages.piece(pages.LEAST) for _ in range(40)]
    where = place(pieces[10])
    del pieces[10:30]
    gc.collect()
    assert place(pages.piece(20 * pages.LEAST)) == where


def test_chunks_that_nobody_uses_go():
    pieces = [pages.piece(3 << 20) for _ in range(12)]
    assert len(pages._CHUNKS) > 1
    del pieces
    gc.collect()
    kept = pages.piece(pages.LEAST)
    assert len(pages._CHUNKS) == 1
    assert kept.nbytes == pages.LEAST


def test_threads_get_pieces_of_their_own():
    failed = []

    def work(seed):
        choice = random.Random(seed)
        held = []
        for number in range(200):
            piece = pages.piece(choice.randrange(pages.LEAST, 1 << 18))
            piece[:] = seed
            held.append(piece)
            if number % 3 == 0:
                held.pop(choice.randrange(len(held)))
            if any(each[0] != seed or each[-1] != seed for each in held):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.skipif(CHECKED, reason="checked memory has guard zones of its own")
def test_aligned_memory_is_of_pages_where_pages_are_larger():
    made = aligned(100_000)
    made[:] = 7
    chunk = pages._CHUNKS[0]
    assert chunk.first <= place(made) < chunk.first + (1 << 24)
    del made
    gc.collect()
    assert not aligned(100_000, zero=True).any()
    assert not np.shares_memory(aligned(100), aligned(8 << 20))


def test_a_large_piece_has_pages_of_its_own():
    piece = pages.piece(pages.MOST + 100, zero=True)
    assert not piece.any()
    assert piece.nbytes == pages.MOST + 100
    assert place(piece) % pages.LINE == 0
    assert mapping(piece) is None  # it is no file's: nothing may let go of what it holds
    assert not pages._CHUNKS
    piece[:] = 7
    part = piece[100:200]
    del piece
    gc.collect()
    assert (part == 7).all()
    other = pages.piece(pages.MOST)
    other[:] = 3
    assert (part == 7).all()


def test_a_large_piece_that_nobody_has_is_given_out_again_for_one_hardly_smaller():
    first = pages.piece(2 * pages.MOST)
    first[:] = 7
    where = place(first)
    del first
    gc.collect()
    small = pages.piece(pages.MOST)
    assert place(small) != where
    second = pages.piece(2 * pages.MOST - 100, zero=True)
    assert place(second) == where
    assert not second.any()


def test_large_pieces_are_kept_within_bounds():
    pieces = [pages.piece(pages._KEPT // 4) for _ in range(6)]
    del pieces
    gc.collect()
    pages.piece(pages.LEAST)
    assert sum(large.nbytes for large in pages._LARGE) == pages._KEPT
    assert pages.piece(2 * pages._KEPT).nbytes == 2 * pages._KEPT
    gc.collect()
    pages.piece(pages.LEAST)
    assert sum(large.nbytes for large in pages._LARGE) <= pages._KEPT
