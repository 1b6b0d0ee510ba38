"""Every declared operator, on every one of its cases, against what its declaration promises."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import WIDE
from helpers.operator_checks import (
    assert_near,
    box,
    localized,
    mutations,
    named,
    run_split,
    sampled_gradients,
    subject,
    tiles,
    uneven_cuts,
)

from soapstone.ir.analysis.samples import for_samples
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.interpret import interpret
from soapstone.ir.ops.normalization.dropout import random_bits
from soapstone.ir.spec import OpSpec, operator, operators
from soapstone.ir.tensor import Array, TensorSpec, spec_of
from soapstone.ir.training.autodiff import gradients
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory
from soapstone.native.promises import Promise

every_operator = pytest.mark.parametrize("spec", operators(), ids=lambda spec: spec.name)
SPLIT = {"rtol": 1e-9, "atol": 1e-11}  # float64: only the order of additions differs
NATIVE = {"rtol": 1e-4, "atol": 1e-5}  # float32 kernels


@every_operator
def test_outputs_have_the_declared_shapes_and_types(spec: OpSpec) -> None:
    assert spec.cases
    for case, real in itertools.product(spec.cases, ("float32", "float64")):
        with named(case):
            item = subject(spec, case, real)
            outputs = item.run()
            assert len(outputs) == len(item.signature.outputs)
            assert tuple(map(spec_of, outputs)) == item.signature.output_specs


@every_operator
def test_every_split_equals_the_whole(spec: OpSpec) -> None:
    for case in spec.cases:
        item = subject(spec, case)
        whole = item.run()
        plans = [(degrees, None) for degrees in item.signature.configurations(4)]
        for degrees, cuts in [*plans, *uneven_cuts(item.signature)]:
            with named(case, degrees, cuts):
                made = run_split(spec, item.attributes, item.arrays, degrees, cuts)
                for output, expected in zip(made, whole, strict=True):
                    assert_near(output, expected, **SPLIT)


@pytest.mark.parametrize("spec", [s for s in operators() if s.states], ids=lambda spec: spec.name)
def test_recurrent_operators_go_on_from_their_states(spec: OpSpec) -> None:
    for case in spec.cases:
        item = subject(spec, case)
        given = dict(zip((name.removesuffix("?") for name in spec.inputs), item.arrays))
        if "lengths" in given or len(given["x"]) < 2:
            continue
        back, x = item.attributes["reverse"], given["x"]
        first, rest, last = (x[1:], x[:1], 0) if back else (x[:-1], x[-1:], -1)
        made = spec.run(item.attributes, *(given | {"x": first}).values())
        before = dict(zip(spec.outputs, made))
        states = {state: before[output][last] for state, output in spec.states.items()}
        y, *_ = spec.run(item.attributes, *(given | {"x": rest} | states).values())
        assert_near(y[0], item.run()[0][last], **SPLIT)


@every_operator
def test_samples_along_an_axis_before_others_get_what_one_gets(spec: OpSpec) -> None:
    for case in spec.cases:
        item = subject(spec, case)
        if len(item.arrays) != 1:
            continue
        (x,) = item.arrays
        several = np.stack([x, x[::-1] if x.ndim else x, x])
        try:
            attributes = for_samples(spec, item.attributes, spec_of(x), len(several))
        except GraphError:
            continue
        dtypes = item.signature.dtypes
        each = [spec.run(item.attributes, one, dtypes=dtypes) for one in several]
        with named(case, attributes):
            for made, *needed in zip(spec.run(attributes, several, dtypes=dtypes), *each):
                np.testing.assert_allclose(made, np.stack(needed), rtol=1e-12)


def test_samples_are_not_where_an_operator_has_no_place_for_them() -> None:
    x = TensorSpec((2, 3, 4, 5), "float32")
    softmax, moved = operator("softmax"), for_samples(operator("softmax"), {"axis": 1}, x, 7)
    assert moved["axis"] == 2
    for spec, attributes in ((softmax, {"axis": -1}), (operator("lrn"), {"size": 3})):
        with pytest.raises(GraphError, match="meet"):
            for_samples(spec, spec.normalise(attributes), x, 7)


@every_operator
def test_gradients_equal_finite_differences(spec: OpSpec) -> None:
    for case in spec.cases if spec.gradient is not None else ():
        item = subject(spec, case)
        generator = np.random.default_rng(zlib.crc32(spec.name.encode()))
        for output, made in enumerate(item.signature.output_specs):
            if not made.is_float:
                continue
            with named(case, f"output {output}"):
                try:
                    pairs = list(sampled_gradients(item, output, generator))
                except GraphError as error:
                    # An auxiliary output (a saved statistic) has no gradient, and says so.
                    assert output > 0, error
                    assert "output" in str(error)
                    continue
                for position, exact, estimate in pairs:
                    with named(f"input {position}"):
                        assert_near(exact, estimate, rtol=2e-5, atol=2e-7)


@every_operator
def test_misfits_are_shape_errors_that_name_the_dim(spec: OpSpec) -> None:
    required = [name for name in spec.inputs if name[-1] != "?"]
    for case in spec.cases:
        item = subject(spec, case)
        specs = [spec_of(array) for array in item.arrays]
        for kind, changed in mutations(specs):
            try:
                signature = spec.bind(changed, item.attributes)
            except ShapeError as error:
                told = re.search(r"\bdim \w+|\brank\b|\belements\b|\bshape\b", str(error))
                assert told, f"{case} {kind}: {error}"
                continue
            assert all(output.size >= 0 for output in signature.output_specs)
        if required:
            with pytest.raises(ShapeError, match="inputs found"):
                spec.bind(specs[: len(required) - 1], item.attributes)


def stored(array: Array, channels_last: bool) -> Array:
    """Return a copy, channels-last in memory where that is asked for and it has four axes."""
    if not channels_last or array.ndim != 4:
        return np.array(array, order="C")  # an array even where it has no axes
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def layouts(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    """Yield copies of arrays: as they are and, where one is an image, channels-last."""
    for last in (False, True) if any(array.ndim == 4 for array in arrays) else (False,):
        yield [stored(array, last) for array in arrays]


# Variants that serve larger images and products only; tests of their own compare them.
LARGER = {
    "conv1d": {"blocked"},  # test_blocked
    "conv2d": {
        "winograd2",
        "winograd4",
        "grouped",
        "blocked",
    },  # test_winograd, test_grouped, test_blocked
    "conv2d_grad_input": {"winograd2"},  # test_winograd
    "with_epilogue": {
        "winograd2",
        "winograd4",
        "grouped",
        "onednn_product",
        "quads",
    },  # test_onednn_products, test_byte_products
}
if not WIDE:  # oneDNN's classic product is its first choice there, and no variant of its own
    for _name in ("linear_grad_input", "with_epilogue"):
        LARGER[_name] = {*LARGER.get(_name, ()), "onednn_gemm"}


# They decline float32: tests/kernels/test_onednn_bfloat16.py.
OF_BFLOAT16 = {"onednn_bfloat16", "onednn_bfloat16_product", "blocks_bfloat16"}


@every_operator
def test_kernels_equal_the_reference(spec: OpSpec) -> None:
    """On tiles of larger arrays, plain and channels-last; and nothing outside a tile is written.

    Each variant serves some case: one that declined whatever it is asked would pass otherwise.
    """
    serving = set()
    for case in spec.cases:
        item = subject(spec, case, "float32")
        blank = [np.full_like(whole, 77) for whole in item.run()]
        plans = list(item.signature.configurations(2, lowers=False))
        for degrees, given, made in itertools.product(plans, layouts(item.arrays), layouts(blank)):
            for tile in tiles(item.signature, degrees):
                with named(case, degrees, dict(tile.intervals)):
                    # The ellipsis keeps a rank-0 tile an array.
                    inputs = tuple(x[(*box(*b), ...)] for x, b in zip(given, tile.inputs))
                    outputs = tuple(y[(*box(*b), ...)] for y, b in zip(made, tile.outputs))
                    attributes = localized(spec, item.attributes, tile)
                    serving |= served(spec, attributes, inputs, outputs, made)
    known = {v.name for v in variants(spec.name)} - OF_BFLOAT16
    assert known - serving <= LARGER.get(spec.name, set())


def promised(array: Array) -> Array:
    """Return an operand whose contents are there for those alone who ask as they should."""
    dense = np.ascontiguousarray(array)
    if array.size == 0:
        return array
    return Promise.of(
        array.shape, array.dtype, lambda: dense, lambda: nullcontext(dense), {}, nullcontext()
    )


def served(
    spec: OpSpec,
    attributes: Mapping[str, Any],
    inputs: tuple[Array, ...],
    outputs: tuple[Array, ...],
    buffers: Sequence[Array],
) -> set[str]:
    """Run every variant of a call into tiles of buffers that are 77, and return who serves it."""
    expected, names = spec.run(attributes, *inputs), set()
    # Kernels may pack operands that are constant, all but the first, and find them promised.
    several = len(inputs) > 1
    for constants, promises in ((False, False), (True, False), (True, True))[: 1 + 2 * several]:
        given = (inputs[0], *map(promised, inputs[1:])) if promises else inputs
        fixed = frozenset(range(1, len(inputs)) if constants else ())
        call = Call(spec.name, attributes, given, outputs, constants=fixed)
        for variant in variants(spec.name):
            if promises and not variant.promises:
                continue
            entry = variant.bind(call)
            if entry is None:
                continue
            names.add(variant.name)
            with named(variant.name, fixed, promises):
                assert memory.run(entry) == 0
                for buffer, output, value in zip(buffers, outputs, expected, strict=True):
                    assert_near(output, value, **NATIVE)
                    output[...] = 77
                    assert (buffer == np.full((), 77, buffer.dtype)).all(), "wrote outside"
    return names


def run(name: str, *arrays: Array, **attributes: object) -> tuple[Array, ...]:
    spec = operator(name)
    return spec.run(spec.normalise(attributes), *arrays)


def test_conv2d_is_the_sum_over_its_windows() -> None:
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((2, 4, 6, 7)), generator.standard_normal((6, 2, 2, 3))
    (y,) = run(
        "conv2d", x, w, bias=False, groups=2, stride=(2, 1), dilation=(2, 1), padding=(1, 0, 2, 1)
    )
    padded = np.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)))
    assert y.shape == (2, 6, 4, 6)
    for n, o, i, j in np.ndindex(y.shape):
        first = o // 3 * 2  # three output and two input channels a group
        window = padded[n, first : first + 2, 2 * i : 2 * i + 3 : 2, j : j + 3]
        np.testing.assert_allclose(y[n, o, i, j], np.sum(window * w[o]), rtol=1e-12, atol=1e-13)


def test_max_pool2d_takes_the_first_maximum_and_never_padding() -> None:
    x = np.full((1, 1, 3, 3), -np.inf)
    x[0, 0, 1, 1:] = 5
    y, index = run(
        "max_pool2d", x, kernel=(2, 2), stride=(2, 2), padding=(1, 1, 0, 0), indices=True
    )
    np.testing.assert_array_equal(y[0, 0], [[-np.inf, -np.inf], [-np.inf, 5]])
    np.testing.assert_array_equal(index[0, 0], [[3, 2], [1, 0]])


def test_avg_pool2d_counts_padding_or_not() -> None:
    x = np.ones((1, 1, 2, 2))
    attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": (1, 1, 1, 1)}
    (with_pad,) = run("avg_pool2d", x, **attributes)
    (without,) = run("avg_pool2d", x, **attributes, include_pad=False)
    np.testing.assert_array_equal(with_pad, np.full((1, 1, 2, 2), 0.25))
    np.testing.assert_array_equal(without, np.ones((1, 1, 2, 2)))


def test_batch_norm_keeps_running_statistics() -> None:
    x = np.random.default_rng(1).standard_normal((5, 2, 3, 3))
    old_mean, old_var = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    y, mean, var, _, _ = run(
        "batch_norm", x, np.ones(2), np.zeros(2), old_mean, old_var, momentum=0.25, epsilon=0.0
    )
    np.testing.assert_allclose(y.mean(axis=(0, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=(0, 2, 3)), 1)
    np.testing.assert_allclose(mean, 0.75 * old_mean + 0.25 * x.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(var, 0.75 * old_var + 0.25 * x.var(axis=(0, 2, 3), ddof=1))


def test_embedding_rejects_an_index_outside_the_table() -> None:
    with pytest.raises(GraphError, match="index 4 found, 0 to 3 needed"):
        run("embedding", np.array([0, 4]), np.ones((4, 2)))
    with pytest.raises(GraphError, match="index -1 found"):
        run("embedding", np.array([-1]), np.ones((4, 2)))


def test_dropout_draws_by_seed_step_and_index() -> None:
    # SplitMix64's finaliser of zero is zero, and its first output from seed 0 is known.
    assert random_bits(0, 0, np.arange(2)).tolist() == [0, 0xE220A839]
    x = np.ones(20_000, np.float32)
    drawn = [
        run("dropout", x, np.int64(s), rate=0.3, seed=k)[0] for s, k in ((1, 5), (2, 5), (1, 6))
    ]
    for y in drawn:
        assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.7)}
        assert abs(np.count_nonzero(y) / x.size - 0.7) < 0.02
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    with pytest.raises(GraphError, match="rate"):
        operator("dropout").bind(
            [TensorSpec((2,)), TensorSpec((), "int64")], {"rate": 1.0, "seed": 0}
        )


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "message"),
    [
        ("conv2d", ((1, 3, 8, 8), (4, 2, 3, 3)), {}, "dim ci is 3 in input 0 but 2 in input 1"),
        ("conv2d", ((1, 3, 8, 8), (4, 1, 3, 3)), {"groups": 2}, "dim g: 2 groups do not divide 3"),
        ("conv2d", ((1, 3, 2, 8), (4, 3, 3, 3)), {}, "dim h: the window spans 3 positions"),
        ("conv2d", ((3, 8, 8), (4, 3, 3, 3)), {}, "input 0 has rank 3"),
        ("max_pool2d", ((1, 3, 8, 8),), {"kernel": (2, 2), "padding": (2, 0, 0, 0)}, "dim h: pad"),
        ("batch_norm_inference", ((2, 3, 4, 4), (2,), (3,), (3,), (3,)), {}, "dim c is 3 in inp"),
        ("layer_norm", ((2, 3), (3,), (4,)), {}, "dim c is 3 in input 0 but 4 in input 2"),
        ("softmax", ((2, 3),), {"axis": 2}, "no axis 2"),
        ("matmul", ((2, 3), (4, 5)), {}, "dim k is 3 in input 0 but 4 in input 1"),
    ],
)
def test_errors_name_the_operator_and_the_dim(
    name: str, shapes: tuple[tuple[int, ...], ...], attributes: dict[str, object], message: str
) -> None:
    builder = GraphBuilder()
    values = [builder.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
    if name == "conv2d":
        attributes = {"bias": False, **attributes}
    with pytest.raises(ShapeError, match=f"{name} 'layer': .*{message}"):
        builder.apply(name, *values, name="layer", **attributes)


def test_types_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="float32 in input 0 but float64 in input 1"):
        operator("add").bind([TensorSpec((2,)), TensorSpec((2,), "float64")], {})


@pytest.mark.parametrize("permutation", [(0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_large_arrays_are_transposed_in_columns(permutation: tuple[int, ...]) -> None:
    x = np.arange(3 * 211 * 150, dtype=np.int32).reshape(3, 211, 150)
    (found,) = operator("transpose").run({"permutation": permutation}, x)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, np.ascontiguousarray(x.transpose(permutation)))


def test_a_small_network_differentiates() -> None:
    builder = GraphBuilder()
    shapes = {"x": (2, 2, 6, 6), "w": (4, 2, 3, 3), "b": (4,), "v": (36, 3), "c": (3,)}
    for name, shape in shapes.items():
        builder.input(name, shape, "float64")
    (y,) = builder.apply("conv2d", "x", "w", "b", padding=(1, 1, 1, 1), activation="tanh")
    y = builder.apply("max_pool2d", y, kernel=(2, 2), stride=(2, 2), indices=True)[0]
    (y,) = builder.apply("add", y, *builder.apply("sigmoid", y))  # a value with two readers
    (y,) = builder.apply("reshape", y, shape=(2, 36))
    (y,) = builder.apply("linear", y, "v", "c", activation="gelu")
    (y,) = builder.apply("log_softmax", y)
    (loss,) = builder.apply("reduce_mean", y, axes=(0, 1))
    found = gradients(builder, loss, list(shapes))
    builder.output(loss, *found.values())
    graph = builder.build()
    generator = np.random.default_rng(2)
    values = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    results = interpret(graph, values)
    for name, shape in shapes.items():
        direction = generator.standard_normal(shape)
        ends = [
            interpret(graph, values | {name: values[name] + sign * 1e-6 * direction})[loss]
            for sign in (1, -1)
        ]
        exact = np.sum(results[found[name]] * direction)
        np.testing.assert_allclose(exact, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-9)
