"""Steps derived from graphs of all tokens: tokens and logits are those of all tokens anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from helpers.decoders import SMALL

from soapstone import DataError, InferenceSession, Model, Tensor, from_onnx, to_onnx
from soapstone.frontend.generation.decoder import Decoder
from soapstone.frontend.generation.run import Run
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array

LENGTH, WIDTH, WORDS = 24, 32, 61
PROMPTS = [[3, 4, 5], [7], [8, 9, 1, 2, 60]]
LATER = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
Mixing = Callable[[Model, Tensor, str], Tensor]


def heads_of(model: Model, x: Tensor, heads: int, name: str) -> Tensor:
    """Return a projection of x, (n, heads, tokens, 8)."""
    y = model.reshape(model.dense(x, heads * 8, name=name), (-1, LENGTH, heads, 8))
    return model.transpose(y, (0, 2, 1, 3))


def joined(model: Model, y: Tensor) -> Tensor:
    return model.dense(model.reshape(model.transpose(y, (0, 2, 1, 3)), (-1, LENGTH, WIDTH)), WIDTH)


def layer(model: Model, x: Tensor, name: str) -> Tensor:
    return model.multi_head_attention(x, x, x, 4, causal=True, name=name)


def masked_layer(model: Model, x: Tensor, name: str) -> Tensor:
    near = np.where(LATER | np.tril(np.ones_like(LATER), -5), -np.inf, 0).astype(np.float32)
    mask = model.constant(f"{name}.window", near)
    return model.multi_head_attention(x, x, x, 4, mask, name=name)


def windowed_layer(model: Model, x: Tensor, name: str) -> Tensor:
    far = np.where(np.tril(np.ones_like(LATER), -5), -1e9, 0).astype(np.float32)
    mask = model.constant(f"{name}.window", far)
    return model.multi_head_attention(x, x, x, 4, mask, causal=True, name=name)


def repeated(model: Model, y: Tensor) -> Tensor:
    """Return two heads, each of them twice."""
    y = model.reshape(y, (-1, 2, 1, LENGTH, 8))
    return model.reshape(model.concat([y, y], axis=2), (-1, 4, LENGTH, 8))


def spelled(
    hide: Callable[[Model, Tensor, str], Tensor], rotary: bool = False, late: bool = False
) -> Mixing:
    """Return attention written in products, of two heads of keys and four of queries.

    late: keys are repeated before they are turned.
    """

    def turned(model: Model, y: Tensor, name: str) -> Tensor:
        angles = np.arange(LENGTH)[:, None] / 10.0 ** np.arange(4)
        cos, sin = (np.tile(f(angles), 2).astype(np.float32) for f in (np.cos, np.sin))
        first = model.slice(y, axis=3, start=0, stop=4)
        last = model.slice(y, axis=3, start=4, stop=8)
        half = model.concat([last * -1.0, first], axis=3)
        return y * model.constant(f"{name}.cos", cos) + half * model.constant(f"{name}.sin", sin)

    def made(model: Model, x: Tensor, name: str) -> Tensor:
        q, k, v = (
            heads_of(model, x, heads, f"{name}.{part}")
            for part, heads in (("query", 4), ("key", 2), ("value", 2))
        )
        k = repeated(model, k) if late else k
        if rotary:
            q, k = turned(model, q, f"{name}.q"), turned(model, k, f"{name}.k")
        k, v = k if late else repeated(model, k), repeated(model, v)
        scores = model.matmul(q, model.transpose(k, (0, 1, 3, 2))) * 8**-0.5
        return joined(model, model.matmul(model.softmax(hide(model, scores, name)), v))

    return made


def in_one_product(model: Model, x: Tensor, name: str) -> Tensor:
    """Queries, keys and values are parts of one product, of rows of all samples."""
    rows = model.dense(model.reshape(x, (-1, WIDTH)), 3 * WIDTH, name=name)
    q, k, v = (
        model.transpose(model.reshape(part, (-1, LENGTH, 4, 8)), (0, 2, 1, 3))
        for part in model.split(model.reshape(rows, (-1, LENGTH, 3 * WIDTH)), [WIDTH] * 3, axis=2)
    )
    scores = added(model, model.matmul(q, model.transpose(k, (0, 1, 3, 2))), name)
    return joined(model, model.matmul(model.softmax(scores), v))


def added(model: Model, scores: Tensor, name: str) -> Tensor:
    mask = np.where(LATER, np.float32(-1e9), np.float32(0))
    return scores + model.constant(f"{name}.mask", mask)


def chosen(model: Model, scores: Tensor, name: str) -> Tensor:
    """Of places compared, as programs with `arange` have it."""
    rows = model.constant(f"{name}.rows", np.arange(LENGTH).reshape(-1, 1))
    columns = model.constant(f"{name}.columns", np.arange(LENGTH).reshape(1, -1))
    low = model.constant(f"{name}.low", np.array(-np.inf, np.float32))
    return model.where(model.less(rows, columns), low, scores)


def hidden_twice(model: Model, scores: Tensor, name: str) -> Tensor:
    """A window of near keys is chosen, a mask added, and a floor set, as GPT-Neo and XGLM do."""
    near = model.constant(f"{name}.near", ~LATER & np.triu(np.ones_like(LATER), -4))
    low = model.constant(f"{name}.low", np.finfo(np.float32).min)
    return model.maximum(added(model, model.where(near, scores, low), name), low)


def without_nans(model: Model, x: Tensor, name: str) -> Tensor:
    """Shares that are NaN become zeros, as exporters of fused attention write it."""
    q, k, v = (heads_of(model, x, 4, f"{name}.{part}") for part in "qkv")
    scores = added(model, model.matmul(q, model.transpose(k, (0, 1, 3, 2))), name)
    shares = model.softmax(scores)
    zero = model.constant(f"{name}.zero", np.array(0, np.float32))
    return joined(model, model.matmul(model.where(model.is_nan(shares), zero, shares), v))


def with_merged_heads(model: Model, x: Tensor, name: str) -> Tensor:
    """Repeated keys are turned with samples and heads as one axis, as newer exporters have it."""
    q, k, v = (heads_of(model, x, 4 if part == "q" else 2, f"{name}.{part}") for part in "qkv")
    k = model.transpose(model.reshape(repeated(model, k), (-1, LENGTH, 8)), (0, 2, 1))
    k = model.reshape(k, (-1, 4, 8, LENGTH)) * 8**-0.5
    scores = added(model, model.matmul(q, k), name)
    return joined(model, model.matmul(model.softmax(scores), repeated(model, v)))


def with_samples_and_heads_as_one(model: Model, x: Tensor, name: str) -> Tensor:
    """All products are of matrices in one row, and keys have biases, as Bloom has them."""
    parts = model.reshape(model.dense(x, 3 * WIDTH, name=name), (-1, LENGTH, 4, 3, 8))
    q, k, v = (
        model.reshape(model.transpose(model.reshape(part, (-1, LENGTH, 4, 8)), (0, 2, 1, 3)), shape)
        for part in model.split(parts, [1] * 3, axis=3)
        for shape in [(-1, LENGTH, 8)]
    )
    bias = model.constant(f"{name}.places", np.float32(np.arange(LENGTH).reshape(1, 1, -1) / 8))
    scores = model.matmul(q, model.transpose(k, (0, 2, 1))) * 8**-0.5 + bias
    shares = model.softmax(added(model, model.reshape(scores, (-1, 4, LENGTH, LENGTH)), name))
    y = model.matmul(model.reshape(shares, (-1, LENGTH, LENGTH)), v)
    return joined(model, model.reshape(y, (-1, 4, LENGTH, 8)))


def with_taken_heads(model: Model, x: Tensor, name: str) -> Tensor:
    """Keys and values are heads that are looked up before the samples, as Falcon's are."""
    heads = model.reshape(model.dense(x, 6 * 8, name=name), (-1, LENGTH, 6, 8))
    first = model.transpose(heads, (2, 0, 1, 3))
    k, v = (
        model.transpose(model.apply("gather_nd", first, model.constant(f"{name}.{n}", place)), turn)
        for n, place, turn in (
            (4, np.array([[4]]), (1, 0, 3, 2)),
            (5, np.array([[5]]), (1, 0, 2, 3)),
        )
    )
    q = model.transpose(model.slice(heads, axis=2, start=0, stop=4), (0, 2, 1, 3))
    scores = added(model, model.matmul(q, k), name)
    return joined(model, model.matmul(model.softmax(scores), v))


def of_states(model: Model, x: Tensor, name: str) -> Tensor:
    """The states of a recurrent layer are keys and values, too."""
    y = model.transpose(model.reshape(lstm(model, x, name), (-1, LENGTH, 4, 8)), (0, 2, 1, 3))
    scores = added(model, model.matmul(y, model.transpose(y, (0, 1, 3, 2))), name)
    return joined(model, model.matmul(model.softmax(scores), y))


def in_rows(model: Model, x: Tensor, name: str) -> Tensor:
    """A sum, too, is of rows of all samples."""
    rows = model.reshape(layer(model, x, name), (-1, WIDTH))
    rows = rows + model.dense(model.layer_norm(rows), WIDTH, activation="relu")
    return model.reshape(rows, (-1, LENGTH, WIDTH))


def lstm(model: Model, x: Tensor, name: str) -> Tensor:
    return model.lstm(x, WIDTH, layers=2, name=name)[0]


def gru(model: Model, x: Tensor, name: str) -> Tensor:
    return model.gru(x, WIDTH, name=name)[0]


def rnn(model: Model, x: Tensor, name: str) -> Tensor:
    return model.rnn(x, WIDTH, name=name)[0]


def sru(model: Model, x: Tensor, name: str) -> Tensor:
    return model.sru(x, WIDTH, name=name)[0]


def backwards(model: Model, x: Tensor, name: str) -> Tensor:
    return model.lstm(x, WIDTH, reverse=True, name=name)[0]


def gpt(mixing: Mixing, tied: bool = False) -> Model:
    model = Model("gpt", seed=3)
    ids = model.input("ids", (2, LENGTH), "int32")
    table = model.parameter("words", (WORDS, WIDTH), Initial("normal", 1.0))
    x = model.learned_positions(model.apply("embedding", ids, table))
    for number in range(2):
        x = x + mixing(model, model.layer_norm(x), f"attention{number}")
        y = model.dense(model.layer_norm(x), 64, activation="gelu")
        x = x + model.dropout(model.dense(y, WIDTH), 0.1)
    x = model.layer_norm(x)
    if tied:
        weights = model.transpose(table, (1, 0), name="output.weights")
        model.output(model.apply("linear", x, weights, bias=False, name="logits"))
    else:
        model.output(model.dense(x, WORDS, name="logits"))
    return model


def logits_of(session: InferenceSession, tokens: Sequence[int]) -> Array:
    filled = np.zeros((1, LENGTH), np.int32)
    filled[0, : len(tokens)] = tokens
    return np.asarray(session.run(filled)[session.outputs[0]][0, len(tokens) - 1])


def assert_greedy(session: InferenceSession, prompt: Sequence[int], made: Sequence[int]) -> None:
    for count in range(len(made)):
        logits = logits_of(session, [*prompt, *made[:count]])
        assert logits.argmax() == made[count]


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


CAUSAL: dict[str, Model] = {
    "layer": gpt(layer, tied=True),
    "masked": gpt(masked_layer),
    "window": gpt(windowed_layer),
    "spelled": gpt(spelled(added)),
    "one product": gpt(in_one_product),
    "without NaNs": gpt(without_nans),
    "merged heads": gpt(with_merged_heads),
    "samples and heads": gpt(with_samples_and_heads_as_one),
    "taken heads": gpt(with_taken_heads),
    "two masks": gpt(spelled(hidden_twice)),
    "rows": gpt(in_rows),
    "rotary": gpt(spelled(chosen, rotary=True)),
    "turned after repeating": gpt(spelled(added, rotary=True, late=True)),
    "lstm": gpt(lstm),
    "states": gpt(of_states),
    "gru": gpt(gru),
    "rnn": gpt(rnn),
    "sru": gpt(sru),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_and_logits_are_those_of_all_tokens_anew(name: str) -> None:
    session = CAUSAL[name].inference()
    with no_warnings():
        made = session.generate(PROMPTS, 18)
        assert made == [session.generate(prompt, 18) for prompt in PROMPTS]
    assert session.decoder is not None and session.decoder.kept and session.decoder.past
    for prompt, tokens in zip(PROMPTS, made):
        assert_greedy(session, prompt, tokens)
    run = Run(session.decoder, [list(prompt) for prompt in PROMPTS], LENGTH)
    for _ in range(4):  # logits, too
        logits = run.logits([True] * 3)
        for tokens, row in zip(run.tokens, logits):
            assert np.allclose(row, logits_of(session, tokens), rtol=1e-4, atol=1e-4)
            tokens.append(int(row.argmin()))


@pytest.mark.parametrize(
    ("name", "heads"),
    [("spelled", (2, 2)), ("merged heads", (2, 2)), ("turned after repeating", (4, 2))],
)
def test_a_step_is_of_one_token(name: str, heads: tuple[int, int]) -> None:
    session = CAUSAL[name].inference()
    session.generate(PROMPTS[0], 3)
    held = session.serial.bounds.held
    step = next(bound for key, bound in held.items() if key[0] == "generation.starts")
    kinds = [node.operator for node in step.graph.nodes]
    assert kinds.count("attention") == kinds.count("write_at") / 2 == 2
    assert session.decoder is not None and len(session.decoder.past) == 4
    written = [node.outputs[0] for node in step.graph.nodes if node.operator == "write_at"]
    sizes = [step.graph.tensors[value].size for value in written[:2]]
    assert sizes == [LENGTH * each * 8 for each in heads]


def test_a_file_without_a_past_keeps_one(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    path = tmp_path / "gpt.onnx"
    to_onnx(CAUSAL["spelled"], path, dims={"batch": "n"})
    session = InferenceSession(path)
    with no_warnings():
        made = session.generate(PROMPTS[2], 12)
    assert session.decoder is not None and session.decoder.kept
    other = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    filled = np.zeros((1, LENGTH), np.int32)
    filled[0, :17] = [*PROMPTS[2], *made]
    logits = other.run(None, {other.get_inputs()[0].name: filled})[0][0]
    assert logits[4:16].argmax(axis=1).tolist() == made


def with_mask(hides_later: bool) -> Model:
    """A decoder that is told which tokens there are, and where: both follow from the texts."""
    model = Model("told", seed=4)
    ids, mask, places = (
        model.input(name, (2, LENGTH), "int64")
        for name in ("input_ids", "attention_mask", "position_ids")
    )
    hidden = model.cast(mask, dtype="float32") * 1e9 + -1e9
    hidden = model.reshape(hidden, (-1, 1, 1, LENGTH))
    if hides_later:
        hidden = hidden + model.constant("later", np.where(LATER, np.float32(-1e9), np.float32(0)))
    mixing = spelled(lambda model, scores, name: scores + hidden)
    x = model.embedding(ids, WORDS, WIDTH) + model.embedding(places, LENGTH, WIDTH)
    for number in range(2):
        x = x + mixing(model, model.layer_norm(x), f"attention{number}")
    model.output(model.dense(x, WORDS, name="logits"))
    return model


def test_a_mask_and_positions_without_a_past_keep_one() -> None:
    session = with_mask(hides_later=True).inference()
    with no_warnings():
        made = session.generate(PROMPTS, 12)
        assert made == [session.generate(prompt, 12) for prompt in PROMPTS]
    assert session.decoder is not None and session.decoder.kept and session.decoder.past
    for prompt, tokens in zip(PROMPTS, made):
        filled, length = np.zeros((1, LENGTH), np.int64), len(prompt) + len(tokens)
        filled[0, :length] = [*prompt, *tokens]
        there = (np.arange(LENGTH) < length).astype(np.int64)[None]
        places = np.arange(LENGTH)[None]
        feeds = {"input_ids": filled, "attention_mask": there, "position_ids": places}
        logits = session.run(feeds)["logits"][0, len(prompt) - 1 : length - 1]
        assert logits.argmax(axis=1).tolist() == tokens


def test_what_only_a_mask_hides_is_run_on_all_tokens_with_it() -> None:
    session = with_mask(hides_later=False).inference()
    with pytest.warns(UserWarning, match="softmax '.*' may mix tokens with later ones"):
        made = session.generate(PROMPTS, 4)
    with no_warnings():
        assert made == [session.generate(prompt, 4) for prompt in PROMPTS]
    assert session.decoder is not None and not session.decoder.kept


def with_places(path: Path, places: int) -> Path:
    """Write a decoder of which each position, up to so many, follows from the text's length."""
    random = np.random.default_rng(5)
    tables = {"words": (WORDS, 8), "places": (places, 8), "out": (8, WORDS)}
    weights = [
        onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32), name)
        for name, shape in tables.items()
    ]
    numbers = {"zero": 0, "one": 1}
    weights += [onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers.items()]
    node = onnx.helper.make_node
    nodes = [
        node("Shape", ["ids"], ["length"], start=1, end=2),
        node("Squeeze", ["length"], ["count"]),
        node("Range", ["zero", "count", "one"], ["range"]),
        node("Gather", ["places", "range"], ["where"]),
        node("Gather", ["words", "ids"], ["what"]),
        node("Add", ["what", "where"], ["x"]),
        node("MatMul", ["x", "out"], ["logits"]),
    ]
    value = onnx.helper.make_tensor_value_info
    ids = value("ids", onnx.TensorProto.INT64, ["n", "length"])
    logits = value("logits", onnx.TensorProto.FLOAT, ["n", "length", WORDS])
    graph = onnx.helper.make_graph(nodes, "places", [ids], [logits], weights)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    return path


def test_texts_may_be_as_long_as_a_table_of_positions(tmp_path: Path) -> None:
    session = InferenceSession(with_places(tmp_path / "places.onnx", 50))
    assert session.generate([3] * 45, 6)[:5] == session.generate([3] * 45, 5)
    with pytest.raises(DataError, match=r"prompt of 45 tokens and max_new_tokens 7 .*: index 50"):
        session.generate([3] * 45, 7)


def test_an_encoder_is_named() -> None:
    model = Model("two")
    x, y = (model.input(name, (1, 8), "int64") for name in ("input_ids", "decoder_input_ids"))
    model.output(model.dense(model.embedding(x, 9, 4) + model.embedding(y, 9, 4), 9))
    with pytest.raises(DataError, match=r"decoder_input_ids.* a decoder without an encoder"):
        model.inference().generate([1], 2)


def seeing_one(model: Model, scores: Tensor, name: str) -> Tensor:
    """One later key is not hidden from one query."""
    mask = np.where(LATER, np.float32(-1e9), np.float32(0))
    mask[2, 9] = 0
    return scores + model.constant(f"{name}.mask", mask)


def shown_again(model: Model, scores: Tensor, name: str) -> Tensor:
    """A second mask undoes the first."""
    return added(model, scores, name) + model.constant(f"{name}.up", np.float32(LATER) * 1e9)


def raised(model: Model, scores: Tensor, name: str) -> Tensor:
    """No score is less than one that is seen."""
    floor = model.constant(f"{name}.floor", np.float32(-5))
    return model.maximum(added(model, scores, name), floor)


def averaged(model: Model, x: Tensor, name: str) -> Tensor:
    return model.reduce_mean(x, axes=1, keepdims=True)


def all_seen(model: Model, x: Tensor, name: str) -> Tensor:
    return model.multi_head_attention(x, x, x, 4, name=name)


def other_softmax(model: Model, x: Tensor, name: str) -> Tensor:
    q, k, v = (heads_of(model, x, 4, f"{name}.{part}") for part in "qkv")
    scores = added(model, model.matmul(q, model.transpose(k, (0, 1, 3, 2))), name)
    return joined(model, model.matmul(model.softmax(scores, axis=2), v))


def samples_mixed(model: Model, x: Tensor, name: str) -> Tensor:
    return model.softmax(x, axis=0) + layer(model, x, name)


def heads_mixed(model: Model, x: Tensor, name: str) -> Tensor:
    """Turned and reshaped so that a row has numbers of several tokens."""
    y = model.transpose(model.reshape(x, (-1, 4, 8, LENGTH)), (0, 1, 3, 2))
    return model.reshape(y, (-1, LENGTH, WIDTH))


@pytest.mark.parametrize(
    ("mixing", "where"),
    [
        (all_seen, "attention"),
        (backwards, "lstm"),
        (averaged, "reduce_mean"),
        (spelled(seeing_one), "softmax"),
        (spelled(shown_again), "add"),
        (spelled(raised), "maximum"),
        (other_softmax, "softmax"),
        (samples_mixed, "softmax"),
        (heads_mixed, "reshape"),
    ],
)
def test_what_is_not_causal_is_found(mixing: Mixing, where: str) -> None:
    session = gpt(mixing).inference()
    decoder = Decoder(session.serial)
    with pytest.warns(UserWarning, match=f"{where} '.*' may mix tokens with later ones"):
        assert not decoder.past_of(2, LENGTH)
    assert not decoder.kept


WRONG: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ("abc", {}, "prompt 0: text found; its tokens needed"),
    ([], {}, "prompt 0: no tokens found; one or more needed"),
    ([[1], []], {}, "prompt 1: no tokens found"),
    ([1.0], {}, r"prompt 0: float64\[1\] found; integers"),
    ([[1], [2, 61]], {}, "prompt 1: token 61 found; input 'ids' has a vocabulary of 61, so 60 at"),
    ([1] * 25, {}, "prompt 0: 25 tokens found; the model takes 24 at most"),
    ([1, 2], {"max_new_tokens": 24}, "the model takes 24, so max_new_tokens 23 at most needed"),
    ([1], {"max_new_tokens": -1}, "max_new_tokens: -1 found"),
    ([1], {"temperature": float("nan")}, "temperature: nan found; a finite number, 0 or more"),
    ([1], {"temperature": "a"}, "temperature: 'a' found; a number needed"),
    ([1], {"top_k": 0}, "top_k: 0 found; 1 or more needed"),
    ([1], {"top_k": 1.5}, "top_k: 1.5 found; an integer"),
    ([1], {"top_p": None}, "top_p: None found; a number needed"),
    ([1], {"on_tokens": 3}, "on_tokens: 3 found; a function needed"),
)


@pytest.mark.parametrize(("prompts", "options", "message"), WRONG)
def test_what_does_not_fit_is_named_before_anything_runs(
    prompts: Any, options: dict[str, Any], message: str
) -> None:
    session = CAUSAL["layer"].inference()
    with pytest.raises(DataError, match=message):
        session.generate(prompts, **{"max_new_tokens": 3, **options})
    assert not session.serial.bounds.held


def test_as_many_tokens_as_fit_are_made() -> None:
    session = CAUSAL["layer"].inference()
    assert len(session.generate([1, 2], 23)) == 23


def test_options_that_have_no_effect_and_unknown_ones_are_named() -> None:
    session = CAUSAL["layer"].inference()
    with pytest.warns(UserWarning, match="top_k: 3 has no effect at temperature 0"):
        session.generate([1], 2, top_k=3)
    with pytest.raises(DataError, match=r"stream: unknown option 'topk'; options are .*top_k"):
        session.stream([1], topk=3)


def test_a_token_past_the_vocabulary_of_a_file_is_named() -> None:
    model = from_onnx(SMALL.model())
    with pytest.raises(DataError, match=f"input 'input_ids' has a vocabulary of {SMALL.words}"):
        InferenceSession(model).generate([SMALL.words], 3)


def test_derived_steps_are_bounded() -> None:
    with CAUSAL["layer"].inference(bound_shapes=2) as session:
        for count in (1, 2, 3):
            session.generate([[1, 2]] * count, 2)
        assert session.decoder is not None and len(session.decoder.derived) == 2
