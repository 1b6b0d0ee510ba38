"""Indexing, selection and reduction operators: what they mean, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.movement.slicing import slice_bounds
from soapstone.ir.spec import operator
from soapstone.ir.tensor import TensorSpec, spec_of

Array = np.ndarray[Any, Any]


def run(name: str, *arrays: Array, **attributes: object) -> tuple[Array, ...]:
    spec = operator(name)
    normal = spec.normalise(attributes)
    signature = spec.bind([spec_of(array) for array in arrays], normal)
    made = spec.run(normal, *arrays)
    assert tuple(map(spec_of, made)) == signature.output_specs
    return made


def one(name: str, *arrays: Array, **attributes: object) -> Array:
    (made,) = run(name, *arrays, **attributes)
    return made


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape)


# ----------------------------------------------------------------------------------- reductions
def test_axes_are_all_where_none_are_given_and_none_where_the_list_is_empty() -> None:
    x = normal(2, 3, 4)
    for name, fold in (("reduce_sum", np.sum), ("reduce_max", np.max), ("reduce_prod", np.prod)):
        np.testing.assert_allclose(one(name, x), fold(x))
        np.testing.assert_allclose(one(name, x, keepdims=True), fold(x, keepdims=True))
        np.testing.assert_array_equal(one(name, x, axes=()), x)
    np.testing.assert_array_equal(one("reduce_sum_square", x, axes=()), x * x)
    np.testing.assert_array_equal(one("reduce_l1", x, axes=()), np.abs(x))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("reduce_sum", 0.0),
        ("reduce_prod", 1.0),
        ("reduce_l1", 0.0),
        ("reduce_l2", 0.0),
        ("reduce_sum_square", 0.0),
        ("reduce_log_sum", -np.inf),
        ("reduce_log_sum_exp", -np.inf),
        ("reduce_max", -np.inf),
        ("reduce_min", np.inf),
    ],
)
def test_a_reduction_of_nothing_is_the_identity(name: str, want: float) -> None:
    for dtype in ("float32", "float64"):
        made = one(name, np.zeros((2, 0, 4), dtype), axes=(1,), keepdims=True)
        np.testing.assert_array_equal(made, np.full((2, 1, 4), want, dtype))


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ShapeError, match="dim d1 is 0 in input 0; 1 or more needed"):
        one("reduce_mean", np.zeros((2, 0)), axes=(1,))


def test_integer_reductions_keep_their_type() -> None:
    x = np.array([[3, -4], [5, 2]], np.int32)
    for name, want in (
        ("reduce_l1", [8, 6]),
        ("reduce_sum_square", [34, 20]),
        ("reduce_prod", [15, -8]),
        ("reduce_max", [5, 2]),
    ):
        made = one(name, x, axes=(0,))
        assert made.dtype == np.int32
        np.testing.assert_array_equal(made, want)


def test_log_sum_exp_of_large_and_infinite_numbers() -> None:
    x = np.array([[1e4, 1e4], [-1e4, -1e4], [-np.inf, -np.inf], [np.inf, 1.0], [-np.inf, 2.0]])
    want = [1e4 + np.log(2), -1e4 + np.log(2), -np.inf, np.inf, 2.0]
    np.testing.assert_allclose(one("reduce_log_sum_exp", x, axes=(1,)), want)


# --------------------------------------------------------------------------------------- slices
@pytest.mark.parametrize("extent", [0, 1, 5, 8])
def test_slice_takes_what_python_takes(extent: int) -> None:
    x = np.arange(extent)
    bounds = (None, *range(-extent - 2, extent + 3))
    for step in (1, 2, 3, -1, -2, -5):
        for start in bounds:
            for stop in bounds:
                first, last, by = slice_bounds(extent, start, stop, step)
                made = one("slice", x, starts=(first,), stops=(last,), steps=(by,))
                np.testing.assert_array_equal(made, x[start:stop:step])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 3, 0), "attribute steps: 0 found for dim d0"),
        ((0, 6, 1), "dim d0: slice 0 to 6 found, 0 <= start <= stop <= 5"),
        ((-1, 3, 1), "dim d0: slice -1 to 3 found"),
        ((5, 0, -1), "dim d0: slice 5 back to 0 found, 5 > start >= stop >= -1"),
        ((1, 3, -1), "dim d0: slice 1 back to 3 found"),
    ],
)
def test_slices_that_leave_the_axis_are_refused(bounds: tuple[int, int, int], message: str) -> None:
    start, stop, step = bounds
    with pytest.raises((ShapeError, GraphError), match=message):
        one("slice", np.arange(5), starts=(start,), stops=(stop,), steps=(step,))


def test_pad_refuses_a_border_of_nothing() -> None:
    with pytest.raises(ShapeError, match="dim d0 is 0 in input 0; 1 or more needed for mode edge"):
        one("pad", np.zeros((0,)), low=(1,), high=(0,), interior=(0,), mode="edge")
    with pytest.raises(GraphError, match="attribute interior"):
        one("pad", np.zeros((3,)), low=(1,), high=(0,), interior=(1,), mode="wrap")


# ---------------------------------------------------------------------------- rearrangements
def test_tile_reverse_and_blocks() -> None:
    x = normal(2, 3)
    np.testing.assert_array_equal(one("tile", x, repeats=(3, 2)), np.tile(x, (3, 2)))
    np.testing.assert_array_equal(one("reverse", x, axes=(1,)), x[:, ::-1])
    image = np.arange(2 * 4 * 2 * 3).reshape(2, 4, 2, 3)
    for mode in ("DCR", "CRD"):
        wide = one("depth_to_space", image, blocksize=2, mode=mode)
        assert wide.shape == (2, 1, 4, 6)
        np.testing.assert_array_equal(wide[:, :, 1::2, 0::2], image[:, 2:3])
        np.testing.assert_array_equal(one("space_to_depth", wide, blocksize=2, mode=mode), image)
    deep = one("depth_to_space", normal(1, 8, 1, 1), blocksize=2)
    np.testing.assert_array_equal(deep[0, :, 0, 1], normal(1, 8, 1, 1)[0, 2:4, 0, 0])
    with pytest.raises(ShapeError, match="dim c: 6 in input 0; a multiple of 4 needed"):
        one("depth_to_space", normal(1, 6, 1, 1), blocksize=2)


def test_the_last_of_several_updates_counts_or_all_are_combined() -> None:
    x, ids, updates = np.ones(3), np.array([1, 1, 2]), np.array([2.0, 5.0, 3.0])
    for reduction, want in (
        ("none", [1, 5, 3]),
        ("add", [1, 8, 4]),
        ("mul", [1, 10, 3]),
        ("max", [1, 5, 3]),
        ("min", [1, 1, 1]),
    ):
        made = one("scatter_elements", x, ids, updates, reduction=reduction)
        np.testing.assert_array_equal(made, want)
        made = one("scatter_nd", x, ids[:, None], updates, reduction=reduction)
        np.testing.assert_array_equal(made, want)


def test_gradients_of_updates_that_were_overwritten_are_zero() -> None:
    dy = np.array([1.0, 2.0, 3.0])
    dx, dupdates = run("scatter_elements_grad", dy, np.array([1, 1, -1]))
    np.testing.assert_array_equal(dx, [1, 0, 0])
    np.testing.assert_array_equal(dupdates, [0, 2, 3])


def test_the_gradient_of_a_product_is_right_where_factors_are_zero() -> None:
    x = np.array([2.0, 0.0, 3.0])
    dx = one("reduce_prod_grad", np.ones(1), x)
    np.testing.assert_array_equal(dx, [0, 6, 0])
    ids, updates = np.array([0, 1, 1]), np.array([0.0, 5.0, 7.0])
    y = one("scatter_elements", x, ids, updates, reduction="mul")
    dx, dupdates = run("scatter_elements_grad", np.ones(3), ids, x, updates, y, reduction="mul")
    np.testing.assert_allclose(dx, [0, 35, 1])
    np.testing.assert_allclose(dupdates, [2, 0, 0])


@pytest.mark.parametrize(
    ("name", "inputs", "attributes"),
    [
        ("gather", ((3, 4), [3]), {}),
        ("gather", ((3, 4), [-5]), {"axis": 1}),
        ("gather_elements", ((3, 4), [[0, 3, 0, 0]]), {}),
        ("gather_nd", ((3, 4), [[2, 4]]), {}),
        ("scatter_elements", ((3,), [-4], (1,)), {}),
        ("scatter_nd", ((3, 4), [[3]], (1, 4)), {}),
        ("embedding", ((3, 4), [3]), {}),
    ],
)
def test_an_index_outside_its_axis_is_an_error(
    name: str, inputs: tuple[Any, ...], attributes: dict[str, int]
) -> None:
    arrays = [np.ones(i) if isinstance(i, tuple) else np.array(i) for i in inputs]
    if name == "embedding":
        arrays.reverse()
    with pytest.raises(GraphError, match=f"{name}: operand .*: index -?[345] found"):
        run(name, *arrays, **attributes)


def test_misfits_are_told() -> None:
    for name, shapes, attributes, message in (
        ("gather", ((3,), (2,)), {"axis": 1}, "dim d1 does not exist"),
        ("gather_elements", ((3, 4), (2, 5)), {}, "dim d1 is 4 in input 0 but 5 in input 1"),
        ("gather_elements", ((3, 4), (2,)), {}, "rank 1"),
        ("gather_nd", ((3, 4), (2, 3)), {}, "3 indices an element, 1 to 2 needed"),
        ("scatter_nd", ((3, 4), (2, 1), (2, 3)), {}, r"input 2 has shape \(2, 3\); \(2, 4\)"),
        ("top_k", ((3,),), {"k": 4}, "dim d0 is 3 in input 0; k = 4"),
        ("trilu", ((3,),), {}, "rank 1"),
        ("argmax", ((0, 3),), {}, "dim d0 is 0"),
    ):
        spec = operator(name)
        specs = [
            TensorSpec(shape, "int64" if place == 1 else "float32")
            for place, shape in enumerate(shapes)
        ]
        with pytest.raises(ShapeError, match=message):
            spec.bind(specs, spec.normalise(attributes))


# ------------------------------------------------------------------------------------ selection
def test_top_k_of_ties_and_nan() -> None:
    x = np.array([3.0, np.nan, 1.0, 3.0, -0.0, 0.0])
    values, indices = run("top_k", x, k=4)
    np.testing.assert_array_equal(values, [np.nan, 3, 3, 1])
    np.testing.assert_array_equal(indices, [1, 0, 3, 2])
    values, indices = run("top_k", x, k=3, largest=False)
    np.testing.assert_array_equal(indices, [4, 5, 2])
    _, indices = run("top_k", x, k=3, sorted=False)
    np.testing.assert_array_equal(indices, [0, 1, 3])
