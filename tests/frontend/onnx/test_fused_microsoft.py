"""What ONNX Runtime's optimiser writes, against ONNX Runtime; without it, what each is made of."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.frontend.onnx.file.tensors import ONNX_OF
from soapstone.frontend.onnx.rules.microsoft.nchwc import block_size
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
MICROSOFT = "com.microsoft"
BLOCKS = "com.microsoft.nchwc"
LEVELS = {
    "basic": theirs.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": theirs.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": theirs.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class Net:
    """A model made node by node, of seeded weights."""

    def __init__(self, seed: int = 0, **inputs: Array) -> None:
        self.random = np.random.default_rng(seed)
        self.feeds = inputs
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: Array) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def drawn(self, *shape: int) -> str:
        return self.weight(self.random.standard_normal(shape).astype(np.float32) / 4)

    def __call__(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], domain=domain, **attributes))
        return name

    def conv(self, x: str, outputs: int, inputs: int, size: int = 3, **attributes: Any) -> str:
        weights = self.drawn(outputs, inputs, size, size), self.drawn(outputs)
        return self("Conv", x, *weights, pads=[size // 2] * 4, **attributes)

    def file(self, output: str, dtype: int = TensorProto.FLOAT, **shapes: Any) -> bytes:
        info = helper.make_tensor_value_info
        shapes = {name: shapes.get(name, array.shape) for name, array in self.feeds.items()}
        inputs = [info(n, ONNX_OF[a.dtype.name], shapes[n]) for n, a in self.feeds.items()]
        outputs = [info(output, dtype, None)]
        graph = helper.make_graph(self.nodes, "net", inputs, outputs, self.weights)
        domains = ("", 17), (MICROSOFT, 1), (BLOCKS, 1)
        opsets = [helper.make_opsetid(*each) for each in domains]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return bytes(made.SerializeToString())


def compare(file: bytes | Path, *asked: dict[str, Array]) -> None:
    """The results are those of ONNX Runtime of the same file, for each of some inputs in turn."""
    options = theirs.SessionOptions()
    options.graph_optimization_level = theirs.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    given = str(file) if isinstance(file, Path) else file
    served = theirs.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        made = [session.run(feeds) for feeds in asked]
    for results, feeds in zip(made, asked, strict=True):
        for each, wanted in zip(served.get_outputs(), served.run(None, feeds), strict=True):
            found = results[each.name]
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5, err_msg=each.name)


def optimised(file: bytes, level: str, path: Path) -> collections.Counter[str]:
    """Write what ONNX Runtime makes of a file; return what operators of its own that has."""
    options = theirs.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    theirs.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(str(path)).graph.node
    return collections.Counter(f"{n.domain}.{n.op_type}" for n in nodes if n.domain)


def images(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def mobile(**shapes: Any) -> tuple[bytes, dict[str, Array]]:
    """Return a net with every kind of convolution, pooling and activation that is joined."""
    net = Net(x=images(2, 3, 15, 13))
    width = 2 * block_size()
    y = net("Relu", net.conv("x", width, 3, strides=[2, 2]))
    y = net("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    least, most = (net.weight(np.float32(number)) for number in (0, 0.6))
    deep = net("Clip", net.conv(y, width, 1, group=width), least, most)
    deep = net("LeakyRelu", net.conv(deep, width, width, 1), alpha=0.2)
    y = net("Relu", net("Add", net.conv(deep, width, width), y))
    grouped = net("Sigmoid", net.conv(y, width, width // 2, group=2))
    y = net("Concat", y, grouped, axis=1)
    y = net("HardSigmoid", net.conv(y, 20, 2 * width, 1), alpha=0.3, beta=0.4)  # no whole block
    y = net("Tanh", net.conv(y, width, 20))
    y = net("AveragePool", y, kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1)
    y = net.conv(y, 20, width, 1)
    y = net("Flatten", net("GlobalAveragePool", y))
    y = net("LeakyRelu", net("Gemm", y, net.drawn(20, 7), net.drawn(7)), alpha=0.3)
    y = net("Relu", net("Gemm", y, net.drawn(5, 7), transB=1))
    return net.file(net("Tanh", net("Gemm", y, net.drawn(5, 4), net.drawn(4))), **shapes), net.feeds


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimised_net_of_images(level: str, tmp_path: Path) -> None:
    file, feeds = mobile()
    own = optimised(file, level, tmp_path / "net.onnx")
    if level == "extended":
        assert own[f"{MICROSOFT}.FusedConv"] >= 6
        assert own[f"{MICROSOFT}.FusedGemm"] == 3
    if level == "all" and own:
        assert own[f"{BLOCKS}.Conv"] == 8
        assert own[f"{BLOCKS}.ReorderOutput"]
    compare(tmp_path / "net.onnx", feeds)


@pytest.mark.parametrize("level", ["extended", "all"])
def test_an_optimised_net_of_images_of_any_size(level: str, tmp_path: Path) -> None:
    file, _ = mobile(x=("n", 3, "h", "w"))
    optimised(file, level, tmp_path / "net.onnx")
    sizes = ((2, 15, 13), (1, 15, 13), (3, 15, 13), (3, 21, 17), (1, 40, 22), (2, 64, 64))
    compare(tmp_path / "net.onnx", *({"x": images(n, 3, h, w)} for n, h, w in sizes))


def test_blocks_made_larger_of_any_size(tmp_path: Path) -> None:
    net = Net(x=images(1, 3, 5, 4))
    width = block_size()
    scales = net.weight(np.array([1, 1, 2, 3], np.float32))
    y = net("Resize", net.conv("x", width, 3), "", scales, mode="linear")
    file = net.file(net.conv(y, width + 4, width), x=("n", 3, "h", "w"))
    optimised(file, "all", tmp_path / "net.onnx")
    sizes = ((1, 5, 4), (2, 5, 4), (2, 7, 9), (1, 8, 8), (3, 6, 11))
    compare(tmp_path / "net.onnx", *({"x": images(n, 3, h, w)} for n, h, w in sizes))


@pytest.mark.parametrize("mode", ["asymmetric", "align_corners", "half_pixel"])
@pytest.mark.parametrize("kind", ["nearest", "linear"])
def test_blocks_made_larger(kind: str, mode: str, tmp_path: Path) -> None:
    net = Net(x=images(1, 3, 5, 4))
    width = block_size()
    scales = net.weight(np.array([1, 1, 2, 3], np.float32))
    options = {"mode": kind, "coordinate_transformation_mode": mode}
    if kind == "nearest":
        options["nearest_mode"] = "floor"
    y = net("Resize", net.conv("x", width, 3), "", scales, **options)
    y = net("GlobalMaxPool", net.conv(y, width, width))
    own = optimised(net.file(y), "all", tmp_path / "net.onnx")
    assert own[f"{BLOCKS}.Upsample"] == (kind == "linear" or mode == "asymmetric")
    compare(tmp_path / "net.onnx", net.feeds)


def test_images_with_their_channels_last_around_blocks(tmp_path: Path) -> None:
    net = Net(x=images(1, 5, 4, 20))
    y = net("Transpose", "x", perm=[0, 3, 1, 2])
    y = net("Relu", net.conv(y, 20, 20))
    file = net.file(net("Transpose", y, perm=[0, 2, 3, 1]))
    assert optimised(file, "all", tmp_path / "net.onnx")[f"{BLOCKS}.Conv"]
    compare(tmp_path / "net.onnx", net.feeds)
    nodes = onnx.load(str(tmp_path / "net.onnx")).graph.node
    turned = [
        n.op_type for n in nodes if any(a.name == "channels_last" and a.i for a in n.attribute)
    ]
    assert turned == ["ReorderInput", "ReorderOutput"]


def test_blocks_of_another_length_are_refused() -> None:
    net = Net(x=images(1, 3, 5, 4))
    y = net("Conv", "x", net.drawn(block_size() - 4, 3, 1, 1), domain=BLOCKS)
    file = net.file(net("ReorderOutput", y, domain=BLOCKS, channels=4))
    with pytest.raises(OnnxError, match=f"blocks of {block_size()} needed"):
        soapstone.from_onnx(file).graph()


@pytest.mark.parametrize("length", [4, 9])
def test_an_optimised_transformer(length: int, tmp_path: Path) -> None:
    net = Net(x=images(2, length, 8))
    one, half, root = (net.weight(np.float32(number)) for number in (1, 0.5, 2**0.5))
    scale, shift = net.drawn(8), net.drawn(8)
    q, k = (net("Transpose", net("MatMul", "x", net.drawn(8, 8)), perm=p) for p in [(0, 1, 2)] * 2)
    scores = net("Div", net("MatMul", q, net("Transpose", k, perm=[0, 2, 1])), root)
    y = net("MatMul", net("MatMul", net("Softmax", scores), "x"), net.drawn(8, 8))
    y = net("Add", y, net.drawn(8))
    y = net("LayerNormalization", net("Add", y, "x"), scale, shift)
    y = net("Add", net("MatMul", y, net.drawn(8, 8)), net.drawn(8))
    bent = net("Add", net("Erf", net("Div", y, root)), one)
    y = net("Mul", net("Mul", y, bent), half)
    own = optimised(net.file(y), "extended", tmp_path / "net.onnx")
    wanted = ("FusedMatMul", "SkipLayerNormalization", "Gelu")
    assert {f"{MICROSOFT}.{kind}" for kind in wanted} <= set(own)
    compare(tmp_path / "net.onnx", net.feeds)


# ------------------------------------------------------------- what no processor of theirs serves
def made(kind: str, inputs: dict[str, Array], **attributes: Any) -> Array:
    net = Net(**inputs)
    file = net.file(net(kind, *inputs, domain=MICROSOFT, **attributes))
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        (result,) = session.run(inputs).values()
    return np.asarray(result)


@pytest.mark.parametrize("kind", ["NhwcConv", "NhwcFusedConv"])
def test_convolutions_with_channels_last(kind: str) -> None:
    x, w, bias = images(2, 6, 5, 4), images(6, 2, 3, 3), images(6)
    first = {"x": x.transpose(0, 3, 1, 2).copy(), "w": w, "b": bias}
    more = images(2, 6, 5, 6) if kind == "NhwcFusedConv" else None
    options: dict[str, Any] = {"group": 2, "pads": [1] * 4}
    own = dict(first) if more is None else {**first, "z": more.transpose(0, 3, 1, 2).copy()}
    if more is not None:
        options |= {"activation": "Clip", "activation_params": [-0.5, 1.5]}
    net = Net(**own)
    file = net.file(net("FusedConv", *own, domain=MICROSOFT, **options))
    served = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    (wanted,) = served.run(None, own)
    last = {"x": x, "w": w, "b": bias} | ({} if more is None else {"z": more})
    if kind == "NhwcConv":  # as the documentation has weights, and as the tool writes them
        by_documentation = made(kind, last, **options)
        np.testing.assert_allclose(by_documentation.transpose(0, 3, 1, 2), wanted, 1e-4, 1e-5)
        last["w"] = w.transpose(0, 2, 3, 1).copy()
    found = made(kind, last, **options)
    np.testing.assert_allclose(found, wanted.transpose(0, 2, 3, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_maxima_of_bytes_with_channels_last(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(0, 120, (2, 7, 6, 5)).astype(dtype)
    net = Net(x=x)
    options = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}
    y = net("NhwcMaxPool", "x", domain=MICROSOFT, **options)
    compare(net.file(y, ONNX_OF[x.dtype.name]), net.feeds)


def normed(x: Array, scale: Array, shift: Array, groups: int, silu: bool) -> Array:
    """Return a group norm of x (n, h, w, c)."""
    parts = x.astype(np.float64).reshape(x.shape[0], -1, groups, x.shape[3] // groups)
    mean, var = (f(axis=(1, 3), keepdims=True) for f in (parts.mean, parts.var))
    y = ((parts - mean) / np.sqrt(var + 1e-3)).reshape(x.shape) * scale + shift
    return np.asarray(y / (1 + np.exp(-y)) if silu else y)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("skip", ["", "whole", "by channel"])
def test_group_norms_of_diffusion(skip: str, last: int) -> None:
    x, scale, shift, bias = images(2, 3, 4, 6), images(6), images(6) + 1, images(6) - 1
    more = {"whole": images(2, 3, 4, 6)[::-1].copy(), "by channel": images(2, 6)}.get(skip)
    total = x if more is None else x + (more if more.ndim == 4 else more[:, None, None]) + bias
    wanted = normed(total, scale, shift, 3, silu=bool(last))

    def turned(image: Array) -> Array:
        return image if last or image.ndim < 4 else image.transpose(0, 3, 1, 2).copy()

    inputs = {"x": turned(x), "scale": scale, "shift": shift}
    if more is not None:
        inputs |= {"skip": turned(more), "bias": bias}
    options = {"groups": 3, "epsilon": 1e-3, "activation": last, "channels_last": last}
    found = made("GroupNorm" if more is None else "SkipGroupNorm", inputs, **options)
    np.testing.assert_allclose(found, turned(wanted), rtol=1e-4, atol=1e-5)


def test_sums_and_halves_of_diffusion() -> None:
    from math import erf

    x, bias, skip = images(2, 3, 8), images(8), images(2, 3, 8)[::-1].copy()
    np.testing.assert_allclose(
        made("BiasAdd", {"x": x, "b": bias, "s": skip}), x + bias + skip, rtol=1e-6
    )
    left, right = np.split((x + bias).astype(np.float64), 2, axis=-1)
    wanted = left * right * 0.5 * (1 + np.vectorize(erf)(right / 2**0.5))
    np.testing.assert_allclose(made("BiasSplitGelu", {"x": x, "b": bias}), wanted, rtol=1e-5)
