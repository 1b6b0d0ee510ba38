"""Attention and embeddings of com.microsoft against ONNX Runtime, with random inputs left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.frontend.onnx.file.tensors import ONNX_OF
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
DOMAIN = "com.microsoft"


def file_of(
    kind: str, inputs: dict[str, Array | None], outputs: dict[str, int], **attributes: Any
) -> tuple[bytes, dict[str, Array]]:
    """Return a model of one operator and its feeds; inputs with names of capitals are weights."""
    given = {name: array for name, array in inputs.items() if array is not None}
    feeds = {name: array for name, array in given.items() if not name.isupper()}
    names = [name if name in given else "" for name in inputs]
    node = helper.make_node(kind, names, list(outputs), domain=DOMAIN, **attributes)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        kind,
        [info(name, ONNX_OF[array.dtype.name], array.shape) for name, array in feeds.items()],
        [info(name, dtype, None) for name, dtype in outputs.items() if name],
        [numpy_helper.from_array(a, name) for name, a in given.items() if name not in feeds],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(made.SerializeToString()), feeds


def compare(file: bytes, feeds: dict[str, Array]) -> None:
    served = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [each.name for each in served.get_outputs()]
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        ours = session.run(feeds)
    for name, wanted in zip(names, served.run(names, feeds), strict=True):
        assert ours[name].dtype == wanted.dtype
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-4, atol=2e-5, err_msg=name)


class Drawn:
    """Random numbers, and whether an input is there."""

    def __init__(self, seed: int) -> None:
        self.own = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        return int(self.own.integers(low, high + 1))

    def some(self) -> bool:
        return bool(self.own.random() < 0.5)

    def reals(self, *shape: int) -> Array:
        return self.own.standard_normal(shape).astype(np.float32)

    def mask(self, form: int, samples: int, count: int, rows: int) -> Array | None:
        """Return a mask, of which each query sees a key, or None."""
        if form == 0:
            return None
        if form == 1:
            return self.own.integers(1, rows + 1, samples).astype(np.int32)
        if form == 2:
            starts = self.own.integers(0, rows, samples)
            return np.concatenate([self.own.integers(starts + 1, rows + 1), starts]).astype(
                np.int32
            )
        shape = (samples, rows) if form == 3 else (samples, count, rows)
        made = self.own.integers(0, 2, shape).astype(np.int32)
        made[..., 0] = 1
        return made


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kind", ["Attention", "QAttention"])
def test_attention_with_its_own_projection(kind: str, seed: int) -> None:
    drawn = Drawn(seed)
    samples, count, heads, width = (drawn.number(1, most) for most in (3, 5, 3, 4))
    width, features, before = 4 * width, drawn.number(2, 9), drawn.number(1, 4)
    hidden = heads * width
    narrow = kind == "QAttention"
    past = drawn.reals(2, samples, heads, before, width) if drawn.some() else None
    rows = count + (0 if past is None else before)
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(drawn.some())}
    values = hidden
    if not narrow and past is None and drawn.some():
        values = 2 * hidden
        attributes["qkv_hidden_sizes"] = [hidden, hidden, values]
    if drawn.some():
        attributes["scale"] = 0.3
    # Of a mask of both ends, the first keys are hidden, which the first queries see alone.
    forms = 5 if not attributes["unidirectional"] else 2
    mask = drawn.mask(seed % forms, samples, count, rows)
    bias = drawn.reals(2 * hidden + values)
    inputs: dict[str, Array | None]
    if narrow:
        columns = 3 * hidden
        dtype, shift = (np.uint8, 60) if drawn.some() else (np.int8, 0)
        one_each = (columns,) if drawn.some() else ()
        w = drawn.own.integers(shift - 60, shift + 60, (features, columns)).astype(dtype)
        zero = np.full(one_each, shift + 5, dtype) if drawn.some() else None
        inputs = {
            "x": drawn.own.integers(0, 256, (samples, count, features)).astype(np.uint8),
            "W": w,
            "B": bias,
            "XS": np.float32(0.011),
            "WS": drawn.own.uniform(0.004, 0.02, one_each).astype(np.float32),
            "mask": mask,
            "XZ": np.uint8(120) if drawn.some() else None,
            "WZ": zero,
            "past": past,
        }
        inputs = {name: a if a is None else np.asarray(a) for name, a in inputs.items()}
    else:
        extra = drawn.reals(samples if drawn.some() else 1, heads, count, rows)
        inputs = {
            "x": drawn.reals(samples, count, features),
            "W": drawn.reals(features, 2 * hidden + values) / 2,
            "B": bias,
            "mask": mask,
            "past": past,
            "bias": extra if past is None and drawn.some() else None,
        }
    outputs = {"y": TensorProto.FLOAT}
    if past is not None:
        outputs["present"] = TensorProto.FLOAT
    compare(*file_of(kind, inputs, outputs, **attributes))


@pytest.mark.parametrize("seed", range(30))
def test_attention_of_what_is_projected(seed: int) -> None:
    drawn = Drawn(seed)
    samples, count, heads, width = (drawn.number(1, most) for most in (3, 5, 3, 4))
    width, before = 4 * width, drawn.number(1, 4)
    hidden, own = heads * width, drawn.some()
    cached = seed % 5 == 4  # keys and values of an encoder, by head
    keys = count if own and not cached else drawn.number(1, 6)
    causal = own and not cached and drawn.some()
    past = not cached and drawn.some()
    rows = keys + before * past
    form = (0, 3, 4)[seed % 3] if not causal else 0
    by_head = (samples, heads, keys, width)
    flat = (samples, keys, hidden)
    cache = (samples, heads, before, width)
    inputs: dict[str, Array | None] = {
        "q": drawn.reals(samples, count, hidden),
        "k": drawn.reals(*(by_head if cached else flat)),
        "v": drawn.reals(*(by_head if cached else flat)),
        "B": drawn.reals(3 * hidden) if not cached and drawn.some() else None,
        "mask": drawn.mask(form, samples, count, rows),
        "bias": drawn.reals(1, heads, count, rows) if drawn.some() else None,
        "past_k": drawn.reals(*cache) if past else None,
        "past_v": drawn.reals(*cache) if past else None,
    }
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(causal)}
    if drawn.some():
        attributes["scale"] = 0.4
    outputs = {"y": TensorProto.FLOAT}
    if past:
        outputs |= {"present_k": TensorProto.FLOAT, "present_v": TensorProto.FLOAT}
    compare(*file_of("MultiHeadAttention", inputs, outputs, **attributes))


@pytest.mark.parametrize("seed", range(16))
def test_embeddings_with_their_norm(seed: int) -> None:
    drawn = Drawn(seed)
    samples, count, width = drawn.number(1, 3), drawn.number(1, 5), 4 * drawn.number(1, 4)
    segments = drawn.some()
    shape = (samples, count)

    def ids(most: int) -> Array:
        return drawn.own.integers(0, most, shape).astype(np.int32)

    lengths = drawn.own.integers(1, count + 1, (samples, 1))
    inputs: dict[str, Array | None] = {
        "ids": ids(11),
        "segments": ids(2) if segments else None,
        "W": drawn.reals(11, width),
        "P": drawn.reals(7, width),
        "S": drawn.reals(2, width) if segments else None,
        "G": drawn.reals(width),
        "B": drawn.reals(width),
        "mask": (np.arange(count) < lengths).astype(np.int32) if drawn.some() else None,
        "places": ids(7) if drawn.some() else None,
    }
    outputs = {"y": TensorProto.FLOAT, "words": TensorProto.INT32, "total": TensorProto.FLOAT}
    attributes = {"epsilon": 1e-3} if drawn.some() else {}
    compare(*file_of("EmbedLayerNormalization", inputs, outputs, **attributes))


@pytest.mark.parametrize("seed", range(8))
def test_embeddings_of_bytes_with_their_norm(seed: int) -> None:
    drawn = Drawn(seed)
    samples, count, width = drawn.number(1, 3), drawn.number(1, 5), 4 * drawn.number(1, 4)
    segments, dtype = seed % 2 == 0, (np.uint8, np.int8)[seed // 2 % 2]

    def ids(most: int) -> Array:
        return drawn.own.integers(0, most, (samples, count)).astype(np.int32)

    def table(*shape: int) -> Array:
        return drawn.own.integers(0, 120, shape).astype(dtype)

    def each(make: Any) -> list[Array | None]:
        made = [np.asarray(make()) for _ in range(5)]
        return [None if at == 2 and not segments else part for at, part in enumerate(made)]

    mask = drawn.own.integers(0, 2, (samples, count)).astype(np.int32)
    given: list[Array | None] = [ids(11), ids(2) if segments else None]
    given += [table(11, width), table(7, width), table(2, width) if segments else None]
    given += [table(width), table(width), mask if drawn.some() else None]
    given += each(lambda: np.float32(drawn.own.uniform(0.01, 0.1)))
    given += each(lambda: dtype(drawn.number(40, 90)))
    names = ["ids", "segments", *"WPSGB", "mask", *(f"S{i}" for i in range(5)), *"QRTUV"]
    names[4] = "TABLE"
    outputs = {"y": TensorProto.FLOAT, "words": TensorProto.INT32}
    compare(*file_of("QEmbedLayerNormalization", dict(zip(names, given)), outputs, epsilon=1e-3))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_what_is_packed(whole: bool, masked: bool) -> None:
    """Which ONNX Runtime has on GPUs alone: as of queries, keys and values apart."""
    drawn = Drawn(int(masked))
    samples, count, heads, width = 2, 4, 3, 8
    keys = count if whole else 5
    parts = [drawn.reals(samples, rows, heads, width) for rows in (count, keys, keys)]
    flat = [part.reshape(*part.shape[:2], -1) for part in parts]
    mask = drawn.mask(3, samples, count, keys) if masked else None
    outputs = {"y": TensorProto.FLOAT}
    inputs: dict[str, Array | None] = {**dict(zip("qkv", flat)), "bias": None, "mask": mask}
    file, feeds = file_of("MultiHeadAttention", inputs, outputs, num_heads=heads)
    served = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    (wanted,) = served.run(None, feeds)
    packed = np.stack(parts if whole else parts[1:], axis=3)
    inputs |= {"q": packed, "k": None, "v": None} if whole else {"k": packed, "v": None}
    file, feeds = file_of("MultiHeadAttention", inputs, outputs, num_heads=heads)
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        np.testing.assert_allclose(session.run(feeds)["y"], wanted, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_fit_what_is_packed_are_refused() -> None:
    x = np.zeros((1, 2, 3, 2, 4), np.float32)
    file, feeds = file_of("MultiHeadAttention", {"q": x}, {"y": TensorProto.FLOAT}, num_heads=3)
    with pytest.raises(OnnxError, match="3 of 3 heads"):
        soapstone.from_onnx(file).graph_for(feeds)


@pytest.mark.parametrize("least", [-1e4, float(np.finfo(np.float32).min)])
def test_halves_are_masked_as_single_precision_is(least: float) -> None:
    drawn = Drawn(0)
    inputs: dict[str, Array | None] = {
        "x": drawn.reals(2, 5, 8).astype(np.float16),
        "W": drawn.reals(8, 24).astype(np.float16),
        "B": drawn.reals(24).astype(np.float16),
        "mask": np.array([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]], np.int32),
        "past": None,
        "bias": drawn.reals(1, 2, 5, 5).astype(np.float16),
    }
    attributes = {"num_heads": 2, "unidirectional": 1, "mask_filter_value": least}
    file, feeds = file_of("Attention", inputs, {"y": TensorProto.FLOAT16}, **attributes)
    wanted = theirs.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        found = session.run(feeds)["y"]
    assert found.dtype == wanted.dtype == np.float16
    np.testing.assert_allclose(found, wanted, rtol=4e-3, atol=4e-3)
