"""A compiled model: its graphs, its session, and the graphs that are bound in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from soapstone.engine.constants import whole_file
from soapstone.engine.mapper import GraphMapper, strategy_of
from soapstone.engine.session import CARRIED, Bound, Session
from soapstone.frontend.arguments import count
from soapstone.frontend.data.feeding import Feeding
from soapstone.frontend.optimization.training import Ground, Steps
from soapstone.frontend.training.hooks import Hooks
from soapstone.frontend.training.loss_scale import mixes
from soapstone.frontend.training.names import matching
from soapstone.frontend.training.objective import Penalty, objective
from soapstone.frontend.training.optimizers import optimizer as as_optimizer
from soapstone.frontend.training.options import Options
from soapstone.frontend.training.state import Position, TrainingState
from soapstone.frontend.training.step_graph import (
    GRADIENTS,
    evaluation_graph,
    gradient_graph,
    training_graph,
)
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array, Role
from soapstone.ir.training.precision import mixed
from soapstone.kernels.choices import Choices
from soapstone.mappers import load as load_mapper
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.mappers.ranges import RangesMapper
from soapstone.native.memory import address
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.start import rank_of

if TYPE_CHECKING:
    from soapstone.frontend.model import Model

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="Compiled")


def together(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Mark a method that all processes of a run call alike: an error in one stops all."""

    @wraps(method)
    def guarded(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if self._session is not None:
                self._session.runtime.executor.stop(error)
            raise

    return cast("Callable[Concatenate[C, P], T]", guarded)


class Compiled:
    """A compiled model, without checkpoints (`Resumable`) and training loops (`Trainer`)."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model = model
        self.optimizer = as_optimizer(options.optimizer)
        self.scaled = mixes(options.precision)
        forward = self._forward(None, training=True)
        parameters = forward.inputs(Role.PARAMETER)
        self.frozen = model.frozen
        self.trains = not self.frozen.issuperset(parameters)
        self.objective = objective(
            options.loss,
            model.output_names,
            options.metrics,
            loss_weights=options.loss_weights,
            weighted=options.weighted,
            penalties=tuple(
                Penalty(name, *model.penalties[name])
                for name in parameters
                if name in model.penalties
            ),
        )
        for setting in ("rates", "decayed"):
            for pattern in getattr(self.optimizer, setting) or ():
                matching(f"{type(self.optimizer).__name__}: {setting}", pattern, parameters)
        self.parts = count("micro_batches", options.micro_batches)
        self.executor = options.executor
        self.first = rank_of(self.executor) == 0
        self._plans = options.plans()
        self.machine = options.runs_on()
        self.rounding = options.rounding(self.machine.processors[0].kind)
        strategy = self._given = options.read_strategy()
        ground = self.machine
        if self._plans is not None:
            self.machine = ground.bounded(self._plans.capacity_bytes, options.overlap)
            self._ranges = options.mapper if isinstance(options.mapper, RangesMapper) else None
            self.mapper: GraphMapper = BoundedMemoryMapper(self._plans, self._ranges)
        else:
            self.mapper = load_mapper(options.mapper, strategy)
        attach(self.mapper, self.machine)
        size = self.part_size(model.batch_size)
        place = Ground(self.machine, self.mapper, model.constants)
        self.steps = Steps(self.original_graph, place, options.optimize, options.step, size)
        self._strategies: dict[str, Strategy] = {}
        self.gradients_of: dict[str, str] = {}  # by parameter, of the bound graph of gradients
        self._repeats = options.choices is not None
        self.choices = Choices() if options.choices is None else Choices.load(options.choices)
        self._bounds: dict[tuple[str, int, tuple[int, ...]], Bound] = {}
        self._session: Session | None = None
        self._position = Position()
        self._fitted, self._hooks = TrainingState(), Hooks()  # of the last fit
        self._sums: dict[str, list[Any]] = {}  # of the epoch so far, of what it ends with
        self._shuffle_seed = model.seed
        self._data: dict[str, int | None] = {}  # what a position counts in
        self.changed = False  # whether parameters are other than the initial ones
        graph = self.original_graph(size)  # everything is checked here
        self.feeding = Feeding(forward, self.objective, model)
        self.carried = {
            name: graph.tensors[name]
            for name, role in graph.roles.items()
            if role in CARRIED and not name.endswith(GRADIENTS)
        }
        shorter = tuple(max(1, extent - 1) for extent in model.varying.values())
        if shorter:
            self._check_lengths(self._step_graph(size, None, shorter), shorter)
        if strategy is not None:
            bounded = self.machine.describe()  # a strategy may be of the machine without a bound
            known = bounded if strategy.machine == bounded else ground.describe()
            strategy.check(self.steps.given or graph, known)

    # Graphs and their bound forms

    @property
    def session(self) -> Session:
        """The session, started with the first bound graph."""
        if self._session is None:
            model = self.model
            self._session = Session(
                self.machine,
                self.mapper,
                model.seed,
                self.executor,
                self.choices,
                model.values,
                self.rounding,
            )
        return self._session

    def training_graph(self, batch_size: int) -> Graph:
        """Return the graph of a training step of a batch_size, optimised if that was asked for.

        Raises:
            GraphError: the model has no output, or no gradient.
        """
        return self.steps.graph(batch_size)

    def original_graph(self, batch_size: int) -> Graph:
        """Return the graph of a training step of a batch_size, not optimised.

        Of a step in micro-batches, it is that of the last one.
        """
        return self._step_graph(batch_size, None if self.parts == 1 else False)

    def _step_graph(
        self, batch_size: int, part: bool | None, lengths: tuple[int, ...] = ()
    ) -> Graph:
        return training_graph(
            self._forward(batch_size, training=True, lengths=lengths),
            self.objective,
            self.optimizer,
            frozen=self.frozen,
            part=part,
            scaled=self.scaled,
        )

    def _check_lengths(self, graph: Graph, lengths: tuple[int, ...]) -> None:
        """Check that the parameters of a graph for other lengths are those of the model."""
        for name, spec in self.carried.items():
            if graph.tensors.get(name) != spec:
                raise GraphError(
                    f"model {self.model.name!r}: {name!r} is {spec}, but at lengths {lengths} of"
                    f" {', '.join(map(repr, self.model.varying))} {graph.tensors.get(name)}; layers"
                    " needed whose parameters do not depend on an input that varies"
                )

    def _forward(
        self, batch_size: int | None, *, training: bool = False, lengths: tuple[int, ...] = ()
    ) -> Graph:
        graph = self.model.build(batch_size, training=training, lengths=lengths)
        return mixed(graph) if self.scaled else graph

    def part_size(self, batch_size: int) -> int:
        """Return the number of samples in the largest micro-batch of a batch of a batch_size."""
        return -(-batch_size // self.parts)

    def strategy_for(self, batch_size: int) -> Strategy:
        """Return the strategy of the training graph for a batch_size.

        Raises:
            MapperError, StrategyError: raised by the mapper, or for its answer.
        """
        return self._strategy(self.training_graph(batch_size))

    def _strategy(self, graph: Graph) -> Strategy:
        key = graph.structural_hash
        if key not in self._strategies:
            if self._given is None:
                self._strategies[key] = strategy_of(self.mapper, graph, self.machine)
            else:
                made_for = self.training_graph(self.part_size(self.model.batch_size))
                self._strategies[key] = self._given.fitted(made_for, graph)
        return self._strategies[key]

    def bound(
        self,
        kind: str,
        batch_size: int,
        inputs: Mapping[str, Array] = NOTHING,
        lengths: tuple[int, ...] = (),
    ) -> Bound:
        """Return the bound graph of one kind for a batch_size; compiled on first use.

        kind: "train", "part" (a micro-batch before the last), "gradients", "evaluate" or "predict".
        inputs: the inputs of the next run, where they are known. An array that is the whole of a
        mapped file is read in place as long as no other one comes. lengths: the extents of inputs
        that vary, where they are not the model's.
        """
        key = (kind, batch_size, lengths)
        lent = {name: array for name, array in inputs.items() if whole_file(array)}
        found = self._bounds.get(key)
        if found is not None and inputs and not _reads(found, inputs):
            self.session.forget(self._bounds.pop(key))
            lent = {}
        if key not in self._bounds:
            if kind == "train" and not lengths:
                graph = self.training_graph(batch_size)
            elif kind in ("train", "part"):
                last = None if self.parts == 1 else False
                graph = self._step_graph(batch_size, True if kind == "part" else last, lengths)
            elif kind == "gradients":
                graph, self.gradients_of = gradient_graph(
                    self._forward(batch_size, training=True, lengths=lengths),
                    self.objective,
                    self.frozen,
                    self.scaled,
                )
            else:
                graph = self._forward(batch_size, lengths=lengths)
                if kind == "evaluate":
                    graph = evaluation_graph(graph, self.objective)
            strategy = self._strategy(graph)
            if self._plans is not None:
                self._plans.step = key == ("train", self.part_size(self.model.batch_size), ())
                self._plans.briefly = self._ranges is not None and not self._ranges.settled
                strategy = self._plans.strategy(strategy)
            constants = {name: self.model.constants[name] for name in graph.inputs(Role.CONSTANT)}
            self._bounds[key] = self.session.bind(graph, strategy, constants, lent=lent)
        return self._bounds[key]

    @property
    def moved_bytes(self) -> tuple[int, int] | None:
        """The bytes that a training step copies between memories: as planned, and as compiled.

        None if no step of the model's batch size is bound, or it follows no memory plan.
        """
        bound = self._bounds.get(("train", self.part_size(self.model.batch_size), ()))
        return None if bound is None else bound.moved_bytes

    @property
    def planned(self) -> bool:
        """Whether graphs follow memory plans."""
        return self._plans is not None

    def rebind(self) -> None:
        """Bind graphs again when they are next run, and ask the mapper again."""
        self._strategies.clear()
        self._bounds.clear()
        if self._session is not None:
            self._session.forget()

    def close(self) -> None:
        """Stop the workers."""
        self._bounds.clear()
        if self._session is not None:
            self._session.close()
            self._session = None


def _reads(bound: Bound, inputs: Mapping[str, Array]) -> bool:
    """Return whether these inputs are the arrays that a bound graph reads in place."""
    return all(
        isinstance(given := inputs.get(name), np.ndarray)
        and given.shape == array.shape
        and address(given) == address(array)
        for name, array in bound.lent.items()
    )
