"""What a model is trained for: losses of its outputs and their weights, penalties, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soapstone.errors import hint
from soapstone.frontend.arguments import number
from soapstone.frontend.data.npz import LABELS, WEIGHTS
from soapstone.frontend.training.formula import FunctionLoss, name_of
from soapstone.frontend.training.losses.elements import LogCosh  # noqa: F401  (losses by name)
from soapstone.frontend.training.losses.loss import LOSSES, Loss, adder, loss_of
from soapstone.frontend.training.losses.sequences import CTC  # noqa: F401  (a loss by name)
from soapstone.frontend.training.metrics.counted import metric_of
from soapstone.frontend.training.metrics.decoding import ErrorRate  # noqa: F401  (a metric by name)
from soapstone.frontend.training.metrics.metric import Metric, Values
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, Role

SHARE = "share"  # of a part of a batch in its loss, and of the loss of an output, `share.NAME`
LossLike = Loss | str | Callable[..., Any]
MetricLike = Metric | Loss | str | Callable[..., Any]
Losses = LossLike | Mapping[str, LossLike]
Metrics = MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike | Iterable[MetricLike]]


@dataclass(frozen=True)
class Penalty:
    """What the size of a parameter adds to the loss: l1 sum |w| + l2 sum w^2."""

    parameter: str
    l1: float = 0.0
    l2: float = 0.0


@dataclass(frozen=True)
class Term:
    """The loss of one output.

    Attributes:
        output: its name, and place among the model's. weight: what its loss is multiplied by.
        metrics: of the output. labels, weights: what graphs call these; None where all count alike.
        prefix: of the names of its results; nothing where it is the only one.
    """

    output: str
    place: int
    loss: Loss
    weight: float = 1.0
    metrics: tuple[Metric, ...] = ()
    labels: str = LABELS
    weights: str | None = None
    prefix: str = ""

    def known(self, given: Mapping[str, Array]) -> tuple[float, int]:
        """Return what the samples of a batch count, and how many labels they have."""
        samples, known = self.loss.known(given[self.labels])
        return (samples if self.weights is None else float(given[self.weights].sum())), known


@dataclass(frozen=True)
class Objective:
    """The losses of a model's outputs, with penalties and metrics.

    Attributes:
        terms: at least one. penalties: of parameters. weighted: whether samples have weights, other
            than those of their classes.
    """

    terms: tuple[Term, ...]
    penalties: tuple[Penalty, ...] = ()
    weighted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What each epoch ends with: the loss, that of each output of several, and metrics."""
        return ("loss", *(name for name, _, _ in self.measured()))

    def measured(self) -> Iterator[tuple[str, Term, Metric | None]]:
        """Yield all that is measured beside the loss: losses of several outputs, and metrics."""
        for term in self.terms:
            if len(self.terms) > 1:
                yield f"{term.prefix}loss", term, None
            for metric in term.metrics:
                yield f"{term.prefix}{metric.name}", term, metric

    def emit(
        self, builder: GraphBuilder, outputs: Sequence[str], *, shared: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """Add labels, losses and metrics of a model's outputs.

        Return the loss and, in the order of `measured`, the values of what is.

        shared: whether the batch is a part of one, of whose loss only its share is the loss here
            (`shares`).

        Raises:
            GraphError, ShapeError: what does not fit an output.
        """
        values: list[str] = []
        parts = []
        for term in self.terms:
            output = outputs[term.place]
            spec = builder.spec(output)
            _fits(term, builder, output)
            needed = term.loss.labels(spec)
            builder.input(term.labels, needed.shape, needed.dtype)
            if term.weights is not None:
                builder.input(term.weights, term.loss.weights(spec).shape)
            name = f"{term.prefix}loss"
            loss = term.loss.emit(builder, name, output, term.labels, term.weights)
            if len(self.terms) > 1:
                values.append(loss)
            of = Values(builder, output, term.labels, term.loss, None if term.weights else loss)
            for metric in term.metrics:
                values += metric.emit(of)
            if term.weight != 1:
                (loss,) = builder.apply("affine", loss, name=f"{name}.scaled", scale=term.weight)
            if shared:
                share = builder.input(f"{SHARE}.{term.output}", (), role=Role.SCALAR)
                (loss,) = builder.apply("mul", loss, share, name=f"{name}.part")
            parts.append(loss)
        if self.penalties and shared:
            builder.input(SHARE, (), role=Role.SCALAR)
        for each in self.penalties:
            add = adder(builder, f"{each.parameter}.penalty")
            axes = tuple(range(builder.spec(each.parameter).rank))
            for operator, scale in (("reduce_l1", each.l1), ("reduce_sum_square", each.l2)):
                if scale:
                    size = add(operator, each.parameter, suffix=".size", axes=axes)
                    size = add("affine", size, scale=scale)
                    parts.append(add("mul", size, SHARE) if shared else size)
        if len(parts) == 1:
            return parts[0], tuple(values)
        return builder.apply("accumulate", *parts, name="loss")[0], tuple(values)

    def count(self, given: Mapping[str, Array]) -> float:
        """Return what a batch counts in the mean loss, from its labels and weights."""
        if len(self.terms) == 1:
            return self.terms[0].known(given)[0]
        return len(given[self.terms[0].labels])

    def of_loss(self, loss: float, given: Mapping[str, Array]) -> list[float]:
        """Return what is summed over batches of the loss: the loss times its count, and the count.

        Then the same of batches of which nothing counts, whose loss is their penalties: it is the
        mean where no batch counts. given: the batch's labels and weights.
        """
        count = self.count(given)
        return [loss * count, count, *((0.0, 0.0) if count else (loss, 1.0))]

    def shares(
        self, part: Mapping[str, Array], whole: Mapping[str, Array]
    ) -> Iterator[tuple[str, float]]:
        """Yield, by the names of scalars, what share of a batch's loss is of a part of it.

        part, whole: their labels and weights.
        """
        rows = self.terms[0].labels
        yield SHARE, len(part[rows]) / len(whole[rows])
        for term in self.terms:
            every = term.known(whole)[0]
            yield f"{SHARE}.{term.output}", term.known(part)[0] / every if every else 0.0

    def counts(
        self, values: Sequence[Array], given: Mapping[str, Array]
    ) -> Iterator[tuple[str, list[Any]]]:
        """Yield what is summed over batches by name, of all that is `measured`.

        values: those of `emit`, of one batch; given: its labels and weights.
        """
        rest = list(values)
        for name, term, metric in self.measured():
            count, known = term.known(given)
            if metric is None:
                yield name, [float(rest.pop(0)) * count, count]
                continue
            taken, rest = rest[: metric.arity], rest[metric.arity :]
            yield name, metric.counted(taken, given[term.labels], known)

    def results(self, sums: Mapping[str, Sequence[Any]], ended: bool = True) -> dict[str, float]:
        """Return loss and metrics from their sums; those that keep outputs once an epoch ended."""
        found = {}
        for name, metric in self.by_name.items():
            if name not in sums:
                continue
            if metric is None:
                total, count, *rest = sums[name]
                if not count and rest:
                    total, count = rest
                found[name] = float(total / (count or 1.0))
            elif ended or not metric.keeps:
                found[name] = float(metric.result(sums[name]))
        return found

    @property
    def by_name(self) -> dict[str, Metric | None]:
        """What is measured, by name; None for a loss."""
        return {"loss": None} | {name: metric for name, _, metric in self.measured()}

    def kept(self, sums: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the sums that a file can have."""
        by_name = self.by_name
        found = {}
        for name, each in sums.items():
            metric = by_name[name]
            if metric is None or not metric.keeps:
                found[name] = [getattr(value, "tolist", lambda v=value: v)() for value in each]
        return found

    @property
    def described(self) -> str | dict[str, str]:
        """What a checkpoint says of it: the name of a loss, or the losses of outputs."""
        texts = {term.output: _text(term) for term in self.terms}
        if len(texts) > 1 or self.penalties:
            penalties = {f"penalty of {each.parameter}": repr(each) for each in self.penalties}
            return texts | penalties
        return next(iter(texts.values()))


_CURVES = ("sigmoid", "softmax")  # what makes probabilities of logits


def _fits(term: Term, builder: GraphBuilder, output: str) -> None:
    """Refuse probabilities where a loss takes logits, logits where it takes probabilities."""
    node = next((node for node in builder.nodes if output in node.outputs), None)
    if node is None:
        return
    made = node.attributes.get("activation") or node.operator
    said = f"loss {_text(term)!r} takes {term.loss.takes}; output {term.output!r} is made by {made}"
    if term.loss.takes == "logits" and made in _CURVES:
        raise GraphError(f"{said}, which the loss contains: leave it out of the model")
    if term.loss.takes == "probabilities" and made in ("linear", "matmul"):
        raise GraphError(f"{said}: sigmoid is missing, or the loss 'bce_with_logits' meant")
    classes = builder.spec(output).shape[-1] if builder.spec(output).shape else 1
    if term.loss.classes and not term.loss.places and classes == 1 and term.loss.takes:
        raise GraphError(
            f"loss {_text(term)!r}: output {term.output!r} has 1 class, 2 or more needed; of one"
            " number that says yes or no, 'bce_with_logits' is the loss"
        )


def _text(term: Term) -> str:
    loss = term.loss
    named = next((name for name, each in LOSSES.items() if each == loss), None)
    if isinstance(loss, FunctionLoss):
        named = f"function {name_of(loss.function)}"
    weighted = "" if term.weights is None else ", weighted"
    scaled = "" if term.weight == 1 else f" times {term.weight:g}"
    return f"{named or repr(loss)}{scaled}{weighted}"


def objective(
    loss: Losses,
    outputs: Sequence[str],
    metrics: Metrics = (),
    *,
    loss_weights: Mapping[str, float] | None = None,
    weighted: bool = False,
    penalties: tuple[Penalty, ...] = (),
) -> Objective:
    """Return what a model with such outputs is trained for; see `Model.compile`.

    outputs: their names.

    Raises:
        GraphError: a loss, metric or output that there is not; names it.
    """
    if isinstance(loss, list | tuple):
        text = ", ".join(f"{name!r}: …" for name in outputs)
        raise GraphError(f"loss: {type(loss).__name__} found, a dict by output needed: {{{text}}}")
    losses = loss if isinstance(loss, Mapping) else {outputs[0]: loss}
    several = len(losses) > 1
    _known("loss", losses, outputs)
    if not losses:
        raise GraphError("loss: an empty dict found, a loss of an output needed")
    scales = dict(loss_weights or {})
    _known("loss_weights", scales, list(losses))
    by_output = _metrics(metrics, list(losses))
    terms = []
    for name, each in losses.items():
        if callable(each) and not isinstance(each, Loss | str | type):
            each = FunctionLoss(each)
        found = loss_of(each)  # type: ignore[arg-type]  # which refuses what is none
        scale = number(f"loss_weights[{name!r}]", scales.get(name, 1.0))
        suffix = f".{name}" if several else ""
        has_weights = weighted or found.weighted
        terms.append(
            Term(
                name,
                list(outputs).index(name),
                found,
                scale,
                by_output.get(name, ()),
                LABELS + suffix,
                WEIGHTS + suffix if has_weights else None,
                f"{name}_" if several else "",
            )
        )
    made = Objective(tuple(terms), penalties, weighted)
    names = made.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GraphError(f"metric {twice!r}: found twice, another name needed")
    return made


def _known(what: str, given: Iterable[str], outputs: Sequence[str]) -> None:
    for name in given:
        if name not in outputs:
            have = ", ".join(map(repr, outputs))
            raise GraphError(
                f"{what}: output {name!r} found, one of {have} needed{hint(name, outputs)}"
            )


def _metrics(metrics: Metrics, outputs: Sequence[str]) -> dict[str, tuple[Metric, ...]]:
    """Return the metrics of each output that has a loss."""
    if isinstance(metrics, Mapping):
        _known("metrics", metrics, outputs)
        return {name: _listed(each) for name, each in metrics.items()}
    found = _listed(metrics)
    if found and len(outputs) > 1:
        raise GraphError(
            f"metrics: {', '.join(each.name for each in found)} found for"
            f" {len(outputs)} outputs; a dict by output needed, such as"
            f" {{{outputs[0]!r}: [{found[0].name!r}]}}"
        )
    return {outputs[0]: found}


def _listed(value: Any) -> tuple[Metric, ...]:
    if isinstance(value, str | Metric | Loss) or callable(value):
        value = (value,)
    if not isinstance(value, Iterable):
        raise GraphError(f"metrics: {value!r} found, names of metrics needed")
    return tuple(map(metric_of, value))
