"""Sequences of different lengths in one batch: which steps a sample has, and what is made of them.

Samples are padded behind their last step. Layers take `lengths`, (n,) integers, or a mask (n, t)
that says the same: true, or not 0, for the steps that a sample has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor

_LOWEST = -3.4028235e38  # of float32, and -inf where it is halved


def check_lengths(label: str, lengths: Tensor, x: Tensor, time: int = 1) -> None:
    """Check that a tensor can be lengths, or a mask, of the steps of x.

    Raises:
        ShapeError: it has another shape, or numbers that are no integers.
    """
    samples, steps = x.shape[1 - time], x.shape[time]
    mask = (samples, steps) if time == 1 else (steps, samples)
    if lengths.shape == mask or (lengths.shape == (samples,) and lengths.dtype in _INTEGERS):
        return
    raise ShapeError(
        f"{label}: lengths {lengths.spec} found; integers ({samples},), or a mask {mask}, needed"
    )


_INTEGERS = ("int32", "int64")


def lengths_of(builder: GraphBuilder, value: str, node: str, time: int = 1) -> str:
    """Return lengths or a mask as lengths (n,) int32; `time` is the mask's axis of steps."""
    spec = builder.spec(value)
    name = f"{node}.lengths"
    if spec.rank == 1:
        if spec.dtype == "int32":
            return value
        return builder.apply("cast", value, to="int32", name=name)[0]
    if spec.dtype != "bool":
        (zero,) = builder.apply("full", shape=(), dtype=spec.dtype, name=f"{name}.zero")
        (value,) = builder.apply("equal", value, zero, name=f"{name}.absent")
        (value,) = builder.apply("logical_not", value, name=f"{name}.mask")
    (value,) = builder.apply("cast", value, to="float32", name=f"{name}.ones")
    (value,) = builder.apply("reduce_sum", value, axes=(time,), name=f"{name}.sum")
    return builder.apply("cast", value, to="int32", name=name)[0]


def steps_of(builder: GraphBuilder, lengths: str, steps: int, node: str) -> str:
    """Return which of so many steps samples of lengths (n,) int32 have, (n, steps) bool."""
    (samples,) = builder.spec(lengths).shape
    # In float32, for which pointwise operators have kernels.
    (ones,) = builder.apply("full", shape=(steps,), value=1.0, name=f"{node}.ones")
    (ordinals,) = builder.apply("cumsum", ones, axis=0, name=f"{node}.ordinals")
    (rows,) = builder.apply("cast", lengths, to="float32", name=f"{node}.counts")
    (rows,) = builder.apply("reshape", rows, shape=(samples, 1), name=f"{node}.rows")
    return builder.apply("less_equal", ordinals, rows, name=node)[0]


def hidden_keys(builder: GraphBuilder, lengths: str, keys: str, node: str) -> str:
    """Return what scores of keys (n, tk, …) past a sample's length are hidden by, (n, 1, 1, tk)."""
    spec = builder.spec(keys)
    samples, steps = spec.shape[:2]
    given = steps_of(builder, lengths_of(builder, lengths, node), steps, f"{node}.steps")
    given = builder.apply("reshape", given, shape=(samples, 1, 1, steps), name=f"{node}.keys")[0]
    ends = [
        builder.apply("full", shape=(), value=value, dtype=spec.dtype, name=f"{node}.{name}")[0]
        for name, value in (("seen", 0.0), ("hidden", float("-inf")))
    ]
    return builder.apply("where", given, *ends, name=f"{node}.mask")[0]


class SequenceLayers(LayerBase):
    """What is made of the steps that samples have."""

    def sequence_mask(self, lengths: Tensor, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return which steps of x, (n, t, …), samples have: (n, t) bool.

        lengths: (n,) integers, or a mask (n, t) whose steps come first.

        Raises:
            ShapeError: lengths of another shape, or of numbers that are no integers.
        """
        node = self._name("sequence_mask", name)
        check_lengths(f"sequence_mask {node!r}", lengths, x)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            steps = builder.spec(values[1]).shape[1]
            return (steps_of(builder, lengths_of(builder, values[0], node), steps, node),)

        return self.record(emit, (lengths, x))[0]

    def mean_over_time(self, x: Tensor, lengths: Tensor, *, name: str | None = None) -> Tensor:
        """Return the mean of each sample's steps. x: (n, t, …); result: (n, …).

        lengths: (n,) integers, or a mask (n, t) whose steps come first. A length of 0 gives 0.

        Raises:
            ShapeError: x without steps, or lengths that do not fit it.
        """
        return self._over_time("mean_over_time", x, lengths, name)

    def max_over_time(self, x: Tensor, lengths: Tensor, *, name: str | None = None) -> Tensor:
        """Return the maximum of each sample's steps. x: (n, t, …); result: (n, …).

        lengths: (n,) integers, or a mask (n, t) whose steps come first. A length of 0 gives the
        lowest float32.

        Raises:
            ShapeError: x without steps, or lengths that do not fit it.
        """
        return self._over_time("max_over_time", x, lengths, name)

    def _over_time(self, kind: str, x: Tensor, lengths: Tensor, name: str | None) -> Tensor:
        node = self._name(kind, name)
        if len(x.shape) < 2:
            raise ShapeError(f"{kind} {node!r}: x has shape {x.shape}; n t … needed")
        check_lengths(f"{kind} {node!r}", lengths, x)
        mean = kind == "mean_over_time"

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            spec = builder.spec(values[0])
            counts = lengths_of(builder, values[1], node)
            mask = steps_of(builder, counts, spec.shape[1], f"{node}.steps")
            shape = (*spec.shape[:2], *(1,) * (spec.rank - 2))
            (mask,) = builder.apply("reshape", mask, shape=shape, name=f"{node}.mask")
            other = 0.0 if mean else _LOWEST
            (rest,) = builder.apply(
                "full", shape=(), value=other, dtype=spec.dtype, name=f"{node}.rest"
            )
            (kept,) = builder.apply("where", mask, values[0], rest, name=f"{node}.kept")
            if not mean:
                return builder.apply("reduce_max", kept, axes=(1,), name=node)
            (total,) = builder.apply("reduce_sum", kept, axes=(1,), name=f"{node}.sum")
            (counts,) = builder.apply("cast", counts, to=spec.dtype, name=f"{node}.counts")
            most = float(max(spec.shape[1], 1))
            (counts,) = builder.apply("clip", counts, low=1.0, high=most, name=f"{node}.known")
            rows = (spec.shape[0], *(1,) * (spec.rank - 2))
            (counts,) = builder.apply("reshape", counts, shape=rows, name=f"{node}.rows")
            return builder.apply("div", total, counts, name=node)

        return self.record(emit, (x, lengths))[0]
