"""What kernels of GPUs and their callers agree on, where no GPU library is loaded."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from soapstone.kernels.cuda.entry import DeviceEntry, Launch, sequence
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device
from soapstone.native.cuda import device


class Kernel:
    """Takes down how it is launched, as `numba.cuda.jit` has it."""

    def __init__(self, log: list[object]) -> None:
        self.log = log

    def __getitem__(self, configuration: object) -> object:
        return lambda *arguments: self.log.append((configuration, arguments))


def test_entries_put_their_launches_on_a_stream_in_order() -> None:
    log: list[object] = []
    kernel = Kernel(log)
    first = DeviceEntry((Launch(kernel, (2,), (32,), (1, "x")), Launch(kernel, (1,), (64,), ())))
    second = DeviceEntry((Launch(kernel, (3,), (32,), (2,), shared=128),), "flag", {1: "no"})
    both = sequence((first, second))
    both.enqueue("stream")
    assert log == [
        (((2,), (32,), "stream", 0), (1, "x")),
        (((1,), (64,), "stream", 0), ()),
        (((3,), (32,), "stream", 128), (2,)),
    ]
    assert (both.status, both.explain(1), both.explain(2)) == ("flag", "no", "status 2")
    with pytest.raises(ValueError, match="2 entries with a status"):
        sequence((second, second))


def test_calls_take_arrays_of_devices_and_nothing_else() -> None:
    device = type("DeviceNDArray", (), {"__cuda_ndarray__": True})()
    assert Call("relu", {}, (device,), (device,)).inputs == (device,)
    with pytest.raises(TypeError, match="an array needed"):
        Call("relu", {}, (np.float32(1),), (device,))  # type: ignore[arg-type]


def test_a_call_that_no_cuda_kernel_serves_is_an_error_that_names_it() -> None:
    x = np.zeros(3, np.complex64)
    with pytest.raises(ValueError, match=r"relu: no CUDA kernel serves complex64 \(3,\)"):
        select_device(Call("relu", {}, (x,), (x,)))


@pytest.mark.parametrize("rows", (65_535 * 64, 65_535 * 64 + 1))
def test_a_transposition_has_no_more_blocks_along_an_axis_than_a_launch_may(rows: int) -> None:
    """The second and third axes of a grid end at 65535 blocks; what needs more is declined."""
    pytest.importorskip("numba.cuda")
    from soapstone.kernels.cuda.movement.transposition import TILE, transposition
    from soapstone.kernels.cuda.substrate.arrays import Described, view

    kind = np.dtype(np.float32)
    source = view(Described((64, rows), (4, 4 * 64), kind))
    found = transposition(source, view(Described((64, rows), (4 * rows, 4), kind)))
    assert (found is None) == (-(-rows // (2 * TILE)) > 65_535)


def test_a_product_has_all_its_blocks_along_the_axis_that_has_room_for_them() -> None:
    pytest.importorskip("numba.cuda")
    from soapstone.kernels.cuda.products.operands import Operand
    from soapstone.kernels.cuda.products.tiled import product
    from soapstone.kernels.cuda.substrate.arrays import View

    counts = {"b": 65_536, "m": 300, "n": 2, "k": 1}
    views = [(key, counts[key[0]], counts[key[1]]) for key in ("mk", "kn", "mn")]
    operands = [
        Operand(View(None, (65_536, p, q), (p * q, q, 1), "float32"), {"b": p * q, x: q, y: 1})
        for (x, y), p, q in views
    ]
    entry = product(*operands, {key: [(key, count)] for key, count in counts.items()})
    (launch,) = entry.launches
    blocks, *others = launch.grid
    assert blocks >= 65_536 and blocks % 65_536 == 0 and set(others) <= {1}


@pytest.mark.parametrize("count", [2**12, 2**16])
def test_elements_are_found_where_32_bits_do_not_count_them(count: int) -> None:
    axes = (("0", count), ("1", 2**18), ("2", 3))
    numbers = {"uint32": np.uint32, "int64": int, "item": (count * 2**18 - 1) * 3 + 2}
    exec("\n".join(indices("item", axes, "")), numbers)
    assert [numbers[f"at_{name}"] for name, _ in axes] == [count - 1, 2**18 - 1, 2]
    narrow = "uint32" in "".join(indices("item", axes, ""))
    assert narrow == (count * 2**18 * 3 <= 2**32)


def test_compilers_that_are_later_than_the_driver_are_an_error_that_names_both() -> None:
    found = SimpleNamespace(nvjitlink=SimpleNamespace(version=lambda: (13, 5)))
    said = r"CUDA 12\.4 found beside .* 13\.5; .*\[cu12\]"
    with patch.dict(sys.modules, {"cuda.bindings": found}):
        device._fits((13, 0))
        with pytest.raises(device.NoDevice, match=said):
            device._fits((12, 4))
    said = r"compilers found missing .*soapstone\[cuda\]"
    with (
        patch.dict(sys.modules, {"cuda.bindings": None}),
        pytest.raises(device.NoDevice, match=said),
    ):
        device._fits((13, 0))
