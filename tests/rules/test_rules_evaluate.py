"""What terms compute, against NumPy written once more; and how graphs are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from helpers.rules_calls import PAPER, SIZES, Array, arrays, uses

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, Value, parse
from soapstone.rules.algebra.evaluate import apply, compare, constant, evaluate
from soapstone.search.rules.shapes import Tree, Type, extents, tensor_type


def pad(x: Array, kernel: tuple[int, int], padding: str, fill: float) -> Array:
    low = [extent // 2 if padding == "same" else 0 for extent in kernel]
    return np.pad(x, [(0, 0), (0, 0), (low[0],) * 2, (low[1],) * 2], constant_values=fill)


def windows(
    x: Array, kernel: tuple[int, int], stride: int, padding: str, fill: float
) -> Iterator[tuple[int, int, Array]]:
    padded = pad(x, kernel, padding, fill)
    height, width = (padded.shape[2 + i] - kernel[i] for i in range(2))
    for i, top in enumerate(range(0, height + 1, stride)):
        for j, left in enumerate(range(0, width + 1, stride)):
            yield i, j, padded[:, :, top : top + kernel[0], left : left + kernel[1]]


def images_of(places: Mapping[tuple[int, int], Array]) -> Array:
    rows, columns = (max(place[i] for place in places) + 1 for i in range(2))
    first = places[0, 0]
    result = np.zeros((*first.shape, rows, columns))
    for (i, j), value in places.items():
        result[:, :, i, j] = value
    return result


def expected(symbol: str, parameters: tuple[Value, ...], operands: list[Array]) -> Array | None:
    """Return what a symbol computes, said once more, one output position at a time."""
    x = operands[0]
    y = operands[1] if len(operands) == 2 else np.zeros(())
    match symbol:
        case "add" | "mul":
            try:
                np.broadcast_shapes(x.shape, y.shape)
            except ValueError:
                return None
            return x + y if symbol == "add" else x * y
        case "smul":
            return x * y if y.ndim == 0 else None
        case "relu":
            return np.maximum(x, 0)
        case "transpose":
            return np.swapaxes(x, -1, -2) if x.ndim >= 2 else None
        case "matmul":
            if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
                return None
            return np.asarray((x[..., :, :, None] * y[..., None, :, :]).sum(-2))
        case "concat":
            axis = int(parameters[0])
            others = [[e for i, e in enumerate(v.shape) if i - v.ndim != axis] for v in (x, y)]
            if x.ndim != y.ndim or x.ndim < -axis or others[0] != others[1]:
                return None
            return np.concatenate([x, y], axis)
        case "split0" | "split1":
            axis = int(parameters[0])
            if x.ndim < -axis or x.shape[axis] != sum(SIZES):
                return None
            return np.split(x, [SIZES[0]], axis)[symbol == "split1"]
    if x.ndim != 4:
        return None
    if symbol == "enlarge":
        size = [int(extent) for extent in str(parameters[0]).split("x")]
        more = [wanted - found for wanted, found in zip(size, x.shape[2:])]
        if any(extent < 0 or extent % 2 for extent in more):
            return None
        result = np.zeros((*x.shape[:2], *size))
        top, left = (extent // 2 for extent in more)
        result[:, :, top : top + x.shape[2], left : left + x.shape[3]] = x
        return result
    return convolved(parameters, x, y) if symbol == "conv2d" else pooled(symbol, parameters, x)


def refused(kernel: tuple[int, int], padding: Value, x: Array) -> bool:
    if padding == "same":
        return kernel[0] % 2 == 0 or kernel[1] % 2 == 0
    return kernel[0] > x.shape[2] or kernel[1] > x.shape[3]


def convolved(parameters: tuple[Value, ...], x: Array, y: Array) -> Array | None:
    groups, stride, padding, activation = parameters
    outputs, inputs, *size = y.shape
    kernel = size[0], size[1]
    count = x.shape[1] if groups == "depthwise" else int(groups)
    if groups == "depthwise" and (inputs != 1 or outputs != count):
        return None
    if x.shape[1] != count * inputs or outputs % count or refused(kernel, padding, x):
        return None
    places = {}
    for i, j, part in windows(x, kernel, int(stride), str(padding), 0):
        values = np.zeros((x.shape[0], outputs))
        for o in range(outputs):
            first = o // (outputs // count) * inputs
            values[:, o] = (part[:, first : first + inputs] * y[o]).sum((1, 2, 3))
        places[i, j] = values
    result = images_of(places)
    return np.maximum(result, 0) if activation == "relu" else result


def pooled(symbol: str, parameters: tuple[Value, ...], x: Array) -> Array | None:
    size = [int(extent) for extent in str(parameters[0]).split("x")]
    kernel, stride, padding = (size[0], size[1]), int(parameters[1]), str(parameters[2])
    if refused(kernel, padding, x):
        return None
    places = {}
    for i, j, part in windows(x, kernel, stride, padding, np.nan):
        if symbol == "max_pool2d":
            places[i, j] = np.nanmax(part, (2, 3))
        elif parameters[3] == "all":
            places[i, j] = np.nansum(part, (2, 3)) / (kernel[0] * kernel[1])
        else:
            places[i, j] = np.nanmean(part, (2, 3))
    return images_of(places)


@pytest.mark.parametrize("symbol", sorted(PAPER))
def test_symbols_compute_what_numpy_does(symbol: str) -> None:
    fitting = 0
    for parameters, shapes in uses(symbol):
        operands = arrays(*shapes, seed=fitting)
        wanted = expected(symbol, parameters, operands)
        if symbol.startswith("split"):
            found = apply(symbol, parameters, operands, SIZES)
        else:
            names = [Term(name) for name in "xy"[: len(operands)]]
            term = Term(symbol, parameters, tuple(names))
            outputs = evaluate([term], dict(zip(names, operands)))
            found = None if outputs is None else outputs[0]
        assert (found is None) == (wanted is None), (symbol, parameters, shapes)
        if wanted is not None and found is not None:
            fitting += 1
            assert found.shape == wanted.shape and found.dtype == np.float64
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert fitting >= 2


def test_constants_are_what_they_are_called() -> None:
    def made(text: str, *shape: int) -> Array | None:
        return constant(parse(text), shape)

    np.testing.assert_array_equal(made("ones", 2, 3), np.ones((2, 3)))
    np.testing.assert_array_equal(made("identity_matrix", 3, 3), np.eye(3))
    assert made("identity_matrix", 3, 4) is None and made("identity_matrix", 3, 3, 3) is None
    x = arrays((2, 4, 5, 3))[0]
    for inputs, groups in ((4, 1), (2, 2), (1, 4)):  # one, two groups, depthwise
        kernel = made("identity_kernel[3x1]", 4, inputs, 3, 1)
        assert kernel is not None
        np.testing.assert_array_equal(convolved((groups, 1, "same", "none"), x, kernel), x)
    assert made("identity_kernel[2x2]", 4, 4, 2, 2) is None
    assert made("identity_kernel[3x3]", 4, 4, 3, 1) is None
    assert made("identity_kernel[3x3]", 4, 3, 3, 3) is None
    pool = made("pool_kernel[2x3]", 4, 1, 2, 3)
    assert pool is not None and np.allclose(pool, 1 / 6) and pool.shape == (4, 1, 2, 3)
    assert made("pool_kernel[2x3]", 4, 2, 2, 3) is None


def test_splits_part_where_the_last_concatenation_was() -> None:
    x, y, z = (Term(name) for name in "xyz")
    values = dict(zip((x, y, z), arrays((2, 3), (2, 4), (2, 1))))
    joined = "relu(concat[-1](concat[-1](x, y), z))"
    terms = [
        parse(f"split0[-1](split0[-1]({joined}))"),
        parse(f"split1[-1](split0[-1](add({joined}, {joined})))"),
        parse(f"split1[-1]({joined})"),
        parse(f"split0[-1](transpose(transpose({joined})))"),
    ]
    found = evaluate(terms, values)
    assert found is not None
    np.testing.assert_array_equal(found[0], np.maximum(values[x], 0))
    np.testing.assert_array_equal(found[1], 2 * np.maximum(values[y], 0))
    np.testing.assert_array_equal(found[2], np.maximum(values[z], 0))
    both = np.concatenate([values[x], values[y]], 1)
    np.testing.assert_array_equal(found[3], np.maximum(both, 0))
    assert evaluate([parse("split0[-1](x)")], values) is None
    assert evaluate([parse("split0[-2](concat[-1](x, y))")], values) is None
    given = {x: Type((2, 3), (None, Tree(None, None, 1)))}
    (part,) = evaluate([parse("split1[-1](x)")], values, given) or ()
    np.testing.assert_array_equal(part, values[x][:, 1:])


def test_wrong_terms_have_no_value() -> None:
    x = Term("x")
    values = {x: arrays((2, 3))[0]}
    for text in ("y", "matmul(x, x)", "relu(x, x)", "frobnicate(x)", "ones", "concat[-3](x, x)"):
        assert evaluate([parse(text)], values) is None
    assert evaluate([parse("mul(x, ones)")], values, {parse("ones"): tensor_type((3,))}) is not None


# comparison


def test_a_counterexample_is_printed() -> None:
    x, y = Term("x"), Term("y")
    types = {x: tensor_type((1, 4, 5, 5)), y: tensor_type((4, 2, 3, 3))}
    wrong = compare(
        [parse("concat[-3](conv2d[2,1,same,none](x, y), conv2d[2,1,same,none](x, y))")],
        [parse("conv2d[2,1,same,none](x, concat[-4](y, y))")],
        types,
    )
    assert wrong is not None and wrong.output == 0 and wrong.values is not None
    assert abs(wrong.values[0] - wrong.values[1]) > 0.1
    assert str(wrong).startswith("output 0 at (0, ") and "x (1, 4, 5, 5)" in str(wrong)
    # the place and the values are right
    rng = np.random.default_rng((0, 0))
    values = {term: rng.uniform(-1, 1, extents(type_)) for term, type_ in types.items()}
    (left,) = evaluate([parse("concat[-3](conv2d[2,1,same,none](x, y), x)")], values) or ()
    if wrong.index[1] < 4:
        assert left[wrong.index] == pytest.approx(wrong.values[0])
    shapes = compare(
        [parse("conv2d[2,1,same,none](x, y)")], [parse("conv2d[2,2,same,none](x, y)")], types
    )
    assert shapes is not None and shapes.values is None
    assert "(1, 4, 5, 5) but (1, 4, 3, 3)" in str(shapes)


def test_comparison_is_relative_and_sees_every_output() -> None:
    x, w = Term("x"), Term("w")
    types = {x: tensor_type((3, 4)), w: tensor_type(())}
    one, other = parse("smul(relu(x), w)"), parse("relu(smul(x, w))")
    assert compare([one], [one], types) is None
    assert compare([one, parse("relu(x)")], [one, parse("relu(relu(x))")], types) is None
    found = [compare([parse("x"), one], [parse("x"), other], types, seed) for seed in range(8)]
    wrong = [each for each in found if each is not None]
    assert wrong and all(each.output == 1 for each in wrong)  # only of negative scalars
    with pytest.raises(GraphError, match=r"matmul\(x, x\) does not fit"):
        compare([parse("matmul(x, x)")], [parse("x")], types)
