"""Generated tokens against those of ONNX Runtime on all tokens anew, without a cache."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.decoders import LEAST, SMALL, Decoder
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from soapstone import DataError, InferenceSession, Model, from_onnx
from soapstone.cli.main import app
from soapstone.frontend.generation.decoder import room
from soapstone.frontend.generation.kept import STARTS
from soapstone.frontend.generation.sampling import Sampling
from soapstone.frontend.purpose import Purpose
from soapstone.ir.graph import Graph, Initial
from soapstone.ir.tensor import Array

RANDOM = np.random.default_rng(1)
PROMPTS = [RANDOM.integers(0, SMALL.words, count).tolist() for count in (5, 11, 3)]


def logits_of(model: onnx.ModelProto, sizes: Decoder, ids: Sequence[int]) -> Array:
    """Return the logits (tokens, words) of all tokens, by ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    count, none = len(ids), (1, sizes.kv_heads, 0, sizes.width // sizes.heads)
    given = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, count), np.int64)}
    if sizes.positions:
        given["position_ids"] = np.arange(count)[None]
    for each in session.get_inputs():
        given.setdefault(each.name, np.zeros(none, np.float32))
    return np.asarray(session.run(["logits"], given)[0][0])


def assert_greedy(
    model: onnx.ModelProto, sizes: Decoder, prompt: Sequence[int], made: Sequence[int]
) -> None:
    """Each token that was made is the likeliest after those before it."""
    logits = logits_of(model, sizes, [*prompt, *made])
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == list(made)


@pytest.fixture(scope="module")
def small() -> onnx.ModelProto:
    return SMALL.model()


@pytest.fixture(scope="module")
def session(small: onnx.ModelProto) -> InferenceSession:
    return InferenceSession(from_onnx(small))


def test_greedy_tokens_are_those_without_a_cache(
    small: onnx.ModelProto, session: InferenceSession
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [session.generate(prompt, 20) for prompt in PROMPTS]
        assert session.generate(PROMPTS, 20) == made  # of several lengths, filled up
    for prompt, tokens in zip(PROMPTS, made):
        assert len(tokens) == 20
        assert_greedy(small, SMALL, prompt, tokens)
    shapes = len(session.serial.bounds.held)
    session.generate(RANDOM.integers(0, SMALL.words, 9), 30)  # another length binds no other shape
    assert len(session.serial.bounds.held) == shapes


def test_buffers_grow(
    small: onnx.ModelProto, session: InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soapstone.frontend.generation.run._ROWS", 8)
    monkeypatch.setattr("soapstone.frontend.generation.run._USUAL", 8)
    monkeypatch.setattr("soapstone.frontend.generation.decoder._LEAST", 8)
    made = session.generate(PROMPTS[0], 20)
    assert {key[2] for key in session.serial.bounds.held if key[0] == STARTS} >= {8, 16, 24}
    assert_greedy(small, SMALL, PROMPTS[0], made)


def test_outputs_may_stand_in_any_order(small: onnx.ModelProto) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(small)
    outputs = list(model.graph.output)[::-1]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    made = InferenceSession(from_onnx(model)).generate(PROMPTS[1], 6)
    assert_greedy(small, SMALL, PROMPTS[1], made)


def test_streams_may_take_turns(session: InferenceSession) -> None:
    streams = [session.stream(prompt, max_new_tokens=12) for prompt in PROMPTS[:2]]
    turns = list(zip(*streams))
    assert [list(tokens) for tokens in zip(*turns)] == [
        session.generate(prompt, 12) for prompt in PROMPTS[:2]
    ]


def test_a_token_to_stop_at_is_the_last(session: InferenceSession) -> None:
    made = session.generate(PROMPTS, 12)
    stop = made[0][4]
    seen: list[tuple[int | None, ...]] = []
    found = session.generate(PROMPTS, 12, stop=stop, on_tokens=seen.append)
    for whole, tokens in zip(made, found):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert tokens == whole[:end]
    assert [row[0] for row in seen if row[0] is not None] == found[0]
    assert session.generate(PROMPTS[0], 0) == []


def test_drawn_tokens_follow_from_the_seed(session: InferenceSession) -> None:
    def drawn(seed: int) -> list[int]:
        return list(session.generate(PROMPTS[0], 10, temperature=1.0, top_k=20, seed=seed))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert session.generate(PROMPTS[0], 5, temperature=1.0, top_k=1) == session.generate(
        PROMPTS[0], 5
    )


def test_places_that_follow_from_the_cache_keep_none() -> None:
    sizes = replace(SMALL, positions=False)
    model = sizes.model()
    session = InferenceSession(from_onnx(model))
    with pytest.warns(UserWarning, match="'mul_.*' depends on the length of the past"):
        made = session.generate(PROMPTS[:2], 5)
    for prompt, tokens in zip(PROMPTS, made):
        assert_greedy(model, sizes, prompt, tokens)


def test_a_mask_that_is_not_applied_keeps_no_cache() -> None:
    model = SMALL.model()
    for each in model.graph.initializer:  # what hides keys hides little
        if each.name.startswith("number") and numpy_helper.to_array(each) == np.float32(LEAST):
            each.CopyFrom(numpy_helper.from_array(np.array(-1.0, np.float32), each.name))
    with pytest.warns(UserWarning, match="logits depend on"):
        InferenceSession(from_onnx(model)).generate(PROMPTS[0], 3)


def test_a_bias_by_distance_keeps_no_cache() -> None:
    model = SMALL.model()
    graph = model.graph
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    _, keys = (node for node in graph.node if node.op_type == "Range")
    at = list(graph.node).index(softmax)
    graph.node.insert(at, helper.make_node("Cast", keys.output, ["far"], to=TensorProto.FLOAT))
    graph.node.insert(at + 1, helper.make_node("Add", [softmax.input[0], "far"], ["biased"]))
    softmax.input[0] = "biased"
    with pytest.warns(UserWarning, match="depends on the order of the past"):
        made = InferenceSession(from_onnx(model)).generate(PROMPTS[0], 3)
    assert_greedy(model, SMALL, PROMPTS[0], made)


def test_a_model_without_a_cache_is_run_on_all_tokens() -> None:
    model = Model("words", seed=3)
    ids = model.input("ids", (2, 16), "int64")
    x = model.embedding(ids, 50, 8) + model.parameter("places", (16, 8), Initial("normal", 1.0))
    q, k, v = (model.reshape(model.dense(x, 8), (2, 16, 2, 4)) for _ in range(3))
    y = model.apply("attention", q, k, v, causal=True)
    model.output(model.dense(x + model.reshape(y, (2, 16, 8)), 50))
    session = model.inference()
    made = session.generate([[3, 4], [5, 6]], 6)
    for prompt, tokens in zip(([3, 4], [5, 6]), made):
        filled = np.zeros((1, 16), np.int64)
        filled[0, :8] = [*prompt, *tokens]
        logits = session.run(filled)[session.outputs[0]][0]
        assert logits[1:7].argmax(axis=1).tolist() == tokens


def test_an_unmasked_model_is_refused_where_lengths_differ() -> None:
    model = Model("words")
    x = model.embedding(model.input("ids", (1, 16), "int64"), 50, 8)
    model.output(model.dense(x + model.reduce_mean(x, axes=1, keepdims=True), 50))
    with (
        pytest.warns(UserWarning, match="reduce_mean '.*' may mix tokens with later ones"),
        pytest.raises(DataError, match="logits depend on tokens after theirs"),
    ):
        model.inference().generate([1, 2], 3)


def test_sessions_that_are_not_held_are_gone(small: onnx.ModelProto) -> None:
    session = InferenceSession(from_onnx(small), bound_shapes=1, plain=True)
    stream = session.stream(PROMPTS[0], max_new_tokens=3)
    seen, session = weakref.ref(session), None  # type: ignore[assignment]
    assert_greedy(small, SMALL, PROMPTS[0], list(stream))
    del stream
    assert seen() is None


WRONG: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (None, {}, "NoneType found; tokens"),
    ([1, -1], {}, "prompt 0: token -1 found"),
    ([[1], [2], [[1], [2, 3]]], {}, r"prompt 2: object\[2\] found"),
    ([1], {"max_new_tokens": "3"}, "max_new_tokens: '3' found"),
    ([1], {"max_new_tokens": 3.0}, r"max_new_tokens: 3\.0 found"),
    ([1], {"seed": -1}, "seed: -1 found"),
    ([1], {"seed": "a"}, "seed: 'a' found"),
    ([1], {"stop": None}, "stop: None found"),
    ([1], {"stop": "end"}, "stop: 'end' found"),
    ([1], {"stop": [3, -1]}, "stop: token -1 found; output 'logits' has logits of"),
    ([1], {"stop": 1 << 20}, "stop: token 1048576 found; output 'logits' has logits of"),
)


def test_what_does_not_fit_is_named(session: InferenceSession) -> None:
    net = Model("net")
    net.output(net.dense(net.input("x", (1, 8)), 3))
    with pytest.raises(DataError, match="'input_ids' needed"):
        net.inference().generate([1], 3)
    with pytest.raises(DataError, match="prompt 1: "):
        session.generate([[1], []], 3)
    with pytest.raises(DataError, match="temperature: -1"):
        session.generate([1], 3, temperature=-1.0)
    with pytest.raises(DataError, match="top_p: 0"):
        session.generate([1], 3, top_p=0.0)
    with pytest.raises(DataError, match="top_k: 0"):
        session.generate([1], 3, top_k=0)
    with pytest.raises(DataError, match="max_new_tokens: -1"):
        session.generate([1], -1)
    for name, value in (("top_k", 5), ("top_p", 0.5), ("seed", 3)):
        with pytest.warns(UserWarning, match=f"{name}: {value} has no effect at temperature 0"):
            session.generate([1], 3, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"unknown option 'temprature'.*did you mean 'temperature'"):
        session.stream([1], temprature=0.5)
    for prompts, options, message in WRONG:
        with pytest.raises(DataError, match=message):
            session.generate(prompts, **options)
    for prompt, options, message in (([[1], [2, 3]], {}, "prompt 0"), ([1], {"seed": -1}, "seed")):
        with pytest.raises(DataError, match=message):
            session.stream(prompt, **options)  # at once, not with the first token
    bounded = InferenceSession(from_onnx(SMALL.model()), fast_memory=1 << 24)
    with bounded, pytest.raises(DataError, match="without a fast memory"):
        bounded.generate([1], 3)


def test_tokens_are_drawn_by_their_shares() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))
    random = np.random.default_rng(0)

    def shares(**options: float) -> Array:
        sampling = Sampling(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
        found = [sampling.choose(logits, random) for _ in range(4000)]
        return np.asarray(np.bincount(found, minlength=4) / 4000)

    assert np.allclose(shares(), [0.1, 0.5, 0.15, 0.25], atol=0.03)
    assert np.allclose(shares(top_k=2), [0, 2 / 3, 0, 1 / 3], atol=0.03)
    assert np.allclose(shares(top_p=0.8), [0, 5 / 9, 1.5 / 9, 2.5 / 9], atol=0.03)
    assert np.allclose(shares(temperature=0.5)[1], 0.25 / 0.345, atol=0.03)
    assert Sampling().choose(logits, random) == 1
    with pytest.raises(DataError, match="nan"):
        Sampling().choose(np.array([0.0, np.nan], np.float32), random)


def test_few_extents_are_bound() -> None:
    assert [room(n) for n in (1, 32, 33, 48, 49, 64, 65, 97, 1000)] == [
        *(32, 32, 48, 48, 64, 64, 96, 128, 1024)
    ]


def test_a_mask_that_is_gathered_key_by_key_keeps_the_cache() -> None:
    model = SMALL.model()
    graph = model.graph
    keys = [node for node in graph.node if node.op_type == "Range"][1]
    unsqueeze = next(node for node in graph.node if "attention_mask" in node.input)
    at = list(graph.node).index(unsqueeze)
    graph.node.insert(
        at, helper.make_node("Gather", ["attention_mask", keys.output[0]], ["each"], axis=1)
    )
    unsqueeze.input[0] = "each"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = InferenceSession(from_onnx(model)).generate(PROMPTS[0], 3)
    assert_greedy(model, SMALL, PROMPTS[0], made)


@pytest.mark.parametrize("fused", [False, True])
def test_a_decoder_of_few_bits_keeps_its_cache(fused: bool) -> None:
    sizes = replace(SMALL, width=64, inner=96, bits=4, fused=fused)
    model = sizes.model()
    session = InferenceSession(from_onnx(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = session.generate(PROMPTS, 10)
    for prompt, tokens in zip(PROMPTS, made):
        assert_greedy(model, sizes, prompt, tokens)


@pytest.mark.parametrize("drops", [False, True])
def test_a_cache_of_which_no_extent_is_told(drops: bool) -> None:
    """And one of whose layers keeps the last tokens alone: the numbers are those of a window."""
    sizes = replace(SMALL, width=64, fused=True)
    model = sizes.model()
    first = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    if drops:
        first.attribute.append(helper.make_attribute("local_window_size", 4))
    given = onnx.ModelProto.FromString(model.SerializeToString())
    for each in (*given.graph.input, *given.graph.output):
        dims = each.type.tensor_type.shape.dim
        if len(dims) == 4:
            dims[3].dim_param = "kv_cache_dim"
            if drops and ".0." in each.name:
                dims[2].dim_param = dims[2].dim_param.replace("sequence", "sliding")
    if drops:
        own = next(node for node in given.graph.node if node.op_type == "GroupQueryAttention")
        own.attribute.append(helper.make_attribute("sliding_window_cache", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its keys and values lie in buffers
        made = InferenceSession(from_onnx(given)).generate(PROMPTS, 12)
    for prompt, tokens in zip(PROMPTS, made):
        assert_greedy(model, sizes, prompt, tokens)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_that_are_kept_in_halves_are_read_in_halves(stored: str) -> None:
    sizes = replace(SMALL, layers=1, width=256, inner=512, stored=stored)
    model = sizes.model()
    session = InferenceSession(from_onnx(model))
    made = session.generate(PROMPTS[0], 8)
    assert_greedy(model, sizes, PROMPTS[0], made)
    (step,) = (bound for key, bound in session.serial.bounds.held.items() if key[0] == STARTS)
    products = [node for node in step.graph.nodes if node.operator == "matmul_nbits"]
    assert [node.attributes["numbers"] for node in products] == [stored] * 3  # gate, up and down


def test_models_of_layers_are_the_files_that_they_are_twins_of(
    small: onnx.ModelProto, session: InferenceSession
) -> None:
    with SMALL.network(32, small).inference() as layers:
        for prompt in PROMPTS:
            assert layers.generate(prompt, 16) == session.generate(prompt, 16)


@pytest.mark.parametrize("layers", [False, True])
def test_no_graph_of_a_decoder_is_built_twice(
    small: onnx.ModelProto, layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = InferenceSession(SMALL.network(40, small) if layers else from_onnx(small))
    built: list[dict[str, tuple[int, ...]]] = []
    build = session.serial.graph_of

    def counted(given: dict[str, Array], purpose: Purpose) -> Graph:
        built.append({name: array.shape for name, array in given.items()})
        return build(given, purpose)

    monkeypatch.setattr(session.serial, "graph_of", counted)
    assert len(session.generate(PROMPTS[0], 4)) == 4
    assert built and all(built.count(each) == 1 for each in built)


def test_keys_that_queries_share_are_not_repeated(session: InferenceSession) -> None:
    session.generate(PROMPTS[0], 2)
    step = next(bound for key, bound in session.serial.bounds.held.items() if key[0] == STARTS)
    most = step.graph.tensors["past_key_values.0.key"].size
    assert (
        max(step.graph.tensors[o].size for node in step.graph.nodes for o in node.outputs) == most
    )


def test_the_command_continues_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(SMALL.model(), path)
    with InferenceSession(path) as session:
        wanted = session.generate([3, 17, 42], 6)
        drawn = session.generate([3, 17, 42], 6, temperature=2.0, top_k=20, seed=3)
    given = ["generate", str(path), "3", "17", "42", "-n", "6"]
    told = CliRunner().invoke(app, given)
    assert told.stdout == " ".join(map(str, wanted)) + "\n"
    told = CliRunner().invoke(app, [*given, "--stop", str(wanted[2]), "--json"])
    assert json.loads(told.stdout) == {"tokens": wanted[: wanted.index(wanted[2]) + 1]}
    options = ["--temperature", "2", "--top-k", "20", "--seed", "3"]
    assert CliRunner().invoke(app, [*given, *options]).stdout.split() == list(map(str, drawn))
    told = CliRunner().invoke(app, ["generate", str(path), "3", "999"])
    assert told.exit_code == 1
    assert "999" in told.output
