"""What a model is fed: names, shapes, element types and ranges, checked before they are cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.errors import DataError
from soapstone.frontend.data.batches import SINGLE, Batch, Batches, Labels, Spec, named_labels
from soapstone.frontend.data.npz import LABELS, WEIGHTS
from soapstone.frontend.recording import Recording
from soapstone.frontend.training.objective import Objective, Term
from soapstone.ir.analysis.indices import index_range
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec

PREDICT = "predict"  # what a data set without labels is for
T = TypeVar("T")


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
        aim: what it is trained for, which says what labels and weights there are.
        model: which inputs vary, and its graphs at their other lengths.
    """

    def __init__(self, forward: Graph, aim: Objective, model: Recording) -> None:
        self.model = forward.name
        self.aim, self._model = aim, model
        self._at: dict[tuple[int, ...], dict[str, TensorSpec]] = {}
        self.inputs = forward.inputs(Role.INPUT)
        self.specs = {name: forward.tensors[name] for name in self.inputs}
        self.labels = self._labels_of(forward)
        self.weighted = aim.weighted
        terms = {term.labels: term for term in aim.terms}
        self.ranges = {
            name: _range(name, spec, forward, terms.get(name))
            for name, spec in (self.specs | self.labels).items()
            if kind_of(spec.dtype) in "iu"
        }

    def _labels_of(self, forward: Graph) -> dict[str, TensorSpec]:
        return {
            term.labels: term.loss.labels(forward.tensors[forward.outputs[term.place]])
            for term in self.aim.terms
        }

    def lengths(self, shapes: Mapping[str, Spec]) -> tuple[int, ...]:
        """Return the extents of inputs that vary; none where they are those of the model.

        shapes: of a sample of each input, by any name that `named` takes.

        Raises:
            DataError: one has more than the model's, or nothing.
        """
        varying = self._model.varying
        if not varying or not shapes:
            return ()
        given = self.named(shapes)
        found = tuple(
            given[name][0][0] if given[name][0] else most for name, most in varying.items()
        )
        for (name, most), extent in zip(varying.items(), found):
            if not 1 <= extent <= most:
                raise DataError(f"input {name!r}: {extent} steps found, 1 to {most} needed")
        return () if found == tuple(varying.values()) else found

    def lengths_of(self, inputs: Mapping[str, Array]) -> tuple[int, ...]:
        """Return `lengths` of a batch."""
        if not self._model.varying:
            return ()
        return self.lengths({name: (each.shape[1:], each.dtype) for name, each in inputs.items()})

    def named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch's inputs under the model's names; one without a name is the one left.

        Raises:
            DataError: an input is missing or unknown.
        """
        if given.keys() == set(self.inputs):
            return given
        missing = [name for name in self.inputs if name not in given]
        if SINGLE in given and SINGLE not in self.specs and len(missing) == 1:
            renamed = {missing[0] if name == SINGLE else name: v for name, v in given.items()}
            return self.named(renamed)
        unknown = [name for name in given if name not in self.specs]
        if unknown == [SINGLE] and len(self.inputs) > 1 and len(given) == 1:
            needed = ", ".join(map(repr, self.inputs))
            raise DataError(f"x: one array found, a dict by input needed: {needed}")
        what = [f"{name!r} is unknown" for name in unknown]
        what += [f"{name!r} is missing" for name in missing]
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
        known = self._specs(self.lengths(shapes))
        for name, (shape, dtype) in self.named(shapes).items():
            self._check(f"{what}: input {name!r}", name, known[name], shape, dtype)
        if what != PREDICT:
            if labels is None:
                raise DataError(f"{what}: labels are missing; y, or files with y, needed")
            for name, each in self._named(labels).items():
                if name in known:
                    shape, dtype = each
                    if _column(shape, known[name]):
                        shape = (*shape, 1)
                    if len(shape) == 1 and self._places(name):
                        shape = known[name].shape[1:]
                    label = f"{what}: {name.replace('.', ' of output ', 1)}"
                    self._check(label, name, known[name], shape, dtype)

    def _places(self, labels: str) -> bool:
        return any(term.loss.places for term in self.aim.terms if term.labels == labels)

    def _specs(self, lengths: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Return what inputs and labels are at lengths of inputs that vary."""
        if not lengths:
            return self.specs | self.labels
        if lengths not in self._at:
            graph = self._model.build(training=True, lengths=lengths)
            inputs = {name: graph.tensors[name] for name in self.inputs}
            self._at[lengths] = inputs | self._labels_of(graph)
        return self._at[lengths]

    def _check(
        self,
        label: str,
        name: str,
        spec: TensorSpec,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        if shape != spec.shape[1:]:
            raise DataError(
                f"{label}: samples of shape {shape} found, {spec.shape[1:]} needed"
                f"{self._advice(name, spec, shape)}"
            )
        if kind_of(dtype) not in "iufb" or (kind_of(dtype) == "f" and kind_of(spec.dtype) != "f"):
            raise DataError(f"{label}: {dtype} found, {spec.dtype} needed")

    def _advice(self, name: str, spec: TensorSpec, shape: tuple[int, ...]) -> str:
        """Return what to do with channels that come last, and labels that have an axis too many."""
        wanted = spec.shape[1:]
        if len(wanted) == 3 and shape == (*wanted[1:], wanted[0]):
            return "; channels come before rows and columns, x.transpose(0, 3, 1, 2)"
        term = next((term for term in self.aim.terms if term.labels == name), None)
        if term is None or not term.loss.classes or shape[:-1] != spec.shape[1:]:
            return ""
        if shape[-1] == 1:
            return "; class numbers without a last axis, y[..., 0]"
        return "; class numbers, y.argmax(-1), or the loss 'cross_entropy_dense'"

    def _named(self, given: Mapping[str, T]) -> dict[str, T]:
        """Return labels and weights under the names of the graph's inputs.

        Raises:
            DataError: those of an output are missing or unknown, or weights that nothing takes.
        """
        terms, found = self.aim.terms, dict(given)
        if len(terms) == 1:
            for kind in (LABELS, WEIGHTS):
                named = f"{kind}.{terms[0].output}"
                if named in found:
                    found[kind] = found.pop(named)
        outputs = ", ".join(repr(term.output) for term in terms)
        for name in found:
            kind, _, output = name.partition(".")
            if kind == WEIGHTS and not self.weighted:
                raise DataError(
                    f"{WEIGHTS} found; model {self.model!r} takes none: compile(weighted=True)"
                )
            if name == LABELS and name not in self.labels:
                raise DataError(f"y: one array found, a dict by output needed: {outputs}")
            if kind == LABELS and name not in self.labels:
                raise DataError(f"y: output {output!r} is unknown; those with a loss: {outputs}")
            if kind == WEIGHTS and output and output not in [term.output for term in terms]:
                raise DataError(f"{WEIGHTS}: output {output!r} is unknown; there are {outputs}")
        for term in terms:
            if term.labels not in found:
                raise DataError(f"y: labels of output {term.output!r} are missing")
            if self.weighted and not {WEIGHTS, f"{WEIGHTS}.{term.output}"} & found.keys():
                raise DataError(f"{WEIGHTS} of output {term.output!r} are missing")
        return found

    def converted(self, batch: Batch) -> Batch:
        """Return a batch, or a whole data set, by the model's names and with its types of integers.

        Raises:
            DataError: a label or id out of range; names its row.
        """
        inputs = {name: self._integers(name, array) for name, array in self.named(batch[0]).items()}
        return inputs, self.targets(batch[1], self.lengths_of(inputs))

    def targets(self, given: Labels, lengths: tuple[int, ...] = ()) -> dict[str, Array] | None:
        """Return labels and weights as the graph takes them, by name.

        lengths: of the inputs that vary.

        Raises:
            DataError: a label out of range, what is missing or unknown, or weights of another
                shape.
        """
        if given is None:
            return None
        found = self._named(named_labels(given))
        made: dict[str, Array] = {}
        for term in self.aim.terms:
            labels = self._integers(term.labels, found[term.labels])
            spec = self._specs(lengths)[term.labels]
            if _column(labels.shape[1:], spec):
                labels = labels.reshape(*labels.shape, 1)
            if term.loss.places:
                labels = term.loss.fitted(labels, spec.shape[1])
            made[term.labels] = labels
            if term.loss.limits is not None:
                _within(term.labels, labels, *term.loss.limits)
            if term.weights is not None:
                own = f"{WEIGHTS}.{term.output}"
                weights = self._weights(term, labels, found.get(own, found.get(WEIGHTS)))
                made[term.weights] = np.asarray(weights, np.float32)
        return made

    def _weights(self, term: Term, labels: Array, given: Array | None) -> Array:
        """Return the weights of labels: those of samples, or of their own, times classes'."""
        shape = term.loss.weights(TensorSpec(labels.shape)).shape
        if term.loss.classes and not term.loss.places:
            shape = labels.shape
        if given is not None:
            if given.shape not in (shape, shape[:1]):
                raise DataError(
                    f"{WEIGHTS}: shape {given.shape} found, {shape[:1]}, one a sample, or {shape}"
                    " needed"
                )
            if not np.isfinite(given).all() or given.min(initial=0) < 0:
                raise DataError(f"{WEIGHTS}: a number below 0, or none, found; 0 or more needed")
            given = given.reshape(given.shape + (1,) * (len(shape) - given.ndim))
        found = term.loss.weigh(labels, given)
        return np.broadcast_to(1.0 if found is None else found, shape)

    def _integers(self, name: str, array: Array) -> Array:
        limits = self.ranges.get(name)
        if limits is None or not isinstance(array, np.ndarray) or kind_of(array.dtype) not in "iu":
            return array
        limits.check(name, array)
        spec = self.specs.get(name) or self.labels[name]
        return array.astype(spec.dtype, copy=False)


def _within(name: str, labels: Array, low: float, high: float) -> None:
    """Refuse labels that a loss has no meaning for; names the first row of them."""
    if not labels.size or (labels.min() >= low and labels.max() <= high):
        return
    wrong = np.argwhere(~((labels >= low) & (labels <= high)))[0]
    raise DataError(
        f"{name}: {labels[tuple(wrong)]} at row {wrong[0]}; numbers from {low:g} to {high:g} needed"
    )


def _column(shape: tuple[int, ...], needed: TensorSpec) -> bool:
    """Return whether samples of a shape are those needed but for a last axis of extent 1."""
    return needed.shape[1:] == (*shape, 1)


def _range(name: str, spec: TensorSpec, forward: Graph, term: Term | None) -> Range:
    """Return the range of an integer input: classes of labels, rows of a table, or its type's."""
    if term is not None and term.loss.classes:
        output = forward.outputs[term.place]
        classes = forward.tensors[output].shape[-1]
        layer = forward.producers[output].name if output in forward.producers else output
        why = f"layer {layer!r} has {classes} classes (0-{classes - 1})"
        if term.loss.masked:
            return Range(-1, classes - 1, f"{why}, and -1 is for none")
        return Range(0, classes - 1, why)
    known = index_range(forward, name)
    if known is not None:
        numbers, node = known
        low, high = numbers.start, numbers.stop - 1
        why = f"layer {node.name!r} has {numbers.stop} rows ({low}-{high})"
        if low < 0:
            why = f"layer {node.name!r} has {numbers.stop} elements ({low} to {high})"
        return Range(low, high, why)
    info = np.iinfo(spec.dtype)
    return Range(info.min, info.max, f"{spec.dtype} holds {info.min} to {info.max}")
