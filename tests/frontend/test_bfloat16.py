"""Sessions whose products with weights round their operands to bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone import InferenceSession, Model
from soapstone.cli.main import app
from soapstone.dtypes import learn
from soapstone.ir.errors import GraphError
from soapstone.kernels.cpu.onednn.library import available, multiplies_bfloat16

NAME = "onednn_bfloat16"
able = pytest.mark.skipif(
    not (available() and multiplies_bfloat16()),
    reason="neither oneDNN nor a processor that multiplies bfloat16",
)


def gain(monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    """Let the processor be one that gains by products in bfloat16, or loses."""
    blocks = import_module("soapstone.kernels.cpu.attention.blocks")
    monkeypatch.setattr(blocks, "pairs_at_once", lambda: gains)
    for module in (
        "engine.lower.halves",
        "kernels.cpu.onednn.bfloat16",
        "kernels.cpu.onednn.library",
    ):
        monkeypatch.setattr(
            import_module(f"soapstone.{module}"), "gains_by_bfloat16", lambda: gains
        )


@pytest.fixture(autouse=True)
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    gain(monkeypatch, True)


def images() -> Model:
    """Convolutions, one of them in groups and one of single channels, and a classifier."""
    model = Model("images")
    x = model.input("x", (2, 3, 20, 20))
    x = model.conv2d(x, 32, 3, padding=1, activation="relu")
    x = model.relu(model.batch_norm(model.conv2d(x, 32, 3, padding=1, groups=4)) + x)
    x = model.conv2d(x, 32, 3, padding=1, groups=32)
    model.output(model.dense(model.flatten(model.conv2d(x, 16, 1, stride=2)), 10))
    return model


def block() -> Model:
    """A block of BERT: attention and two dense layers, with sums and norms."""
    model = Model("block")
    x = model.input("x", (2, 24, 64))
    x = model.layer_norm(x + model.multi_head_attention(x, x, x, 4))
    made = model.dense(model.dense(x, 256, activation="gelu"), 64)
    model.output(model.layer_norm(x + made))
    return model


def masked() -> Model:
    """Attention by products of two values, with a mask between them."""
    model = Model("masked")
    x = model.input("x", (2, 24, 64))
    q, k, v = (
        model.transpose(model.reshape(model.dense(x, 64), (2, 24, 4, 16)), (0, 2, 1, 3))
        for _ in range(3)
    )
    scores = model.matmul(q, model.transpose(k, (0, 1, 3, 2))) + model.constant(
        "mask", np.triu(np.full((24, 24), -1e4, np.float32), 1)
    )
    mixed = model.matmul(model.softmax(scores), v)
    model.output(model.dense(model.reshape(model.transpose(mixed, (0, 2, 1, 3)), (2, 24, 64)), 8))
    return model


def rows(count: int = 8) -> Model:
    model = Model("rows")
    x = model.input("x", (count, 64))
    model.output(model.dense(model.dense(x, 128, activation="relu"), 8))
    return model


def drawn(model: Model) -> np.ndarray:
    shape = {"images": (2, 3, 20, 20), "rows": (8, 64)}.get(model.name, (2, 24, 64))
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@able
@pytest.mark.parametrize("make", [images, block, masked, rows])
def test_results_are_those_of_float32_within_rounding(make: Callable[[], Model]) -> None:
    """Sessions of both precisions side by side: neither takes what the other chose or packed."""
    model = make()
    x = drawn(model)
    with model.inference(tune=False) as alone:
        (expected,) = alone.run(x).values()
    with (
        model.inference(tune="now", precision="bfloat16") as small,
        model.inference(tune=False) as single,
        model.inference(tune=False, precision="bfloat16", requests=2) as several,
    ):
        for _ in range(2):
            (near,), (same,) = small.run(x).values(), single.run(x).values()
            np.testing.assert_array_equal(same, expected)
            (other,) = several.run_async(x).result().values()
            for each in (near, other):
                error = np.linalg.norm(each - expected) / np.linalg.norm(expected)
                assert error < 1e-2
        assert error > 1e-5
        assert NAME in several.variants(x).values()
        assert NAME not in single.variants(x).values()


@able
def test_products_of_two_values_are_of_halves() -> None:
    model = masked()
    with model.inference(tune=False, precision="bfloat16") as session:
        variants = session.variants(drawn(model))
    assert variants["matmul_1"] in (NAME, "blocks_bfloat16")


@able
def test_maxima_are_of_what_is_kept() -> None:
    """Rounding keeps order, so pooling rounded values gives the rounded maxima."""
    model = Model("pooled")
    x = model.input("x", (2, 3, 20, 20))
    x = model.conv2d(x, 40, 3, padding=1, activation="relu")
    x = model.max_pool(x, 3, 2, padding=1)
    model.output(model.conv2d(x, 16, 1))
    given = np.random.default_rng(3).standard_normal((2, 3, 20, 20)).astype(np.float32)
    with (
        model.inference(tune=False, precision="bfloat16") as session,
        model.inference(tune=False) as single,
    ):
        (found,), (exact,) = session.run(given).values(), single.run(given).values()
        assert "cast" not in "".join(session.variants(given))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < 1e-2


@able
def test_a_processor_that_loses_by_it_keeps_products_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gain(monkeypatch, False)
    model = block()
    x = drawn(model)
    with (
        model.inference(tune=False) as single,
        model.inference(tune=False, precision="bfloat16") as small,
    ):
        assert small.variants(x) == single.variants(x)
        (exact,), (found,) = single.run(x).values(), small.run(x).values()
        np.testing.assert_array_equal(found, exact)


@able
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_a_few_rows_read_weights_of_half_the_size(
    count: int, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their operands are rounded as those of more rows are, and sums are of single precision."""
    gain(monkeypatch, gains)
    model = Model("few")
    model.output(model.dense(model.input("x", (count, 64)), 40, activation="relu", name="one"))
    values = model.weights()
    x = drawn(rows())[:count]
    half = learn("bfloat16")
    kernel, bias = values["one.weight"], values["one.bias"]
    expected = np.maximum(
        x.astype(half).astype(float) @ kernel.astype(half).astype(float) + bias, 0
    )
    with model.inference(tune=False, precision="bfloat16") as session:
        (found,) = session.run(x).values()
        assert NAME not in session.variants(x).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@able
def test_rows_are_the_same_in_any_batch() -> None:
    model = Model("any")
    model.output(model.dense(model.input("x", (9, 64)), 256, bias=False))
    with model.inference(tune=False, precision="bfloat16") as session:
        whole = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
        (all_rows,) = session.run(whole).values()
        for count in (1, 4, 7):
            (some,) = session.run(whole[:count]).values()
            np.testing.assert_allclose(some, all_rows[:count], rtol=1e-5, atol=1e-5)


@able
def test_predict_takes_the_precision(tmp_path: Path) -> None:
    from soapstone import to_onnx

    path, given = tmp_path / "rows.onnx", tmp_path / "x.npz"
    to_onnx(rows(), path)
    np.savez(given, x=drawn(rows()))
    shown = CliRunner().invoke(
        app, ["predict", str(path), "-i", str(given), "--precision", "bfloat16", "--json"]
    )
    assert shown.exit_code == 0 and NAME in shown.output


@able
def test_the_other_interfaces_take_the_precision(tmp_path: Path) -> None:
    import soapstone.onnxruntime as ort
    from soapstone import to_onnx

    to_onnx(rows(), path := tmp_path / "rows.onnx")
    given = [("CPUExecutionProvider", {"precision": "bfloat16"})]
    session = ort.InferenceSession(path, providers=given)
    session.run(None, {"x": drawn(rows())})
    assert NAME in session.session.variants({"x": drawn(rows())}).values()
    torch = pytest.importorskip("torch", reason="pip install soapstone[torch]")
    import soapstone.torch

    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    compiled = soapstone.torch.compile(module, precision="bfloat16")
    with torch.no_grad():
        x = torch.randn(16, 64)
        near, exact = compiled(x), module(x)
    error = float((near - exact).norm() / exact.norm())
    assert 1e-5 < error < 1e-2


def test_what_cannot_be_is_refused() -> None:
    model = rows()
    with pytest.raises(GraphError, match="'bfloat' found, 'float32', 'bfloat16', 'tf32'"):
        model.inference(precision="bfloat")
    with pytest.raises(GraphError, match="'tf32' found, but it is of NVIDIA's GPUs"):
        model.inference(precision="tf32")
    if available() and multiplies_bfloat16():
        with pytest.raises(GraphError, match="products of streamed weights stay float32"):
            model.inference(precision="bfloat16", fast_memory=1 << 20)
    assert InferenceSession(model, precision="float32").run(drawn(model))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        pytest.param(
            {"ONEDNN_MAX_CPU_ISA": "AVX2"},
            "this processor has no instructions for it (AVX512_BF16 needed)",
            marks=pytest.mark.onednn,
        ),
        ({"SOAPSTONE_ONEDNN": "off"}, "oneDNN is not there"),
    ],
)
def test_without_instructions_it_is_an_error(variables: dict[str, str], said: str) -> None:
    code = """if True:
        from soapstone import Model
        model = Model("rows")
        model.output(model.dense(model.input("x", (1, 4)), 3))
        model.inference()
        try:
            model.inference(precision="bfloat16")
        except Exception as error:
            print(error)
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    needed = f"precision: 'bfloat16' found, but {said}; 'float32' needed"
    assert ran.stdout.strip() == needed


@able
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_of_the_type_multiplies_in_it(precision: str) -> None:
    """Whatever the precision: its numbers are of the type, and each result is rounded once."""
    import ml_dtypes
    from onnx import TensorProto, helper

    from soapstone import from_onnx

    rng, kind = np.random.default_rng(0), TensorProto.BFLOAT16

    def weight(name: str, *shape: int) -> object:
        made = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        return helper.make_tensor(name, kind, shape, made.tobytes(), raw=True)

    nodes = [
        helper.make_node("Conv", ["x", "k", "c"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "l"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["d", "b"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["g"]),
        helper.make_node("Tanh", ["g"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, shape in (("x", (2, 16, 8, 8)), ("y", (2, 24)))
    ]
    weights = [weight("k", 32, 16, 3, 3), weight("c", 32), weight("l", 32, 32, 3, 3)]
    graph = helper.make_graph(
        nodes, "halves", ends[:1], ends[1:], [*weights, weight("m", 2048, 24)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    x = rng.standard_normal((2, 16, 8, 8)).astype(ml_dtypes.bfloat16)
    loaded = from_onnx(model.SerializeToString())
    with InferenceSession(loaded, plain=True, tune=False) as plain:
        expected = plain.run(x)["y"].astype(np.float32)
    with InferenceSession(loaded, tune=False, precision=precision) as session:
        found = session.run(x)["y"].astype(np.float32)
        assert NAME in session.variants(x).values()
    assert (found != expected).mean() < 0.1  # sums in another order may round otherwise
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)
