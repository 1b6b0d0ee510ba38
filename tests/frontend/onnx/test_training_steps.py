"""Steps of optimisers that ONNX has operators of, against ONNX's reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError

SHAPES = ((3,), (2, 4))
STEPS: dict[str, tuple[str, int, dict[str, Any]]] = {  # with how many states of each parameter
    "adagrad": ("Adagrad", 1, {"decay_factor": 0.1, "norm_coefficient": 0.01}),
    "adam": ("Adam", 2, {"alpha": 0.8, "norm_coefficient": 0.02, "norm_coefficient_post": 0.03}),
    "momentum": ("Momentum", 1, {"mode": "standard"}),
    "nesterov": ("Momentum", 1, {"mode": "nesterov"}),
}
MOMENTUM = {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01}


def model_of(kind: str, states: int, attributes: dict[str, Any], left_out: int = 0) -> Any:
    kinds = ["x", "g", *(f"s{i}" for i in range(states))]
    names = [f"{each}{i}" for each in kinds for i in range(len(SHAPES))]
    names = names[: len(names) - left_out]
    given = {"r": (), "t": (), **{name: SHAPES[int(name[-1])] for name in names}}
    made = [f"{each}{i}.new" for each in (kinds[0], *kinds[2:]) for i in range(len(SHAPES))]
    domain = "ai.onnx.preview.training"
    node = helper.make_node(kind, list(given), made, domain=domain, **attributes)
    types = {"t": TensorProto.INT64}
    graph = helper.make_graph(
        [node],
        "step",
        [
            helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), shape)
            for n, shape in given.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in made],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_reference(name: str, count: int) -> None:
    kind, states, attributes = STEPS[name]
    if kind == "Momentum":
        attributes = attributes | MOMENTUM
    model = model_of(kind, states, attributes)
    random = np.random.default_rng(count)
    feeds: dict[str, Any] = {"r": np.float32(0.1), "t": np.array(count)}
    for value in model.graph.input[2:]:
        shape = SHAPES[int(value.name[-1])]
        feeds[value.name] = random.random(shape).astype(np.float32)
    feeds["r"] = np.asarray(feeds["r"])
    with InferenceSession(from_onnx(model), threads=1) as session:
        found = session.run(feeds)
    for mine, wanted in zip(
        found.values(), ReferenceEvaluator(model).run(None, feeds), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


def test_states_that_are_missing_are_told() -> None:
    model = from_onnx(model_of("Momentum", 1, {"mode": "standard", **MOMENTUM}, left_out=1))
    with pytest.raises(OnnxError, match="5 tensors found, as many of each of 3 kinds needed"):
        model.graph()
