"""The time that ONNX Runtime takes for a group of operators, as inside a whole network.

The group is written as a model of its own, which ONNX Runtime optimises as it always does, and its
profiler tells the time of each operator that is left. Before every run the caches are swept, so
that weights are cold; then nodes of the same model make the group's inputs, so that those are warm
and, where wanted, in the blocked layout that ONNX Runtime gives values between spatial operators.
Conversions to and from that layout at the group's boundary are left out: a graph is charged for
those that it has (TASO, section 2.7: layouts are part of what is searched for).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from soapstone.deadline import Deadline
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.search.cost.cost import PricingError
from soapstone.search.cost.database import ROUNDS, robust
from soapstone.search.cost.ort_groups import Group
from soapstone.search.cost.ort_profile import CONTEXT, profile, witness, witness_feed

Export = Callable[[Graph, Mapping[str, Array]], bytes]
"""Writes a graph of inference with its weights as a serialised ONNX model."""

# Integers of operands, from and below. Zero is the safe index, and the one number that must not be
# divided by; nor must the difference of equal ones.
_INTEGERS = ((0, 1), (1, 2), (1, 100))
_CHAIN, _TINY_US = 256, 0.2  # operators on one number, and the time of such a kernel
_REORDERS = ("ReorderInput", "ReorderOutput")


@dataclass(frozen=True)
class Bench:
    """How ONNX Runtime is timed on groups of operators.

    Attributes:
        export: writes a group's graph as an ONNX model.
        threads: of ONNX Runtime.
        sweep_bytes: read before each run, so that weights are not in a near cache.
    """

    export: Export
    threads: int
    sweep_bytes: int


@dataclass(frozen=True)
class Reads:
    """Whether operators of a group read an input in the plain layout, in a blocked one, or both."""

    plain: bool
    blocked: bool


@dataclass(frozen=True)
class Measured:
    """What ONNX Runtime makes of a group.

    `reads` has an entry for each input; `blocked` says which outputs come in the blocked layout.
    """

    time_us: float
    launches: int
    nbytes: float
    reads: tuple[Reads, ...]
    blocked: tuple[bool, ...]


def measure(
    graph: Graph,
    group: Group,
    contents: Mapping[str, Array],
    blocked: Sequence[bool],
    bench: Bench,
    deadline: Deadline,
) -> Measured:
    """Return what a group costs when these inputs come in the blocked layout.

    `contents`: the values of constants on which fusions depend; other constants get random ones.

    Raises:
        PricingError: ONNX Runtime refuses the group with all integers that were tried; names it.
    """
    divided = any(node.operator in ("div", "mod") for node in group.nodes)
    for integers in sorted(_INTEGERS, key=lambda span: divided and span[0] == 0):
        made = _Scratch(graph, group, contents, blocked, bench.sweep_bytes, integers)
        model = bench.export(made.graph, made.weights)
        try:
            found = profile(model, made.feeds, bench.threads, deadline)
            break
        except Exception as error:  # what ONNX Runtime raises has no common base
            refused = error
    else:
        names = ", ".join(node.name for node in group.nodes)
        raise PricingError(f"operators {names}: ONNX Runtime refuses them: {refused}")
    seen = _Optimised(found.model, made, len(group.inputs), len(group.outputs))
    counted = [name for name in found.samples if name in seen.counted]
    nbytes = sum(found.nbytes[name] for name in counted)
    nbytes += sum(graph.tensors[name].nbytes for name in group.fixed)
    total = sum(found.us(name) for name in counted)
    return Measured(total, len(counted), nbytes, seen.reads, seen.blocked)


class _Scratch:
    """A graph that makes a group's inputs, warm and in their layout, and then runs the group."""

    def __init__(
        self,
        graph: Graph,
        group: Group,
        contents: Mapping[str, Array],
        blocked: Sequence[bool],
        sweep_bytes: int,
        integers: tuple[int, int] = (0, 1),
    ) -> None:
        self._random = np.random.default_rng(0)
        self._integers = integers
        self._builder = builder = GraphBuilder("group")
        self.weights: dict[str, Array] = {}
        self.feeds: dict[str, Array] = {}
        swept = self._swept(sweep_bytes)
        names: dict[str, str] = {}
        self.inputs: list[str] = []
        for position, (name, apart) in enumerate(zip(group.inputs, blocked)):
            names[name] = self._input(f"{CONTEXT}{position}", graph.tensors[name], apart, swept)
            self.inputs.append(names[name])
        for position, name in enumerate(group.fixed):
            spec = graph.tensors[name]
            names[name] = builder.input(f"w{position}", spec.shape, spec.dtype, Role.PARAMETER)
            self.weights[names[name]] = (
                contents[name] if name in contents else self._values(spec, 0.1)
            )
        for position, node in enumerate(group.nodes):
            outputs = builder.apply(
                node.operator,
                *(names[i] for i in node.inputs),
                name=f"node.{position}",
                **node.attributes,
            )
            names |= zip(node.outputs, outputs)
        self.outputs = [names[name] for name in group.outputs]
        # As outputs, the inputs cannot be fused into the group.
        context = [name for name in self.inputs if builder.maker(name) is not None]
        builder.output(*self.outputs, *dict.fromkeys(context), self._witness(swept))
        self.graph = builder.build()

    def _witness(self, swept: str) -> str:
        self.feeds |= witness_feed()
        return witness(self._builder, self.weights, swept)

    def _swept(self, nbytes: int) -> str:
        """Return a zero that is known only once the caches were swept."""
        count = max(16, nbytes // 8)  # read and written
        big = self._builder.input("sweep", (count,))
        self.feeds[big] = np.full(count, -0.0, np.float32)  # written: zeros would be one page
        swept = self._builder.apply("abs", big, name=f"{CONTEXT}sweep")[0]
        return self._builder.apply(
            "slice", swept, name=f"{CONTEXT}first", starts=(0,), stops=(1,), steps=(1,)
        )[0]

    def _input(self, name: str, spec: TensorSpec, blocked: bool, swept: str) -> str:
        """Return a value of a spec as another operator would just have made it."""
        builder = self._builder
        shape = (spec.shape[0], 1, *spec.shape[2:]) if blocked else spec.shape
        given = builder.input(f"{name}.given", shape, spec.dtype)
        self.feeds[given] = self._values(TensorSpec(shape, spec.dtype), 1.0)
        if spec.dtype != "float32" or spec.rank == 0:
            return given
        value = builder.apply("add", given, swept, name=name)[0]
        if blocked:
            wide = TensorSpec((spec.shape[1], 1, 1, 1))
            weight = builder.input(f"{name}.w", wide.shape, role=Role.PARAMETER)
            self.weights[weight] = self._values(wide, 1.0)
            value = builder.apply(
                "conv2d", value, weight, name=f"{name}.blocked", bias=False, padding=(0, 0, 0, 0)
            )[0]
        return value

    def _values(self, spec: TensorSpec, scale: float) -> Array:
        if not spec.is_float:
            return self._random.integers(*self._integers, spec.shape).astype(spec.dtype)
        values = self._random.random(spec.shape, np.float32) * scale + scale / 10
        return np.asarray(values, spec.dtype)


class _Optimised:
    """Which nodes of an optimised model are the group's, and the layouts at its boundary."""

    def __init__(self, model: onnx.ModelProto, made: _Scratch, inputs: int, outputs: int) -> None:
        nodes = list(model.graph.node)
        maker = {name: node for node in nodes for name in node.output}
        readers: dict[str, list[Any]] = {}
        for node in nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node)

        def of_context(node: Any) -> bool:
            if node.op_type in _REORDERS:
                source = maker.get(node.input[0])
                return source is None or of_context(source)
            return bool(node.name.startswith(CONTEXT))

        def last(node: Any) -> bool:
            out = node.output[0]
            return node.op_type == _REORDERS[1] and out in made.outputs and out not in readers

        self.counted = {n.name for n in nodes if not of_context(n) and not last(n)}

        def reads(name: str) -> Reads:
            """Follow an input, as it is and converted, to operators of the group."""
            source = maker.get(name)
            known = {name: False}
            if source is not None and source.op_type == _REORDERS[1]:
                known[source.input[0]] = True
            elif source is not None and source.domain.endswith("nchwc"):
                known[name] = True
            for node in nodes:
                if node.op_type in _REORDERS and node.input[0] in known:
                    known[node.output[0]] = node.op_type == _REORDERS[0]
            used = {
                apart
                for value, apart in known.items()
                for node in readers.get(value, ())
                if node.op_type not in _REORDERS and not of_context(node)
            }
            return Reads(False in used, True in used)

        self.reads = tuple(reads(name) for name in made.inputs[:inputs])
        self.blocked = tuple(name in maker and last(maker[name]) for name in made.outputs[:outputs])


def conversion_us(spec: TensorSpec, inward: bool, bench: Bench, deadline: Deadline) -> float:
    """Return the time from the plain layout to the blocked one, or back, in microseconds."""
    builder = GraphBuilder("conversion")
    x = builder.input("x", spec.shape)
    weight = builder.input("w", (64, spec.shape[1], 1, 1), role=Role.PARAMETER)
    builder.output(*builder.apply("conv2d", x, weight, bias=False))
    graph = builder.build()
    group = Group(list(graph.nodes), (x,), (weight,), graph.outputs)
    made = _Scratch(graph, group, {}, (not inward,), bench.sweep_bytes)
    model = bench.export(made.graph, made.weights)
    found = profile(model, made.feeds, bench.threads, deadline)
    value = made.inputs[0]
    names = {
        node.name
        for node in found.model.graph.node
        if node.op_type == _REORDERS[0 if inward else 1]
        and value == (node.input[0] if inward else node.output[0])
    }
    return sum(found.us(name) for name in found.samples if name in names)


def node_us(bench: Bench) -> float:
    """Return what ONNX Runtime needs for each operator beside its kernel, in microseconds."""
    builder = GraphBuilder("chain")
    value = builder.input("x", (1,))
    for position in range(_CHAIN):
        value = builder.apply("neg" if position % 2 else "abs", value)[0]
    builder.output(value)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = bench.threads
    model = bench.export(builder.build(), {})
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {"x": np.ones(1, np.float32)}
    samples = []
    for _ in range(5 * ROUNDS):
        began = time.perf_counter()
        session.run(None, feeds)
        samples.append((time.perf_counter() - began) * 1e6)
    return max(0.0, robust(samples) / _CHAIN - _TINY_US)
