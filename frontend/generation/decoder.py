"""How a session runs a decoder: prompts at once, then a token at a time, in few shapes.

Prompts are filled up at their ends, and keys and values are kept in buffers (`kept.py`), so that
few shapes are bound. Whether a model allows either is looked for, once a session, and what it does
not allow is done without: a warning says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from soapstone.engine.session import Bound
from soapstone.errors import DataError, warn
from soapstone.frontend.generation.appended import Step, appended
from soapstone.frontend.generation.grouped import grouped
from soapstone.frontend.generation.kept import STARTS, differs, keeping, pairs, unfit
from soapstone.frontend.generation.last import LAST, of_last
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference.session import InferenceSession
    from soapstone.frontend.inference.sources import Field

IDS, MASK, PLACES, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_LEAST = 32  # tokens that a prompt is filled up to
_ROWS = 128  # of a buffer at least
_USUAL = 512  # rows of a first buffer, where it may get that long
_NOISE = 100.0
_GRAPHS = 4  # that are kept: a step and a prompt need the same ones several times


def room(length: int) -> int:
    """Return the extent that is bound for a length: a power of two, or one and a half times one."""
    power = max(_LEAST, 1 << max(length - 1, 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > _LEAST else power


@dataclass
class _Buffers:
    """A bound step with the buffers that it writes to, and whose keys and values these hold."""

    bound: Bound
    rows: int
    owner: Callable[[], Run | None] = lambda: None


class Decoder:
    """What is known of a session's model as a decoder.

    Raises:
        DataError: the model is not one; names the input or output.
    """

    def __init__(self, session: InferenceSession) -> None:
        self.session: InferenceSession = weakref.proxy(session)  # which has this one
        fields = {each.name: each for each in session.inputs}
        self.label = f"generate: model {session.name!r}"
        past = [each for each in session.inputs if each.name not in (IDS, MASK, PLACES)]
        if not session.in_main_memory:
            raise DataError(f"{self.label}: a session of cores, without a fast memory, needed")
        if len(fields) == len(past) == 1 and _are_ids(past[0]):
            self.ids, past = past[0], []
        elif IDS in fields:
            self.ids = fields[IDS]
        else:
            have = ", ".join(map(str, session.inputs))
            raise DataError(f"{self.label}: inputs {have} found; {IDS!r} needed")
        self.mask, self.places = fields.get(MASK), fields.get(PLACES)
        self.past = {each.name: _time_axis(each, self.label) for each in past}
        self.past_fields = {each.name: each for each in past}
        if LOGITS not in session.outputs and len(session.outputs) > 1:
            raise DataError(
                f"{self.label}: outputs {', '.join(session.outputs)} found; {LOGITS!r} needed"
            )
        self.logits = LOGITS if LOGITS in session.outputs else session.outputs[0]
        self.given = bool(self.past)  # whether the model takes a past, or its step is derived
        self.kept = self.given or len(fields) == 1  # whether keys and values are
        self.filled = True  # whether prompts are
        self.presents: dict[str, str] = {}  # by input, the output that continues it
        # By samples, new tokens and those of the past: graphs, with what keeps their constants.
        self.graphs: dict[tuple[int, int, int], tuple[Graph, list[Array]]] = {}
        self.derived: dict[tuple[int, int], Step | str] = {}  # by samples and tokens
        self.samples: dict[str, int] = {}  # by input, the axis of them in that output, if not 0
        self.tried: set[str] = set()  # what has been found to have no effect
        self.buffers: WeakValueDictionary[tuple[int, int], _Buffers] = WeakValueDictionary()

    def check(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Find out whether the model takes prompts, and so many tokens more.

        Raises:
            DataError: a token that it does not know, or too many; names the prompt and the input.
        """
        fixed, words = self.ids.shape[1], self.extents[self.ids.name]
        places = self.extents.get(self.places.name) if self.places is not None else None
        limits = [fixed if isinstance(fixed, int) else None, places]
        room_for = min((limit for limit in limits if limit is not None), default=None)
        for number, prompt in enumerate(prompts):
            where = f"generate: prompt {number}:"
            if words is not None and max(prompt) >= words:
                raise DataError(
                    f"{where} token {max(prompt)} found; input {self.ids.name!r} has a vocabulary"
                    f" of {words}, so {words - 1} at most needed"
                )
            if room_for is None or len(prompt) + most - 1 <= room_for:
                continue
            takes = f"the model takes {room_for}"
            if len(prompt) > room_for:
                raise DataError(f"{where} {len(prompt)} tokens found; {takes} at most")
            raise DataError(
                f"{where} {len(prompt)} tokens and max_new_tokens {most} found; {takes}, so"
                f" max_new_tokens {room_for + 1 - len(prompt)} at most needed"
            )

    @cached_property
    def extents(self) -> Mapping[str, int | None]:
        """The extents of the tables that tokens, and their places, are looked up in, by input."""
        fixed = self.ids.shape[1]
        extent = fixed if isinstance(fixed, int) else 1
        graph = self.graph(1, extent, 1 if self.given else 0)
        names = [each.name for each in (self.ids, self.places) if each is not None]
        return {name: _looked_up(graph, name) for name in names}

    def feeds(self, samples: int, new: int, past: int) -> dict[str, Array]:
        """Return zeros for each input, of as many new tokens and tokens of the past."""
        found: dict[str, Array] = {}
        for each in (self.ids, self.places):
            if each is not None:
                found[each.name] = np.zeros((samples, new), each.dtype)
        if self.mask is not None:
            found[self.mask.name] = np.zeros((samples, past + new), self.mask.dtype)
        for name, each in self.past_fields.items():
            shape = [samples, *(past if not isinstance(d, int) else d for d in each.shape[1:])]
            shape[self.past[name]] = past
            found[name] = np.zeros(shape, each.dtype)
        return found

    def graph(self, samples: int, new: int, past: int) -> Graph:
        """Return the model's graph for these lengths, of which the last few are kept."""
        key = samples, new, past
        found = self.graphs.get(key)
        if found is None:
            made, weights = self.session.graph_of(self.feeds(*key)), self.session.weights()
            _make_room(self.graphs, _GRAPHS)
            found = made, [weights[name] for name in made.roles if name in weights]
            self.graphs[key] = found
        return found[0]

    def whole(self, samples: int, extent: int) -> Graph:
        """Return the graph of so many tokens from the first one on, with logits of some alone."""
        graph = self.graph(samples, extent, 0)
        if self.kept and not self.given:
            kept = self.past_of(samples, extent)
            graph = replace(graph, outputs=(self.logits, *kept), updates={}).pruned()
        return of_last(graph, self.logits, extent)

    def past_of(self, samples: int, extent: int) -> list[str]:
        """Return the values that a derived step keeps the rows of; its buffers are the past then.

        There are none, and none are kept, where no step can be derived; a warning says why.
        """
        step = self._derived(samples, extent)
        if isinstance(step, str):
            self.kept = False
            self.warn(
                f"{step} is not known to make rows of the tokens up to theirs alone, so each token"
                " costs as much as all before it"
            )
            return []
        self.past = {kept.buffer: kept.axis for kept in step.kept.values()}
        self.presents = {kept.buffer: value for value, kept in step.kept.items()}
        self.samples = {kept.buffer: kept.samples for kept in step.kept.values()}
        return list(step.kept)

    def warn(self, what: str) -> None:
        """Warn of what the model does not allow."""
        warn(f"{self.label}: {what}")

    def constants(self, samples: int, rows: int) -> Mapping[str, Array]:
        """Return what a step reads besides the weights."""
        step = "" if self.given else self._derived(samples, rows)
        return step.constants if isinstance(step, Step) else {}

    def _derived(self, samples: int, extent: int) -> Step | str:
        """Return the step that is derived from the graph of so many tokens, or where none is."""
        key = samples, extent
        found = self.derived.get(key)
        if found is None:
            graph = self.graph(samples, extent, 0)
            found = appended(graph, self.ids.name, self.logits, self.session.weights())
            _make_room(self.derived, self.session.most_bound)
            self.derived[key] = found
        return found

    def step(self, samples: int, rows: int) -> Graph | str:
        """Return the graph of a token with buffers of so many rows, or why there is none."""
        derived = self._derived(samples, rows) if self.kept and not self.given else ""
        if isinstance(derived, Step):
            return grouped(derived.graph, {**self.session.weights(), **derived.constants})
        if not self.past or self.mask is None:
            return "it has no past and attention_mask among its inputs"
        graph = self.graph(samples, 1, rows - 1)
        found = pairs(graph)
        if {pair.past for pair in found} != self.past.keys():
            missing = sorted(self.past.keys() - {pair.past for pair in found})
            return f"no output is input {missing[0]!r} joined with what is new"
        weights = self.session.weights()
        why = unfit(graph, found, self.logits, self.mask.name, weights)
        if not why:  # of all lengths that it will be run with, the least and the most
            least = self.graph(samples, 1, 1)
            where = differs(graph, least, self.session.weights(), self.logits)
            why = f"{where} depends on the length of the past" if where else ""
        self.presents = {pair.past: pair.present for pair in found}
        return why or grouped(keeping(graph, found, self.logits), self.session.weights())


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """Forget the first that was kept where there are as many as may be."""
    if len(kept) >= most:
        kept.pop(next(iter(kept)), None)


def _are_ids(each: Field) -> bool:
    return each.dtype in ("int32", "int64") and len(each.shape) == 2


def _looked_up(graph: Graph, ids: str) -> int | None:
    """Return the least extent of the tables that integers are looked up in; None for no table."""
    found, names = [], [ids]
    for name in names:
        for node in graph.consumers.get(name, ()):
            if node.operator == "embedding" and node.inputs[0] == name:
                found.append(graph.tensors[node.inputs[1]].shape[0])
            elif node.operator == "gather" and node.inputs[1] == name != node.inputs[0]:
                found.append(graph.tensors[node.inputs[0]].shape[node.attributes["axis"]])
            elif node.operator == "cast" or node.spec.view:
                names.extend(node.outputs)
    return min(found, default=None)


def _time_axis(each: Field, label: str) -> int:
    """Return the axis along which a past grows: after axis 0, the one with an open extent."""
    found = [axis for axis, dim in enumerate(each.shape) if axis and not isinstance(dim, int)]
    if len(found) != 1 or len(each.shape) < 3:
        raise DataError(f"{label}: input {each} found; one open extent after the first needed")
    return found[0]


@dataclass
class Run:
    """Prompts being continued: their lengths and, in buffers or arrays, their keys and values.

    most: how long they get at most.
    """

    decoder: Decoder
    tokens: list[list[int]]
    most: int
    seen: list[int] = field(default_factory=list)  # tokens of each that keys and values are of
    buffers: _Buffers | None = None
    made: Mapping[str, Array] = field(default_factory=dict)  # with the prompts, by output
    past: dict[str, Array] = field(default_factory=dict)  # where they are in no buffer, by input

    def logits(self, advance: Sequence[bool]) -> Array:
        """Return the logits (samples, words) of the token that follows each of the tokens.

        advance: of each, whether a token has been added since; others stay as they are.
        """
        with self.decoder.session.turn():
            if not self.seen:
                return self._prompt()
            return self._next(advance) if self.decoder.kept else self._all()[1]

    # Prompts

    def _filled(self, bound: Bound, filler: int) -> Array:
        """Return the logits of each one's last token, of a run on all, filled up with a token."""
        decoder, feeds = self.decoder, bound.feeds
        feeds[decoder.ids.name][:] = filler
        if decoder.places is not None:
            feeds[decoder.places.name][:] = np.arange(feeds[decoder.ids.name].shape[1])
        if decoder.mask is not None:
            feeds[decoder.mask.name][:] = 0
        for row, tokens in enumerate(self.tokens):
            feeds[decoder.ids.name][row, : len(tokens)] = tokens
            feeds[LAST][row, 0] = row, len(tokens) - 1
            if decoder.mask is not None:
                feeds[decoder.mask.name][row, : len(tokens)] = 1
        decoder.session.run_bound(bound)
        return bound.results[decoder.logits][:, 0].copy()

    def _all(self) -> tuple[Mapping[str, Array], Array]:
        """Return the outputs for all tokens at once, and the logits of the last ones."""
        decoder, samples = self.decoder, len(self.tokens)
        lengths, fixed = set(map(len, self.tokens)), decoder.ids.shape[1]
        longest = max(lengths)
        extent = fixed if isinstance(fixed, int) else room(longest) if decoder.filled else longest
        if longest > extent:
            raise DataError(f"{decoder.label}: {longest} tokens found; {extent} at most needed")
        if decoder.kept and not decoder.given:
            whole = fixed if isinstance(fixed, int) else room(self.most)
            decoder.past_of(samples, whole)
            extent = whole if decoder.kept else extent
        bound = decoder.session.bound_as(
            (LAST, samples, extent), lambda: decoder.whole(samples, extent)
        )
        logits = self._filled(bound, 0)
        if lengths != {extent} and "prompt" not in decoder.tried:
            # Tokens after the last one must have no effect: others are tried.
            other = next((token for token in self.tokens[0] if token), 1)
            if not _near(logits, self._filled(bound, other)):
                if extent == fixed or len(lengths) > 1:
                    raise DataError(
                        f"{decoder.label}: logits depend on tokens after theirs; prompts of one"
                        " length, which the model's inputs have or leave open, needed"
                    )
                decoder.filled = False
                decoder.kept = decoder.kept and decoder.given
                decoder.warn("logits depend on tokens after theirs, so each length is bound anew")
                return self._all()
            decoder.tried.add("prompt")
        return bound.results, logits

    def _prompt(self) -> Array:
        outputs, logits = self._all()
        self.seen = [len(tokens) for tokens in self.tokens]
        if self.decoder.kept:
            past = (name for name in outputs if name != self.decoder.logits)
            self.made = {name: outputs[name].copy() for name in past}
        return logits

    # One token

    def _next(self, advance: Sequence[bool]) -> Array:
        decoder = self.decoder
        longest = max(self.seen)
        if self.buffers is None or longest >= self.buffers.rows:
            self._grow(longest)
        held = self.buffers
        if held is None:
            return self._all()[1]
        if held.owner() is not self:
            self._take(held)
        feeds, last = held.bound.feeds, np.array([tokens[-1] for tokens in self.tokens])
        seen = np.array(self.seen) - ~np.asarray(advance, bool)  # who stays is written over
        feeds[decoder.ids.name][:, 0] = last
        feeds[STARTS][:] = seen
        if decoder.places is not None:
            feeds[decoder.places.name][:, 0] = seen
        if decoder.mask is not None:
            for row, count in enumerate(seen):
                feeds[decoder.mask.name][row, count] = 1
        hidden = bool((seen + 1 < held.rows).any())
        if hidden and "rows" not in decoder.tried and not self._try(held, seen):
            self._without("logits depend on rows that attention_mask hides")
            return self._all()[1]
        decoder.session.run_bound(held.bound)
        self.seen = [int(count) + 1 for count in seen]
        return held.bound.results[decoder.logits][:, -1].copy()

    def _try(self, held: _Buffers, seen: Array) -> bool:
        """Return whether rows past those in use have no effect: they are made others."""
        session, found = self.decoder.session, []
        for noise in (0.0, _NOISE):
            for name, axis in self.decoder.past.items():
                buffer = np.moveaxis(held.bound.feeds[name], axis, 1)
                for row, count in enumerate(seen):
                    buffer[row, count + 1 :] = noise
            session.run_bound(held.bound)
            found.append(held.bound.results[self.decoder.logits].copy())
        self._clear(held, seen + 1)
        if _near(*found):
            self.decoder.tried.add("rows")
        return "rows" in self.decoder.tried

    def _without(self, why: str) -> None:
        """Go on without keys and values: on all tokens at once."""
        self.buffers, self.decoder.kept, self.made, self.past = None, False, {}, {}
        self.decoder.warn(f"{why}, so each token costs as much as all before it")

    def _clear(self, held: _Buffers, seen: Array) -> None:
        for name, axis in self.decoder.past.items():
            buffer = np.moveaxis(held.bound.feeds[name], axis, 1)
            for row, count in enumerate(seen):
                buffer[row, count:] = 0

    def _grow(self, longest: int) -> None:
        """Go on in larger buffers."""
        decoder, session, samples = self.decoder, self.decoder.session, len(self.tokens)
        before = 0 if self.buffers is None else self.buffers.rows
        rows = room(min(self.most, max(2 * before, _USUAL, longest + 1)))
        rows = max(rows, room(longest + 1), _ROWS)
        if not decoder.given:  # all there are, of the graph that the prompts ran in
            rows = (
                decoder.ids.shape[1] if isinstance(decoder.ids.shape[1], int) else room(self.most)
            )
        if self.buffers is not None and self.buffers.owner() is self:
            self._spill(self.buffers, self.seen)

        def make() -> Graph:
            made = decoder.step(samples, rows)
            if isinstance(made, str):
                raise _Unfit(made)
            return made

        try:
            constants = decoder.constants(samples, rows)
            bound = session.bound_as((STARTS, samples, rows), make, constants)
        except _Unfit as error:
            self._without(str(error))
            return
        held = decoder.buffers.get((samples, rows))
        if held is None or held.bound is not bound:
            held = _Buffers(bound, rows)
            decoder.buffers[samples, rows] = held  # for as long as somebody runs on them
        self.buffers = held
        if self.made:
            self.past = {
                name: np.moveaxis(self.made[present], decoder.samples.get(name, 0), 0)
                for name, present in decoder.presents.items()
            }
            self.made = {}

    def _take(self, held: _Buffers) -> None:
        """Move keys and values into buffers, and those out of them that others have there."""
        owner = held.owner()
        if owner is not None and owner.buffers is held:
            owner._spill(held, owner.seen)
        feeds = held.bound.feeds
        if self.decoder.mask is not None:
            feeds[self.decoder.mask.name][:] = 0
            for row, count in enumerate(self.seen):
                feeds[self.decoder.mask.name][row, :count] = 1
        for name, axis in self.decoder.past.items():
            buffer, past = (np.moveaxis(a, axis, 1) for a in (feeds[name], self.past[name]))
            for row, count in enumerate(self.seen):
                buffer[row, :count] = past[row, :count]
                buffer[row, count:] = 0
        self.past = {}
        held.owner = weakref.ref(self)

    def _spill(self, held: _Buffers, seen: Sequence[int] | Array) -> None:
        """Move keys and values from buffers to arrays."""
        longest = max(seen)
        for name, axis in self.decoder.past.items():
            cut = (slice(None),) * axis + (slice(longest),)
            self.past[name] = held.bound.feeds[name][cut].copy()
        held.owner = lambda: None


class _Unfit(Exception):
    """The model has no step that keeps its past in buffers; says why."""


def _near(a: Array, b: Array) -> bool:
    """Return whether logits are the same but for the order of additions."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max()))))
