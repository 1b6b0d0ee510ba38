"""What operators that move, index and scan elements are in ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.frontend.onnx.declared import write_declared
from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.export.rules import Given, export
from soapstone.frontend.onnx.file.tensors import as_tensor
from soapstone.ir.ops.products.attention_lower import shared

_LEAST = -(1 << 62)


@export("reshape")
def _reshape(g: Given) -> None:
    g.last("Reshape", g.inputs[0], g.ints(g["shape"]), allowzero=int(0 in g["shape"]))


@export("transpose")
def _transpose(g: Given) -> None:
    if not g["permutation"]:
        g.last("Identity", g.inputs[0])
        return
    write_declared(g)


@export("broadcast")
def _broadcast(g: Given) -> None:
    if g.specs[0].shape == tuple(g["shape"]):
        g.last("Identity", g.inputs[0])
        return
    write_declared(g)


@export("split")
def _split(g: Given) -> None:
    g("Split", g.inputs[0], g.ints(g["sizes"]), to=g.outputs, axis=g["axis"])


@export("full")
def _full(g: Given) -> None:
    value = as_tensor(np.full(1, g["value"], g["dtype"]))
    g.last("ConstantOfShape", g.ints(g["shape"]), value=value)


@export("slice")
def _slice(g: Given) -> None:
    # A stop of -1 is before the first element here; in ONNX it would count from the end.
    stops = [stop if stop >= 0 else _LEAST for stop in g["stops"]]
    lists = (g["starts"], stops, range(g.specs[0].rank), g["steps"])
    if not g.specs[0].rank:
        g.last("Identity", g.inputs[0])
        return
    g.last("Slice", g.inputs[0], *(g.ints(values) for values in lists))


@export("reverse")
def _reverse(g: Given) -> None:
    axes = g["axes"]
    if not axes:
        g.last("Identity", g.inputs[0])
        return
    lists = ((-1,) * len(axes), (_LEAST,) * len(axes), axes, (-1,) * len(axes))
    g.last("Slice", g.inputs[0], *(g.ints(values) for values in lists))


@export("pad")
def _pad(g: Given) -> None:
    if any(g["interior"]):
        raise UnsupportedError(f"{g.node.label}: padding between elements has no counterpart")
    pads, value = g.ints((*g["low"], *g["high"])), g.number(g["value"])
    g.last("Pad", g.inputs[0], pads, *([value] if g["mode"] == "constant" else []), mode=g["mode"])


@export("space_to_depth")
def _space_to_depth(g: Given) -> None:
    if g["mode"] != "DCR":
        raise UnsupportedError(
            f"{g.node.label}: mode {g['mode']} has no counterpart before opset 28"
        )
    g.last("SpaceToDepth", g.inputs[0], blocksize=g["blocksize"])


@export("resize")
def _resize(g: Given) -> None:
    same = ("mode", "coordinate_transformation_mode", "nearest_mode")
    attributes = {name: g[name] for name in same}
    attributes |= {name: int(g[name]) for name in ("exclude_outside", "antialias")}
    for name in ("cubic_coeff_a", "extrapolation_value"):
        attributes[name] = g[name]
    x, rank = g.inputs[0], g.specs[0].rank
    region = ""
    if g["roi"] is not None:
        region = g.writer.constant(np.asarray(g["roi"], np.float32))
    if g["scales"] is None:
        g.last("Resize", x, region, "", g.ints(g["sizes"]), **attributes)
        return
    scales = np.asarray(g["scales"], np.float32)
    starts, ends = (g["roi"] or (0.0,) * rank)[:rank], (g["roi"] or (1.0,) * (2 * rank))[-rank:]
    made = [
        int(np.floor(extent * (hi - lo) * float(scale)))
        for extent, scale, lo, hi in zip(g.specs[0].shape, scales, starts, ends)
    ]
    if tuple(made) != tuple(g["sizes"]):
        raise UnsupportedError(f"{g.node.label}: sizes {g['sizes']} do not follow from the scales")
    g.last("Resize", x, region, g.writer.constant(scales), **attributes)


# By index


def _ids(g: Given, position: int) -> str:
    """Return indices in a type that ONNX allows."""
    if g.specs[position].dtype in ("int32", "int64"):
        return g.inputs[position]
    return g("Cast", g.inputs[position], to_=7)


@export("embedding_bag")
def _embedding_bag(g: Given) -> None:
    kinds = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax"}
    if not g.specs[0].shape[1]:  # bags of nothing are zeros, whatever reduces them
        zeros = as_tensor(np.zeros(1, g.made[0].dtype))
        g.last("ConstantOfShape", g.ints(g.made[0].shape), value=zeros)
        return
    rows = g("Gather", g.inputs[1], _ids(g, 0), axis=0)
    g.last(kinds[g["reduction"]], rows, g.ints((1,)), keepdims=0)


@export("top_k")
def _top_k(g: Given) -> None:
    largest = int(g["largest"])  # sorted anyhow: the order would be each library's own
    g("TopK", g.inputs[0], g.ints((g["k"],)), to=g.outputs, axis=g["axis"], largest=largest)


@export("one_hot")
def _one_hot(g: Given) -> None:
    values = g.writer.constant(np.asarray([0, 1], g["dtype"]))
    depth = g.writer.constant(np.asarray(g["classes"], np.int64))
    if g["base"] or g["total"] is not None:
        raise UnsupportedError(f"{g.node.label}: a tile of classes has no counterpart")
    if g.specs[0].rank:
        g.last("OneHot", g.inputs[0], depth, values, axis=-1)
        return
    row = g("OneHot", g("Unsqueeze", g.inputs[0], g.ints((0,))), depth, values, axis=-1)
    g.last("Squeeze", row, g.ints((0,)))


# Recurrent layers


@export("lstm", "gru", "rnn")
def _recurrent(g: Given) -> None:
    kind = g.node.operator.upper()
    states = 2 if kind == "LSTM" else 1
    g.unread(1 + states)
    x, w, r, *rest = g.inputs
    hidden = g.specs[2].shape[0]
    order = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}[kind]
    bias = rest[0]
    other = (
        rest[1]
        if kind == "GRU"
        else g.writer.constant(np.zeros(g.specs[3].shape, g.specs[3].dtype))
    )
    first = rest[2:] if kind == "GRU" else rest[1:]
    lengths = first.pop() if len(first) > states else ""

    def rows(name: str, columns: bool) -> str:
        """Return gates in ONNX's order as the rows of a matrix, or along a vector."""
        if columns:
            name = g("Transpose", name, perm=(1, 0))
        if len(order) == 1:
            return name
        cut = [
            g("Slice", name, g.ints((i * hidden,)), g.ints(((i + 1) * hidden,)), g.ints((0,)))
            for i in order
        ]
        return g("Concat", *cut, axis=0)

    def one(name: str) -> str:
        return g("Unsqueeze", name, g.ints((0,)))

    biases = g("Concat", rows(bias, False), rows(other, False), axis=0)
    attributes: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": "reverse" if g["reverse"] else "forward",
    }
    if kind == "GRU":
        attributes["linear_before_reset"] = int(g["linear_before_reset"])
    if kind == "RNN":
        attributes["activations"] = [g["activation"].capitalize()]
    inputs = (x, one(rows(w, True)), one(rows(r, True)), one(biases), lengths, *map(one, first))
    made = [g.writer.new(f"{g.node.name}.all{i}") for i in range(1 + states)]
    g(kind, *inputs, to=made, **attributes)
    g("Squeeze", made[0], g.ints((1,)), to=g.outputs[0])
    for name, output in zip(made[1:], g.outputs[1:]):
        g("Squeeze", name, g.ints((0,)), to=output)


@export("attention")
def _attention(g: Given) -> None:
    """Write attention as its products: queries, keys and values are (b, t, heads, d)."""
    g.unread(1)
    q, k, v, *mask = g.inputs
    scale = g["scale"]
    if scale is None:
        scale = g.specs[0].shape[-1] ** -0.5
    heads = (0, 2, 1, 3)
    queries = g("Mul", g("Transpose", q, perm=heads), g.number(scale))
    group = shared(g.specs[0].shape[2], g.specs[1].shape[2])
    keys = _repeated(g, g("Transpose", k, perm=(0, 2, 3, 1)), group, g.specs[0].shape[3])
    scores = g("MatMul", queries, keys)
    if g["causal"]:
        tq, tk = g.specs[0].shape[1], g.specs[1].shape[1]
        later = np.triu(np.full((tq, tk), -np.inf, g.specs[0].dtype), 1)
        scores = g("Add", scores, g.writer.constant(later))
    if mask:
        scores = g("Add", scores, mask[0])
    weights = g("Softmax", scores, axis=-1)
    if mask and g["empty"] == "zeros":
        weights = g("Where", g("IsNaN", weights), g.number(0), weights)
    made = g(
        "MatMul", weights, _repeated(g, g("Transpose", v, perm=heads), group, g.specs[2].shape[1])
    )
    g("Transpose", made, to=g.outputs[0], perm=heads)


def _repeated(g: Given, x: str, group: int, rows: int) -> str:
    """Write x (b, heads, rows, …) with each head so many times."""
    if group == 1:
        return x
    wide = g("Expand", g("Unsqueeze", x, g.ints((2,))), g.ints((1, 1, group, 1, 1)))
    return g("Reshape", wide, g.ints((0, g.specs[0].shape[2], rows, -1)))
