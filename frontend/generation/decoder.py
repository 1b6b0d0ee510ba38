"""A session's model as a decoder: its graphs for prompts and for single tokens.

Whether a model allows padded prompts, and keys and values in buffers (`kept.py`), is determined
once for each session. What it does not allow is not used, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from soapstone.errors import DataError, warn
from soapstone.frontend.generation.appended import appended
from soapstone.frontend.generation.grouped import grouped
from soapstone.frontend.generation.kept import differs, keeping, pairs, unfit
from soapstone.frontend.generation.last_logits import of_last
from soapstone.frontend.generation.step_graph import Step
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.generation.run import Buffers
    from soapstone.frontend.inference.serial_session import SerialSession
    from soapstone.frontend.inference.sources import Field

IDS, MASK, PLACES, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_LEAST = 32  # tokens that a prompt is filled up to
_GRAPHS = 4  # that are kept: a step and a prompt need the same ones several times


def room(length: int) -> int:
    """Return the extent that is bound for a length: a power of two, or 1.5 times one."""
    power = max(_LEAST, 1 << max(length - 1, 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > _LEAST else power


class Decoder:
    """A session's model as a decoder.

    Raises:
        DataError: the model is no decoder; names the input or output.
    """

    def __init__(self, session: SerialSession) -> None:
        self.session, source = session, session.source
        fields = {each.name: each for each in source.inputs}
        self.label = f"generate: model {source.name!r}"
        past = [each for each in source.inputs if each.name not in (IDS, MASK, PLACES)]
        if not session.in_main_memory:
            raise DataError(f"{self.label}: a session of cores, without a fast memory, needed")
        if len(fields) == len(past) == 1 and _are_ids(past[0]):
            self.ids, past = past[0], []
        elif IDS in fields:
            self.ids = fields[IDS]
        else:
            have = ", ".join(map(str, source.inputs))
            raise DataError(f"{self.label}: inputs {have} found; {IDS!r} needed")
        self.mask, self.places = fields.get(MASK), fields.get(PLACES)
        self.past = {each.name: _time_axis(each, self.label) for each in past}
        self.past_fields = {each.name: each for each in past}
        self.widths: dict[str, int] = {}  # of other open dims of the past, by name
        if LOGITS not in source.outputs and len(source.outputs) > 1:
            raise DataError(
                f"{self.label}: outputs {', '.join(source.outputs)} found; {LOGITS!r} needed"
            )
        self.logits = LOGITS if LOGITS in source.outputs else source.outputs[0]
        self.given = bool(self.past)  # whether the model takes a past, or its step is derived
        self.kept = True  # whether keys and values are
        self.filled = True  # whether prompts are
        self.refused: int | None = None  # the least extent that it was found not to take
        self.presents: dict[str, str] = {}  # by input, the output that continues it
        # By samples, new tokens and those of the past: graphs, with what keeps their constants.
        self.graphs: dict[tuple[int, int, int], tuple[Graph, list[Array]]] = {}
        self.derived: dict[tuple[int, int], Step | str] = {}  # by samples and tokens
        self.extents: Mapping[str, int | None] = {}  # of tables, by the input that is looked up
        self.made = 0  # tokens that there are logits of
        self.samples: dict[str, int] = {}  # by input, the axis of them in that output, if not 0
        self.tried: set[str] = set()  # what has been found to have no effect
        self.buffers: WeakValueDictionary[tuple[int, int], Buffers] = WeakValueDictionary()

    def check(self, prompts: Sequence[Sequence[int]], most: int, ends: Collection[int]) -> None:
        """Check that the model takes prompts and `most` further tokens, those of `ends` included.

        Raises:
            DataError: a token that it does not know or make, or too many; names prompt and input.
        """
        longest = max(map(len, prompts))
        self._know_extents(len(prompts), longest, longest + max(most - 1, 0))
        wrong = [token for token in ends if not 0 <= token < self.made]
        if wrong:
            raise DataError(
                f"generate: stop: token {min(wrong)} found; output {self.logits!r} has logits of"
                f" {self.made} tokens, so one of 0 to {self.made - 1} needed"
            )
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

        if not self.given and not isinstance(fixed, int):
            try:
                length = longest + max(most - 1, 0)
                self.graph(len(prompts), self.extent(len(prompts), length), 0)
            except GraphError as error:  # of positions that follow from the length, say
                raise DataError(
                    f"{self.label}: a prompt of {longest} tokens and max_new_tokens {most} found,"
                    f" fewer needed: {error}"
                ) from None

    def extent(self, samples: int, length: int) -> int:
        """Return the extent that texts of a length are run in: one of few, if the model takes it.

        length: of all tokens but the last that is made, which is run in nothing.
        """
        fixed, wanted = self.ids.shape[1], room(length)
        if isinstance(fixed, int):
            return fixed
        if not self.filled or (self.refused is not None and wanted >= self.refused):
            return length
        if wanted > length:
            try:
                self.graph(samples, wanted, 0)
            except GraphError:
                self.refused = wanted
                return length
        return wanted

    def _know_extents(self, samples: int, longest: int, most: int) -> None:
        """Determine the numbers of tokens and positions from the model's tables and logits.

        samples, longest, most: of prompts, whose graph shows them; otherwise that of a token does.
        """
        if self.extents:
            return
        fixed = self.ids.shape[1]
        if isinstance(fixed, int):
            graph = self.graph(1, fixed, 1 if self.given else 0)
        else:
            length = longest if self.given else most
            try:
                graph = self.graph(samples, self.extent(samples, length), 0)
            except GraphError:  # more than it takes, perhaps
                graph = self.graph(1, 1, 1 if self.given else 0)
        self.made = int(graph.tensors[self.logits].shape[-1])
        self._know_widths(graph)
        names = [each.name for each in (self.ids, self.places) if each is not None]
        self.extents = {name: _looked_up(graph, name) for name in names}

    def feeds(self, samples: int, new: int, past: int) -> dict[str, Array]:
        """Return zeros for each input, for numbers of new and of past tokens."""
        found: dict[str, Array] = {}
        for each in (self.ids, self.places):
            if each is not None:
                found[each.name] = np.zeros((samples, new), each.dtype)
        if self.mask is not None:
            found[self.mask.name] = np.zeros((samples, past + new), self.mask.dtype)
        for name, each in self.past_fields.items():
            dims = each.shape[1:]
            shape = [
                samples,
                *(d if isinstance(d, int) else self.widths.get(str(d), 0) for d in dims),
            ]
            shape[self.past[name]] = past
            found[name] = np.zeros(shape, each.dtype)
        return found

    def _know_widths(self, graph: Graph) -> None:
        """Take the extents of open dims of the past from the outputs, which are in its order."""
        presents = [name for name in graph.outputs if name != self.logits]
        if len(presents) != len(self.past):
            return
        for (name, time), present in zip(self.past.items(), presents):
            dims = zip(self.past_fields[name].shape, graph.tensors[present].shape, strict=True)
            for axis, (dim, extent) in enumerate(dims):
                if axis not in (0, time) and isinstance(dim, str) and dim not in self.widths:
                    self.widths[dim] = extent
                    self.graphs.clear()

    def told(self, feeds: Mapping[str, Array]) -> tuple[Array | None, Array | None]:
        """Return the mask and the positions among what a bound graph is fed, None for no such."""
        mask, places = (
            None if each is None else feeds.get(each.name) for each in (self.mask, self.places)
        )
        return mask, places

    def assumed(self, samples: int, extent: int) -> dict[str, Array]:
        """Return the mask and the positions of a model whose step is derived, which are constant.

        They are those of texts of `extent` tokens: what later tokens are is of no effect there.
        """
        found: dict[str, Array] = {}
        if self.kept and not self.given:
            if self.mask is not None:
                found[self.mask.name] = np.ones((samples, extent), self.mask.dtype)
            if self.places is not None:
                places = np.arange(extent, dtype=self.places.dtype)
                found[self.places.name] = np.broadcast_to(places, (samples, extent)).copy()
        return found

    def graph(self, samples: int, new: int, past: int) -> Graph:
        """Return the model's graph for these lengths; the last few are kept.

        In the graph of a model without a past, products have a row for each token of each sample,
        where the file has joined these two dims, and mask and positions are constants: so a step
        can be derived.
        """
        key = samples, new, past
        found = self.graphs.get(key)
        if found is None:
            made = self.session.graph_of(self.feeds(*key), "decoding")
            weights = self.session.source.weights()
            if not self.given:
                from soapstone.engine.lower.fold import fold
                from soapstone.engine.lower.weights import MOVE_RESHAPES

                assumed = self.assumed(samples, new)
                roles = {**made.roles, **dict.fromkeys(assumed, Role.CONSTANT)}
                weights = {**weights, **assumed}
                made = fold(MOVE_RESHAPES, replace(made, roles=roles), weights)
            _make_room(self.graphs, _GRAPHS)
            found = made, [weights[name] for name in made.roles if name in weights]
            self.graphs[key] = found
        return found[0]

    def whole(self, samples: int, extent: int) -> Graph:
        """Return the graph for `extent` tokens from the first on, with logits of some of them."""
        graph = self.graph(samples, extent, 0)
        if self.kept and not self.given:
            kept = self.past_of(samples, extent)
            graph = replace(graph, outputs=(self.logits, *kept), updates={}).pruned()
        return of_last(graph, self.logits, extent)

    def past_of(self, samples: int, extent: int) -> list[str]:
        """Return the values whose rows a derived step keeps; its buffers are then the past.

        If no step can be derived there are none, and a warning says why.
        """
        step = self._derived(samples, extent)
        if isinstance(step, str):
            self.kept = False
            self.graphs.clear()  # in which mask and positions are constants
            self.warn(
                f"{step} may mix tokens with later ones, so no keys and values are kept, and each"
                " token costs as much as all before it"
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
        if not isinstance(step, Step):
            return {}
        return {**step.constants, **self.assumed(samples, rows)}

    def _derived(self, samples: int, extent: int) -> Step | str:
        """Return the step derived from the graph for `extent` tokens, or why there is none."""
        key = samples, extent
        found = self.derived.get(key)
        if found is None:
            graph = self.graph(samples, extent, 0)
            weights = {**self.session.source.weights(), **self.assumed(samples, extent)}
            found = appended(graph, self.ids.name, self.logits, weights)
            _make_room(self.derived, self.session.bounds.most)
            self.derived[key] = found
        return found

    def step(self, samples: int, rows: int) -> Graph | str:
        """Return the graph for a token with buffers of `rows` rows, or why there is none."""
        derived = self._derived(samples, rows) if self.kept and not self.given else ""
        if isinstance(derived, Step):
            constants = self.constants(samples, rows)
            return grouped(derived.graph, {**self.session.source.weights(), **constants})
        if not self.past or self.mask is None:
            return "it has no past and attention_mask among its inputs"
        graph = self.graph(samples, 1, rows - 1)
        found = pairs(graph)
        if {pair.past for pair in found} != self.past.keys():
            missing = sorted(self.past.keys() - {pair.past for pair in found})
            return f"no output is input {missing[0]!r} joined with what is new"
        weights = self.session.source.weights()
        why = unfit(graph, found, self.logits, self.mask.name, weights)
        if not why:  # of all lengths that it will be run with, the least and the most
            least = self.graph(samples, 1, 1)
            where = differs(graph, least, self.session.source.weights(), self.logits)
            why = f"{where} depends on the length of the past" if where else ""
        self.presents = {pair.past: pair.present for pair in found}
        return why or grouped(keeping(graph, found, self.logits), self.session.source.weights())


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """Remove the oldest entry if there are `most`."""
    if len(kept) >= most:
        kept.pop(next(iter(kept)), None)


def _are_ids(each: Field) -> bool:
    return each.dtype in ("int32", "int64") and len(each.shape) == 2


def _looked_up(graph: Graph, ids: str) -> int | None:
    """Return the smallest extent of the tables that token ids index; None for no table."""
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
    """Return the axis along which a past grows: the first after axis 0 with an open extent."""
    if len(each.shape) < 3:
        raise DataError(
            f"{label}: input {each} found; {IDS!r}, {MASK!r}, {PLACES!r} and keys and values of"
            " three or more dims needed, so a decoder without an encoder"
        )
    found = [axis for axis, dim in enumerate(each.shape) if axis and not isinstance(dim, int)]
    if not found:
        raise DataError(f"{label}: input {each} found; an open extent after the first needed")
    return found[0]
