"""Layers that move elements and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from soapstone.frontend.arguments import DType, integers
from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


class MovementLayers(LayerBase):
    """Reshaping, joining, cutting and changing of types."""

    def cast(self, x: Tensor, dtype: DType, *, name: str | None = None) -> Tensor:
        """Return x, of any shape, as another element type (dtype), such as "int32" or "float16".

        Raises:
            GraphError: a dtype that there is not.
        """
        return self.apply("cast", x, name=name, to=dtype)

    def flatten(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x, (n, …), as (n, everything else)."""
        return self.reshape(x, (x.shape[0], math.prod(x.shape[1:])), name=name)

    def reshape(self, x: Tensor, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """Return x, of any shape, in another shape with as many elements, in row-major order.

        Args:
            shape: the extents; one may be -1 and follows from the others. The first ones, as far as
                they are those of x, follow x where the model is built for another batch size, or
                for less of what varies.

        Raises:
            ShapeError: several -1, or another number of elements.
        """
        node = self._name("reshape", name)
        target = integers(f"reshape {node!r}: shape", shape)
        if target.count(-1) > 1:
            raise ShapeError(f"reshape {node!r}: shape {target} has several -1; at most one needed")
        if -1 not in target and math.prod(target) != math.prod(x.shape):
            raise ShapeError(
                f"reshape {node!r}: shape {target} of {math.prod(target)} elements found,"
                f" {math.prod(x.shape)} needed as in {x.spec}"
            )
        pairs = enumerate(zip(target, x.shape))
        follows = next((axis for axis, (new, old) in pairs if new != old), None)
        if follows is None:
            follows = min(len(target), len(x.shape))

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            spec = builder.spec(values[0])
            shape = (*spec.shape[:follows], *target[follows:])
            rest = math.prod(extent for extent in shape if extent != -1)
            known = tuple(spec.size // rest if e == -1 and rest else max(e, 0) for e in shape)
            return builder.apply("reshape", *values, name=node, shape=known)

        return self.record(emit, (x,))[0]

    def concat(
        self, tensors: Sequence[Tensor], axis: int = 1, *, name: str | None = None
    ) -> Tensor:
        """Return tensors joined along an axis, counted from the end where it is negative.

        tensors: of equal shape but for that axis, whose extents add up.

        Raises:
            GraphError: no tensors, or the axis of samples.
            ShapeError: there is no such axis, or another extent differs.
        """
        if not isinstance(tensors, Sequence):
            raise GraphError(f"concat: {tensors!r} found, a list of tensors needed")
        if not tensors:
            raise GraphError("concat: no tensors found, 1 or more needed")
        where = self._axis("concat", tensors[0], axis)
        if where == 0:
            raise GraphError(
                "concat: axis 0 runs over samples, which are not joined; 1 or more needed"
            )
        return self.apply("concat", *tensors, name=name, axis=where)

    def split(
        self, x: Tensor, sizes: Sequence[int], axis: int = 1, *, name: str | None = None
    ) -> tuple[Tensor, ...]:
        """Return x, of any shape, cut along an axis into pieces of the given sizes, in order.

        The axis counts from the end where it is negative; sizes add up to its extent.

        Raises:
            ShapeError: there is no such axis, or the sizes have another sum.
        """
        where = self._axis("split", x, axis)
        return self.apply_all("split", x, name=name, axis=where, sizes=tuple(sizes))

    def slice(
        self,
        x: Tensor,
        axis: int,
        start: int,
        stop: int,
        step: int = 1,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x[start:stop:step] along one axis other than the batch; the other axes stay whole.

        The axis counts from the end where it is negative; start and stop do not: they are positions
        from 0, and with a negative step a stop of -1 is before the first one.

        Raises:
            GraphError: the axis is that of samples, or the step is 0.
            ShapeError: there is no such axis.
        """
        where = self._axis("slice", x, axis)
        if where == 0:
            raise GraphError("slice: axis 0 runs over samples and is not sliced")
        node = self._name("slice", name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            shape = builder.spec(values[0]).shape
            starts = tuple(start if i == where else 0 for i in range(len(shape)))
            stops = tuple(stop if i == where else extent for i, extent in enumerate(shape))
            steps = tuple(step if i == where else 1 for i in range(len(shape)))
            return builder.apply(
                "slice", *values, name=node, starts=starts, stops=stops, steps=steps
            )

        return self.record(emit, (x,))[0]

    def pad(
        self,
        x: Tensor,
        low: Sequence[int],
        high: Sequence[int],
        value: float = 0.0,
        mode: str = "constant",
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x with a border: `low` elements before and `high` after each axis.

        Args:
            low, high: as many numbers, 0 or more, as x has axes.
            value: what the border is made of in mode "constant".
            mode: "constant"; or the nearest element ("edge"), the mirror image without the edge
                itself ("reflect"), or the other end ("wrap").

        Raises:
            GraphError, ShapeError: a border that does not fit x; names the argument or the axis.
        """
        low, high = tuple(low), tuple(high)
        attributes = {"low": low, "high": high, "interior": (0,) * len(low), "mode": mode}
        return self.apply("pad", x, name=name, value=value, **attributes)

    def expand(self, x: Tensor, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """Return x broadcast to a shape, as NumPy broadcasts.

        shape: the extents, whose first follows the batch size if it is that of x and both have as
        many axes.

        Raises:
            ShapeError: an extent of x is neither 1 nor that of the shape.
        """
        node = self._name("expand", name)
        target = tuple(int(extent) for extent in shape)
        follows = bool(x.shape) and len(target) == len(x.shape) and target[0] == x.shape[0]

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            first = builder.spec(values[0]).shape[:1] if follows else target[:1]
            return builder.apply("broadcast", *values, name=node, shape=(*first, *target[1:]))

        return self.record(emit, (x,))[0]

    def depth_to_space(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Return channels moved into block x block positions.

        x: (n, c, h, w), c divisible by block²; result: (n, c / block², h block, w block).

        Raises:
            ShapeError: x has another rank, or the block's square does not divide its channels.

        Source: ONNX's DepthToSpace, mode DCR.
        """
        return self.apply("depth_to_space", x, name=name, blocksize=block)

    def space_to_depth(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Return block x block positions moved into channels.

        x: (n, c, h, w), rows and columns divisible by the block; result: (n, c block², h / block, w
        / block).

        Raises:
            ShapeError: x has another rank, or the block does not divide its rows or columns.

        Source: ONNX's SpaceToDepth.
        """
        return self.apply("space_to_depth", x, name=name, blocksize=block)

    def resize(
        self, x: Tensor, sizes: Sequence[int], mode: str = "nearest", *, name: str | None = None
    ) -> Tensor:
        """Return x interpolated to new extents of its positions. x: (n, c, …).

        Args:
            sizes: one extent for each axis after samples and channels.
            mode: "nearest", "linear" or "cubic", of positions at the centres of their cells.

        Raises:
            ShapeError: another number of sizes.
            GraphError: another mode.

        Source: ONNX's Resize, coordinate_transformation_mode half_pixel.
        """
        node = self._name("resize", name)
        if len(sizes) != len(x.shape) - 2:
            raise ShapeError(
                f"resize {node!r}: sizes {tuple(sizes)} found for x {x.spec};"
                f" one for each axis after the first two needed"
            )

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            kept = builder.spec(values[0]).shape[:2]
            return builder.apply("resize", *values, name=node, sizes=(*kept, *sizes), mode=mode)

        return self.record(emit, (x,))[0]
