"""A Llama-like decoder as an ONNX file, of random weights, as the exporters of torch write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (by whose names NumPy then knows types)
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from soapstone import Model, Tensor

_ENDS = ("past_key_values", "present")
LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder; 125 million parameters by default.

    positions: whether it takes `position_ids`; without it, places follow from how many keys are in
    the cache, so that a cache with gaps would be wrong. bits: of weights, in blocks of `block`; 0:
    they are float32. fused: whether attention and norms are operators of com.microsoft. stored: the
    type that matrices are kept in, and cast from.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 4
    inner: int = 2048
    words: int = 32000
    positions: bool = True
    bits: int = 0
    block: int = 32
    fused: bool = False
    stored: str = ""
    seed: int = 0

    def model(self) -> onnx.ModelProto:
        """Return the model: ids, mask and cache in, logits and cache out."""
        return _Writer(self).model()

    def network(self, length: int, file: onnx.ModelProto) -> Model:
        """Return the model made of layers, for texts of that length, with the weights of a file."""
        model, head = Model("decoder"), self.width // self.heads
        angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, head, 2) / head))
        cosine, sine = (
            model.constant(name, np.float32(np.tile(turn(angles), 2)[:, None]))
            for name, turn in (("cosines", np.cos), ("sines", np.sin))
        )

        def split(x: Tensor, name: str, heads: int) -> Tensor:
            y = model.dense(x, heads * head, bias=False, name=name)
            return model.reshape(y, (-1, length, heads, head))

        def turned(x: Tensor) -> Tensor:
            first = model.slice(x, axis=3, start=0, stop=head // 2)
            second = model.slice(x, axis=3, start=head // 2, stop=head)
            return x * cosine + model.concat([second * -1.0, first], axis=3) * sine

        def repeated(x: Tensor) -> Tensor:
            one = model.reshape(x, (-1, length, self.kv_heads, 1, head))
            each = model.concat([one] * (self.heads // self.kv_heads), axis=3)
            return model.reshape(each, (-1, length, self.heads, head))

        x = model.input("ids", (1, length), "int32")
        x = model.embedding(x, self.words, self.width, name="words")
        for number in range(self.layers):
            name = f"layers.{number}"
            h = model.rms_norm(x, name=f"{name}.norm")
            q = turned(split(h, f"{name}.q", self.heads))
            k = repeated(turned(split(h, f"{name}.k", self.kv_heads)))
            v = repeated(split(h, f"{name}.v", self.kv_heads))
            y = model.scaled_dot_product_attention(q, k, v, causal=True)
            y = model.reshape(y, (-1, length, self.width))
            x = x + model.dense(y, self.width, bias=False, name=f"{name}.o")
            h = model.rms_norm(x, name=f"{name}.norm2")
            gate = model.dense(h, self.inner, bias=False, name=f"{name}.gate")
            up = model.dense(h, self.inner, bias=False, name=f"{name}.up")
            y = model.silu(gate) * up
            x = x + model.dense(y, self.width, bias=False, name=f"{name}.down")
        x = model.rms_norm(x, name="last.norm")
        model.output(model.dense(x, self.words, bias=False, name="head"))
        known = {each.name: numpy_helper.to_array(each) for each in file.graph.initializer}
        own = {name: known[name.rpartition(".")[0]] for name in model.weights()}
        model.set_weights(own)
        return model


SMALL = Decoder(layers=2, width=32, heads=4, kv_heads=2, inner=48, words=61)


class _Writer:
    def __init__(self, sizes: Decoder) -> None:
        self.sizes = sizes
        self.random = np.random.default_rng(sizes.seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.known: dict[tuple[Any, ...], str] = {}

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def ints(self, *values: int, scalar: bool = False) -> str:
        key = (values, scalar)
        if key not in self.known:
            self.known[key] = f"ints_{len(self.known)}"
            array = np.array(values[0] if scalar else values, np.int64)
            self.weights.append(numpy_helper.from_array(array, self.known[key]))
        return self.known[key]

    def number(self, value: float) -> str:
        if (value,) not in self.known:
            self.known[value,] = f"number_{len(self.known)}"
            self.keep(self.known[value,], np.array(value, np.float32))
        return self.known[value,]

    def keep(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        scale = 1.5 / np.sqrt(shape[0])
        return self.keep(name, self.random.standard_normal(shape, np.float32) * scale)

    def times(self, x: str, name: str, depth: int, columns: int, out: str = "") -> str:
        """Return x times a weight, which is kept in few bits where the decoder's are."""
        bits, block = self.sizes.bits, self.sizes.block
        scale = 1.5 / np.sqrt(depth)
        if not bits:
            w = self.weight(name, depth, columns)
            if self.sizes.stored:
                kept = numpy_helper.to_array(self.weights.pop()).astype(self.sizes.stored)
                self.weights.append(numpy_helper.from_array(kept, w))
                w = self.op("Cast", w, to=TensorProto.FLOAT)
            return self.op("MatMul", x, w, out=out)
        w = self.random.integers(0, 256, (columns, depth // block, block * bits // 8), np.uint8)
        self.weights.append(numpy_helper.from_array(w, name))
        spread = 2**bits / np.sqrt(12)  # of numbers that are drawn evenly
        scales = self.keep(f"{name}.scales", np.full(columns * depth // block, scale / spread))
        options = {"K": depth, "N": columns, "bits": bits, "block_size": block}
        own = "com.microsoft"
        return self.op("MatMulNBits", x, name, scales, out=out, domain=own, **options)

    def norm(self, x: str, name: str) -> str:
        if self.sizes.fused:
            scale = self.keep(name, 1 + 0.1 * self.random.standard_normal(self.sizes.width))
            return self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-5)
        squares = self.op("ReduceMean", self.op("Pow", x, self.number(2.0)), self.ints(-1))
        root = self.op("Sqrt", self.op("Add", squares, self.number(1e-5)))
        scale = self.keep(name, 1 + 0.1 * self.random.standard_normal(self.sizes.width))
        return self.op("Mul", scale, self.op("Mul", x, self.op("Reciprocal", root)))

    def model(self) -> onnx.ModelProto:
        sizes, head = self.sizes, self.sizes.width // self.sizes.heads
        past = self.op("Gather", self.op("Shape", "past_key_values.0.key"), self.two, axis=0)
        new = self.op("Gather", self.op("Shape", "input_ids"), self.ints(1, scalar=True), axis=0)
        total = self.op("Add", past, new)
        one, zero = self.ints(1, scalar=True), self.ints(0, scalar=True)
        places = self.op("Range", past, total, one)
        keys = self.op("Range", zero, total, one)
        later = self.op("Greater", keys, self.op("Unsqueeze", places, self.ints(1)))
        hidden = self.op("Where", later, self.number(LEAST), self.number(0.0))
        seen = self.op("Cast", self.op("Unsqueeze", "attention_mask", self.ints(1, 2)), to=1)
        absent = self.op("Equal", self.op("Add", hidden, seen), self.number(0.0))
        self.mask = self.op("Where", absent, self.number(LEAST), hidden)
        if not sizes.positions:
            where = self.op("Unsqueeze", places, self.ints(0, 1))
        else:
            where = self.op("Unsqueeze", "position_ids", self.ints(1))
        self.rates = 10000.0 ** (-np.arange(0, head, 2) / head)
        rates = self.keep("rates", self.rates.reshape(1, -1, 1))
        turns = self.op("Transpose", self.op("MatMul", rates, self.float(where)), perm=[0, 2, 1])
        angle = self.op("Concat", turns, turns, axis=-1)
        self.turn = [
            self.op("Unsqueeze", self.op(kind, angle), self.ints(1)) for kind in ("Cos", "Sin")
        ]
        x = self.op("Gather", self.weight("words", sizes.words, sizes.width), "input_ids", axis=0)
        for layer in range(sizes.layers):
            x = self.layer(x, layer)
        x = self.norm(x, "last.norm")
        self.times(x, "head", sizes.width, sizes.words, out="logits")
        return self.built(head)

    @property
    def two(self) -> str:
        return self.ints(2, scalar=True)

    def float(self, x: str) -> str:
        return self.op("Cast", x, to=1)

    def split(self, x: str, heads: int) -> str:
        """Return x (batch, sequence, …) as (batch, heads, sequence, …)."""
        head = self.sizes.width // self.sizes.heads
        apart = self.op("Reshape", x, self.ints(0, 0, heads, head))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3])

    def turned(self, x: str) -> str:
        """Return x with each pair of elements turned by its place."""
        half = self.sizes.width // self.sizes.heads // 2
        far = self.ints(np.iinfo(np.int64).max)
        first = self.op("Slice", x, self.ints(0), self.ints(half), self.ints(3))
        second = self.op("Slice", x, self.ints(half), far, self.ints(3))
        swapped = self.op("Concat", self.op("Neg", second), first, axis=-1)
        cosine, sine = self.turn
        return self.op("Add", self.op("Mul", x, cosine), self.op("Mul", swapped, sine))

    def repeated(self, x: str) -> str:
        """Return x with each of its heads as often as queries have heads for it."""
        sizes = self.sizes
        times = sizes.heads // sizes.kv_heads
        if times == 1:
            return x
        head = sizes.width // sizes.heads
        batch, length = (
            self.op("Slice", self.op("Shape", x), self.ints(a), self.ints(a + 1)) for a in (0, 2)
        )
        kv, each = self.ints(sizes.kv_heads), self.ints(head)
        wide = self.op("Concat", batch, kv, self.ints(times), length, each, axis=0)
        spread = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), wide)
        joined = self.op("Concat", batch, self.ints(sizes.heads), length, each, axis=0)
        return self.op("Reshape", spread, joined)

    def layer(self, x: str, number: int) -> str:
        sizes, name = self.sizes, f"layers.{number}"
        width, head = sizes.width, sizes.width // sizes.heads
        h = self.norm(x, f"{name}.norm")
        parts = {}
        for part, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            parts[part] = self.times(h, f"{name}.{part}", width, heads * head)
        flat = self.fused_attention(parts, number) if sizes.fused else self.attention(parts, number)
        x = self.op("Add", x, self.times(flat, f"{name}.o", width, width))
        h = self.norm(x, f"{name}.norm2")
        gate = self.times(h, f"{name}.gate", width, sizes.inner)
        up = self.times(h, f"{name}.up", width, sizes.inner)
        inner = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        return self.op("Add", x, self.times(inner, f"{name}.down", sizes.inner, width))

    def attention(self, parts: dict[str, str], number: int) -> str:
        """Return attention as ONNX's own operators."""
        sizes = self.sizes
        width, head = sizes.width, sizes.width // sizes.heads
        kinds = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
        parts = {part: self.split(parts[part], heads) for part, heads in kinds.items()}
        q, k, v = self.turned(parts["q"]), self.turned(parts["k"]), parts["v"]
        held = []
        for kind, new in (("key", k), ("value", v)):
            old, to = f"past_key_values.{number}.{kind}", f"present.{number}.{kind}"
            held.append(self.repeated(self.op("Concat", old, new, out=to, axis=-2)))
        across = self.op("Transpose", held[0], perm=[0, 1, 3, 2])
        scores = self.op("Mul", self.op("MatMul", q, across), self.number(head**-0.5))
        weights = self.op("Softmax", self.op("Add", scores, self.mask), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, held[1]), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.ints(0, 0, width))

    def fused_attention(self, parts: dict[str, str], number: int) -> str:
        """Return attention as one operator, which writes keys and values to rows itself."""
        sizes = self.sizes
        if ("last",) not in self.known:
            used = self.op("ReduceSum", "attention_mask", self.ints(1), keepdims=0)
            last = self.op("Sub", used, self.ints(1, scalar=True))
            self.known["last",] = self.op("Cast", last, to=6)
            extent = self.op("Gather", self.op("Shape", "attention_mask"), self.ints(1), axis=0)
            self.known["total",] = self.op("Cast", self.op("Squeeze", extent), to=6)
            angles = np.outer(np.arange(4096), self.rates.reshape(-1))
            for kind, table in (("cosines", np.cos(angles)), ("sines", np.sin(angles))):
                self.known[kind,] = self.keep(kind, table)
        names = [f"{end}.{number}.{k}" for end in _ENDS for k in ("key", "value")]
        known = (self.known[name,] for name in ("last", "total", "cosines", "sines"))
        inputs = [parts["q"], parts["k"], parts["v"], *names[:2], *known]
        out = f"attention.{number}"
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [out, *names[2:]],
                domain="com.microsoft",
                num_heads=sizes.heads,
                kv_num_heads=sizes.kv_heads,
                do_rotary=1,
            )
        )
        return out

    def built(self, head: int) -> onnx.ModelProto:
        sizes, value = self.sizes, helper.make_tensor_value_info
        ids = ["batch_size", "sequence_length"]
        total = "past_sequence_length + sequence_length"
        inputs = [
            value("input_ids", TensorProto.INT64, ids),
            value("attention_mask", TensorProto.INT64, ["batch_size", total]),
        ]
        if sizes.positions:
            inputs.append(value("position_ids", TensorProto.INT64, ids))
        outputs = [value("logits", TensorProto.FLOAT, [*ids, sizes.words])]
        for number in range(sizes.layers):
            for kind in ("key", "value"):
                for prefix, extent, into in (
                    ("past_key_values", "past_sequence_length", inputs),
                    ("present", total, outputs),
                ):
                    shape = ["batch_size", sizes.kv_heads, extent, head]
                    into.append(value(f"{prefix}.{number}.{kind}", TensorProto.FLOAT, shape))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)
