"""Mixed precision: near single precision, its scale adapts, kernels serve it, and it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, Adam, Model
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Role

RANDOM = np.random.default_rng(0)
Y = RANDOM.integers(0, 2, 64)
X = RANDOM.standard_normal((64, 3, 8, 8), np.float32) + Y[:, None, None, None].astype(np.float32)


def network(precision: str = "mixed_float16", **options: Any) -> Model:
    model = Model("net", seed=1)
    x = model.conv2d(model.input("image", (16, 3, 8, 8)), 8, 3, padding=1, name="conv")
    x = model.max_pool2d(model.relu(model.batch_norm(x)), 2)
    x = model.layer_norm(model.dense(model.flatten(x), 16, "gelu"))
    model.output(model.dense(x, 2, name="head"))
    model.compile(**{"optimizer": Adam(0.01), "precision": precision, **options})
    return model


def scale(model: Model) -> tuple[float, float]:
    state = model.trainer.state()
    return float(state["loss_scale"]), float(state["loss_scale.good_steps"])


def test_losses_are_near_those_of_single_precision() -> None:
    found = {}
    for precision in ("float32", "mixed_float16"):
        with network(precision) as model:
            found[precision] = model.fit(X, Y, epochs=6, progress=False).history["loss"]
            if precision == "mixed_float16":
                graph = model.training_graph
                halves = [name for name, spec in graph.tensors.items() if spec.is_half]
                assert {"conv", "head"} <= set(halves)
                assert not {*halves} & {*graph.inputs(Role.PARAMETER), *graph.inputs(Role.STATE)}
                assert "reference" not in model.statistics["variants"].values()
    losses, halved = found["float32"], found["mixed_float16"]
    assert halved[-1] < 0.5 * halved[0]
    np.testing.assert_allclose(halved, losses, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_overflows_changes_nothing_but_the_scale(parts: int) -> None:
    with network(micro_batches=parts) as model:
        model.train_on_batch(X, Y)
        model.set_weights({"loss_scale": np.float32(2**30)})
        before = model.trainer.state()
        loss = model.train_on_batch(X, Y)["loss"]
        after = model.trainer.state()
        assert np.isfinite(loss)
        assert scale(model) == (2**29, 0)
        for name in before.keys() - {"loss_scale", "loss_scale.good_steps"}:
            # The parts before the one that overflows leave gradients, and running statistics.
            if parts == 1 or not name.endswith((".gradients", "norm.mean", "norm.variance")):
                np.testing.assert_array_equal(before[name], after[name], err_msg=name)
        for _ in range(20):
            model.train_on_batch(X, Y)
        assert model.train_on_batch(X, Y)["loss"] < loss
        assert all(np.isfinite(each).all() for each in model.weights().values())


def test_the_scale_doubles_after_many_good_steps() -> None:
    with network() as model:
        model.train_on_batch(X, Y)
        assert scale(model) == (2**15, 1)
        model.set_weights({"loss_scale.good_steps": np.float32(1998)})
        model.train_on_batch(X, Y)
        assert scale(model) == (2**15, 1999)
        model.train_on_batch(X, Y)
        assert scale(model) == (2**16, 0)


def test_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    with network() as model:
        model.fit(X, Y, epochs=1, progress=False)
        model.set_weights({"loss_scale": np.float32(2**12)})
        model.save_checkpoint(tmp_path / "c.safetensors")
        model.fit(X, Y, epochs=2, progress=False, resume=tmp_path / "c.safetensors")
        expected = model.trainer.state()
    with network() as model:
        model.fit(X, Y, epochs=2, progress=False, resume=tmp_path / "c.safetensors")
        found = model.trainer.state()
    assert found["loss_scale"] == 2**12
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_gradients_are_those_of_the_loss() -> None:
    with network("float32", optimizer=SGD(0.1)) as single, network(optimizer=SGD(0.1)) as mixed:
        expected, found = single.gradients(X, Y), mixed.gradients(X, Y)
    for name, value in expected.items():
        off = np.linalg.norm(found[name] - value)
        assert off < 0.05 * np.linalg.norm(value) + 1e-3, name


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(GraphError, match=r"'mixed_bfloat16' found.*there is no type bfloat16 here"):
        network("mixed_bfloat16")
    with pytest.raises(GraphError, match="'tf32' found, but it is of NVIDIA's GPUs"):
        network("tf32", cpus=1)
