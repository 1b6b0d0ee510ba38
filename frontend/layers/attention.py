"""Attention, positions, and bags of embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from soapstone.frontend.layers.base import LayerBase, Parameters, declare
from soapstone.frontend.layers.sequences import check_lengths, hidden_keys
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


class AttentionLayers(LayerBase):
    """Layers that mix positions by attention, and those that feed them."""

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        lengths: Tensor | None = None,
        scale: float | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Return softmax(query key' scale + mask) value of each head.

        query: (n, tq, heads, d), key: (n, tk, heads, d), value: (n, tk, heads, dv); result:
        (n, tq, heads, dv). Keys and values may have fewer heads, each shared by as many of queries,
        those beside each other.

        Args:
            mask: broadcasts to (n, heads, tq, tk), and is added to the scores.
            causal: whether a position sees no later one.
            lengths: how many keys each sample has, (n,) integers, or a mask (n, tk) that is true
                for those, which come first; the others are not seen.
            scale: what scores are multiplied by, 1/sqrt(d) by default.

        Raises:
            ShapeError: operands that do not fit each other; names the dim.

        Source: Vaswani et al., Attention is all you need, NeurIPS 2017, section 3.2.1.
        """
        node = self._name("attention", name)
        operands, added = self._masked(node, (query, key, value), mask, lengths)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return builder.apply(
                *("attention", *values[:3], *added(builder, values)),
                causal=causal,
                scale=scale,
                name=node,
            )[:1]

        return self.record(emit, operands)[0]

    def _masked(
        self,
        node: str,
        given: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], Callable[[GraphBuilder, tuple[str, ...]], list[str]]]:
        """Return the operands of attention, and what adds to a graph the mask that they make."""
        if lengths is not None:
            check_lengths(f"attention {node!r}", lengths, given[1])

        def added(builder: GraphBuilder, values: tuple[str, ...]) -> list[str]:
            masks = list(values[3:])
            if lengths is not None:
                masks.append(hidden_keys(builder, masks.pop(), values[1], f"{node}.hidden"))
            if len(masks) == 2:
                return [*builder.apply("add", *masks, name=f"{node}.masks")]
            return masks

        return (*given, *(each for each in (mask, lengths) if each is not None)), added

    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        lengths: Tensor | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return attention of projected heads, projected again.

        query: (n, tq, width), key and value: (n, tk, …); result: (n, tq, width).

        Args:
            heads: how many heads the width is cut into; a divisor of it.
            mask: broadcasts to (n, heads, tq, tk), and is added to the scores.
            causal: whether a position sees no later one.
            lengths: how many keys each sample has, (n,) integers, or a mask (n, tk) that is true
                for those, which come first; the others are not seen.
            bias: whether the four projections add a trained vector.
            name: of the last node. Parameters are `name.query.weight`, `name.query.bias`, and so on
                for key, value and output; weights are (k, width), PyTorch's transposed.

        Raises:
            ShapeError: an operand has another rank, or they do not fit each other.
            GraphError: the heads do not divide the width.

        Source: Vaswani et al., Attention is all you need, NeurIPS 2017, section 3.2.2.
        """
        node = self._name("multi_head_attention", name)
        label = f"multi_head_attention {node!r}"
        given = (query, key, value)
        if any(len(tensor.shape) != 3 for tensor in given):
            shapes = ", ".join(str(tensor.shape) for tensor in given)
            raise ShapeError(f"{label}: operands of shapes {shapes} found; n t k needed of each")
        width = query.shape[2]
        if heads < 1 or width % heads:
            raise GraphError(f"{label}: {heads} heads found; a divisor of width {width} needed")

        def projected(builder: GraphBuilder, x: str, part: str, initial: Initial, end: str) -> str:
            parameters: Parameters = {"weight": ((builder.spec(x).shape[-1], width), initial)}
            if bias:
                parameters["bias"] = ((width,), Initial())
            weights = declare(builder, f"{node}.{part}", parameters)
            return builder.apply("linear", x, *weights, bias=bias, name=end)[0]

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            inner = Initial("uniform", math.sqrt(6 / (4 * width)))
            split: list[str] = []
            for part, x in zip(("query", "key", "value"), values):
                y = projected(builder, x, part, inner, f"{node}.{part}")
                rows, steps, _ = builder.spec(y).shape
                shape = (rows, steps, heads, width // heads)
                split += builder.apply("reshape", y, shape=shape, name=f"{node}.{part}.heads")
            masks = added(builder, values)
            mixed = builder.apply(
                "attention", *split, *masks, causal=causal, name=f"{node}.attention"
            )[0]
            rows, steps = builder.spec(mixed).shape[:2]
            whole = (rows, steps, width)
            (joined,) = builder.apply("reshape", mixed, shape=whole, name=f"{node}.joined")
            outer = Initial("uniform", 1 / math.sqrt(width))
            return (projected(builder, joined, "output", outer, node),)

        operands, added = self._masked(node, given, mask, lengths)
        return self.record(emit, operands)[0]

    def learned_positions(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x plus a trained row for each position. x and the result: (n, t, width).

        The rows are `name.table`, (t, width), and begin as normal numbers of deviation 0.02. Where
        x varies (`Model.input`), shorter ones take the first rows.

        Raises:
            ShapeError: x has another rank.
        """
        node = self._name("learned_positions", name)
        if len(x.shape) != 3:
            raise ShapeError(f"learned_positions {node!r}: x has shape {x.shape}; n t k needed")
        parameters: Parameters = {"table": (x.shape[1:], Initial("normal", 0.02))}

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            table = declare(builder, node, parameters)
            steps = builder.spec(values[0]).shape[1]
            if steps < x.shape[1]:
                bounds: dict[str, Any] = {"starts": (0, 0), "stops": (steps, x.shape[2])}
                rows = f"{node}.rows"
                table = [*builder.apply("slice", *table, name=rows, steps=(1, 1), **bounds)]
            return builder.apply("add", *values, *table, name=node)

        return self.record(emit, (x,))[0]

    def embedding_bag(
        self,
        ids: Tensor,
        rows: int,
        width: int,
        *,
        reduction: str = "mean",
        name: str | None = None,
    ) -> Tensor:
        """Return the sum, mean or maximum of a trained table's rows that each bag of ids names.

        ids: (n, l) integers from 0 to rows - 1, a bag a row; result: (n, width). The table is
        `name.table`, (rows, width). reduction: "sum", "mean" or "max".

        Raises:
            ShapeError: ids of another rank or type, or a table without elements.
            GraphError: another reduction.
            TaskError: when run, an id outside the table.

        Source: PyTorch's EmbeddingBag, with bags of one length.
        """
        node = self._name("embedding_bag", name)
        if rows < 1 or width < 1:
            raise ShapeError(
                f"embedding_bag {node!r}: table ({rows}, {width}) found; 1 or more needed"
            )
        parameters: Parameters = {"table": ((rows, width), Initial("normal", 1.0))}
        return self._layer("embedding_bag", ids, parameters, node, reduction=reduction)
