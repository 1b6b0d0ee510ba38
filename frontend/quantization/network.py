"""An ONNX model as quantisation sees it: who makes and reads values, constants, folded norms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.file.read import read
from soapstone.frontend.onnx.model import OnnxModel
from soapstone.frontend.onnx.trained import written
from soapstone.frontend.onnx.values import unused
from soapstone.ir.tensor import Array

OPSET = 13  # the first that has a scale a channel


class Network:
    """The nodes of a model's graph by what they make and read, and the constants among values.

    Args:
        model: a path, the bytes of a file, what was read of one, or a message, which is changed.

    Raises:
        OnnxError: the file is no ONNX model, or one that no converter makes one of opset 13 of.
    """

    def __init__(self, model: str | Path | bytes | onnx.ModelProto | OnnxModel) -> None:
        self.model = _current(_read(model))
        self.graph = self.model.graph
        self.constants: dict[str, Array] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at the graph again, which was changed."""
        graph = self.graph
        self.nodes: list[NodeProto] = list(graph.node)
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in graph.output}
        self.names = {*self.maker, *(value.name for value in graph.input)}
        self.names.update(value.name for value in graph.initializer)
        for tensor in graph.initializer:
            if tensor.name not in self.constants:
                self.constants[tensor.name] = numpy_helper.to_array(tensor)
        for node in self.nodes:
            if node.op_type == "Constant" and node.output[0] not in self.constants:
                value = next((a.t for a in node.attribute if a.name == "value"), None)
                if value is not None:
                    self.constants[node.output[0]] = numpy_helper.to_array(value)

    def unique(self, base: str) -> str:
        """Return a name that no value has, and that is taken from now on."""
        return unused(base, self.names)

    def hold(self, base: str, array: Array) -> str:
        """Add a constant and return its name."""
        name = self.unique(base)
        self.graph.initializer.append(numpy_helper.from_array(np.array(array), name))
        self.constants[name] = array
        return name

    def fold_norms(self) -> None:
        """Take batch norms into the convolutions before them, as inference does."""
        gone: list[NodeProto] = []
        for node in self.nodes:
            if node.op_type != "BatchNormalization" or len([o for o in node.output if o]) > 1:
                continue
            conv = self.maker.get(node.input[0])
            fixed = [self.constants.get(name) for name in node.input[1:]]
            if (
                conv is None
                or conv.op_type != "Conv"
                or node.input[0] in self.outputs
                or len(self.readers[node.input[0]]) > 1
                or any(each is None for each in fixed)
                or any(name and name not in self.constants for name in conv.input[1:])
            ):
                continue
            gamma, beta, mean, var = (np.asarray(each) for each in fixed)
            weights = self.constants[conv.input[1]]
            bias = self.constants[conv.input[2]] if len(conv.input) > 2 else np.zeros_like(mean)
            factor = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
            column = factor.reshape(-1, *(1,) * (weights.ndim - 1))
            held = [
                self.hold(f"{conv.input[1]}.folded", (weights * column).astype(weights.dtype)),
                self.hold(
                    f"{node.output[0]}.bias", (beta + (bias - mean) * factor).astype(beta.dtype)
                ),
            ]
            del conv.input[1:]
            conv.input.extend(held)
            conv.output[0] = node.output[0]
            gone.append(node)
        for node in gone:
            self.graph.node.remove(node)
        if gone:
            self.refresh()

    def drop_unread(self) -> None:
        """Remove constants that nothing reads."""
        self.refresh()
        read = {*self.readers, *self.outputs, *_inside(self.graph)}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in read]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)


def attribute(node: NodeProto, name: str, default: float) -> float:
    """Return a number among a node's attributes."""
    found = next((each for each in node.attribute if each.name == name), None)
    return default if found is None else float(onnx.helper.get_attribute_value(found))


def _inside(graph: onnx.GraphProto) -> set[str]:
    """Return what the subgraphs of a graph's nodes read."""
    found: set[str] = set()
    for node in graph.node:
        for each in node.attribute:
            for part in (each.g, *each.graphs):
                found.update(name for inner in part.node for name in inner.input)
                found |= _inside(part)
    return found


def _read(model: str | Path | bytes | onnx.ModelProto | OnnxModel) -> onnx.ModelProto:
    if isinstance(model, OnnxModel):
        model = written(model, (), None, None)[0].tobytes()
    read(model)  # whose errors name the file, and what of it is wrong
    if isinstance(model, onnx.ModelProto):
        return model
    return onnx.load(str(model)) if isinstance(model, str | Path) else onnx.load_from_string(model)


def _current(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with operators of opset 13 or later."""
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if version >= OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, OPSET)
    except Exception as error:  # of the converter, whichever
        raise OnnxError(
            f"model: opset {version} found, {OPSET} or later needed, and it was not converted:"
            f" {error}"
        ) from None
