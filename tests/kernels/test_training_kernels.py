"""Numba's losses, updates, copies, dropout and embeddings, beyond the operators' cases.

Layouts, sizes over several items of work, threads, aliasing, status codes and special values.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import FILL, place, random, reference as declared
from helpers.operator_checks import named

from soapstone.ir.errors import GraphError
from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variants
from soapstone.native import memory

Array = np.ndarray[Any, Any]
THREADS = pytest.mark.parametrize("threads", [1, 2])


def bind(
    name: str, inputs: list[Array], outputs: list[Array], threads: int = 1, **attributes: Any
) -> Entry | None:
    (variant,) = [v for v in variants(name) if v.name == "numba"]
    spec = operator(name)
    own = {key: value for key, value in attributes.items() if key in spec.attributes}
    return variant.bind(
        Call(name, {**attributes, **spec.normalise(own)}, tuple(inputs), tuple(outputs), threads)
    )


def run(
    name: str, inputs: list[Array], outputs: list[Array], threads: int = 1, **attributes: Any
) -> None:
    entry = bind(name, inputs, outputs, threads, **attributes)
    assert entry is not None
    assert memory.run(entry) == 0


def reference(name: str, *inputs: Array, **attributes: Any) -> tuple[Array, ...]:
    """The declared meaning, in float64."""
    return tuple(declared(name, inputs, attributes))


def scalar(value: float) -> Array:
    return np.array(value, np.float32)


LAYOUTS = {name: partial(place, layout=name) for name in ("plain", "last", "tile", "reversed")}
last, tile, reversed_axes = LAYOUTS["last"], LAYOUTS["tile"], LAYOUTS["reversed"]


# Updates


@THREADS
@pytest.mark.parametrize("layout", ["plain", "last", "tile"])
@pytest.mark.parametrize(
    "attributes",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
)
def test_sgd_in_place(attributes: dict[str, Any], layout: str, threads: int) -> None:
    arrays = [LAYOUTS[layout](random(4, 24, 20, 21, seed=i)) for i in range(3)]
    w, g, v = arrays
    state = [v] if "momentum" in attributes else []
    inputs = [w, g, *state, scalar(0.01), np.array(True)]
    want = reference("sgd", *inputs, **attributes)
    run("sgd", inputs, [w, *state], threads, **attributes)
    for found, expected in zip([w, *state], want):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


@THREADS
@pytest.mark.parametrize("layout", ["plain", "last", "tile"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_in_place(decoupled: bool, layout: str, threads: int) -> None:
    w, g, m, v = (LAYOUTS[layout](random(4, 24, 20, 21, seed=i)) for i in range(4))
    np.abs(v, out=v)
    attributes = {"weight_decay": 0.1, "decoupled": decoupled}
    inputs = [w, g, m, v, scalar(0.01), np.array(7), np.array(True)]
    want = reference("adam", *inputs, **attributes)
    run("adam", inputs, [w, m, v], threads, **attributes)
    for found, expected in zip([w, m, v], want):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_updates_copy_when_not_ok(in_place: bool) -> None:
    arrays = [random(1000, seed=i) for i in range(4)]
    before = [a.copy() for a in arrays]
    w, g, m, v = arrays
    g[3] = np.nan
    ok, rate = np.array(False), scalar(0.1)
    outputs = [w, m, v] if in_place else [np.zeros(1000, np.float32) for _ in range(3)]
    run("adam", [w, g, m, v, rate, np.array(1), ok], outputs)
    for found, expected in zip(outputs, (before[0], before[2], before[3])):
        np.testing.assert_array_equal(found, expected)
    run("sgd", [w, g, m, rate, ok], outputs[:2], momentum=0.5)
    for found, expected in zip(outputs[:2], (before[0], before[2])):
        np.testing.assert_array_equal(found, expected)


# Losses


@THREADS
@pytest.mark.parametrize("labels", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(1, 1), (700, 10), (37, 1003), (300, 64)])
def test_cross_entropy(shape: tuple[int, int], labels: type, threads: int) -> None:
    logits = tile(5 * random(*shape))
    y = np.random.default_rng(0).integers(0, shape[1], (shape[0], 2)).astype(labels)[:, 1]
    loss, lse, dlogits = scalar(0), np.zeros(shape[0], np.float32), tile(np.zeros_like(logits))
    run("cross_entropy", [logits, y], [loss, lse], threads)
    want = reference("cross_entropy", logits, y)
    np.testing.assert_allclose(loss, want[0], rtol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-6)
    run("cross_entropy_grad", [scalar(2), logits, y, lse], [dlogits], threads)
    (want_grad,) = reference("cross_entropy_grad", scalar(2), logits, y, want[1])
    np.testing.assert_allclose(dlogits, want_grad, rtol=1e-5, atol=2e-6 / shape[0])


@THREADS
@pytest.mark.parametrize("shape", [(700, 10), (37, 1003)])
def test_cross_entropy_dense(shape: tuple[int, int], threads: int) -> None:
    logits, targets = tile(5 * random(*shape)), tile(np.abs(random(*shape, seed=1)))
    loss, lse, dlogits = scalar(0), np.zeros(shape[0], np.float32), tile(np.zeros_like(logits))
    run("cross_entropy_dense", [logits, targets], [loss, lse], threads, count=9)
    want = reference("cross_entropy_dense", logits, targets, count=9)
    np.testing.assert_allclose(loss, want[0], rtol=2e-6)
    inputs = [scalar(2), logits, targets, lse]
    run("cross_entropy_dense_grad", inputs, [dlogits], threads, count=9)
    (want_grad,) = reference("cross_entropy_dense_grad", *inputs[:3], want[1], count=9)
    np.testing.assert_allclose(dlogits, want_grad, rtol=1e-5, atol=1e-5)


@THREADS
@pytest.mark.parametrize("bad", [-1, 10])
def test_a_label_out_of_range_is_status_1(bad: int, threads: int) -> None:
    logits, labels = random(3000, 10), np.zeros(3000, np.int64)
    labels[2900] = bad
    lse = np.zeros(3000, np.float32)
    entries = [
        bind("cross_entropy", [logits, labels], [scalar(0), lse], threads),
        bind("cross_entropy_grad", [scalar(1), logits, labels, lse], [logits.copy()], threads),
    ]
    for entry in entries:
        assert entry is not None
        assert memory.run(entry) == 1
        assert "label" in entry.statuses[1]


def test_no_samples_are_served() -> None:
    logits, dtable = np.zeros((0, 3), np.float32)[:, ::-1], np.ones((5, 3), np.float32)
    labels, none, total = np.zeros(0, np.int64), np.zeros(0, np.float32), scalar(7)
    run("cross_entropy", [logits, labels], [total, none], count=4)
    assert total == 0
    run("correct", [logits, labels], [total])
    assert total == 0
    run("cross_entropy_grad", [scalar(1), logits, labels, none], [logits], count=4)
    run("embedding", [labels, dtable], [logits])
    run("embedding_grad", [logits, labels], [dtable], vocabulary=5)
    assert not dtable.any()


def test_cross_entropy_of_transposed_logits_is_left_to_others() -> None:
    lse = np.zeros(4, np.float32)
    inputs = [reversed_axes(random(4, 3)), np.zeros(4, np.int64)]
    assert bind("cross_entropy", inputs, [scalar(0), lse]) is None


@THREADS
def test_sums_have_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    p, t = random(333, 777), random(333, 777, seed=1)
    totals = []
    for count in (1, threads):
        loss = scalar(0)
        run("mse", [p, t], [loss], count)
        totals.append(loss)
    np.testing.assert_array_equal(*totals)


@THREADS
@pytest.mark.parametrize("kind", ["mse", "bce"])
def test_losses_of_operands_that_lie_differently_take_rows(kind: str, threads: int) -> None:
    """The bits are those of equal layouts; elements added one by one would give others."""
    attributes = {} if kind == "mse" else {"from_logits": True}
    p, t = random(3, 20, 19, 21), random(3, 20, 19, 21, seed=1)
    sums, grads = [], []
    for one, other, made in ((p, t, p), (last(p), t, last(p)), (last(p), t, p), (p, last(t), p)):
        loss, dp = scalar(0), np.full_like(made, 7)
        run(kind, [one, other], [loss], threads, **attributes)
        run(f"{kind}_grad", [scalar(3), one, other], [dp], threads, **attributes)
        grads.append(dp)
        if other is t:  # whose order is that in which is added
            sums.append(loss)
    for found, equal in ((sums, sums[0]), (grads, grads[0])):
        for array in found:
            np.testing.assert_array_equal(array, equal)


@THREADS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mse", "bce", "bce logits"])
def test_pair_losses(name: str, layout: str, threads: int) -> None:
    kind, *logits = name.split()
    attributes = {} if kind == "mse" else {"from_logits": bool(logits)}
    p, t = random(3, 20, 19, 21), random(3, 20, 19, 21, seed=1)
    if name == "bce":
        p = 1 / (1 + np.exp(-12 * p))  # also next to 0 and 1
    p, t = LAYOUTS[layout](p), LAYOUTS[layout](1 / (1 + np.exp(-t)))
    loss, dp = scalar(0), LAYOUTS[layout](np.zeros_like(p))
    run(kind, [p, t], [loss], threads, **attributes)
    # the clipping bound is float32's: the reference runs on the same bounds
    with np.errstate(all="ignore"):
        want = reference(kind, np.clip(p, np.float32(1e-7), np.float32(1 - 1e-7)), t, **attributes)
        if name != "bce":
            want = reference(kind, p, t, **attributes)
    np.testing.assert_allclose(loss, want[0], rtol=2e-6)
    run(f"{kind}_grad", [scalar(3), p, t], [dp], threads, **attributes)
    spec = operator(f"{kind}_grad")
    (grad,) = spec.run(spec.normalise(attributes), scalar(3), p, t)
    np.testing.assert_allclose(dp, grad, rtol=2e-5, atol=1e-8)
    if kind == "bce":
        run("bce_target_grad", [scalar(3), p], [dp], threads, **attributes)
        spec = operator("bce_target_grad")
        (grad,) = spec.run(spec.normalise(attributes), scalar(3), p)
        np.testing.assert_allclose(dp, grad, rtol=1e-5, atol=1e-8)


def test_binary_cross_entropy_keeps_small_terms() -> None:
    p, t, loss = np.full(1000, 1e-6, np.float32), np.zeros(1000, np.float32), scalar(0)
    run("bce", [p, t], [loss])
    np.testing.assert_allclose(loss, 1e-6, rtol=1e-5)
    run("bce", [np.full(1000, -20, np.float32), t], [loss], from_logits=True)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-20.0)), rtol=1e-5)


@THREADS
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_is_finite(bad: float | None, threads: int) -> None:
    for at, layout in itertools.product((0, 5, -1), LAYOUTS):
        x, ok = LAYOUTS[layout](random(3, 20, 19, 21)), np.array(bad is not None)
        x[0, 0, 0, 0] = 3e38
        if bad is not None:
            x[np.unravel_index(at % x.size, x.shape)] = bad
        run("is_finite", [x], [ok], threads)
        assert bool(ok) == (bad is None)


@THREADS
def test_correct_takes_the_first_maximum(threads: int) -> None:
    logits = np.round(2 * random(5000, 7))  # many ties
    logits[17, 3] = logits[17, 5] = np.nan
    labels = np.random.default_rng(0).integers(-1, 8, 5000)
    labels[17] = 3
    count = scalar(0)
    run("correct", [tile(logits), labels], [count], threads)
    assert float(count) == np.sum(np.argmax(logits, axis=1) == labels)


# Copies


@THREADS
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float64", "int32", "uint8"])
@pytest.mark.parametrize("target", LAYOUTS)
def test_copies_between_layouts(target: str, dtype: str, threads: int) -> None:
    shapes = (2, 3, 13, 17), (3, 70, 9, 31), (1, 1, 5, 1), (2, 66, 3, 300)
    for source, shape in itertools.product(LAYOUTS, shapes):
        values = (100 * random(*shape)).astype(np.int64).astype(dtype)
        x = LAYOUTS[source](values)
        to = LAYOUTS[target](np.zeros(shape, dtype))
        with named(source, shape):
            run("store", [x, to], [to], threads)
            np.testing.assert_array_equal(to, values)
            if to.base is not None and target == "tile":
                frame = to.base.copy()
                frame[tuple(slice(1, 1 + extent) for extent in shape)] = FILL
                assert np.all(frame == np.full((), FILL, dtype))  # nothing beside it is written


@THREADS
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (4, 64, 7, 7), (2, 96, 40, 41)])
def test_flatten_of_channels_last_and_back(shape: tuple[int, ...], threads: int) -> None:
    values = random(*shape)
    flat = np.zeros((shape[0], values[0].size), np.float32)
    run("reshape", [last(values)], [flat], threads, shape=flat.shape)
    np.testing.assert_array_equal(flat, values.reshape(flat.shape))
    back = last(np.zeros(shape, np.float32))
    run("reshape", [flat], [back], threads, shape=shape)
    np.testing.assert_array_equal(back, values)


def test_reshapes_of_tiles() -> None:
    for before, after in (((6, 4), (2, 12)), ((2, 3, 4), (6, 4)), ((4, 6), (2, 2, 1, 3, 2))):
        values = random(*before)
        y = tile(np.zeros(after, np.float32))
        run("reshape", [tile(values)], [y], shape=after)
        np.testing.assert_array_equal(y, values.reshape(after))
    y = tile(np.zeros((3, 2), np.float32))
    assert bind("reshape", [tile(random(2, 3))], [y], shape=(3, 2)) is None
    run("reshape", [random(2, 3)], [y], shape=(3, 2))
    np.testing.assert_array_equal(y, random(2, 3).reshape(3, 2))


@THREADS
def test_every_transpose(threads: int) -> None:
    x = random(5, 70, 33, 6)
    for permutation in itertools.permutations(range(4)):
        want = x.transpose(permutation)
        y = np.zeros(want.shape, np.float32)
        run("transpose", [x], [y], threads, permutation=permutation)
        np.testing.assert_array_equal(y, want)


@THREADS
@pytest.mark.parametrize("layout", ["plain", "last"])
def test_pad_slice_concat_split(layout: str, threads: int) -> None:
    put = LAYOUTS[layout]
    x = put(random(2, 19, 30, 31))
    for interior in ((0, 0, 0, 0), (0, 0, 1, 2)):
        attributes = {"low": (0, 1, 2, 0), "high": (1, 0, 0, 3), "interior": interior}
        (want,) = reference("pad", x, value=1.5, **attributes)
        y = put(np.zeros(want.shape, np.float32))
        run("pad", [x], [y], threads, value=1.5, **attributes)
        np.testing.assert_array_equal(y, want)
    bounds = {"starts": (0, 2, 1, 3), "stops": (2, 19, 30, 29), "steps": (1, 3, 1, 2)}
    (want,) = reference("slice", x, **bounds)
    y = put(np.zeros(want.shape, np.float32))
    run("slice", [x], [y], threads, **bounds)
    np.testing.assert_array_equal(y, want)
    parts = [put(np.zeros((2, n, 30, 31), np.float32)) for n in (4, 0, 15)]
    run("split", [x], parts, threads, axis=1, sizes=(4, 0, 15))
    whole = put(np.zeros(x.shape, np.float32))
    run("concat", parts, [whole], threads, axis=1)
    np.testing.assert_array_equal(whole, x)


@THREADS
def test_broadcast_and_full(threads: int) -> None:
    y = np.zeros((50, 40, 30), np.float32)
    for shape in ((40, 1), (50, 1, 30), (30,), (1,), ()):
        x = random(*shape)
        run("broadcast", [x], [y], threads, shape=y.shape)
        np.testing.assert_array_equal(y, np.broadcast_to(x, y.shape))
    run("full", [], [y], threads, shape=y.shape, value=-2.5)
    assert np.all(y == np.float32(-2.5))


def test_a_store_onto_itself_changes_nothing() -> None:
    x = random(100, 100)
    run("store", [x, x], [x])
    np.testing.assert_array_equal(x, random(100, 100))


# Dropout


@THREADS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_draws_the_same_in_every_layout(layout: str, threads: int) -> None:
    x, step = random(3, 20, 19, 21), np.array(12345678901)
    attributes = {"rate": 0.3, "seed": 2**63 + 5}
    (want,) = reference("dropout", x, step, **attributes)
    y = LAYOUTS[layout](np.zeros_like(x))
    run("dropout", [LAYOUTS[layout](x), step], [y], threads, **attributes)
    np.testing.assert_allclose(y, want, rtol=1e-6)
    turned = np.zeros_like(x)
    run("dropout", [LAYOUTS[layout](x), step], [turned], threads, **attributes)
    np.testing.assert_array_equal(turned, y)
    part = (slice(1, 3), slice(4, 20), slice(0, 19), slice(2, 9))
    attributes |= {"origin": (1, 4, 0, 2), "full_shape": x.shape}
    y = LAYOUTS[layout](np.zeros_like(x[part]))
    run("dropout", [LAYOUTS[layout](x[part]), step], [y], threads, **attributes)
    np.testing.assert_allclose(y, want[part], rtol=1e-6)


@THREADS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_of_rows_with_a_step_each(layout: str, threads: int) -> None:
    x, steps = random(40, 20, 19, 3), np.arange(80, dtype=np.int64)[::2] << 32
    attributes = {"rate": 0.3, "seed": 5}
    y = LAYOUTS[layout](np.zeros_like(x))
    if layout == "reversed":  # the reference serves where rows lie side by side
        assert bind("dropout", [LAYOUTS[layout](x), steps], [y], threads, **attributes) is None
        return
    run("dropout", [LAYOUTS[layout](x), steps], [y], threads, **attributes)
    for row, step in enumerate(steps):
        (want,) = reference("dropout", x[row], step, **attributes)
        np.testing.assert_allclose(y[row], want, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.5, 1 - 1e-12])
def test_dropout_at_the_ends(rate: float) -> None:
    x, y, step = np.full(3001, np.inf, np.float32), np.empty(3001, np.float32), np.array(-4)
    run("dropout", [x, step], [y], rate=rate)
    np.testing.assert_array_equal(y, reference("dropout", x, step, rate=rate)[0])


def test_dropout_in_place_follows_the_step_in_memory() -> None:
    x, step = np.ones(5000, np.float32), np.array(1)
    y = np.empty_like(x)
    entry = bind("dropout", [x, step], [y], rate=0.5, seed=3)
    assert entry is not None
    for value in (1, 2):
        step[...] = value
        assert memory.run(entry) == 0
        np.testing.assert_array_equal(y, reference("dropout", x, step, rate=0.5, seed=3)[0])
    run("dropout", [x, step], [x], rate=0.5, seed=3)
    np.testing.assert_array_equal(x, y)


# Embedding


@THREADS
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_embedding(dtype: type, threads: int) -> None:
    table = tile(random(300, 65))
    ids = np.random.default_rng(0).integers(0, 300, (40, 30)).astype(dtype)[:, ::2]
    y = tile(np.zeros((40, 15, 65), np.float32))
    run("embedding", [ids, table], [y], threads)
    np.testing.assert_array_equal(y, table[ids])
    partial = {"base": 100, "partial": True}
    run("embedding", [ids, table[100:200]], [y], threads, **partial)
    inside = ((ids >= 100) & (ids < 200))[..., None]
    np.testing.assert_array_equal(y, np.where(inside, table[ids], 0))
    dtable = tile(np.full((100, 65), np.nan, np.float32))
    dy = tile(random(40, 15, 65, seed=2))
    run("embedding_grad", [dy, ids], [dtable], threads, vocabulary=100, base=100)
    (want,) = reference("embedding_grad", dy, ids, vocabulary=100, base=100)
    np.testing.assert_allclose(dtable, want, rtol=1e-5, atol=1e-5)


@THREADS
def test_an_index_outside_the_table_is_status_1(threads: int) -> None:
    ids, table = np.zeros(9000, np.int32), random(4, 3)
    for bad in (-1, 4):
        ids[8000] = bad
        entry = bind("embedding", [ids, table], [np.zeros((9000, 3), np.float32)], threads)
        assert entry is not None
        assert memory.run(entry) == 1
        said = entry.statuses[1]
        assert callable(said) and f"index {bad} found, 0 to 3 needed" in said()
        with pytest.raises(GraphError, match="index"):
            reference("embedding", ids, table)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("softmax", [(3, 4)]),
        ("mse", [(3, 4), (3, 4)]),
        ("is_finite", [(3, 4)]),
        ("dropout", [(3, 4)]),
    ],
)
def test_other_types_are_left_to_others(name: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [np.zeros(shape) for shape in shapes] + [np.array(1)] * (name == "dropout")
    (made,) = reference(name, *inputs)
    assert bind(name, inputs, [np.empty_like(made)]) is None
