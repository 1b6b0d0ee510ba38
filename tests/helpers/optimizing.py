"""A cost model, graphs and rules for tests of the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.optimization.check import agree, check_outputs, draws, inputs_of, taking
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Arrays, Role
from soapstone.search.cost import Cost, CostModel
from soapstone.search.cost.cost import NO_LAYOUTS
from soapstone.search.optimize import normal
from soapstone.search.optimize.pool import Pool
from soapstone.search.rules.rulebook import Rulebook

Values = tuple[int, ...]
MERGED = (
    "conv2d[1,s,p,c](x, y); conv2d[1,s,p,c](x, z) ->"
    " split0[-3](conv2d[1,s,p,c](x, concat[-4](y, z)));"
    " split1[-3](conv2d[1,s,p,c](x, concat[-4](y, z)))"
)
GROUPED = (
    "concat[-3](conv2d[g,s,p,c](x, y), conv2d[g1,s,p,c](z, w)) ->"
    " conv2d[g+g1,s,p,c](concat[-3](x, z), concat[-4](y, w))"
)


def verified(
    graph: Graph, weights: Mapping[str, Array], new: Graph, new_weights: Mapping[str, Array]
) -> float:
    """Return the largest difference of two graphs' outputs on random inputs, compared as a whole.

    Raises:
        GraphError: names or shapes of outputs differ, or values by more than rounding.
    """
    check_outputs(graph, new)
    with (
        InferenceSession(graph, weights, tune="now") as first,
        InferenceSession(new, new_weights, tune="now") as second,
    ):
        return agree(graph.outputs, draws(graph), taking(first.run), taking(second.run))


VIEWS = ("concat", "split", "broadcast", "reshape")


class Launches(CostModel):
    """Prices without measuring: so many microseconds an operator and one a megaflop.

    What constants alone determine costs nothing, nor do the operators of `free`.
    """

    target = "launches"

    def __init__(self, us: float = 1.0, free: tuple[str, ...] = VIEWS) -> None:
        self.us, self.free = us, free

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        known = set(constants)
        count, flops = 0, 0.0
        for node in graph.nodes:
            if known.issuperset(node.inputs):
                known.update(node.outputs)
            elif node.operator not in self.free:
                count += 1
                flops += graph.flops(node)
        return Cost(self.us * count + flops / 1e6, flops, 0.0, count, 0)


def parts_of(builder: GraphBuilder, value: str, sizes: tuple[int, ...]) -> list[str]:
    """Return the parts of a value along axis 1, each split from what the last has left.

    Convolutions of what one split makes are one already, by lowering alone.
    """
    parts = []
    for number, size in enumerate(sizes[:-1]):
        rest = sum(sizes[number + 1 :])
        part, value = builder.apply("split", value, axis=1, sizes=(size, rest))
        parts.append(part)
    return [*parts, value]


def branches(count: int = 4, bias: bool = True) -> tuple[Graph, dict[str, Array]]:
    """A split image, a convolution for each part, and their concatenation with relu."""
    builder = GraphBuilder("branches")
    random = np.random.default_rng(0)
    x = builder.input("x", (2, 3 * count, 6, 5))
    weights: dict[str, Array] = {}
    parts = parts_of(builder, x, (3,) * count)
    made = []
    for number, part in enumerate(parts):
        w = builder.input(f"w{number}", (2, 3, 3, 3), role=Role.PARAMETER)
        weights[w] = random.standard_normal((2, 3, 3, 3)).astype(np.float32)
        operands = [part, w]
        if bias:
            b = builder.input(f"b{number}", (2,), role=Role.PARAMETER)
            weights[b] = random.standard_normal(2).astype(np.float32)
            operands.append(b)
        made.append(builder.apply("conv2d", *operands, padding=(1, 1, 1, 1), bias=bias)[0])
    joined = builder.apply("concat", *made, axis=1)[0]
    builder.output(builder.apply("relu", joined, name="y")[0])
    return builder.build(), weights


def siblings() -> tuple[Graph, dict[str, Array]]:
    """Three 1x1 convolutions of one image, each an output."""
    builder = GraphBuilder("siblings")
    random = np.random.default_rng(1)
    x = builder.input("x", (1, 4, 5, 6))
    weights = {}
    for number, channels in enumerate((2, 3, 5)):
        w = builder.input(f"w{number}", (channels, 4, 1, 1), role=Role.PARAMETER)
        weights[w] = random.standard_normal((channels, 4, 1, 1)).astype(np.float32)
        builder.output(builder.apply("conv2d", x, w, bias=False, name=f"y{number}")[0])
    return builder.build(), weights


def chain(count: int, *operators: str) -> Graph:
    builder = GraphBuilder("chain")
    value = builder.input("x", (2, 3))
    for number in range(count):
        w = builder.input(f"w{number}", (3, 3), role=Role.PARAMETER)
        value = builder.apply("matmul", value, w)[0]
        for operator in operators or ("tanh",):
            value = builder.apply(operator, value)[0]
    builder.output(value)
    return builder.build()


def outputs_of(graph: Graph, weights: Mapping[str, Array]) -> list[Array]:
    found = interpret(graph, inputs_of(graph) | dict(weights))
    return [found[name] for name in graph.outputs]


def assert_same(
    one: tuple[Graph, Mapping[str, Array]], other: tuple[Graph, Mapping[str, Array]]
) -> None:
    for a, b in zip(outputs_of(*one), outputs_of(*other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def named(book: Rulebook, text: str) -> str:
    (found,) = [rule.name for rule in book.rules if str(rule) == text]
    return found


def symbolic(path: Path, dims: tuple[object, ...]) -> Path:
    """Write a model of one operator with such an input."""
    value = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims) for name in "xy"
    ]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


class Pooled:
    """A graph as values of a pool."""

    def __init__(self, graph: Graph, weights: Mapping[str, Array]) -> None:
        self.graph, self.weights = graph, weights
        self.pool = Pool()
        self.frame, self.outputs = normal.read(graph, self.pool, weights)

    def written(self, values: Values) -> normal.Written:
        """The graph of some values in place of the outputs."""
        return normal.write(self.pool, self.frame, values)
