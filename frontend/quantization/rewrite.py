"""The model with values that are rounded to bytes and back, and weights that are bytes.

`QuantizeLinear` and `DequantizeLinear` say what becomes bytes; the operators between stay as they
were, so any runtime runs the file, and one that knows bytes runs it in those.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, helper

from soapstone.frontend.quantization.choice import Choice
from soapstone.frontend.quantization.network import Network
from soapstone.frontend.quantization.ranges import Range, scale_of
from soapstone.ir.tensor import Array


def rewrite(
    network: Network, choice: Choice, ranges: Mapping[str, Range], dtype: str, per_channel: bool
) -> None:
    """Change a network's model into its quantised one.

    Args:
        ranges: of the values that are chosen. dtype: of their bytes.
        per_channel: whether each channel of weights has a scale of its own.
    """
    shared: dict[str, Range] = {}
    for value in choice.values:
        root = choice.scale_of(value)
        low, high = shared.get(root, (0.0, 0.0))
        least, most = ranges[value]
        shared[root] = min(low, least), max(high, most)
    numbers: dict[str, tuple[str, str]] = {}
    scales: dict[str, np.float32] = {}
    for root, limits in shared.items():
        scale, zero = scale_of(limits, dtype)
        scales[root] = scale
        names = network.hold(f"{root}.scale", np.asarray(scale))
        numbers[root] = names, network.hold(f"{root}.zero", zero)
    read: dict[str, str] = {}  # values by what stands for them once they were bytes
    after: dict[str, list[NodeProto]] = {}
    for value in choice.values:
        scale_name, zero_name = numbers[choice.scale_of(value)]
        bytes_, real = network.unique(f"{value}.bytes"), network.unique(f"{value}.rounded")
        read[value] = real
        after[value] = [
            helper.make_node("QuantizeLinear", [value, scale_name, zero_name], [bytes_]),
            helper.make_node("DequantizeLinear", [bytes_, scale_name, zero_name], [real]),
        ]
    weights: list[NodeProto] = []
    known: dict[tuple[str, int], tuple[str, Array]] = {}
    for node, axis in choice.products:
        key = node.input[1], axis
        if key not in known:
            known[key] = _weights(network, *key, per_channel, weights)
        name, own = known[key]
        if len(node.input) > 2 and node.input[2]:
            step = scales[choice.scale_of(node.input[0])] * own
            channels = network.constants[node.input[1]].shape[axis]
            if network.constants[node.input[2]].size in (1, channels):
                node.input[2] = _bias(network, node.input[2], step.astype(np.float32), weights)
        node.input[1] = name
    nodes = [*weights]
    for each in network.graph.input:
        nodes += after.get(each.name, [])
    for node in network.nodes:
        if node.output and node.output[0] in choice.readers:
            inputs = [read.get(name, name) for name in node.input]
            del node.input[:]
            node.input.extend(inputs)
        nodes.append(node)
        for name in node.output:
            nodes += after.get(name, [])
    del network.graph.node[:]
    network.graph.node.extend(nodes)
    network.drop_unread()


def _weights(
    network: Network, name: str, axis: int, per_channel: bool, nodes: list[NodeProto]
) -> tuple[str, Array]:
    """Return weights that were signed bytes, and their scales."""
    array = network.constants[name]
    others = tuple(each for each in range(array.ndim) if each != axis)
    reach = np.abs(array).max(axis=others if per_channel else None, keepdims=True)
    scale = np.where(reach > 0, reach / np.float32(127), np.float32(1)).astype(np.float32)
    held = np.clip(np.rint(array / scale), -127, 127).astype(np.int8)
    own = scale.reshape(-1) if per_channel else scale.reshape(())
    inputs = [
        network.hold(f"{name}.bytes", held),
        network.hold(f"{name}.scale", own),
        network.hold(f"{name}.zero", np.zeros(own.shape, np.int8)),
    ]
    at = {"axis": axis} if per_channel else {}
    real = network.unique(f"{name}.rounded")
    nodes.append(helper.make_node("DequantizeLinear", inputs, [real], **at))
    return real, own


def _bias(network: Network, name: str, step: Array, nodes: list[NodeProto]) -> str:
    """Return a bias, of each channel, that was whole numbers of the step of sums of products."""
    bias = network.constants[name].reshape(-1)
    limits = np.iinfo(np.int32)
    steps = np.rint(bias.astype(np.float64) / step)
    held = np.clip(steps, limits.min, limits.max).astype(np.int32)
    inputs = [network.hold(f"{name}.steps", held), network.hold(f"{name}.scale", step)]
    real = network.unique(f"{name}.rounded")
    at = {"axis": 0} if step.ndim else {}
    nodes.append(helper.make_node("DequantizeLinear", inputs, [real], **at))
    return real
