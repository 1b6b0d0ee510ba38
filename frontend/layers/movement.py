"""Layers that move elements and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import GraphBuilder

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class MovementLayers(LayerBase):
    """Reshaping, joining, cutting and changing of types."""

    def cast(self, x: Tensor, dtype: str, *, name: str | None = None) -> Tensor:
        """Return x as another element type, such as "int32"."""
        return self.apply("cast", x, name=name, to=dtype)

    def flatten(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x as (n, everything else)."""
        return self.reshape(x, (-1, math.prod(x.shape[1:])), name=name)

    def reshape(self, x: Tensor, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """Return x in another shape; one extent may be -1, and is the batch if the first is."""
        node = self._name("reshape", name)
        target = tuple(int(extent) for extent in shape)
        if target.count(-1) > 1:
            raise ShapeError(f"reshape {node!r}: shape {target} has several -1; at most one needed")
        if -1 not in target and target and target[0] == x.shape[0]:
            target = (-1, *target[1:])  # follows the batch size of other bound shapes

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            size = builder.spec(values[0]).size
            rest = math.prod(extent for extent in target if extent != -1)
            known = tuple(size // rest if e == -1 and rest else max(e, 0) for e in target)
            return builder.apply("reshape", *values, name=node, shape=known)

        return self.record(emit, (x,))[0]

    def concat(
        self, tensors: Sequence[Tensor], axis: int = 1, *, name: str | None = None
    ) -> Tensor:
        """Return tensors joined along an axis."""
        if not tensors:
            raise GraphError("concat: no tensors found, 1 or more needed")
        where = self._axis("concat", tensors[0], axis)
        return self.apply("concat", *tensors, name=name, axis=where)

    def split(
        self, x: Tensor, sizes: Sequence[int], axis: int = 1, *, name: str | None = None
    ) -> tuple[Tensor, ...]:
        """Return x cut along an axis into pieces of the given sizes."""
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
        """Return x[start:stop:step] along one axis other than the batch."""
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
        """Return x with a border: `low` before and `high` after each axis.

        The border is `value`, or by `mode` the nearest element ("edge"), the mirror image
        ("reflect"), or the other end ("wrap").
        """
        low, high = tuple(low), tuple(high)
        attributes = {"low": low, "high": high, "interior": (0,) * len(low), "mode": mode}
        return self.apply("pad", x, name=name, value=value, **attributes)

    def expand(self, x: Tensor, shape: Sequence[int], *, name: str | None = None) -> Tensor:
        """Return x broadcast to a shape, whose first extent follows the batch if it is x's."""
        node = self._name("expand", name)
        target = tuple(int(extent) for extent in shape)
        follows = bool(x.shape) and len(target) == len(x.shape) and target[0] == x.shape[0]

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            first = builder.spec(values[0]).shape[:1] if follows else target[:1]
            return builder.apply("broadcast", *values, name=node, shape=(*first, *target[1:]))

        return self.record(emit, (x,))[0]

    def depth_to_space(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Return channels moved into block x block positions. x: (n, c, h, w)."""
        return self.apply("depth_to_space", x, name=name, blocksize=block)

    def space_to_depth(self, x: Tensor, block: int, *, name: str | None = None) -> Tensor:
        """Return block x block positions moved into channels. x: (n, c, h, w)."""
        return self.apply("space_to_depth", x, name=name, blocksize=block)

    def resize(
        self, x: Tensor, sizes: Sequence[int], mode: str = "nearest", *, name: str | None = None
    ) -> Tensor:
        """Return x interpolated to new extents of its positions. x: (n, c, …).

        Args:
            sizes: one extent for each axis after samples and channels.
            mode: "nearest", "linear" or "cubic", of positions at the centres of their cells.
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
