"""Prompts under continuation: all tokens of a prompt at once, then one token at a time.

Prompts are padded at their ends, and keys and values are kept in buffers, so that few shapes are
bound.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from soapstone.engine.session import Bound
from soapstone.errors import DataError
from soapstone.frontend.generation.decoder import Decoder, room
from soapstone.frontend.generation.kept import STARTS
from soapstone.frontend.generation.last_logits import LAST
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

_ROWS = 128  # of a buffer at least
_USUAL = 512  # rows of a first buffer, where it may get that long
_NOISE = 100.0  # what rows that are hidden are filled with, to see whether they have an effect


@dataclass
class Buffers:
    """A bound step with its buffers, and the run whose keys and values they hold."""

    bound: Bound
    rows: int
    owner: Callable[[], Run | None] = lambda: None


@dataclass
class Run:
    """Prompts under continuation: their lengths, and their keys and values in buffers or arrays.

    most: the largest length that is run, without the last token that is made.
    """

    decoder: Decoder
    tokens: list[list[int]]
    most: int
    seen: list[int] = field(default_factory=list)  # tokens of each that keys and values are of
    buffers: Buffers | None = None
    made: Mapping[str, Array] = field(default_factory=dict)  # with the prompts, by output
    past: dict[str, Array] = field(default_factory=dict)  # where they are in no buffer, by input

    def logits(self, advance: Sequence[bool]) -> Array:
        """Return the logits (samples, words) of the token that follows each prompt.

        advance: for each, whether a token was added since; the logits of others are unchanged.
        """
        with self.decoder.session.turn():
            if not self.seen:
                return self._prompt()
            return self._next(advance) if self.decoder.kept else self._all()[1]

    # Prompts

    def _filled(self, bound: Bound, filler: int) -> Array:
        """Return the logits of each prompt's last token, by a run on all, padded with `filler`."""
        decoder, feeds = self.decoder, bound.feeds
        feeds[decoder.ids.name][:] = filler
        mask, places = decoder.told(feeds)
        if places is not None:
            places[:] = np.arange(places.shape[1])
        if mask is not None:
            mask[:] = 0
        for row, tokens in enumerate(self.tokens):
            feeds[decoder.ids.name][row, : len(tokens)] = tokens
            feeds[LAST][row, 0] = row, len(tokens) - 1
            if mask is not None:
                mask[row, : len(tokens)] = 1
        decoder.session.run_bound(bound)
        return bound.results[decoder.logits][:, 0].copy()

    def _all(self) -> tuple[Mapping[str, Array], Array]:
        """Return the outputs for all tokens at once, and the logits of the last ones."""
        decoder, samples = self.decoder, len(self.tokens)
        lengths, fixed = set(map(len, self.tokens)), decoder.ids.shape[1]
        longest = max(lengths)
        extent = decoder.extent(samples, longest)
        if longest > extent:
            raise DataError(f"{decoder.label}: {longest} tokens found; {extent} at most needed")
        if decoder.kept and not decoder.given:
            whole = decoder.extent(samples, self.most)
            decoder.past_of(samples, whole)
            extent = whole if decoder.kept else extent
        bound = decoder.session.bound_as(
            (LAST, samples, extent, decoder.kept),
            lambda: decoder.whole(samples, extent),
            decoder.assumed(samples, extent),
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
        mask, places = decoder.told(feeds)
        if places is not None:
            places[:, 0] = seen
        if mask is not None:
            mask[np.arange(len(seen)), seen] = 1
        hidden = bool((seen + 1 < held.rows).any())
        if hidden and "rows" not in decoder.tried and not self._try(held, seen):
            self._without("logits depend on rows that attention_mask hides")
            return self._all()[1]
        decoder.session.run_bound(held.bound)
        self.seen = [int(count) + 1 for count in seen]
        return held.bound.results[decoder.logits][:, -1].copy()

    def _try(self, held: Buffers, seen: Array) -> bool:
        """Return whether rows past those in use have no effect, by changing them."""
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
        """Continue without keys and values, on all tokens at once."""
        self.buffers, self.decoder.kept, self.made, self.past = None, False, {}, {}
        self.decoder.warn(f"{why}, so each token costs as much as all before it")

    def _clear(self, held: Buffers, seen: Array) -> None:
        for name, axis in self.decoder.past.items():
            buffer = np.moveaxis(held.bound.feeds[name], axis, 1)
            for row, count in enumerate(seen):
                buffer[row, count:] = 0

    def _grow(self, longest: int) -> None:
        """Continue in larger buffers."""
        decoder, session, samples = self.decoder, self.decoder.session, len(self.tokens)
        before = 0 if self.buffers is None else self.buffers.rows
        rows = room(min(self.most, max(2 * before, _USUAL, longest + 1)))
        rows = max(rows, room(longest + 1), _ROWS)
        if not decoder.given:  # all there are, of the graph that the prompts ran in
            rows = decoder.extent(samples, self.most)
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
            held = Buffers(bound, rows)
            decoder.buffers[samples, rows] = held  # for as long as somebody runs on them
        self.buffers = held
        if self.made:
            self.past = {
                name: np.moveaxis(self.made[present], decoder.samples.get(name, 0), 0)
                for name, present in decoder.presents.items()
            }
            self.made = {}

    def _take(self, held: Buffers) -> None:
        """Move keys and values to buffers, after moving out those of another run."""
        owner = held.owner()
        if owner is not None and owner.buffers is held:
            owner._spill(held, owner.seen)
        feeds = held.bound.feeds
        mask, _ = self.decoder.told(feeds)
        if mask is not None:
            mask[:] = 0
            for row, count in enumerate(self.seen):
                mask[row, :count] = 1
        for name, axis in self.decoder.past.items():
            buffer, past = (np.moveaxis(a, axis, 1) for a in (feeds[name], self.past[name]))
            for row, count in enumerate(self.seen):
                buffer[row, :count] = past[row, :count]
                buffer[row, count:] = 0
        self.past = {}
        held.owner = weakref.ref(self)

    def _spill(self, held: Buffers, seen: Sequence[int] | Array) -> None:
        """Move keys and values from buffers to arrays."""
        longest = max(seen)
        for name, axis in self.decoder.past.items():
            cut = (slice(None),) * axis + (slice(longest),)
            self.past[name] = held.bound.feeds[name][cut].copy()
        held.owner = lambda: None


class _Unfit(Exception):
    """The model has no step that keeps its past in buffers; says why."""


def _near(a: Array, b: Array) -> bool:
    """Return whether logits are equal up to the order of additions."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max()))))
