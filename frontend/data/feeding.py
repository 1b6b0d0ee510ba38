"""What a model is fed: names, shapes, element types and ranges, checked before they are cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.batches import SINGLE, Batch, Batches
from soapstone.frontend.training.losses import LABELS
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec

PREDICT = "predict"  # what a data set without labels is for
_VIEWS = ("reshape", "transpose", "slice")


@dataclass(frozen=True)
class Range:
    """The integers that an input may hold, and why: `layer 'o' has 4 classes (0-3)`."""

    low: int
    high: int
    why: str

    def check(self, name: str, array: Array) -> None:
        """Raise DataError, naming the first row with another number, unless all are in range."""
        if not array.size or (array.min() >= self.low and array.max() <= self.high):
            return
        wrong = np.argwhere((array < self.low) | (array > self.high))[0]
        value = array[tuple(wrong)]
        raise DataError(f"{name}: {value} at row {wrong[0]}; {self.why}")


class Feeding:
    """What a model takes of a user's batches.

    Args:
        forward: the model's graph; only its first axes depend on the batch size.
        labels: what its loss takes beside the first output.
        masked: whether a label may be -1, of a sample that does not count.
    """

    def __init__(self, forward: Graph, labels: TensorSpec, masked: bool = False) -> None:
        self.model = forward.name
        self.inputs = forward.inputs(Role.INPUT)
        self.specs = {name: forward.tensors[name] for name in self.inputs} | {LABELS: labels}
        self.ranges = {
            name: _range(name, spec, forward, masked)
            for name, spec in self.specs.items()
            if np.dtype(spec.dtype).kind in "iu"
        }

    def named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch's inputs under the model's names; one without a name has that of the only.

        Raises:
            DataError: an input is missing or unknown.
        """
        if given.keys() == set(self.inputs):
            return given
        if list(given) == [SINGLE] and len(self.inputs) == 1:
            return {self.inputs[0]: given[SINGLE]}
        unknown = [name for name in given if name not in self.specs]
        what = [f"{name!r} is unknown" for name in unknown]
        what += [f"{name!r} is missing" for name in self.inputs if name not in given]
        raise DataError(
            f"input {', '.join(what)}; model {self.model!r} takes"
            f" {', '.join(map(repr, self.inputs))}"
        )

    def check(self, data: Batches, what: str) -> None:
        """Check what is known of a data set before its first batch.

        Raises:
            DataError: no samples, other inputs, or samples of another shape or type.
        """
        if data.steps == 0:
            raise DataError(f"{what}: 0 samples found, 1 or more needed")
        found = data.specs()
        if found is None:
            return
        shapes, labels = found
        for name, (shape, dtype) in self.named(shapes).items():
            self._check(f"{what}: input {name!r}", name, shape, dtype)
        if what != PREDICT:
            if labels is None:
                raise DataError(f"{what}: labels are missing; y, or files with y, needed")
            self._check(f"{what}: labels", LABELS, *labels)

    def _check(self, label: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        spec = self.specs[name]
        if shape != spec.shape[1:]:
            raise DataError(f"{label}: samples of shape {shape} found, {spec.shape[1:]} needed")
        if dtype.kind not in "iufb" or (dtype.kind == "f" and np.dtype(spec.dtype).kind != "f"):
            raise DataError(f"{label}: {dtype} found, {spec.dtype} needed")

    def converted(self, batch: Batch) -> Batch:
        """Return a batch, or a whole data set, by the model's names and with its types of integers.

        Raises:
            DataError: a label or id out of range; names its row.
        """
        inputs = {name: self._integers(name, array) for name, array in self.named(batch[0]).items()}
        labels = batch[1]
        return inputs, None if labels is None else self._integers(LABELS, labels)

    def _integers(self, name: str, array: Array) -> Array:
        limits = self.ranges.get(name)
        if limits is None or not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            return array
        limits.check(name, array)
        return array.astype(self.specs[name].dtype, copy=False)


def _range(name: str, spec: TensorSpec, forward: Graph, masked: bool) -> Range:
    """Return the range of an integer input: classes of labels, rows of a table, or its type's."""
    if name == LABELS:
        output = forward.outputs[0]
        classes = forward.tensors[output].shape[-1]
        layer = forward.producers[output].name if output in forward.producers else output
        why = f"layer {layer!r} has {classes} classes (0-{classes - 1})"
        if masked:
            return Range(-1, classes - 1, f"{why}, and -1 is for none")
        return Range(0, classes - 1, why)
    pending, rows = [name], []
    while pending:
        for node in forward.consumers[pending.pop()]:
            if node.operator == "embedding":
                rows.append((forward.tensors[node.inputs[1]].shape[0], node.name))
            elif node.spec.view in _VIEWS:
                pending += node.outputs
    if rows:
        least, layer = min(rows)
        return Range(0, least - 1, f"layer {layer!r} has {least} rows (0-{least - 1})")
    info = np.iinfo(spec.dtype)
    return Range(info.min, info.max, f"{spec.dtype} holds {info.min} to {info.max}")
