"""ONNX files that are trained further: torch's numbers, new heads, freezing, files, mistakes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

import soapstone
from soapstone import SGD, GraphError, Model, from_onnx, to_onnx
from soapstone.frontend.onnx import OnnxError
from soapstone.frontend.training.compatibility import infinite
from soapstone.ir.tensor import Array, Role

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((10, 3, 8, 8)).astype(np.float32)
IDS = RANDOM.integers(0, 20, (10, 6))
LABELS = RANDOM.integers(0, 5, 10)


class Residual(nn.Module):
    """A small residual network, with what exporters make of such."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = nn.functional.max_pool2d(h + 0.5 * nn.functional.silu(self.body(h)), 2)
        return self.fc(h.mean((2, 3)))


class Encoder(nn.Module):
    """A transformer of two layers over ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.places = nn.Parameter(torch.zeros(1, 6, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 24, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(self.table(ids) + self.places).mean(1))


def twin(make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose parameters and statistics all differ, in the mode in which it is exported."""
    torch.manual_seed(0)
    module = make().eval()
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            value += torch.rand_like(value) if "var" in name else 0.1 * torch.randn_like(value)
    return module


def exported(module: nn.Module, example: Array) -> bytes:
    file = io.BytesIO()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which exports one operator that is no ONNX
    try:
        torch.onnx.export(
            *(module, (torch.from_numpy(example[:2]),), file),
            dynamo=False,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": {0: "n"}, "logits": {0: "n"}},
        )
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return file.getvalue()


def model_of(text: str, **weights: Array) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text form, with these initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return model


def reals(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


LINEAR = "g (float[n,6] x) => (float[n,4] y) { y = MatMul(x, w) }"


def headed(file: Any, outputs: Any = None, batch: int = 8, **settings: Any) -> Model:
    """A model of rows of six numbers with a head of three classes."""
    model = Model("m", seed=3)
    x = model.input("x", (batch, 6))
    model.output(model.dense(model.onnx(file, x, outputs=outputs, **settings), 3, name="head"))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "x"), [(Residual, IMAGES), (Encoder, IDS)], ids=["convolutions", "transformer"]
)
def test_gradients_and_steps_are_those_of_torch(make: Callable[[], nn.Module], x: Array) -> None:
    module = twin(make)
    model = Model("m")
    model.output(model.onnx(exported(module, x), model.input("x", (10, *x.shape[1:]), x.dtype)))
    assert model.parameters().keys() == dict(module.named_parameters()).keys()
    statistics = set(model.carried) - model.parameters().keys()
    assert statistics == {n for n, b in module.named_buffers() if b.is_floating_point()}
    speeds = [torch.zeros_like(each) for each in module.parameters()]
    with model:
        model.compile(SGD(0.1, momentum=0.9), cpus=1)
        for step in range(4):
            module.zero_grad()
            logits = module(torch.from_numpy(x))
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(LABELS))
            loss.backward()
            if not step:
                made = model.gradients(x, LABELS)
                for name, parameter in module.named_parameters():
                    wanted = parameter.grad.numpy()  # type: ignore[union-attr]
                    np.testing.assert_allclose(made[name], wanted, atol=2e-6, err_msg=name)
            assert model.train_on_batch(x, LABELS)["loss"] == pytest.approx(loss.item(), rel=1e-4)
            with torch.no_grad():  # torch.optim takes seconds to import
                for parameter, speed in zip(module.parameters(), speeds):
                    parameter -= 0.1 * speed.mul_(0.9).add_(parameter.grad)
        for name, value in model.weights().items():
            wanted = module.state_dict()[name].numpy()
            np.testing.assert_allclose(value, wanted, atol=2e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore")
def test_a_body_gets_another_head_and_is_trained_in_turns(tmp_path: Path) -> None:
    file, path = tmp_path / "net.onnx", tmp_path / "m.safetensors"
    file.write_bytes(exported(twin(Residual), IMAGES))
    body = from_onnx(file)
    assert body.values[-1] == "logits"
    model = Model("m")
    features = model.onnx(str(file), model.input("x", (4, 3, 8, 8)), outputs=body.values[-2])
    model.freeze("*")
    model.output(model.dense(features, 5, name="head"))
    assert not any(name.startswith("fc") for name in model.parameters())
    before = model.weights()
    with model:
        model.compile(SGD(0.1), cpus=1)
        model.fit(IMAGES, LABELS, epochs=2, progress=False)
        after = model.weights()
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed == {"head.weight", "head.bias"}
        model.unfreeze()
        model.compile(SGD(0.1), cpus=1)
        model.fit(IMAGES, LABELS, epochs=2, progress=False)
        model.save(path)
        after, wanted = model.weights(), model.predict(IMAGES)
        to_onnx(model, tmp_path / "out.onnx", dims={"batch": "n"})
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == model.parameters().keys()
    (made,) = onnxruntime.InferenceSession(tmp_path / "out.onnx").run(None, {"x": IMAGES})
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)
    file.unlink()
    again = soapstone.load(path)
    np.testing.assert_allclose(again.predict(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    assert again.build(7, training=True) == model.build(7, training=True)
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").stat().st_size == path.stat().st_size


def test_a_saved_file_has_each_weight_once_and_no_dropped_head(tmp_path: Path) -> None:
    text = (
        "g (float[n,6] x) => (float[n,9] y)"
        "{ m = MatMul(x, w)  h = Mul(m, half)  z = Reshape(h, shape)  y = MatMul(z, old) }"
    )
    weights = {"w": reals(6, 400), "old": reals(400, 9), "half": np.float32(0.5)}
    model = headed(model_of(text, shape=np.array([-1, 400]), **weights), "z")
    model.save(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 4 * 400 * 9 + 8000
    again = soapstone.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(again.weights()["w"], weights["w"])
    np.testing.assert_array_equal(again.predict(reals(5, 6)), model.predict(reals(5, 6)))


def test_which_initializers_are_weights() -> None:
    text = """g (float[n,6] x) => (float[n,4] y) {
        m = MatMul(x, w)  h = Add(m, bias)  a = Add(h, mask)  b = Mul(a, half)  c = Add(b, one)
        y = Gather <axis = 1> (c, order) }"""
    masked = np.array([0, 0, -np.inf, 0], np.float32)
    settings = {"half": np.float32(0.5), "mask": masked, "order": np.array([3, 1, 0, 0])}
    file = model_of(text, w=reals(6, 4), bias=reals(4), one=reals(1), **settings)
    model = headed(file)
    assert [n for n in model.parameters() if "head" not in n] == ["w", "bias", "one"]
    assert set(model.graph.inputs(Role.CONSTANT)) == {"mask", "order"}
    assert not infinite(model.weights())
    model.compile(cpus=1)
    grads = model.gradients(np.ones((8, 6), "f4"), np.zeros(8, int))
    assert grads["one"].shape == (1,) and np.isfinite(grads["bias"][:2]).all()
    model.close()


def test_a_weight_that_is_also_a_statistic_is_trained_where_it_is_a_weight() -> None:
    text = """g (float[n,6] x) => (float[n,6] y)
        { a = BatchNormalization(x, ones, zeros, zeros, ones)  y = Relu(a) }"""
    model = headed(model_of(text, ones=np.ones(6, "f4"), zeros=np.zeros(6, "f4")))
    nodes = {node.operator: node for node in model.graph.nodes}
    assert nodes["batch_norm_inference"].inputs[1:3] == ("ones", "zeros")
    assert {"ones", "zeros"} <= model.parameters().keys()
    with model:
        model.compile(SGD(0.5), cpus=1)
        before = model.predict(reals(8, 6))
        model.fit(reals(8, 6), np.arange(8) % 3, epochs=2, progress=False)
        assert not np.array_equal(model.weights()["ones"], np.ones(6))
        assert np.isfinite(before).all()
    constants = [model.constants[n] for n in nodes["batch_norm_inference"].inputs[3:]]
    np.testing.assert_array_equal(constants, [np.zeros(6), np.ones(6)])


@pytest.mark.parametrize("variance", ["ones", "v"])
def test_a_weight_that_is_also_a_statistic_is_saved_as_both(variance: str, tmp_path: Path) -> None:
    text = f"""g (float[n,6] x) => (float[n,6] y)
        {{ v = Identity(ones)  a = BatchNormalization(x, ones, zeros, zeros, {variance})
          y = Relu(a) }}"""
    model = headed(model_of(text, ones=np.ones(6, "f4"), zeros=np.zeros(6, "f4")))
    with model:
        model.compile(SGD(0.5), cpus=1)
        model.fit(reals(8, 6), np.arange(8) % 3, epochs=2, progress=False)
        wanted = model.predict(reals(8, 6))
    for name in ("first", "second"):
        model.save(tmp_path / f"{name}.safetensors")
        model = soapstone.load(tmp_path / f"{name}.safetensors")
        np.testing.assert_allclose(model.predict(reals(8, 6)), wanted, rtol=1e-5, atol=1e-6)


def test_any_batch_size_and_length() -> None:
    text = "g (float[n,t,6] x) => (float[n,4] y) { m = MatMul(x, w)  y = ReduceMean(m, axis) }"
    weights = {"w": reals(6, 4), "axis": np.array([1])}
    model = Model("m")
    x = model.input("x", (8, 5, 6), varying=True)
    file = model_of(text.replace("(m, axis)", "<keepdims = 0> (m, axis)"), **weights)
    model.output(model.dense(model.onnx(file, x), 3))
    with model:
        model.compile(cpus=1)
        for rows, steps in ((10, 5), (8, 3)):
            model.fit(reals(rows, steps, 6), np.arange(rows) % 3, progress=False)
        assert model.predict(reals(3, 4, 6)).shape == (3, 3)


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_weights_of_other_types_are_trained_in_single_precision(kind: str, tmp_path: Path) -> None:
    dtype = {"double": "float64"}.get(kind, kind)
    text = LINEAR.replace("float[", f"{kind}[")
    model = Model("m")
    x = model.cast(model.input("x", (8, 6)), dtype)
    body = model.onnx(model_of(text, w=reals(6, 4).astype(dtype)), x)
    model.output(model.dense(model.cast(body, "float32"), 3))
    with model:
        model.compile(SGD(1e-5), cpus=1)
        model.fit(reals(8, 6), np.arange(8) % 3, progress=False)
        trained = model.weights()["w"]
        model.save(tmp_path / "m.safetensors")
    assert trained.dtype == np.float32 and 0 < abs(trained - reals(6, 4)).max() < 1e-2
    again = soapstone.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(again.weights()["w"], trained)
    assert again.build(3) == model.build(3)


def test_constants_that_follow_from_the_batch_size(tmp_path: Path) -> None:
    """A row is multiplied by its number, which the file folds from the shape."""
    text = """g (float[n,6] x) => (float[n,4] y) {
        m = MatMul(x, w)  n = Shape <start = 0, end = 1> (x)  count = Squeeze(n)
        r = Range(zero, count, one)  f = Cast <to = 1> (r)  c = Unsqueeze(f, axis)
        y = Mul(m, c) }"""
    settings = {"zero": np.array(0), "one": np.array(1), "axis": np.array([1])}
    model = Model("m")
    model.output(model.onnx(model_of(text, w=reals(6, 4), **settings), model.input("x", (4, 6))))
    x = reals(9, 6)
    wanted = x @ reals(6, 4) * np.arange(9)[:, None]
    np.testing.assert_allclose(model.predict(x, batch_size=9), wanted, rtol=1e-5, atol=1e-5)
    to_onnx(model, tmp_path / "m.onnx", dims={"batch": 9})
    (made,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
    with model:
        model.compile(loss="mse", cpus=1)
        model.fit(reals(6, 6), reals(6, 4), shuffle=False, progress=False)
        assert model.predict(x).shape == (9, 4)


def test_a_shared_file_has_one_set_of_weights(tmp_path: Path) -> None:
    model = Model("pair")
    file = model_of(LINEAR, w=reals(6, 4))
    encode = model.shared(lambda x: model.onnx(file, x, name="body"))
    one, two = (encode(model.input(name, (4, 6))) for name in ("a", "b"))
    model.output(model.dense(one - two, 3))
    assert [name for name in model.parameters() if "dense" not in name] == ["body.w"]
    model.save(tmp_path / "m.npz")
    assert soapstone.load(tmp_path / "m.npz").build(3) == model.build(3)


class Projected(nn.Module):
    """A matrix of one's own beside a linear layer, both square."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.own = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) @ self.own


@pytest.mark.filterwarnings("ignore")
def test_weights_of_torch_fit_an_imported_file() -> None:
    module, x = twin(Projected), reals(8, 6)
    model = Model("m")
    model.output(model.onnx(exported(Projected().eval(), x), model.input("x", (8, 6))))
    assert not model.load_weights(module.state_dict()).missing
    with torch.no_grad():
        np.testing.assert_allclose(model.predict(x), module(torch.from_numpy(x)), atol=1e-5)


def rounded(**frozen: Any) -> Model:
    text = "g (float[n,6] x) => (float[n,4] y) { m = MatMul(x, w)  r = Round(m)  y = Neg(r) }"
    file = model_of(text, w=reals(6, 4))
    file.graph.node[1].name = "/quant/Round"
    model = headed(file)
    model.freeze(*frozen.get("freeze", ()))
    model.compile(cpus=1)
    return model


def twice(**settings: Any) -> Model:
    model = Model("m")
    x = model.input("x", (8, 6))
    for each in ({}, settings):
        model.output(model.onnx(model_of(LINEAR, w=reals(6, 4)), x, **each))
    return model


def of_ids(text: str) -> Model:
    model = Model("m")
    ids = model.onnx(model_of(text, w=np.arange(6)), model.input("x", (8, 6), "int64"))
    model.output(model.dense(ids, 3))
    return model


def fitted(file: onnx.ModelProto, rows: int) -> None:
    model = headed(file)
    model.compile(cpus=1)
    model.fit(reals(rows, 6), np.zeros(rows, int), progress=False)


FIXED = model_of(LINEAR.replace("[n", "[8"), w=reals(6, 4))
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: headed("nope.onnx"), "file 'nope.onnx': no such file"),
    (lambda: headed(3), "onnx: file: int found, the path of an .onnx file or what"),
    (lambda: headed(b"abc"), "the file is truncated or no ONNX model"),
    (
        lambda: headed(model_of(LINEAR, w=reals(6, 4)), "z"),
        "onnx 'g': outputs: no value 'z' in the file; its last ones are y",
    ),
    (
        lambda: headed(model_of(LINEAR, w=reals(6, 4)), 3),
        "onnx 'g': outputs: 3 found, a name or several needed",
    ),
    (
        lambda: Model("m").onnx(model_of(LINEAR, w=reals(6, 4))),
        "onnx 'g': 0 tensors found, 1 needed: x: float32[n, 6]",
    ),
    (
        lambda: headed(model_of(LINEAR.replace("[n,6]", "[n,5]"), w=reals(5, 4))),
        "onnx 'g': input 'x': axis 1 is 6; 5 needed",
    ),
    (
        lambda: headed(model_of(LINEAR.replace("[n,6]", "[n,k]"), w=reals(5, 4))),
        "onnx 'g': node 0 (MatMul): linear 'y': dim k is 6 in input 0 but 5 in input 1",
    ),
    (
        lambda: headed(FIXED, batch=4),
        "onnx 'g': input 'x': a first axis of 4 found, 8 needed, which the file fixes;",
    ),
    (lambda: fitted(FIXED, 20), "fit: a last batch of 4: onnx 'g': input 'x': a first axis of 4"),
    (rounded, "round '/quant/Round': no gradient passes through it to 'w'; freeze that:"),
    (twice, "onnx 'g': 'w' exists already; name=… puts a name before those of the file"),
    (
        lambda: of_ids("g (int64[n,6] x) => (int64[n,6] y) { y = Add(x, w) }"),
        "linear 'dense': input 1 has type float32; int64 of input 0 needed",
    ),
    (
        lambda: of_ids("g (float[n,6] x) => (float[n,6] y) { y = Neg(x) }"),
        "onnx 'g': input 'x': int64 found, float32 needed",
    ),
]


@pytest.mark.parametrize(("make", "said"), MISTAKES, ids=[said[:40] for _, said in MISTAKES])
def test_mistakes_are_one_clear_sentence(make: Callable[[], Any], said: str) -> None:
    with pytest.raises((GraphError, FileNotFoundError)) as caught:
        make()
    assert said in str(caught.value)


def test_a_name_that_is_taken_changes_nothing() -> None:
    model = Model("m")
    mine = model.constant("w", np.ones((6, 4), np.int64))
    text = "g (int64[n,6] x) => (int64[n,4] y) { y = MatMul(x, w) }"
    file = model_of(text, w=np.zeros((6, 4), np.int64))
    x = model.input("x", (8, 6), "int64")
    with pytest.raises(GraphError, match="'w' exists already"):
        model.onnx(file, x)
    model.output(mine, model.onnx(file, x, name="body"))
    assert model.constants["w"].all() and not model.constants["body.w"].any()


def test_what_has_no_gradient_may_stay() -> None:
    with rounded(freeze=["w"]) as model:
        model.fit(reals(8, 6), np.arange(8) % 3, progress=False)
    assert twice(name="b").parameters().keys() == {"w", "b.w"}


def test_a_saved_weight_of_another_shape_is_refused() -> None:
    from soapstone.frontend.onnx.trained import restored, written

    file, beside = written(from_onnx(model_of(LINEAR, w=reals(6, 4))), {"w"}, None, None)
    assert beside == {"w": "w"}
    with pytest.raises(OnnxError, match=r"initializer 'w': float32 of shape \(5, 4\) found"):
        restored(file, {"w": reals(5, 4)})
