"""Models and weights in files: what was written is what is read, from here, PyTorch and ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import soapstone
from soapstone import SGD, Adam, CheckpointError, GraphError, Model
from soapstone.frontend.exchange import as_array
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((20, 3, 8, 8)).astype(np.float32)
LABELS = RANDOM.integers(0, 5, 20)


def network(classes: int = 5) -> Model:
    """A model with arithmetic, tuples, a constant and a parameter."""
    model = Model("net", seed=4)
    x = model.input("image", (4, 3, 8, 8))
    x = model.conv2d(x, 6, kernel=3, padding=(1, 1), activation="relu", name="conv")
    x = model.max_pool2d(model.batch_norm(x, name="norm"), 2)
    x = 0.5 * (x + model.constant("shift", np.arange(6, dtype="f4").reshape(1, 6, 1, 1)))
    scale = model.parameter("scale", (1, 6, 1, 1), Initial("normal", 0.5))
    x = model.dropout(model.flatten(x * scale - 1), 0.1)
    model.output(model.dense(x, classes, name="head"))
    return model


def fit(model: Model, epochs: int = 1) -> None:
    model.fit(IMAGES, LABELS, epochs=epochs, shuffle=False, progress=False)


def same(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_loaded_model_is_the_saved_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m.{suffix}"
    with network() as model:
        model.freeze("conv.bias")
        model.regularize("head", l2=0.1)
        model.compile(Adam(1e-2), cpus=1)
        fit(model)
        model.save(path)
        again = soapstone.load(path)
        assert again.build(7).structural_hash == model.build(7).structural_hash
        assert again.build(7, training=True) == model.build(7, training=True)
        assert again.frozen == {"conv.bias"} and again.penalties == model.penalties
        same(again.weights(), model.weights())
        predicted = model.predict(IMAGES)
    with again:
        again.compile(Adam(1e-2), cpus=1)
        np.testing.assert_array_equal(again.predict(IMAGES), predicted)
        fit(again)


@pytest.mark.parametrize("with_states", [False, True])
def test_the_optimizer_goes_on_where_it_was_asked_for(tmp_path: Path, with_states: bool) -> None:
    path = tmp_path / "m.safetensors"
    with network() as model:
        model.compile(Adam(1e-2), cpus=1)
        fit(model)
        model.save(path, optimizer=with_states)
        for _ in range(2):
            model.train_on_batch(IMAGES, LABELS)
        expected = model.weights()
    with soapstone.load(path) as again:
        again.compile(Adam(1e-2), cpus=1)
        for _ in range(2):
            again.train_on_batch(IMAGES, LABELS)
        if with_states:
            same(again.weights(), expected)
        else:
            assert (again.weights()["head.weight"] != expected["head.weight"]).any()
    with soapstone.load(path) as other:
        other.compile(SGD(0.1, momentum=0.9), cpus=1)  # whose states begin anew
        other.train_on_batch(IMAGES, LABELS)


def test_weights_for_another_head(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    network().save(path)
    model = network(classes=3)
    with pytest.raises(CheckpointError, match=r"'head.weight': shape \(96, 5\) found, \(96, 3\)"):
        model.load_weights(path)
    before = model.weights()
    done = model.load_weights(path, skip=["head"])
    assert "conv.weight" in done.taken and not {"head.weight", "head.bias"} & {*done.taken}
    same({n: v for n, v in before.items() if n.startswith("head")}, _of(model, "head"))
    assert "head.weight" in model.load_weights(path, strict=False).left
    with pytest.raises(GraphError, match="skip: no parameter 'haed'; 'head' is there"):
        model.load_weights(path, skip=["haed"])
    checkpoint = tmp_path / "c.npz"
    with network() as trained:
        trained.compile("sgd", cpus=1)
        fit(trained)
        trained.save_checkpoint(checkpoint)
        done = model.load_weights(checkpoint, skip=["head.*"])
        same(_of(model, "conv"), _of(trained, "conv"))
    with pytest.raises(CheckpointError, match="no layers found; a file of"):
        soapstone.load(checkpoint)


def _of(model: Model, layer: str) -> dict[str, Array]:
    return {name: value for name, value in model.weights().items() if name.startswith(layer)}


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.square = nn.Linear(6, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.out(torch.relu(self.square(x)))


def twin() -> Model:
    model = Model("twin", seed=1)
    x = model.conv2d(model.input("x", (4, 3, 8, 8)), 6, kernel=3, padding=1, name="conv")
    x = model.global_avg_pool(model.relu(model.batch_norm(x, name="norm")))
    x = model.dense(x, 6, activation="relu", name="square")
    model.output(model.dense(x, 5, name="head"))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dict", "pt", "wrapped.pth", "safetensors", "onnx"])
def test_weights_of_torch_and_onnx_by_name(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = Twin()
    theirs(torch.tensor(IMAGES))  # running statistics
    theirs.eval().to(dtype)
    path: Any = tmp_path / f"w.{kind}"
    if kind == "dict":
        path = theirs.state_dict()
    elif kind == "safetensors":
        from safetensors.torch import save_file

        save_file(theirs.state_dict(), path)
    elif kind == "onnx":
        onnx_file(theirs, path)
    else:
        state = theirs.state_dict()
        torch.save(state if kind == "pt" else {"epoch": 3, "state_dict": state}, path)
    with twin() as model:
        strict = kind != "onnx"  # which has constants beside weights
        done = model.load_weights(path, names={"head": "out"}, strict=strict)
        assert not done.missing
        expected = theirs.float()(torch.tensor(IMAGES)).detach().numpy()
        np.testing.assert_allclose(model.predict(IMAGES), expected, rtol=1e-4, atol=1e-5)


def onnx_file(theirs: nn.Module, path: Path) -> None:
    """Write the initializers and products of a module as PyTorch's exporter does."""
    import onnx
    from onnx import helper, numpy_helper

    state = {n: as_array(v, n) for n, v in theirs.state_dict().items() if "tracked" not in n}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], pads=[1] * 4),
        helper.make_node(
            "BatchNormalization",
            ["a", *(f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var"))],
            ["b"],
        ),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", "square.weight", "square.bias"], ["f"], transB=1),
        helper.make_node("Relu", ["f"], ["g"]),
        helper.make_node("Gemm", ["g", "out.weight", "out.bias"], ["y"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 8, 8])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 5])
    weights = [numpy_helper.from_array(value, name) for name, value in state.items()]
    graph = helper.make_graph(nodes, "twin", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)


def test_what_cannot_be_saved_or_read_is_said(tmp_path: Path) -> None:
    model = network()
    model.output(model.record(lambda b, t, v: (b.input("p", (3,)),), ())[0])
    with pytest.raises(GraphError, match="layer 'record' was given a function"):
        model.save(tmp_path / "m.npz")
    with pytest.raises(GraphError, match="not compiled"):
        network().save(tmp_path / "m.npz", optimizer=True)
    (tmp_path / "broken.pt").write_bytes(b"no pickle")
    for source, message in (
        (tmp_path / "m.h5", "one of .safetensors"),
        (tmp_path / "none.npz", "no such file"),
        (tmp_path / "broken.pt", "no state dict of PyTorch"),
        (3, "int found, a path or arrays needed"),
        ({"head.weight": "a"}, "'head.weight': str found, numbers needed"),
        ({"head.weight": np.ones((3, 3))}, "'conv.weight' is missing; .*; and 6 more"),
    ):
        with pytest.raises(CheckpointError, match=message):
            network().load_weights(source)
