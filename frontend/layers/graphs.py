"""Layers over the neighbours of each vertex; the samples are the vertices of one whole graph."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.layers.base import Parameters, declare, layer_seed
from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.frontend.layers.dense import DenseLayers
from soapstone.frontend.layers.parameter import ParameterLayers
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial
from soapstone.ir.training.guard import step_number

if TYPE_CHECKING:
    from soapstone.frontend.graphs.adjacency import Adjacency
    from soapstone.frontend.recording import Tensor


class GraphLayers(DenseLayers, ParameterLayers, DeclaredLayers):
    """Sums, means and maxima over neighbours, and the convolutions that are made of them."""

    _matrices: dict[int, tuple[Adjacency, tuple[Tensor, ...]]]

    def aggregate(
        self, x: Tensor, graph: Adjacency, reduction: str = "sum", *, name: str | None = None
    ) -> Tensor:
        """Return, for each vertex, the sum, mean or maximum of x over the edges that lead to it.

        x: (vertices, width), a row for the source of each edge; result: of that shape, 0 where no
        edge leads to a vertex.

        Args:
            graph: the edges (`soapstone.frontend.graphs`); a sum is of x times their weights.
            reduction: "sum", "mean" or "max".

        Raises:
            ShapeError: x has another number of rows than the graph has vertices.
            GraphError: another reduction, or a mean or maximum where edges have weights.

        Source: Jia, Automated Discovery of Machine Learning Optimizations, 2020, section 4.2.
        """
        node = self._name("aggregate", name)
        label = f"aggregate {node!r}"
        if reduction != "sum" and graph.weights is not None:
            raise GraphError(f"{label}: edges with weights found; a {reduction} has none")
        self._check_vertices(label, x, graph)
        return self._reduced(label, x, graph, reduction, node)

    def _reduced(
        self, label: str, x: Tensor, matrix: Adjacency, reduction: str, node: str
    ) -> Tensor:
        """Return the sums, means or maxima of the rows of x that rows of a matrix name."""
        if reduction not in ("sum", "mean", "max"):
            raise GraphError(
                f"{label}: reduction {reduction!r} found, 'sum', 'mean' or 'max' needed"
            )
        operands = self._matrix(matrix)
        if reduction == "max":
            return self.apply_all("spmm_max", x, *operands, name=node)[0]
        return self.apply("spmm", x, *operands, name=node, reduction=reduction)

    def gcn_conv(
        self,
        x: Tensor,
        graph: Adjacency,
        width: int,
        *,
        activation: str | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return activation(A x w + b): a graph convolution.

        x: (vertices, k); result: (vertices, width). The product with w comes first where it
        narrows x, so that fewer columns are summed over edges.

        Args:
            graph: A, the edges with their weights, as `Adjacency.normalised` gives them.
            width: columns of the result.
            activation: an operator of one operand, such as "relu"; None for none.
            bias: whether b, a trained vector, is added.
            name: of the node; its parameters are `name.weight`, (k, width), uniform in
                sqrt(6 / (k + width)) either way, and `name.bias`, (width,), which begins at 0.

        Raises:
            ShapeError: x has another number of rows than the graph has vertices, or the width is
                below 1.
            GraphError: edges without weights, or another argument that does not fit.

        Source: Kipf and Welling, Semi-supervised classification with graph convolutional networks,
        ICLR 2017.
        """
        node = self._name("gcn_conv", name)
        label = f"gcn_conv {node!r}"
        self._check_vertices(label, x, graph)
        if width < 1:
            raise ShapeError(f"{label}: width {width} found, 1 or more needed")
        if graph.weights is None:
            raise GraphError(f"{label}: edges without weights found; graph.normalised() needed")
        k = x.shape[1]
        weight = Initial("uniform", math.sqrt(6 / max(k + width, 1)))
        parameters: Parameters = {"weight": ((k, width), weight)}
        if bias:
            parameters["bias"] = ((width,), Initial())

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            y, *matrix = values
            weight, *shift = declare(builder, node, parameters)
            steps = [("spmm", matrix), ("linear", [weight])]
            if width < k:
                steps.reverse()
            if bias:
                steps.append(("add", shift))
            if activation is not None:
                steps.append((activation, []))
            for operator, operands in steps:
                more: dict[str, Any] = {"bias": False} if operator == "linear" else {}
                label = node if operator == steps[-1][0] else f"{node}.{operator}"
                (y,) = builder.apply(operator, y, *operands, name=label, **more)
            return (y,)

        return self.record(emit, (x, *self._matrix(graph)))[0]

    def sage_conv(
        self,
        x: Tensor,
        graph: Adjacency,
        width: int,
        *,
        reduction: str = "mean",
        activation: str | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Return activation(x v + m w + b), where m is the mean of x over neighbours: GraphSAGE.

        x: (vertices, k); result: (vertices, width).

        Args:
            graph: the edges, without weights unless it is a sum.
            width: columns of the result.
            reduction: "mean", "max" or "sum".
            activation: an operator of one operand, such as "relu"; None for none.
            name: of the node; its parameters are those of dense layers `name.own` and
                `name.neighbours`, of which the second has no bias.

        Raises:
            ShapeError, GraphError: as of `aggregate` and `dense`.

        Source: Hamilton, Ying and Leskovec, Inductive representation learning on large graphs,
        NeurIPS 2017; all neighbours are taken, not a sample of them.
        """
        node = self._name("sage_conv", name)
        return self._beside(node, x, graph, width, reduction, activation)

    def comm_conv(
        self,
        x: Tensor,
        graph: Adjacency,
        width: int,
        *,
        first: Tensor | None = None,
        activation: str | None = "tanh",
        name: str | None = None,
    ) -> Tensor:
        """Return activation(x h + c m + f s + b), where c is the mean over neighbours: CommNet.

        x: (vertices, k); result: (vertices, width).

        Args:
            graph: the edges, without weights, by which vertices tell each other.
            width: columns of the result.
            first: f, (vertices, any), what the vertices began with; None to leave it out.
            activation: an operator of one operand; None for none.
            name: of the node; its parameters are those of dense layers `name.own` (h and b),
                `name.neighbours` (m) and `name.first` (s).

        Raises:
            ShapeError, GraphError: as of `aggregate` and `dense`.

        Source: Sukhbaatar, Szlam and Fergus, Learning multiagent communication with
        backpropagation, NeurIPS 2016, sections 2.1 and 2.2.
        """
        node = self._name("comm_conv", name)
        return self._beside(node, x, graph, width, "mean", activation, first)

    def _beside(
        self,
        node: str,
        x: Tensor,
        graph: Adjacency,
        width: int,
        reduction: str,
        activation: str | None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Return a dense layer of x, of what neighbours have, and perhaps of a third, added up."""
        narrow = width < x.shape[-1] and reduction != "max"  # what is linear may come first
        near = x if narrow else self.aggregate(x, graph, reduction, name=f"{node}.edges")
        near = self.dense(near, width, bias=False, name=f"{node}.neighbours")
        if narrow:
            near = self.aggregate(near, graph, reduction, name=f"{node}.edges")
        if first is not None:
            third = self.dense(first, width, bias=False, name=f"{node}.first")
            near = self.add(near, third, name=f"{node}.both")
        own = self.dense(x, width, name=f"{node}.own")
        y = self.add(own, near, name=node if activation is None else f"{node}.add")
        return y if activation is None else self.apply(activation, y, name=node)

    def residual_gcn_conv(
        self, x: Tensor, graph: Adjacency, width: int, *, name: str | None = None
    ) -> Tensor:
        """Return x + relu(A x w + b), where x goes through a linear layer if its width differs.

        x: (vertices, k); result: (vertices, width).

        Args:
            graph: A, as of `gcn_conv`.
            width: columns of the result.
            name: of the node; its parameters are those of `name.conv` and, where k is not the
                width, of the dense layer `name.pass`, which has no bias.

        Raises:
            ShapeError, GraphError: as of `gcn_conv`.

        Source: Jia, Automated Discovery of Machine Learning Optimizations, 2020, section 4.7.5.
        """
        node = self._name("residual_gcn_conv", name)
        y = self.gcn_conv(x, graph, width, activation="relu", name=f"{node}.conv")
        if x.shape[-1] != width:
            x = self.dense(x, width, bias=False, name=f"{node}.pass")
        return self.add(x, y, name=node)

    def gin_conv(
        self, x: Tensor, graph: Adjacency, width: int, *, name: str | None = None
    ) -> Tensor:
        """Return two dense layers of x + s, where s is the sum of x over neighbours: GIN-0.

        x: (vertices, k); result: (vertices, width), with a rectifier between the layers. The inner
        layer's product comes first where it narrows x, so that fewer columns are summed over edges.

        Args:
            graph: the edges.
            width: columns of the result, and between the layers.
            name: of the node, which is the second layer; the first is `name.inner`.

        Raises:
            ShapeError, GraphError: as of `aggregate` and `dense`.

        Source: Xu, Hu, Leskovec and Jegelka, How powerful are graph neural networks?, ICLR 2019.
        """
        node = self._name("gin_conv", name)
        narrow = width < x.shape[-1]  # the inner layer's product may come first
        if narrow:
            self._check_vertices(f"gin_conv {node!r}", x, graph)
            x = self.dense(x, width, bias=False, initial="he", name=f"{node}.inner")
        near = self.aggregate(x, graph, name=f"{node}.edges")
        y = self.add(x, near, name=f"{node}.add")
        if narrow:
            y = self.add(y, self.parameter(f"{node}.inner.bias", (width,)), name=f"{node}.shift")
            y = self.relu(y, name=f"{node}.relu")
        else:
            y = self.dense(y, width, activation="relu", initial="he", name=f"{node}.inner")
        return self.dense(y, width, name=node)

    def gat_conv(
        self,
        x: Tensor,
        graph: Adjacency,
        width: int,
        heads: int = 1,
        *,
        concat: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
        activation: str | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return activation(y + b), where y has for each head the neighbours' z = x w, weighted.

        x: (vertices, k); result: (vertices, heads * width), or (vertices, width) of a mean. Weights
        are softmax, over the edges that lead to a vertex v, of leaky(t z[v] + s z[u]) for an edge
        from u: an edge of a vertex to itself has to be there (`Adjacency.with_self_edges`). Nothing
        that each edge has its own of is kept in memory.

        Args:
            graph: the edges, without weights.
            width: columns of a head.
            heads: how many there are.
            concat: whether heads lie beside each other; otherwise their mean is the result.
            slope: of the scores below 0.
            dropout: the share of weights of edges that a training step leaves out.
            activation: an operator of one operand, such as "elu"; None for none.
            bias: whether b, a trained vector, is added.
            name: of the node; its parameters are w, `name.weight`, (k, heads * width), uniform in
                sqrt(6 / (k + heads * width)) either way; s and t, `name.source` and `name.target`,
                (heads, width), in sqrt(6 / (width + 1)); and `name.bias`, which begins at 0.

        Raises:
            ShapeError: x has another number of rows than the graph has vertices, or the width or
                the number of heads is below 1.
            GraphError: edges with weights, or another argument that does not fit.

        Source: Velickovic et al., Graph attention networks, ICLR 2018.
        """
        node = self._name("gat_conv", name)
        label = f"gat_conv {node!r}"
        self._check_vertices(label, x, graph)
        if min(width, heads) < 1:
            raise ShapeError(f"{label}: width {width} and {heads} heads found, 1 or more needed")
        if not 0 <= dropout < 1:
            raise GraphError(f"{label}: dropout {dropout!r} found, 0 <= dropout < 1 needed")
        if graph.weights is not None:
            raise GraphError(f"{label}: edges with weights found; attention makes them")
        k, columns = x.shape[1], heads * width
        ends = Initial("uniform", math.sqrt(6 / (width + 1)))
        parameters: Parameters = {
            "weight": ((k, columns), Initial("uniform", math.sqrt(6 / (k + columns)))),
            "source": ((heads, width), ends),
            "target": ((heads, width), ends),
        }
        if bias:
            parameters["bias"] = ((columns if concat else width,), Initial())
        own = np.repeat(np.eye(heads, dtype=np.float32), width, axis=0)  # columns of each head
        masks = (self.constant(f"{node}.heads", own),) if heads > 1 else ()
        matrix = self._matrix(graph)
        seed = layer_seed(self.seed, self._drawn(node))

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            def add(of: str, operator: str, *operands: str, **more: Any) -> str:
                return builder.apply(operator, *operands, name=f"{node}{of}", **more)[0]

            y, *edges = values[:5]
            weight, source, target, *shift = declare(builder, node, parameters)
            z = add(".product", "linear", y, weight, bias=False)
            scores = []
            for end, part in (("source", source), ("target", target)):
                vector = add(f".{end}.column", "reshape", part, shape=(columns, 1))
                for mask in values[5:]:
                    vector = add(f".{end}.columns", "mul", vector, mask)
                scores.append(add(f".{end}.scores", "matmul", z, vector))
            rows = builder.spec(z).shape[0]
            cut = add(".cut", "reshape", z, shape=(rows, heads, width))
            drawn = training and dropout > 0
            step = [step_number(builder)] if drawn else []
            more: dict[str, Any] = {"rate": dropout, "seed": seed} if drawn else {}
            operands = (cut, *scores, *edges, *step)
            y = add(".edges", "graph_attention", *operands, slope=slope, **more)
            steps: list[tuple[str, list[str], dict[str, Any]]] = [
                ("reshape", [], {"shape": (rows, columns)})
                if concat
                else ("reduce_mean", [], {"axes": (1,)})
            ]
            if bias:
                steps.append(("add", shift, {}))
            if activation is not None:
                steps.append((activation, [], {}))
            for operator, others, given in steps:
                of = "" if operator == steps[-1][0] else f".{operator}"
                y = add(of, operator, y, *others, **given)
            return (y,)

        return self.record(emit, (x, *matrix, *masks))[0]

    def _check_vertices(self, label: str, x: Tensor, graph: Adjacency) -> None:
        if len(x.shape) != 2 or x.shape[0] != graph.vertices:
            raise ShapeError(
                f"{label}: x {x.spec} found; (vertices, width) needed, with {graph.vertices}"
                " vertices"
            )

    def _matrix(self, graph: Adjacency) -> tuple[Tensor, ...]:
        """Return what `spmm` takes after x: constants, the same for all layers over a graph."""
        if id(graph) not in self._matrices:
            number = len(self._matrices)
            node = f"graph_{number}" if number else "graph"
            forward, backward = list["Tensor"](), list["Tensor"]()
            for name in ("indptr", "indices", "weights"):
                there, back = getattr(graph, name), getattr(graph, f"{name}_t")
                if there is None:
                    continue
                made = self.constant(f"{node}.{name}", there)
                forward.append(made)
                same = back is there  # edges go both ways
                backward.append(made if same else self.constant(f"{node}.{name}_t", back))
            operands = (*forward[:2], *backward[:2], *forward[2:], *backward[2:])
            self._matrices[id(graph)] = graph, operands  # which keeps the graph, and its id
        return self._matrices[id(graph)][1]
