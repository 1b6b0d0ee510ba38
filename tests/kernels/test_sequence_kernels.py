"""Kernels of recurrent layers, attention and bags: which calls they serve, and on what layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers.kernel_calls import LIBRARY, bound, near, reference, run, served

from soapstone.dtypes import learn
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.products.forms import IN_PLACE
from soapstone.kernels.entry import BFLOAT16, Call
from soapstone.kernels.registry import variants
from soapstone.native import memory
from soapstone.native.snapshot import _Kept

T, N, K, H = 7, 12, 24, 32


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, shape).astype(np.float32)


run_all = partial(served, threads=1, tolerance=2e-4)


def recurrent(kind: str) -> tuple[list[Array], int]:
    """Return the operands of a layer over steps, and how many states it has."""
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    weights = [draw(1, K, gates * H), draw(2, H, gates * H), draw(3, gates * H)]
    if kind == "gru":
        weights.append(draw(4, gates * H))
    states = 2 if kind == "lstm" else 1
    return [draw(0, T, N, K), *weights, *(draw(5 + i, N, H) for i in range(states))], states


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_layers_are_served(kind: str, reverse: bool, constant: bool, threads: int) -> None:
    operands, _ = recurrent(kind)
    served = run_all(
        kind,
        operands,
        {"reverse": reverse},
        threads=threads,
        constants=frozenset({1, 2}) if constant else frozenset(),
    )
    assert LIBRARY in served and (LIBRARY != "onednn" or "onednn_gemm" in served)


@pytest.mark.onednn
def test_a_single_sample_is_served_without_packing() -> None:
    operands, _ = recurrent("lstm")
    one = [operands[0][:, :1], *operands[1:4], *(state[:1] for state in operands[4:])]
    assert "onednn_gemm" in run_all("lstm", one, {}, threads=2)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_constant_weights_of_few_samples_are_read_in_panels(kind: str) -> None:
    operands, _ = recurrent(kind)
    for samples, steps in ((1, T), (3, 1)):
        few = [operands[0][:steps, :samples], *operands[1:]]
        few = [x[:samples] if x.shape == (N, H) else x for x in few]
        served = run_all(kind, few, {}, threads=2, constants=frozenset({1, 2}))
        assert "panels" in served and IN_PLACE.isdisjoint(served)
        assert "panels" not in run_all(kind, few, {}, threads=2)
    assert "panels" not in run_all(kind, operands, {}, constants=frozenset({1, 2}))


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_layers_take_tiles_and_transposes(kind: str) -> None:
    operands, _ = recurrent(kind)
    whole = draw(20, N + 3, T, K + 2)
    operands[0] = whole[2 : N + 2, :, 1 : K + 1].transpose(1, 0, 2)  # samples first, in memory
    expected = operator(kind).run(operator(kind).normalise({}), *operands)
    buffers = [np.full((*v.shape[:-2], v.shape[-2] + 2, v.shape[-1]), 7, v.dtype) for v in expected]
    outputs = [buffer[..., 1:-1, :] for buffer in buffers]
    assert run_all(kind, operands, {}, outputs=outputs)
    for buffer in buffers:
        assert (buffer[..., 0, :] == 7).all()
        assert (buffer[..., -1, :] == 7).all()
    scattered = [np.asfortranarray(operand) for operand in operands]
    assert run_all(kind, scattered, {}, constants=frozenset({1, 2}))


def test_a_long_input_is_multiplied_by_stretches() -> None:
    x = draw(0, 11, 150, 8)
    operands = [x, draw(1, 8, 16), draw(2, 4, 16), draw(3, 16), draw(4, 150, 4), draw(5, 150, 4)]
    for reverse in (False, True):
        assert run_all("lstm", operands, {"reverse": reverse}, threads=2)


@pytest.mark.parametrize("linear", [False, True])
def test_the_reset_gate_before_or_after_the_product(linear: bool) -> None:
    operands, _ = recurrent("gru")
    attributes = {"linear_before_reset": linear}
    assert LIBRARY in run_all("gru", operands, attributes)
    x, w, r, b, rb, h0 = operands
    assert LIBRARY in run_all("gru_cell", [x[0], h0, w, r, b, rb], attributes)


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_are_served(threads: int) -> None:
    steps, rows = draw(0, T, N, H), draw(1, N, H)
    gates, r = draw(2, T, N, 4 * H) + 0.5, draw(3, H, 4 * H)
    given = [steps, rows, draw(4, N, H), gates, draw(5, T, N, H), r, draw(6, N, H)]
    for reverse in (False, True):
        assert LIBRARY in run_all("lstm_grad", given, {"reverse": reverse}, threads=threads)
    three = [steps, rows, gates[..., : 3 * H], draw(5, T, N, H), draw(6, T, N, H)]
    assert LIBRARY in run_all("gru_grad", [*three, draw(3, H, 3 * H)], {}, threads=threads)
    plain = [steps, rows, draw(5, T, N, H), draw(3, H, H)]
    assert LIBRARY in run_all("rnn_grad", plain, {}, threads=threads)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_with_lengths_are_served(reverse: bool) -> None:
    lengths = np.array([0, 1, 9, T, 3, T - 1, 2, 2, 5, 4, 1, 0], np.int32)
    for kind in ("lstm", "gru", "rnn"):
        operands, _ = recurrent(kind)
        for limits in (lengths, np.minimum(lengths, 3)):  # and where no sample has the last steps
            assert LIBRARY in run_all(kind, [*operands, limits], {"reverse": reverse}, threads=2)
        again = {"reverse": reverse, "linear_before_reset": False}
        assert kind != "gru" or run_all(kind, [*operands, lengths], again)
    steps, rows, r = draw(0, T, N, H), draw(1, N, H), draw(3, H, 4 * H)
    gates = draw(2, T, N, 4 * H) + 0.5
    calls = {
        "lstm_grad": [steps, rows, draw(4, N, H), gates, draw(5, T, N, H), r, draw(6, N, H)],
        "gru_grad": [steps, rows, gates[..., : 3 * H], *2 * [draw(5, T, N, H)], r[:, : 3 * H]],
        "rnn_grad": [steps, rows, draw(5, T, N, H), r[:, :H]],
        "previous_step": [steps, rows],
        "sru": [draw(7, T, N, H), r[:, : 3 * H], draw(8, 2 * H), rows],
        "sru_grad": [steps, rows, gates[..., : 3 * H], *2 * [draw(5, T, N, H)], rows],
    }
    for name, given in calls.items():
        for limits in (lengths, np.minimum(lengths, 3)):
            assert run_all(name, [*given, limits], {"reverse": reverse}), name


def test_cells_are_served() -> None:
    x, h, c = draw(0, N, K), draw(1, N, H), draw(2, N, H)
    for name, gates in (("lstm_cell", 4), ("nas_cell", 8)):
        weights = [draw(3, K, gates * H), draw(4, H, gates * H), draw(5, gates * H)]
        constants = frozenset({3, 4})
        assert LIBRARY in run_all(name, [x, h, c, *weights], {}, threads=2)
        assert LIBRARY in run_all(name, [x, h, c, *weights], {}, constants=constants)


@pytest.mark.parametrize("columns", [3, 4])
def test_sru_is_served(columns: int) -> None:
    width = K if columns == 3 else H
    operands = [draw(0, T, N, K), draw(1, K, columns * width), draw(2, 2 * width)]
    for reverse in (False, True):
        attributes = {"reverse": reverse}
        assert LIBRARY in run_all("sru", [*operands, draw(3, N, width)], attributes, threads=2)
        gates, cells = draw(4, T, N, columns * width) + 0.5, draw(5, T, N, width)
        given = [draw(6, T, N, width), draw(7, N, width), gates, cells, operands[0]]
        assert "numba" in run_all("sru_grad", [*given, draw(8, N, width)], attributes, threads=2)


# Where there are registers enough for products of six rows.
BLOCKS = {"blocks"} & {each.name for each in variants("attention", "cpu")}
HEADS = ((2, 40, 3, 16), (2, 70, 3, 16), (2, 70, 3, 20))


def heads(transposed: bool) -> list[Array]:
    """Return queries, keys and values, in memory by heads where `transposed`."""
    if not transposed:
        return [draw(i, *shape) for i, shape in enumerate(HEADS)]
    return [draw(i, b, h, t, d).transpose(0, 2, 1, 3) for i, (b, t, h, d) in enumerate(HEADS)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, (40, 70), (2, 1, 1, 70), (1, 3, 40, 1), (1,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_attention_is_served(
    transposed: bool, mask: tuple[int, ...] | None, causal: bool, threads: int
) -> None:
    operands = heads(transposed)
    masks = [] if mask is None else [draw(9, *mask) * 3]
    attributes = {"causal": causal}
    spec = operator("attention")
    served = run_all("attention", [*operands, *masks], attributes, threads=threads)
    y, lse = spec.run(spec.normalise(attributes), *operands, *masks)
    dy = draw(10, *y.shape)
    given = [dy, *operands, y, lse, *masks]
    assert served == {LIBRARY} | BLOCKS
    assert run_all("attention_grad", given, attributes, threads=threads) == {LIBRARY}


@pytest.mark.parametrize(("queries", "keys"), [(600, 600), (600, 90), (70, 900)])
def test_attention_by_blocks_of_queries(queries: int, keys: int) -> None:
    operands = [draw(0, 1, queries, 2, 8), draw(1, 1, keys, 2, 8), draw(2, 1, keys, 2, 8)]
    for causal in (False, True):
        attributes = {"causal": causal, "scale": 1.5}
        spec = operator("attention")
        assert run_all("attention", operands, attributes, threads=2)
        y, lse = spec.run(spec.normalise(attributes), *operands)
        given = [draw(3, *y.shape), *operands, y, lse]
        assert run_all("attention_grad", given, attributes, threads=2)


@pytest.mark.skipif(not BLOCKS, reason="registers hold the sums of too few rows")
def test_attention_by_blocks_needs_nothing_that_was_in_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session is kept for later processes unless what counts has words that may be addresses."""
    made = memory.aligned

    def filled(nbytes: int, *, zero: bool = False) -> Array:
        found = made(nbytes, zero=zero)
        if not zero:
            found[:] = 0xA5
        return found

    monkeypatch.setattr(memory, "aligned", filled)
    operands = draw(0, 1, 13, 2, 8), draw(1, 1, 21, 2, 8), draw(2, 1, 21, 2, 5)
    attributes = operator("attention").normalise({})
    outputs = draw(3, 1, 13, 2, 5), draw(4, 1, 2, 13)
    entry = bound(Call("attention", attributes, operands, outputs), "blocks")
    assert entry is not None
    run(entry)
    kept = _Kept()
    kept.block(entry.arguments)
    arrays = (span.array for span in kept.arrays.values())
    counts = [each for each in arrays if not isinstance(each, memory.Scratch)]
    assert counts and not any(b"\xa5" * 8 in each.tobytes() for each in counts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", ["zeros", "nan"])
@pytest.mark.parametrize("number", [False, True])
def test_attention_masks_of_infinities(number: bool, empty: str, causal: bool) -> None:
    """Hidden keys, rows of which all keys are hidden, and what is not a number; 1100 keys."""
    operands = [draw(0, 1, 13, 2, 8), draw(1, 1, 1100, 2, 8), draw(2, 1, 1100, 2, 5)]
    mask = draw(3, 1, 2, 13, 1 if number else 1100)
    mask[0, 0, 2] = -np.inf
    mask[0, 1, 12, -1] = np.nan
    if not number:
        mask[..., 5:9] = -np.inf
        mask[0, 0, 7, 700:] = -np.inf
    for threads in (1, 2):
        attributes = {"causal": causal, "empty": empty}
        served = run_all("attention", [*operands, mask], attributes, threads=threads)
        assert served >= BLOCKS


@pytest.mark.skipif(not BLOCKS, reason="needs registers for the sums of six rows")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", [-1e10, 1e30, np.finfo(np.float32).min])
def test_a_large_number_that_is_added_to_all_scores_of_a_query(number: float, causal: bool) -> None:
    """Beside which scores are nothing: weights are those of the scores alone."""
    operands = [draw(0, 1, 13, 2, 8) * 1000, draw(1, 1, 90, 2, 8), draw(2, 1, 90, 2, 5)]
    mask = np.zeros((2, 13, 1), np.float32)
    mask[:, ::2] = number
    attributes = operator("attention").normalise({"causal": causal})
    expected, _ = reference("attention", operands, attributes)
    y, lse = (np.full(shape, np.nan, np.float32) for shape in ((1, 13, 2, 5), (1, 2, 13)))
    run(bound(Call("attention", attributes, (*operands, mask), (y, lse)), "blocks"))
    near(y, expected, 2e-4)


@pytest.mark.parametrize("hides", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("used", [0, 1, 37, 90])
def test_attention_of_few_queries_reads_keys_in_place(hides: float, used: int) -> None:
    operands = [draw(0, 2, 3, 2, 8), draw(1, 2, 2, 90, 8), draw(2, 2, 2, 90, 5)]
    operands[1:] = (each.swapaxes(1, 2) for each in operands[1:])
    mask = np.full((2, 1, 3, 90), hides, np.float32)
    mask[..., :used] = draw(3, 90)[:used]
    mask[1, :, 2, 20:] = hides
    for causal in (False, True):
        served = run_all("attention", [*operands, mask], {"causal": causal}, threads=2)
        assert served == {LIBRARY, "few"}


@pytest.mark.parametrize("ahead", [-2, -9])
@pytest.mark.parametrize("empty", ["zeros", "nan"])
def test_queries_before_all_keys_of_a_tile_are_rows_without_weights(empty: str, ahead: int) -> None:
    operands = [draw(0, 2, 4, 2, 8), draw(1, 2, 6, 2, 8), draw(2, 2, 6, 2, 5)]
    attributes = {"causal": True, "ahead": ahead, "empty": empty}
    assert "few" in run_all("attention", operands, attributes, threads=2)


@pytest.mark.skipif(not BLOCKS, reason="needs 32 registers of sixteen floats")
@pytest.mark.parametrize(("queries", "keys"), [(6, 1), (7, 16), (13, 49), (49, 65), (20, 130)])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (32, 32), (17, 65), (70, 3)])
@pytest.mark.parametrize("scale", [None, -0.5, 0.0])
def test_attention_of_six_rows_at_a_time(
    queries: int, keys: int, d: int, dv: int, scale: float | None
) -> None:
    operands = [draw(0, 1, queries, 2, d), draw(1, 1, keys, 2, d), draw(2, 1, keys, 2, dv)]
    mask = draw(3, 1, 2, queries, keys)
    for causal in (False, True):
        for given in (operands, [*operands, mask]):
            attributes = {"causal": causal, "scale": scale}
            assert "blocks" in run_all("attention", given, attributes, threads=5)


@pytest.mark.skipif(
    "blocks_bfloat16" not in {each.name for each in variants("attention", "cpu")},
    reason="needs instructions for bfloat16",
)
@pytest.mark.parametrize(("queries", "keys"), [(6, 1), (7, 16), (13, 49), (49, 65), (20, 130)])
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 64), (18, 65), (70, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_six_rows_of_halves(
    queries: int, keys: int, d: int, dv: int, causal: bool
) -> None:
    """Operands and weights have eight bits; sums have all."""
    shapes = (1, queries, 2, d), (1, keys, 2, d), (1, keys, 2, dv)
    operands = [draw(i, *shape) for i, shape in enumerate(shapes)]
    spec = operator("attention")
    at = spec.normalise({"causal": causal})
    half = learn(BFLOAT16)
    rounded = [each.astype(half).astype(np.float64) for each in operands]
    for masks in ([], [draw(3, 1, 2, queries, keys)]):
        expected = spec.run(at, *rounded, *(mask.astype(np.float64) for mask in masks))
        made = tuple(np.full(each.shape, np.nan, np.float32) for each in expected)
        call = Call("attention", at, (*operands, *masks), made, 2, frozenset(), BFLOAT16)
        run(bound(call, "blocks_bfloat16"))
        np.testing.assert_allclose(made[0], expected[0], rtol=0, atol=3e-3)
        np.testing.assert_allclose(made[1], expected[1], rtol=1e-4, atol=1e-4)
        assert bound(replace(call, precision="float32"), "blocks_bfloat16") is None


@pytest.mark.parametrize("queries", [3, 40])
def test_rows_of_which_all_keys_are_hidden_may_be_nan(queries: int) -> None:
    operands = [each[:, :queries] if i == 0 else each for i, each in enumerate(heads(False))]
    mask = np.zeros((queries, 70), np.float32)
    mask[1] = -np.inf
    spec = operator("attention")
    attributes = spec.normalise({"empty": "nan"})
    with np.errstate(invalid="ignore"):
        y, _ = spec.run(attributes, *operands, mask)
    assert np.isnan(y[:, 1]).all()
    assert np.isfinite(np.delete(y, 1, axis=1)).all()
    assert run_all("attention", [*operands, mask], attributes, threads=2)


def test_rows_of_which_all_keys_are_hidden_are_zero() -> None:
    operands = heads(False)
    mask = np.zeros((40, 70), np.float32)
    mask[3] = -np.inf
    mask[5, ::2] = -np.inf
    spec = operator("attention")
    y, lse = spec.run(spec.normalise({}), *operands, mask)
    assert (y[:, 3] == 0).all()
    assert np.isneginf(lse[..., 3]).all()
    assert run_all("attention", [*operands, mask], {})
    given = [draw(3, *y.shape), *operands, y, lse, mask]
    assert run_all("attention_grad", given, {})
    grads = operator("attention_grad").run(spec.normalise({}), *given)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_bags_are_served(reduction: str, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(0, 90, (50, 6)).astype(dtype)
    table = draw(1, 90, 40)
    assert run_all("embedding_bag", [ids, table], {"reduction": reduction}, threads=2)
    assert run_all("embedding_bag", [ids[:, ::2], table[:, 3:30]], {"reduction": reduction})


def test_bags_refuse_an_index_outside_the_table() -> None:
    ids, table = np.array([[0, 9]], np.int32), draw(0, 9, 4)
    (variant,) = variants("embedding_bag")
    attributes = operator("embedding_bag").normalise({})
    call = Call("embedding_bag", attributes, (ids, table), (np.zeros((1, 4), np.float32),))
    entry = variant.bind(call)
    assert entry is not None
    said = entry.statuses[memory.run(entry)]
    assert callable(said) and "index 9 found, 0 to 8 needed" in said()


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_tables_are_served(threads: int) -> None:
    ids = np.random.default_rng(0).integers(0, 3000, (50, 6))
    bags = {"vocabulary": 3000, "scale": 0.5}
    served = run_all("embedding_bag_grad", [draw(0, 50, 40), ids], bags, threads=threads)
    assert served == {"numba"}
    rows = run_all("embedding_grad", [draw(0, 50, 6, 40), ids], {"vocabulary": 3000})
    assert rows == {"numba"}
