"""The arena planner: no two blocks alive at once share a byte, and the peak is honest."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.runtime.tracing.arena import ALIGNMENT, ArenaPlan, Block, plan


def _check(blocks: list[Block], found: ArenaPlan | None = None) -> None:
    found = found or plan(blocks)
    tops = [0]
    for i, (a, at) in enumerate(zip(blocks, found.offsets)):
        assert at % ALIGNMENT == 0 and at >= 0
        tops.append(int(at) + a.nbytes)
        for b, other in zip(blocks[:i], found.offsets[:i]):
            alive = a.start <= b.end and b.start <= a.end
            apart = at + a.nbytes <= other or other + b.nbytes <= at
            assert apart or not alive or not a.nbytes or not b.nbytes
    assert found.peak_bytes >= max(tops)
    assert found.bound_bytes <= found.peak_bytes
    live = [
        sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in blocks if b.start <= step <= b.end)
        for step in {block.start for block in blocks}
    ]
    assert found.bound_bytes == max(live, default=0)


@pytest.mark.parametrize("seed", range(25))
def test_no_live_overlap_on_random_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(int(rng.integers(1, 80))):
        start = int(rng.integers(0, 60))
        blocks.append(Block(int(rng.integers(0, 5000)), start, start + int(rng.integers(0, 20))))
    _check(blocks)


def test_more_is_tried_to_stay_within_a_limit() -> None:
    fewer = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, 20, 24)
        blocks = [
            Block(int(rng.integers(1, 40)) * 64, int(start), int(start + rng.integers(0, 12)))
            for start in starts
        ]
        free = plan(blocks)
        tight = plan(blocks, free.bound_bytes)
        _check(blocks, tight)
        assert tight.peak_bytes <= free.peak_bytes
        fewer += tight.peak_bytes < free.peak_bytes
    assert fewer


def test_a_chain_reuses_two_buffers() -> None:
    blocks = [Block(1024, step, step + 1) for step in range(50)]
    _check(blocks)
    assert plan(blocks).peak_bytes == 2048


def test_blocks_fill_gaps_left_by_larger_ones() -> None:
    blocks = [Block(4096, 0, 1), Block(1024, 0, 9), Block(2048, 2, 3), Block(2048, 2, 3)]
    assert plan(blocks).peak_bytes == 5120


def test_nothing_needs_nothing() -> None:
    assert plan([]).peak_bytes == 0
    assert plan([Block(0, 0, 5)]).peak_bytes == 0


@pytest.mark.parametrize("block", [Block(-1, 0, 0), Block(1, 3, 2)])
def test_impossible_blocks_are_refused(block: Block) -> None:
    with pytest.raises(ValueError, match="arena block 0"):
        plan([block])


def test_the_same_blocks_get_the_same_plan() -> None:
    rng = np.random.default_rng(3)
    blocks = [Block(int(s), i, i + 3) for i, s in enumerate(rng.integers(1, 999, size=40))]
    assert plan(blocks).offsets.tolist() == plan(list(blocks)).offsets.tolist()
