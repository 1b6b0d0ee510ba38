"""Inference sessions in a fast memory: real copies, as many bytes as planned, equal results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from soapstone import InferenceSession, Model
from soapstone.frontend.memory_plans import launched
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Role
from soapstone.search.placement.find import memory_plan
from soapstone.search.placement.timeline import timeline


def network(batch: int = 2) -> Model:
    """Convolutions with batch norm, a residual, a concatenation and a classifier."""
    model = Model("residual")
    x = model.input("image", (batch, 3, 12, 12))
    x = model.relu(model.batch_norm(model.conv2d(x, 16, kernel=3, padding=1, bias=False)))
    y = model.batch_norm(model.conv2d(x, 16, kernel=3, padding=1))
    x = model.relu(x + y)
    x = model.concat([x, model.max_pool2d(x, 3, stride=1, padding=1)], axis=1)
    model.output(model.softmax(model.dense(model.flatten(x), 5)))
    return model


def roomless(model: Model, share: float) -> tuple[int, int]:
    """Return what the largest launch of a model needs, and a share of what all need at once."""
    known = timeline(launched(model.graph, 1), 1 << 40)
    least = int(known.needs.max())
    return least, max(least, int(known.working_set_bytes * share))


@pytest.mark.parametrize("plan", ["dp", "lru", "stream", "belady"])
def test_a_session_in_a_fast_memory_moves_what_is_planned(plan: str) -> None:
    model = network(3)
    capacity = roomless(model, 0.5)[1]
    with (
        model,
        model.inference(fast_memory=1 << 24, plan=plan) as roomy,
        model.inference(fast_memory=capacity, plan=plan) as tight,
        model.inference() as packed,
    ):
        model.compile(loss="mse")
        for batch in (2, 0, 3, 2):
            x = np.random.default_rng(batch).standard_normal((batch, 3, 12, 12), np.float32)
            wanted = packed.run(x)
            for session in (roomy, tight):
                for name, array in session.run(x).items():
                    np.testing.assert_allclose(array, wanted[name], rtol=2e-5, atol=1e-6)
            planned, copied = tight.moved_bytes(x) or (0, 0)
            assert planned == copied >= (roomy.moved_bytes(x) or (0, 0))[1] > 0
            assert packed.moved_bytes(x) is None
            inner = tight.serial.bounds.session
            used, machine = inner.used_bytes, inner.machine
            assert used[[m.name for m in machine.memories].index("system.bounded")] == capacity
            assert tight.peak_bytes == sum(used)  # all shapes share it


def test_a_plan_of_an_inference_graph_is_followed_and_checked(tmp_path: Path) -> None:
    model = network()
    least, capacity = roomless(model, 0.5)
    made = memory_plan(launched(model.graph, 1), capacity, "lru").plan
    made.save(tmp_path / "plan.json")
    x = np.random.default_rng(0).standard_normal((2, 3, 12, 12), np.float32)
    with model, model.inference(plan=tmp_path / "plan.json", bound_shapes=1) as session:
        first = session.run(x)
        assert session.moved_bytes(x) == (made.moved_bytes, made.moved_bytes)
        with pytest.raises(GraphError, match="is not what the plan is of"):
            session.run(x[:1])
        again = session.run(x)
        np.testing.assert_array_equal(*(next(iter(each.values())) for each in (first, again)))
    with (
        model.inference(fast_memory=least - 64) as session,
        pytest.raises(GraphError, match=r"uses \d+ bytes at once, \d+ found .* 64 more needed"),
    ):
        session.run(x)
    with pytest.raises(GraphError, match="found without a fast memory"):
        model.inference(plan="lru")


def test_outputs_that_are_weights_leave_a_fast_memory_too() -> None:
    builder = GraphBuilder("outputs")
    builder.input("x", (4, 8))
    builder.input("w", (8, 8), role=Role.PARAMETER)
    product = builder.apply("matmul", "x", "w", name="product")[0]
    twice = builder.apply("add", "w", "w", name="twice")[0]
    builder.output(product, twice, "w")
    graph = builder.build()
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8)))
    with InferenceSession(graph, {"w": w}, fast_memory=1024, plan="stream") as session:
        for scale in (1, 2):
            found = session.run(x * scale)
            np.testing.assert_allclose(found[product], x * scale @ w, rtol=1e-5)
            np.testing.assert_array_equal(found[twice], 2 * w)
            np.testing.assert_array_equal(found["w"], w)
