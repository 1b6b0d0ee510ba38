"""Products with packed weights of few bits, and rows written in place, against their references."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.kernel_calls import bound, near, reference, run

from soapstone.ir.ops.products.nbits import KINDS, WHOLE
from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.products.nbits import _by_dots, _product
from soapstone.kernels.cpu.products.nbits_dots import LAYOUTS, PLANES, Layout, has_dots
from soapstone.kernels.entry import Call
from soapstone.native.memory import run as status_of

RANDOM = np.random.default_rng(0)


def names(bits: int) -> list[str]:
    """Return the variants that multiply by weights of so many bits."""
    return ["panels", *(["dots"] if has_dots(bits) else [])]


def operands(
    rows: int, depth: int, columns: int, block: int, bits: int, zeros: bool
) -> list[Array]:
    blocks = -(-depth // block)
    x = RANDOM.standard_normal((rows, depth), np.float32)
    w = RANDOM.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8)
    scales = RANDOM.standard_normal((columns, blocks), np.float32)
    middle = RANDOM.integers(0, 1 << bits, (columns, blocks)).astype(np.float32)
    return [x, w, scales, *([middle] if zeros else [])]


@pytest.mark.parametrize(
    ("bits", "name"), [(bits, name) for bits in (2, 4, 8) for name in names(bits)]
)
@pytest.mark.parametrize("zeros", [False, True])
def test_products_of_few_bits(name: str, bits: int, zeros: bool) -> None:
    shapes = (
        (1, 64, 16, 32),
        (1, 80, 150, 32),
        (2, 96, 37, 16),
        (3, 256, 5, 128),
        (7, 48, 33, 32),
        (5, 16, 64, 64),
    )
    for shape in shapes:
        arrays = operands(*shape, bits, zeros)
        attributes = {"bits": bits, "zeros": zeros, "numbers": "integer", "coarse": False}
        (wanted,) = reference("matmul_nbits", arrays, attributes)
        for threads in (1, 2):
            y = np.full(wanted.shape, np.nan, np.float32)
            known = frozenset(range(1, len(arrays)))
            call = Call("matmul_nbits", attributes, tuple(arrays), (y,), threads, known)
            run(bound(call, name))
            near(y, wanted)


@pytest.mark.parametrize("numbers", [kind for kind in KINDS if kind != WHOLE])
def test_products_of_narrow_types(numbers: str) -> None:
    bits = KINDS[numbers]
    for rows, depth, columns, block in ((1, 80, 37, 32), (3, 256, 20, 128), (6, 48, 5, 32)):
        x, w, scales = operands(rows, depth, columns, block, bits, False)
        # Bytes that are no number, or infinity, are left out here.
        w &= 0xFF if bits == 4 else 0xBB
        attributes = {"bits": bits, "zeros": False, "numbers": numbers, "coarse": False}
        (wanted,) = reference("matmul_nbits", [x, w, scales], attributes)
        y = np.full(wanted.shape, np.nan, np.float32)
        run(
            bound(
                Call("matmul_nbits", attributes, (x, w, scales), (y,), 2, frozenset({1, 2})),
                "panels",
            )
        )
        near(y, wanted)


def test_bytes_of_any_size_make_products_as_fine_as_float32() -> None:
    x, w, scales = operands(3, 4096, 70, 128, 4, False)
    x[0] *= np.float32(10.0) ** RANDOM.integers(-30, 20, 32).repeat(128)  # a size of each block
    x[1, :128], x[1, 128:] = 0, 1e-33
    x[2, 5] = np.inf
    (wanted,) = reference(
        "matmul_nbits",
        [x[:2], w, scales],
        {"bits": 4, "zeros": False, "numbers": "integer", "coarse": False},
    )
    for name in names(4):
        y = np.zeros((3, 70), np.float32)
        attributes = {"bits": 4, "zeros": False, "numbers": "integer", "coarse": False}
        run(
            bound(
                Call("matmul_nbits", attributes, (x, w, scales), (y,), 2, frozenset({1, 2})), name
            )
        )
        for row in range(2):
            wrong = np.abs(y[row] - wanted[row]).max()
            assert wrong <= 1e-6 * np.abs(wanted[row]).max() + 1e-33
        assert not np.isfinite(y[2]).any()


@pytest.mark.skipif(not has_dots(4), reason="this processor adds no products of bytes")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_panels_that_lie_together_make_the_same_products(layout: Layout) -> None:
    body = _by_dots(4, True, PLANES, layout)
    attributes = {"bits": 4, "zeros": True, "numbers": "integer", "coarse": False}
    known = frozenset(range(1, 4))
    for rows, depth, columns in ((1, 96, 70), (1, 32, 16), (2, 64, 17), (3, 160, 48), (5, 32, 130)):
        arrays = operands(rows, depth, columns, 32, 4, True)
        (wanted,) = reference("matmul_nbits", arrays, attributes)
        for threads in (1, 3):
            y = np.full(wanted.shape, np.nan, np.float32)
            call = Call("matmul_nbits", attributes, tuple(arrays), (y,), threads, known)
            run(_product(call, {(4, True, WHOLE): body}, PLANES, layout))
            near(y, wanted)


@pytest.mark.skipif(not has_dots(4), reason="this processor adds no products of bytes")
@pytest.mark.parametrize("bits", [bits for bits in (2, 4, 8) if has_dots(bits)] or [4])
@pytest.mark.parametrize("zeros", [False, True])
def test_where_one_byte_will_do_numbers_of_x_are_one(bits: int, zeros: bool) -> None:
    for rows, depth, columns, block in ((1, 96, 130, 32), (11, 256, 20, 128), (17, 32, 5, 16)):
        x, *weights = operands(rows, depth, columns, block, bits, zeros)
        attributes = {"bits": bits, "zeros": zeros, "numbers": "integer", "coarse": True}
        apart = np.float64(x).reshape(rows, -1, block)
        step = np.abs(apart).max(-1, keepdims=True) / 127
        nearest = (np.rint(apart / step) * step).reshape(x.shape)
        (wanted,) = reference("matmul_nbits", [nearest, *weights], attributes)
        y = np.full(wanted.shape, np.nan, np.float32)
        known = frozenset(range(1, 3 + zeros))
        run(bound(Call("matmul_nbits", attributes, (x, *weights), (y,), 2, known), "dots"))
        near(y, wanted, 1e-4)


def test_rows_apart_are_served_and_weights_that_change_are_not() -> None:
    x, *rest = operands(6, 64, 20, 32, 4, False)
    attributes = {"bits": 4, "zeros": False, "numbers": "integer", "coarse": False}
    (wanted,) = reference("matmul_nbits", (x[::2], *rest), attributes)
    y = np.zeros((3, 20), np.float32)
    call = Call("matmul_nbits", attributes, (x[::2], *rest), (y,), 1, frozenset({1, 2}))
    run(bound(call, "panels"))
    near(y, wanted)
    loose = Call("matmul_nbits", attributes, (x[::2], *rest), (y,), 1, frozenset({1}))
    assert bound(loose, "panels") is None


def test_rows_are_written_where_they_lie() -> None:
    x = RANDOM.standard_normal((2, 3, 6, 4), np.float32)
    rows = RANDOM.standard_normal((2, 2, 3, 4), np.float32).swapaxes(1, 2)
    starts = np.array([4, 1])
    before, attributes = x.copy(), {"axis": 2}
    entry = bound(Call("write_at", attributes, (x, rows, starts), (x,), 2), "numba")
    run(entry)
    near(x, reference("write_at", (before, rows, starts), attributes)[0])
    assert np.array_equal(x[0, :, :4], before[0, :, :4])
    starts[:] = 5, 0  # two rows do not fit from the sixth on
    assert entry is not None
    said = entry.statuses[status_of(entry)]
    assert "5 found, 0 to 4 needed" in (said() if callable(said) else said)
