"""Addresses of arrays: taken in one place, and kept alive by whoever has one."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from soapstone.native import arrays
from soapstone.native.arrays import start
from soapstone.native.entries import bind, native
from soapstone.native.intrinsics import f32p, words
from soapstone.native.memory import (
    CHECKED,
    Address,
    Block,
    address,
    aligned_array,
    extent,
    one_at_a_time,
    pack,
    run,
    scratch,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [each.parent for each in ROOT.glob("*/__init__.py")]
# What makes a number of an object's memory, by attribute or by function, and the files that may:
# `arrays.py` and `pages.py` beside it, and those of libraries' own handles, tables and buffers.
RAW = {
    "ctypes": {"native/arrays.py", "native/pages.py", "native/cuda/arrays.py"},
    "__array_interface__": {"runtime/executors/legate/stores.py"},
    "__array_struct__": set(),
    "addressof": set(),
    "_addressof": {"runtime/executors/mpi/persistent.py"},
    "fromaddress": {"runtime/executors/mpi/persistent.py"},
    "from_address": {
        *("native/arrays.py", "native/pages.py", "native/cuda/arrays.py"),
        "native/threads/linking.py",
    },
    "alloca": {"native/intrinsics.py"},
    "alloca_once": set(),
}


def raw_addresses(file: Path) -> list[str]:
    """The lines on which a file takes an address by itself; compiled code is given live arrays."""
    text = file.read_text()
    if not any(f".{name}" in text for name in RAW):
        return []
    tree = ast.parse(text)
    compiled = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("njit" in ast.unparse(each) for each in node.decorator_list)
        for inner in ast.walk(node)
    }
    place = file.relative_to(ROOT).as_posix()
    return [
        f"{place}:{node.lineno}: {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in RAW
        and place not in RAW[node.attr]
        and id(node) not in compiled
    ]


def test_addresses_are_taken_in_one_place() -> None:
    files = [file for folder in FOLDERS for file in folder.rglob("*.py")]
    assert len(files) > 300 and ROOT / "native/arrays.py" in files
    assert [line for file in files for line in raw_addresses(file)] == []


@pytest.mark.parametrize("direct", [True, False])
def test_addresses_are_those_that_numpy_tells(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_LIES_THERE", direct)
    whole = np.arange(24.0).reshape(4, 6)
    whole.tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", np.float64, "r")
    kinds = (whole, whole[::-1, 2:], whole[2:2], whole.T, np.array(1.5), mapped[3:], scratch(8))
    assert [start(each) for each in kinds] == [each.ctypes.data for each in kinds]


def test_what_is_no_array_has_no_address() -> None:
    array = np.array(3.0, np.float32)
    assert address(array) == array.ctypes.data
    for value in (array * np.float32(0.5), np.float32(1), 1.0, [1.0]):
        with pytest.raises(TypeError, match="an array needed"):
            address(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"float32\(1\.5\), a number or array needed"):
        pack(array * np.float32(0.5))


@native()
def _double(block: object) -> int:
    w = words(block)
    f32p(w[1])[0] = f32p(w[0])[0] * w[2]
    return 0


@pytest.mark.skipif(CHECKED, reason="checked mode runs entries on copies of their arrays")
def test_an_entry_keeps_its_arrays() -> None:
    """Whatever is packed lives as long as the entry, and no longer; offsets of an array keep it."""
    y = np.zeros(2, np.float32)
    x = np.arange(8, dtype=np.float32)
    entry = bind(_double, address(x, 12), y, 2)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is not None
    assert run(entry) == 0 and y[0] == 6.0
    gc.disable()
    try:
        del entry
        assert gone() is None  # without a collection: nothing holds itself
    finally:
        gc.enable()


def test_blocks_hold_numbers_addresses_and_what_they_point_to() -> None:
    x, y = np.zeros((2, 3)), aligned_array((5,), np.int32)
    inner = pack(x, 7)
    entry = bind(_double, x, y)
    block = pack((1, True, np.int64(-4)), [2.5, inner], entry, address(y, 8), 1 << 63, keep=(y,))
    told = np.array(block.words)
    assert told[:3].tolist() == [1, 1, -4]
    assert told[3:4].view(np.float64)[0] == 2.5
    assert told[4:9].tolist() == [
        inner.address,
        entry.address,
        entry.block,
        y.ctypes.data + 8,
        -(1 << 63),
    ]
    assert {id(array) for array in block.arrays} == {id(x), id(y)}
    assert isinstance(address(y), Address) and isinstance(block, Block)
    assert block.address == block.words.buffer_info()[0]


@pytest.mark.parametrize(
    "index", [(), (slice(None, None, -1),), (slice(1, 3), slice(None, None, 2)), (2, 3)]
)
def test_extents_are_those_of_the_elements(index: tuple[object, ...]) -> None:
    whole = np.arange(20).reshape(4, 5)
    view = whole[(*index, ...)]  # type: ignore[index]
    low, high = extent(view)
    places = view * 8 + whole.ctypes.data
    assert low == places.min() and high == places.max() + 8


@pytest.mark.skipif(CHECKED, reason="scratch memory has guard zones of its own in checked mode")
def test_entries_that_run_one_at_a_time_share_their_scratch() -> None:
    """One entry's rooms are apart, the next one has the same; what nobody keeps is let go of."""
    with one_at_a_time() as workspace:
        small, large = scratch(1 << 16), scratch(1 << 18)
        assert small.nbytes == 1 << 16 and not np.shares_memory(small, large)
        workspace.next_entry()
        part = scratch(1 << 17)  # of the smallest room that is large enough
        assert part.nbytes == 1 << 17 and start(part) == start(large)
        assert start(scratch(1 << 16)) == start(small)
        assert not any(np.shares_memory(scratch(1 << 16), each) for each in (small, large))
        workspace.next_entry()
        kept, view = weakref.ref(large.room), part.view(np.float32).reshape(2, -1)
        del large, part
        assert start(scratch(1 << 18)) == start(view)
        workspace.next_entry()
        del view
        assert kept() is None
        alone = scratch(1 << 16)
        assert start(alone) == start(small)
    assert not np.shares_memory(scratch(1 << 16), small)
