"""Kernels that move, index, select and reduce, against the references, on several threads."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers.kernel_calls import LAYOUTS, served

from soapstone.ir.errors import GraphError
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, spec_of
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory
from soapstone.runtime.model.task import status_text


def check(name: str, *arrays: Array, **attributes: object) -> None:
    """The kernel on every layout, with one and with three threads."""
    for layout in LAYOUTS[:3]:
        by = served(name, arrays, attributes, layout=layout, every=True, threads=(1, 3))
        assert "numba" in by, f"{name} {layout}"


def numbers(*shape: int, dtype: str = "float32") -> Array:
    generator = np.random.default_rng([*shape])
    if dtype.startswith("float"):
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 100 if dtype != "bool" else 2, shape).astype(dtype)


def indices(extent: int, *shape: int, dtype: str = "int64") -> Array:
    return np.random.default_rng([extent, *shape]).integers(-extent, extent, shape).astype(dtype)


DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_any_type(dtype: str) -> None:
    x = numbers(2, 19, 23, 31, dtype=dtype)
    check("transpose", x, permutation=(0, 2, 3, 1))
    check("transpose", x, permutation=(3, 1, 0, 2))
    check("concat", x, numbers(2, 5, 23, 31, dtype=dtype), x, axis=1)
    check("split", x, axis=1, sizes=(4, 0, 12, 3))
    bounds = {"starts": (0, 18, 1, 30), "stops": (2, -1, 22, 3), "steps": (1, -1, 2, -3)}
    check("slice", x, **bounds)
    check("reverse", x, axes=(1, 3))
    check("tile", x, repeats=(1, 2, 1, 3))
    check("gather", x, indices(23, 9, 4), axis=2)
    check("gather_elements", x, indices(19, 2, 7, 23, 31), axis=1)
    check("gather_nd", x, indices(2, 40, 3))
    check("trilu", x, k=-2)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad(mode: str) -> None:
    x = numbers(2, 20, 33, 17)
    borders = {"low": (0, 0, 4, 3), "high": (0, 0, 2, 16), "interior": (0, 0, 0, 0)}
    check("pad", x, **borders, mode=mode, value=1.5)
    check(
        "pad", numbers(700, 3, dtype="int64"), low=(1, 2), high=(3, 2), interior=(0, 0), mode=mode
    )


@pytest.mark.parametrize("parts", [2, 5, 32])
def test_concat_and_split_of_many_channels(parts: int) -> None:
    shapes = [(2, 1 + 3 * i % 7, 24, 25) for i in range(parts)]
    arrays = [numbers(*shape) for shape in shapes]
    check("concat", *arrays, axis=1)
    whole = np.concatenate(arrays, 1)
    check("split", whole, axis=1, sizes=tuple(shape[1] for shape in shapes))


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks(mode: str) -> None:
    check("depth_to_space", numbers(2, 36, 17, 19), blocksize=3, mode=mode)
    check("space_to_depth", numbers(2, 5, 34, 38), blocksize=2, mode=mode)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_gather(axis: int, dtype: str) -> None:
    x = numbers(40, 50, 60)
    check("gather", x, indices(x.shape[axis], 70, dtype=dtype), axis=axis)
    check("gather", x, indices(x.shape[axis], 6, 1, 5, dtype=dtype), axis=axis)
    check("gather", x, np.array(-1, dtype), axis=axis)
    shape = [70 if d == axis else 40 for d in range(3)]
    dy = numbers(*(70 if d == axis else e for d, e in enumerate(x.shape)))
    ids = indices(x.shape[axis], 70, dtype=dtype)
    check("gather_grad", dy, ids, axis=axis, extent=x.shape[axis])
    check("gather_elements", x, indices(x.shape[axis], *shape, dtype=dtype), axis=axis)
    for reduction in ("none", "add", "mul", "max", "min"):
        places = indices(x.shape[axis], *shape, dtype=dtype)
        check("scatter_elements", x, places, numbers(*shape), axis=axis, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_slices_by_several_indices(reduction: str) -> None:
    x = numbers(30, 20, 40)
    ids = indices(20, 50, 2)
    check("scatter_nd", x, ids, numbers(50, 40), reduction=reduction)
    check("scatter_nd", x, indices(30, 9, 1), numbers(9, 20, 40), reduction=reduction)
    check("scatter_nd", x, indices(20, 300, 3), numbers(300), reduction=reduction)
    check("gather_nd", x, ids)
    check("gather_nd", x, indices(20, 30, 7, 1), batch_dims=1)
    check("gather_nd_grad", numbers(30, 7, 40), indices(20, 30, 7, 1), batch_dims=1, shape=x.shape)
    check("gather_nd_grad", numbers(50, 40), ids, batch_dims=0, shape=x.shape)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes"),
    [
        ("gather", (numbers(9, 5), np.array([0, 9])), {}),
        ("gather", (numbers(9, 5), np.array([0, -6])), {"axis": 1}),
        ("gather_grad", (numbers(2, 5), np.array([0, 9])), {"extent": 9}),
        ("gather_elements", (numbers(9, 5), np.array([[9]])), {}),
        ("gather_nd", (numbers(9, 5), np.array([[0, 5]])), {}),
        ("gather_nd_grad", (numbers(1), np.array([[0, 5]])), {"shape": (9, 5)}),
        ("scatter_elements", (numbers(9), np.array([-10]), numbers(1)), {}),
        ("scatter_nd", (numbers(9, 5), np.array([[9]]), numbers(1, 5)), {}),
        ("embedding", (np.array([[-1]]), numbers(9, 5)), {}),
        ("embedding_bag", (np.array([[-1, 2]]), numbers(9, 5)), {}),
    ],
)
def test_kernels_name_an_index_outside_as_the_reference_does(
    name: str, inputs: tuple[Array, ...], attributes: dict[str, object]
) -> None:
    """Both name operator, operand, index and extent."""
    given = operator(name).normalise(attributes)
    specs = operator(name).bind(list(map(spec_of, inputs)), given).output_specs
    outputs = tuple(np.zeros(made.shape, made.dtype) for made in specs)
    (variant,) = (v for v in variants(name) if v.name == "numba")
    entry = variant.bind(Call(name, given, inputs, outputs))
    assert entry is not None
    status = memory.run(entry)
    said = status_text(entry, status)
    outside = r"index -?\d+ found, -?\d to \d needed for the [95] (rows|elements)"
    assert re.match(f"{name}: operand 'ids': {outside}", said)
    with pytest.raises(GraphError) as reference:
        operator(name).run(given, *inputs)
    assert said == str(reference.value)


def test_tiles_of_an_axis_hold_what_is_theirs() -> None:
    x, ids = numbers(10, 6), indices(10, 25)
    spec = operator("gather")
    total = np.zeros((25, 6), np.float32)
    (variant,) = variants("gather")
    for lo, hi in ((0, 3), (3, 3), (3, 10)):
        attributes = {"axis": 0, "base": lo, "total": 10}
        y = np.full((25, 6), 77, np.float32)
        entry = variant.bind(Call("gather", attributes, (x[lo:hi], ids), (y,)))
        if entry is None:
            y = spec.run(attributes, x[lo:hi], ids)[0]
        else:
            assert memory.run(entry) == 0
        total += y
    np.testing.assert_array_equal(total, x[ids])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_selection(axis: int) -> None:
    x = numbers(30, 300, 41)
    x[3, 7, 5], x[4, 100:], x[20, 3] = np.nan, 2.5, -np.inf
    for last in (False, True):
        for keepdims in (False, True):
            for name in ("argmax", "argmin"):
                check(name, x, axis=axis, select_last_index=last, keepdims=keepdims)
    for k in (1, 7, 30):
        check("top_k", x, axis=axis, k=k)
        check("top_k", x, axis=axis, k=k, largest=False)
        check("top_k", x, axis=axis, k=k, sorted=False)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cumsum(axis: int) -> None:
    for exclusive in (False, True):
        for reverse in (False, True):
            kinds = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
            check("cumsum", numbers(30, 70, 300), **kinds)
            check("cumsum", numbers(30, 70, 300, dtype="int64"), **kinds)


@pytest.mark.parametrize("axes", [(), (0,), (1,), (3,), (2, 3), (0, 2, 3), (1, 3), None])
def test_reductions(axes: tuple[int, ...] | None) -> None:
    x = numbers(3, 37, 20, 21)
    for name in ("l1", "l2", "sum_square", "log_sum_exp", "sum", "max", "min"):
        check(f"reduce_{name}", x, axes=axes)
    check("reduce_prod", 1 + x / 100, axes=axes)
    check("reduce_log_sum", np.abs(x), axes=axes)
    for name in ("max", "min"):
        whole = operator(f"reduce_{name}")
        rounded = np.round(x)  # ties
        attributes = whole.normalise({"axes": axes})
        (y,) = whole.run(attributes, rounded)
        check("reduce_max_grad", numbers(*y.shape), rounded, y, axes=axes)


def test_powers_of_large_and_infinite_numbers() -> None:
    x = numbers(6, 200) * 1e4
    x[1], x[2, 5], x[3, 7], x[4, 7] = -np.inf, np.inf, -np.inf, np.nan
    for axis in (0, 1):
        check("reduce_log_sum_exp", x, axes=(axis,))
