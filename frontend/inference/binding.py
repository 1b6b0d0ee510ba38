"""How graphs of a model are bound for inference: over constant weights, or over streamed ones.

Sessions of one model that run at once share what is here, so weights are packed once for all.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from soapstone.engine.constants import Constants, Found
from soapstone.engine.inference import InferenceGraph
from soapstone.engine.lower import fold_weights, split_constants
from soapstone.engine.lower.few_bits import ROUNDING
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.session import Bound, Session
from soapstone.errors import DataError
from soapstone.frontend.inference.families import GraphFamilies, Known
from soapstone.frontend.inference.session_strategy import SessionStrategy
from soapstone.frontend.inference.shape_warmup import ShapeWarmup
from soapstone.frontend.inference.sources import Notes, Source
from soapstone.ir.by_extents import Choice, Said, noted
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import NOTHING, Array, Role, spec_of
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.choices import Choices, Tune
from soapstone.records import dataclass
from soapstone.runtime import Machine, Runtime
from soapstone.runtime.forks import tell

if TYPE_CHECKING:
    from soapstone.frontend.memory_plans import Plans

_CHOICES = 1 << 12  # of kernels that a session keeps: ever more shapes have ever more calls


class Packed:
    """What kernels have made of a model's weights, for all its shapes and all its sessions.

    Attributes:
        found: packed weights, by what they were packed of.
        lock: held while a graph is made and bound.
        families: the graphs of the model for the shapes that were met.
        warmup: the thread that makes graphs for shapes that are likely to come.
    """

    def __init__(self) -> None:
        self.forked()
        tell(self)

    def forked(self) -> None:
        """In a child process nobody holds the lock, and weights are packed anew."""
        self.found, self.lock, self.families = Found(), threading.Lock(), GraphFamilies()
        self.warmup = ShapeWarmup(self.lock)


@dataclass(frozen=True, eq=False)
class Binder:
    """A model, what it runs on, and how.

    Attributes:
        source, packed: the model, and what its sessions share.
        strategy, machine: the strategy, and what runs it.
        plans: how weights are streamed, None where they are constant.
        plain, layouts, tune, precision: see `InferenceSession`.
    """

    source: Source
    packed: Packed
    strategy: SessionStrategy
    machine: Machine
    plans: Plans | None
    plain: bool
    layouts: Layouts | None
    tune: Tune
    precision: str

    def session(self, values: dict[str, Array]) -> Session:
        """Return a new session that graphs are bound in. values: what is streamed begins with."""
        mapper = GraphMapper()
        if self.plans is not None:
            from soapstone.mappers.bounded import BoundedMemoryMapper

            mapper = BoundedMemoryMapper(self.plans)
        return self._session(mapper, Choices(tune=self.tune, most=_CHOICES), values, None)

    @property
    def binds_beside(self) -> bool:
        """Whether a thread may bind graphs while others run, and measures nothing meanwhile."""
        machine = self.machine
        alone = len(machine.processors) == 1 and machine.processors[0].kind == "cpu"
        return alone and self.plans is None and self.tune != "now"

    def beside(self, session: Session) -> Session:
        """Return a session in which the calling thread binds graphs that run as one's own."""
        mapper = GraphMapper()
        runtime = Runtime(self.machine, mapper, session.runtime.executor.beside)
        runtime.executor.here = True
        return self._session(mapper, session.choices, {}, runtime)

    def _session(
        self,
        mapper: GraphMapper,
        choices: Choices,
        values: dict[str, Array],
        runtime: Runtime | None,
    ) -> Session:
        return Session(
            *(self.machine, mapper, 0),
            choices=choices,
            values=values,
            precision=SINGLE if self.precision in ROUNDING else self.precision,
            runtime=runtime,
        )

    @property
    def extends(self) -> bool:
        """Whether the graph for a shape may be made of those for others."""
        return self.plans is None and not self.plain and self.strategy.given is None

    def known(self, given: Mapping[str, Array]) -> tuple[Known, Mapping[str, Array]]:
        """Return the graph for inputs, and those on whose contents it depends.

        Raises:
            GraphError: the model has none for these shapes.
            DataError: a weight is missing, or of another type or shape.
        """
        # Of sequences and optional values no graph is made, which the source says.
        arrays = {name: each for name, each in given.items() if isinstance(each, np.ndarray)}
        shapes = {name: array.shape for name, array in arrays.items()}
        families = self.packed.families
        found = families.at(shapes, self._plain) if len(arrays) == len(given) else None
        if found is not None:
            return found, NOTHING
        graph, contents, notes = self.source.noted(given, "lasting" if self.extends else "run")
        known = self.folded(replace(graph, updates={}), notes=notes)
        if self.extends and known.layouts is None and not contents:
            families.note(shapes, known, self.source.weights())
        return known, contents

    @property
    def _plain(self) -> bool:
        """Whether graphs are launched alike for all extents, as far as passes see to it."""
        return self.extends and len(self.machine.workers) == 1

    def prepare_families(self, session: Session) -> None:
        """Lower the graphs of each family, so that graphs derived from it need no passes.

        The thread of the warm-up calls this.
        """

        def make(known: Known) -> InferenceGraph:
            self.packed.warmup.give_way()
            return self._inference_graph(session, known)

        if self._plain:
            self.packed.families.prepare(make)

    @property
    def has_unprepared(self) -> bool:
        """Whether there is a family for `prepare_families` to prepare."""
        return self._plain and self.packed.families.has_unprepared

    def folded(
        self, graph: Graph, constants: Mapping[str, Array] = NOTHING, notes: Notes | None = None
    ) -> Known:
        """Return a graph ready to be bound, with what constant weights allow to fold.

        constants: what it reads besides the weights. notes: see `Source`.

        Raises:
            DataError: a weight is missing, or of another type or shape.
        """
        layouts, pruned = self._orders(graph), graph.pruned()
        held = _held(graph, {**self.source.weights(), **constants})
        choices = list[Choice | Said]()
        if self.plans is None and not self.plain:
            kind = self.machine.processors[0].kind
            with noted() as choices:
                pruned = fold_weights(pruned, held, processor=kind, precision=self.precision)
        made = pruned, held
        return Known(lambda: made, graph.outputs, graph, layouts, notes, lambda: tuple(choices))

    def bind(
        self, session: Session, values: dict[str, Array], known: Known, in_turn: bool = False
    ) -> Bound:
        """Return a graph compiled to a trace, over constant or streamed weights.

        session, values: of `session`. known: of `known` or `folded`. in_turn: see
        `Session.bind_prepared`.

        Raises:
            DataError: a weight is missing, or of another type or shape.
        """
        try:
            if self.plans is None and not self.plain:
                ready = known.inference or self._inference_graph(session, known)
                self.packed.found.bound()
                bound = session.bind_prepared(
                    *(ready.prepared.graph, ready.prepared, ready.constants),
                    names=known.outputs,
                    in_turn=in_turn,
                )
                ready.constants.bound()
                return bound
            graph, held = known.graph, self._held(known)
            fixed: Mapping[str, Array]
            if self.plans is not None:
                fixed = {name: held.pop(name) for name in graph.inputs(Role.CONSTANT)}
                values.update(held)
            else:
                self.packed.found.bound()
                prologue = replace(graph, nodes=(), outputs=())
                fixed = Constants(held, prologue, self.packed.found)
            strategy = self.strategy.of(known.given or graph, graph, known.layouts)
            bound = session.bind(graph, strategy, fixed, names=known.outputs, fuse=not self.plain)
            if isinstance(fixed, Constants):
                fixed.bound()
            return bound
        finally:
            values.clear()

    def _held(self, known: Known) -> dict[str, Array]:
        return _held(known.graph, {**self.source.weights(), **known.constants})

    def _inference_graph(self, session: Session, known: Known) -> InferenceGraph:
        """Return a graph over constant weights, lowered."""
        graph, held = known.graph, self._held(known)
        prologue, rest = split_constants(graph, graph.roles.keys() & held.keys())
        constants = Constants(held, prologue, self.packed.found)
        strategy = self.strategy.of(known.given or graph, rest, known.layouts)
        return InferenceGraph(
            held, prologue, constants, session.prepared(rest, strategy, {*constants})
        )

    def _orders(self, graph: Graph) -> Layouts | None:
        """Return the axis orders of a graph's values; a file's are for all extents of its dims."""
        layouts = self.layouts
        if layouts is None and self.source.layouts is not None:
            known = self.source.layouts
            layouts = {name: order for name, order in known.items() if name in graph.tensors}
        if layouts is not None:
            Strategy({DEFAULT: Configuration()}, layouts=layouts).check(graph)
        return layouts


def _held(graph: Graph, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a graph takes besides its inputs, checked."""
    fixed = {name for name, role in graph.roles.items() if role is not Role.INPUT}
    missing = sorted(fixed - weights.keys())
    if missing:
        raise DataError(f"model {graph.name!r}: weight {missing[0]!r} is missing")
    for name in sorted(fixed):
        found, needed = spec_of(weights[name]), graph.tensors[name]
        if found != needed:
            raise DataError(
                f"model {graph.name!r}: weight {name!r}: {found} found, {needed} needed"
            )
    return {name: weights[name] for name in fixed}
