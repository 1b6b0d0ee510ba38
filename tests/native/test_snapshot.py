"""Snapshots of bound entries: another entry made of the data runs alike, or there are no data."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from soapstone import system
from soapstone.cache.objects import LOADED
from soapstone.native import snapshot
from soapstone.native.arrays import start
from soapstone.native.copies import copy
from soapstone.native.entries import noop, sequence
from soapstone.native.memory import (
    CHECKED,
    LINE,
    Entry,
    Scratch,
    aligned,
    aligned_array,
    call,
    pack,
)

pytestmark = pytest.mark.skipif(
    not system.mapped() or CHECKED or sys.platform != "linux",
    reason="a snapshot needs to know what memory there is",
)


def _taken(entry: Entry, **ends: np.ndarray[Any, Any]) -> tuple[snapshot.Data, Any]:
    told, nbytes = snapshot.taken(
        entry, ends, (), None, {each: each for each in LOADED}, lambda *_: "no objects"
    )
    data, pieces = told()
    contents = aligned(nbytes, zero=True)
    for offset, piece in pieces:
        contents[offset : offset + piece.size] = piece
    return data, contents


def _restored(data: snapshot.Data, contents: Any) -> snapshot.Restored:
    return snapshot.restored(data, contents, None, int, lambda *_: None)


def test_an_entry_of_the_data_runs_on_memory_of_its_own() -> None:
    rng = np.random.default_rng(0)
    x, y = (aligned_array((2, 6, 4), np.float32) for _ in range(2))
    constant = rng.standard_normal((2, 6)).astype(np.float32)
    between = aligned_array((4, 2, 6), np.float32).view(Scratch)
    entries = [
        copy(between, x.transpose(2, 0, 1), 1),
        copy(between[0], constant, 1),
        copy(y, between.transpose(1, 2, 0), 1),
    ]
    assert None not in entries
    data, contents = _taken(sequence([each for each in entries if each]), x=x, y=y)
    before = constant.copy()
    constant[:] = 0  # what is taken is as it was
    made = _restored(data, contents)
    for _ in range(2):
        made.ends["x"][:] = rng.standard_normal(x.shape)
        assert call(made.address, made.block) == 0
        np.testing.assert_array_equal(made.ends["y"][:, :, 0], before)
        np.testing.assert_array_equal(made.ends["y"][:, :, 1:], made.ends["x"][:, :, 1:])
    assert not any(np.shares_memory(made.ends[name], each) for name, each in (("x", x), ("y", y)))


def test_addresses_of_what_is_not_known_are_refused() -> None:
    function, array = noop().address, np.zeros(1000)
    with pytest.raises(snapshot.UnknownError, match="what is not known"):
        _taken(Entry(function, pack(start(array))))
    held = np.array([start(array)])  # in an array of words it is one of `array`
    data, contents = _taken(Entry(function, pack(held, array)))
    assert len(data["moved"]) == 1 and contents.nbytes >= array.nbytes
    assert snapshot.held_bytes(data) == contents.nbytes and not contents.any()  # of zeros alone
    _restored(data, contents)
    assert contents.any()  # an address of this process
    snapshot.clear(data["moved"], contents)
    assert not contents.any()
    with pytest.raises(snapshot.UnknownError, match="no words"):
        _taken(Entry(function, pack(held.view(np.float64), array)))
    with pytest.raises(snapshot.UnknownError, match="in no file"):
        _taken(Entry(start(array), pack(array)))


@pytest.mark.parametrize("tail", range(1, 9))
def test_small_arrays_beside_each_other_are_one_piece_with_no_address_between_them(
    tail: int,
) -> None:
    size, address = 56 + tail, np.array([start(np.zeros(9))]).view(np.uint8)
    raw = aligned(16 * LINE, zero=True)
    arrays = [raw[first : first + size] for first in range(0, raw.size, LINE)]
    for number, each in enumerate(arrays):
        each[:] = number
        each[-tail:] = address[:tail] if tail < 8 else 0  # with zeros behind it, maybe an address
    told, _ = snapshot.taken(
        Entry(noop().address, pack(*arrays)),
        *({}, (), None, {each: each for each in LOADED}, lambda *_: "no objects"),
    )
    data, pieces = told()
    assert not data["moved"] and len(pieces) == (16 if 4 < tail < 8 else 1)
    contents = aligned(snapshot.held_bytes(data), zero=True)
    for offset, piece in pieces:
        contents[offset : offset + piece.size] = piece
    for number, each in enumerate(arrays):
        np.testing.assert_array_equal(contents[LINE * number :][:size], each)
