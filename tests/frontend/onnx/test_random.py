"""Random numbers that ONNX models draw: other ones in each run, the same in each session."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import UnboundError


def session_of(text: str) -> InferenceSession:
    header = '<ir_version: 9, opset_import: ["": 18]>'
    model = onnx.parser.parse_model(f"{header}\ng {text}").SerializeToString()
    return InferenceSession(from_onnx(model), threads=1)


COUNT = 20_000
X = np.full((COUNT,), 0.3, np.float32)
MODELS: dict[str, tuple[str, float, float]] = {  # with the mean and the variance
    "normal": (
        f"y = RandomNormal<shape = [{COUNT}], mean = 2.0, scale = 0.5, seed = 3.0>()",
        *(2, 0.25),
    ),
    "like": ("y = RandomNormalLike<seed = 4.0>(x)", 0, 1),
    "uniform": (f"y = RandomUniform<shape = [{COUNT}], low = -1.0, high = 3.0>()", 1, 16 / 12),
    "uniform like": ("y = RandomUniformLike<seed = 5.0>(x)", 0.5, 1 / 12),
    "bernoulli": ("y = Bernoulli<seed = 6.0>(x)", 0.3, 0.21),
    "dropout": (
        """r = Constant<value = float {0.25}>()  t = Constant<value = bool {1}>()
        one = Div(x, x)  y = Dropout<seed = 7>(one, r, t)""",
        *(1, 1 / 3),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_distributed_as_declared(name: str) -> None:
    nodes, mean, variance = MODELS[name]
    text = f"(float[n] x) => (float[n] y) {{ {nodes} }}"
    with session_of(text) as session, session_of(text) as other:
        first, second = (session.run(X)["y"] for _ in range(2))
        assert first.dtype == np.float32
        assert first.shape == (COUNT,)
        both = np.concatenate([first, second]).astype(np.float64)
        error = 5 * np.sqrt(variance / both.size)
        assert abs(both.mean() - mean) < error
        assert abs(both.var() - variance) < 0.05 * variance
        assert not np.array_equal(first, second)
        if "seed" in nodes:
            np.testing.assert_array_equal(other.run(X)["y"], first)
            np.testing.assert_array_equal(other.run(X)["y"], second)


def test_classes_are_drawn_by_their_logits() -> None:
    chances = np.array([[0.1, 0.6, 0.3], [0.5, 0.0, 0.5]])
    with np.errstate(divide="ignore"):
        logits = np.log(chances).astype(np.float32)
    text = f"""(float[n, 3] x) => (int32[n, {COUNT}] y) {{
        y = Multinomial<sample_size = {COUNT}, seed = 1.0>(x) }}"""
    with session_of(text) as session:
        drawn = session.run(logits)["y"]
    for row, wanted in zip(drawn, chances):
        found = np.bincount(row, minlength=3) / COUNT
        np.testing.assert_allclose(found, wanted, atol=0.02)


def test_the_generator_is_that_of_the_reference() -> None:
    text = "(float[n] x) => (float[n] y) { y = RandomNormalLike<seed = 9.0, mean = 1.0>(x) }"
    with session_of(text) as session:
        found = session.run(X)["y"]
    wanted: Any = np.random.RandomState(9).standard_normal(COUNT) + 1
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_a_loop_draws_others_in_each_trip() -> None:
    text = """(int64 n) => (float[k, 2] y) {
        yes = Constant<value = bool {1}>()
        y = Loop(n, yes) <body = b (int64 i, bool c) => (bool d, float[2] z) {
            d = Identity(c)  z = RandomUniform<shape = [2], seed = 1.0>() }> }"""
    with session_of(text) as session:
        found = session.run(np.array(5))["y"]
    assert len(np.unique(found)) == 10


def test_a_graph_draws_none() -> None:
    header = '<ir_version: 9, opset_import: ["": 18]>'
    text = "g (float[n] x) => (float[n] y) { y = RandomNormalLike(x) }"
    model = from_onnx(onnx.parser.parse_model(f"{header}\n{text}"))
    with pytest.raises(UnboundError, match=r"node 0 \(RandomNormalLike\): random numbers"):
        model.graph({"n": 2})
