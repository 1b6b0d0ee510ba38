"""Constants read from mapped files: their contents at any byte, and the pages that are let go."""

from __future__ import annotations

import re
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from soapstone.engine.constants import Constants
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select
from soapstone.native.memory import run
from soapstone.native.promises import Notes, held, lying

COUNT = 3_000_001  # numbers: more than are copied at once, and no multiple of it


def _weights(path: Path, at: int) -> tuple[Constants, np.ndarray]:
    """The numbers that a file has at a byte, as constants over the mapped file, and as they are."""
    values = np.random.default_rng(at).standard_normal(COUNT).astype(np.float32)
    path.write_bytes(b"-" * at + values.tobytes() + b"-" * 9)
    mapped = np.memmap(path, np.uint8, "r")[at : at + values.nbytes].view(np.float32)
    return Constants({"w": mapped}, Graph("none", {}, {}, (), ())), values


@pytest.mark.parametrize("at", [0, 4, 4097, 4099])
def test_weights_of_a_file_are_what_it_has_at_any_byte(tmp_path: Path, at: int) -> None:
    constants, values = _weights(tmp_path / "w.bin", at)
    for _ in range(2):
        with constants.lent("w") as lent:
            assert lent.flags.aligned
            np.testing.assert_array_equal(lent, values)
    constants.bound()
    np.testing.assert_array_equal(constants["w"], values)
    np.testing.assert_array_equal(held(constants.promised("w")[5:77]), values[5:77])


def test_contents_that_several_ask_for_are_made_once_and_one_at_a_time(tmp_path: Path) -> None:
    constants, _ = _weights(tmp_path / "w.bin", 0)
    other, _ = _weights(tmp_path / "other.bin", 0)
    one, two = constants.promised("w"), other.promised("w")
    for _ in range(3):
        held(one)
    assert constants.read_bytes == 4 * COUNT
    gone = weakref.ref(held(one).base)
    held(two)
    assert gone() is None
    kept = weakref.ref(held(two).base)
    other.bound()
    assert kept() is None


@pytest.mark.parametrize("at", [0, 4099])
def test_rows_of_a_table_are_read_where_the_file_has_them(tmp_path: Path, at: int) -> None:
    constants, values = _weights(tmp_path / "w.bin", at)
    table = constants.promised("w")[: 3 * 1_000_000].reshape(-1, 3)
    made = values[: table.size].reshape(-1, 3)
    ids = np.array([[7, 0], [999_999, 7]])
    for operator, inputs, attributes in (
        ("embedding", (ids, table), {}),
        ("gather", (table, ids), {"axis": 0}),
    ):
        y = np.empty((2, 2, 3), np.float32)
        fixed = frozenset(n for n, each in enumerate(inputs) if each is table)
        _, entry = select(Call(operator, attributes, inputs, (y,), constants=fixed))
        assert entry is not None and run(entry) == 0
        np.testing.assert_array_equal(y, made[ids])
    if sys.platform == "linux":
        assert _pages(tmp_path / "w.bin") < values.nbytes / 2
    contents = held(table)  # now somebody has them all
    assert np.shares_memory(lying(table), contents)


def test_weights_whose_contents_somebody_has_are_lent_without_a_copy(tmp_path: Path) -> None:
    constants, values = _weights(tmp_path / "w.bin", 4099)
    contents = held(constants.promised("w"))
    with constants.lent("w") as lent:
        assert np.shares_memory(lent, contents)
    np.testing.assert_array_equal(contents, values)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, which tells what is in memory")
@pytest.mark.parametrize("how", ["lent", "resident"])
def test_pages_of_a_file_are_let_go(tmp_path: Path, how: str) -> None:
    constants, _ = _weights(tmp_path / "w.bin", 4099)
    if how == "lent":
        with constants.lent("w"):
            assert _pages(tmp_path / "w.bin") < 1 << 20
    else:
        assert constants["w"].size == COUNT
    assert _pages(tmp_path / "w.bin") < 1 << 20


def _pages(path: Path) -> int:
    """The bytes of a mapped file that are in this process's memory."""
    found = re.search(
        rf"{re.escape(str(path))}\n.*?Rss:\s+(\d+) kB", Path("/proc/self/smaps").read_text(), re.S
    )
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.onednn
def test_weights_of_sequences_are_packed_once_for_all_lengths() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 32, 9)).astype(np.float32)
    constants = Constants({"w": weights}, Graph("none", {}, {}, (), ()))
    attributes = {"stride": (1,), "padding": (4, 4), "dilation": (1,), "groups": 1, "bias": False}
    kept, made = [], []
    for length in (40, 40, 56):
        x, y = (np.zeros((2, channels, length), np.float32) for channels in (32, 64))
        call = Call("conv1d", attributes, (x, constants.promised("w")), (y,), 1, frozenset([1]))
        with Notes().taken() as notes:
            kept.append(select(call, variant="onednn"))
        assert not notes.read
        made += [each.made for each in notes.packed]
    assert len({id(each) for each in made[:2]}) <= 1


class _Counted(dict[str, np.ndarray]):
    """Weights, and how often they were read."""

    reads = 0

    def __getitem__(self, name: str) -> np.ndarray:
        self.reads += 1
        return super().__getitem__(name)


def test_what_several_constants_are_made_of_is_computed_once_for_a_graph() -> None:
    builder = GraphBuilder("scales")
    scale = builder.apply("affine", builder.input("v", (8,), role=Role.PARAMETER), shift=1.0)[0]
    made = [builder.apply("affine", scale, scale=number)[0] for number in (2.0, 3.0)]
    builder.output(*made)
    weights = _Counted(v=np.arange(8, dtype=np.float32))
    constants = Constants(weights, builder.build())
    weights.reads = 0
    for number, name in zip((2, 3), made):
        np.testing.assert_array_equal(constants[name], number * (np.arange(8) + 1))
    assert weights.reads == 1
    constants.bound()
    np.testing.assert_array_equal(constants[made[0]], 2 * (np.arange(8) + 1))
    assert weights.reads == 2
