"""A dynamic session: a model written as plain Python over values that are computed later.

Each step records the calls of cells and layers that Python makes, runs those of one cell together
where their operands are there, goes back through them, and updates the parameters.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from soapstone.engine.session import Bound, Session
from soapstone.errors import DataError
from soapstone.frontend.arguments import count
from soapstone.frontend.dynamic import checkpoints
from soapstone.frontend.dynamic.patterns import Patterns
from soapstone.frontend.dynamic.record import Recorder
from soapstone.frontend.dynamic.report import CellReport, Report
from soapstone.frontend.dynamic.rows import Graphs
from soapstone.frontend.dynamic.runs import Run
from soapstone.frontend.dynamic.schedule import Agenda
from soapstone.frontend.dynamic.table import Table
from soapstone.frontend.dynamic.tape import RESULTS, Units, placed
from soapstone.frontend.dynamic.values import Lazy
from soapstone.frontend.training.hooks import Hooks
from soapstone.frontend.training.optimizers import Optimizer, optimizer as as_optimizer
from soapstone.frontend.training.state import Position
from soapstone.frontend.training.trainer import NonFiniteLoss
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.ir.training.guard import LEARNING_RATE, STEP
from soapstone.mappers import load as load_mapper
from soapstone.native.threads.openmp import available, set_threads
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.start import machine_of
from soapstone.system import deep_recursion, usable_cores

STAGES = (
    "recording",
    "finding",
    "scheduling",
    "compiling",
    "forward",
    "backward",
    "weights",
    "update",
)
REUSE = ("off", "patterns", "batch", "all")
_LOSS = "loss"


class DynamicSession(Recorder):
    """A model whose graph changes from sample to sample, and its training.

    Layers are methods, as of `Model`, on values of one sample each, whose first axis has extent 1.
    One that has parameters needs a name: calls of one name share them.

    Args:
        name: of the model. optimizer: an SGD, Adam or AdamW, or its name in small letters.
        seed: of initial parameters and of dropout.
        cpus: cores that share a run, by default all: as threads of OpenMP within its operators, or
            where there is no OpenMP each with some of the rows, if they are many.
        reuse: "all"; "patterns", which computes each call of a cell alone; "batch", which batches
            operators, whatever cell they are of; "off", operator by operator.
        pattern_depth, collect_steps, pattern_frequency: layers outside of cells that occur together
            become patterns: how deep at most, 1 for none; in how many steps they are counted
            before; how often they must occur in these (P_Depth, P_Collect and P_Freq of Liu).

    Raises:
        GraphError: an argument that does not fit.

    Example:
        >>> with soapstone.DynamicSession("sums", "sgd") as session:
        ...     words = session.table("words", 4, 8)
        ...     @session.cell
        ...     def merge(m, left, right):
        ...         return m.dense(m.concat([left, right], axis=1), 8, name="merge")
        ...     def of(tree):
        ...         return words[tree] if isinstance(tree, int) else merge(*map(of, tree))
        ...     loss = session.step([session.cross_entropy(of(((0, 1), 2)), 3)])
    """

    def __init__(
        self,
        name: str = "model",
        optimizer: Optimizer | str = "adam",
        *,
        seed: int = 0,
        cpus: int | None = None,
        reuse: str = "all",
        pattern_depth: int = 8,
        collect_steps: int = 3,
        pattern_frequency: int = 10,
    ) -> None:
        if reuse not in REUSE:
            raise GraphError(f"reuse {reuse!r} found, one of {', '.join(REUSE)} needed")
        self.optimizer = as_optimizer(optimizer)
        cores = usable_cores() if cpus is None else count("cpus", cpus)
        processors, threads = (1, cores) if available() else (cores, 1)
        machine = machine_of("local", processors, threads)
        mapper = load_mapper("data_parallel", None)
        attach(mapper, machine)
        self.session = Session(machine, mapper, seed)
        self.session.runtime.executor.here = True
        super().__init__(name, seed, reuse, Graphs(self.session))
        self.position = Position()  # in the data, of `fit`, which says what `data` are
        self.data: dict[str, int] = {}
        self.hooks = Hooks()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._training = True
        self.tables: dict[str, Table] = {}
        self._patterns = Patterns(
            self._pattern,
            lambda number: self._runs[number].cell,
            seed,
            depth=count("pattern_depth", pattern_depth),
            collect=count("collect_steps", collect_steps, 0),
            least=count("pattern_frequency", pattern_frequency),
        )
        self._agenda = Agenda()
        self._update: tuple[tuple[str, ...], Bound] | None = None
        self._log: list[Run] = []
        self._undone = False  # whether some calls that were handed on have not run, as in tiles
        self._tiled = False  # whether there are tiles in this step
        self._stores_of: tuple[int, Array, Array] | None = None  # see `_stored`
        self._deep: AbstractContextManager[None] = nullcontext()
        self._collecting = False
        self._threads = self._openmp = threads
        self._since = time.perf_counter()

    def __enter__(self) -> Self:
        self._collecting = gc.isenabled()
        gc.disable()  # a step makes thousands of objects, which go when it ends
        self._deep = deep_recursion()
        self._deep.__enter__()
        self._openmp = set_threads(self._threads)  # small graphs run in this thread
        self._since = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._deep.__exit__(kind, error, at)
        if self._collecting:
            gc.enable()
        set_threads(self._openmp)
        self.close()

    def close(self) -> None:
        """Forget what is recorded, stop the workers and free the memory."""
        self.forget()
        self.session.close()

    def table(self, name: str, rows: int, width: int, initial: Initial | None = None) -> Table:
        """Return a trained table of vectors, whose rows are values: `table[id]`.

        A step updates the rows that it used, and their states, alone.

        Args:
            name: of the table. rows, width: its shape.
            initial: what it begins as, normal numbers of deviation 0.1 by default.

        Raises:
            GraphError: the name is taken.
        """
        if name in self.tables:
            raise GraphError(f"table {name!r}: the name is taken")
        made = Table(self, name, (rows, width), initial or Initial("normal", 0.1))
        self.tables[name] = made
        return made

    def values(self, values: Sequence[Lazy]) -> Array:
        """Return the contents of values of one type, (values, …); what is needed is computed.

        Raises:
            DataError: values of several types or of a step that is over.

        What else goes wrong ends the step.
        """
        self._check(values)
        rows = values[0].rows
        if any(value.rows is not rows for value in values):
            raise DataError("values: several types found, one needed")
        try:
            self._run(values)
        except BaseException:
            self.forget()  # some of what was asked for has run, and some has not
            raise
        return rows.data[self._rows_of(values)]

    def _rows_of(self, values: Sequence[Lazy]) -> Array:
        """Return which rows values are that are there."""
        codes = np.array([value.code for value in values], np.int64)
        made = codes >= 0
        rows = ~codes // RESULTS
        rows[made] = self._tape.rows[self._tape.results_of(codes[made])]
        return rows

    def _check(self, values: Sequence[Lazy]) -> None:
        if not values:
            raise DataError("values: none found, 1 or more needed")
        for value in values:
            here = isinstance(value, Lazy) and value.model is self and value.column.live
            if not here:
                raise DataError(f"values: {value!r} found, values of this step needed")

    def _run(self, asked: Sequence[Lazy]) -> None:
        """Compute all that is recorded, and some values."""
        with self._timed("forward"):
            for table in self.tables.values():
                table.fetch()
        tape, begun = self._tape, len(self._tape.units)
        if begun == len(self._calls) and (self._rows_of(asked) >= 0).all():
            return
        with self._timed("scheduling"):
            tape.extend(list(islice(self._calls, begun, None)), self._stored[0])
            results = tape.results_of([value.code for value in asked if value.code >= 0])
        with self._timed("finding"):
            if self._undone:
                pending = tape.needed(begun, results)
            else:
                pending = np.arange(begun, len(tape.units))
            self._undone = True  # until all of that has run
            units, tiled = tape.units.taken(pending), False
            if self.reuse in ("patterns", "all"):
                units, tiled = self._patterns.applied(units, len(tape.rows), self._layers, results)
        with self._timed("scheduling"):
            order, starts = np.arange(len(units)), np.arange(len(units) + 1)
            if self.reuse in ("batch", "all"):
                makers = units.makers(len(tape.rows))
                order, starts = self._agenda.batches(units.cells, units.first, makers)
            places, firsts = self._placed(units, order, starts)
        with self._timed("forward"):
            at = 0
            cells = units.cells[order[starts[:-1]]].tolist()
            for cell, count, outputs in zip(cells, np.diff(starts).tolist(), firsts.tolist()):
                runs = self._runs[cell]
                made = runs.run(count, places, at, outputs, self._training)
                at += count * len(runs.operands)
                if self._training:
                    self._log += made
            self.graphs.work.do()
        self._undone = self._tiled = self._tiled or tiled

    def _placed(self, units: Units, order: Array, starts: Array) -> tuple[Array, Array]:
        """Return what `placed` does, with room for all results."""
        stores = list(self._stores.values())
        sizes = np.array([rows.size for rows in stores], np.int64)
        given = units.cells, units.first, units.operands, units.outs, units.results
        made: tuple[Array, Array] = placed(
            order, starts, *given, self._stored[1], sizes, self._tape.rows
        )
        for rows, size in zip(stores, sizes.tolist()):
            rows.take(size - rows.size)
        return made

    @property
    def _stored(self) -> tuple[Array, Array]:
        """How many results each cell has, by its number, and in which arrays they are."""
        if self._stores_of is None or self._stores_of[0] != len(self._runs):
            counts = np.zeros(max(self._runs) + 1, np.int64)
            most = max(len(runs.outputs) for runs in self._runs.values())
            stores = np.zeros((len(counts), most), np.int64)
            for number, runs in self._runs.items():
                counts[number] = len(runs.outputs)
                stores[number, : counts[number]] = [rows.number for rows in runs.outputs]
            self._stores_of = len(self._runs), counts, stores
        return self._stores_of[1], self._stores_of[2]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        self.seconds["recording"] += began - self._since
        compiling = self.graphs.seconds
        try:
            yield
        finally:
            self._since = time.perf_counter()
            compiling = self.graphs.seconds - compiling
            self.seconds["compiling"] += compiling
            self.seconds[stage] += self._since - began - compiling

    @contextmanager
    def inference(self) -> Iterator[None]:
        """What is recorded inside is not trained: no dropout, nothing kept."""
        if len(self._tape.units) < len(self._calls) or self._log:
            raise GraphError(
                "inference: found in the midst of a step; step() or forget() needed before"
            )
        self._training = False
        try:
            yield
        finally:
            self._training = True
            self.forget()

    def step(self, losses: Sequence[Lazy]) -> float:
        """Train on what was recorded, and return the mean of the losses; the step is over then.

        losses: values of one number each.

        Raises:
            DataError: no losses, or none of this step.
            NonFiniteLoss: the mean is NaN or infinite; nothing is changed.
        """
        self._check(losses)
        if any(loss.rows.spec.size != 1 or not loss.rows.spec.is_float for loss in losses):
            raise DataError("losses: values of one floating-point number each needed")
        if not self._training:
            raise DataError("step: found where nothing is trained, in `inference`")
        try:
            self._run(losses)
            at = self._rows_of(losses).tolist()
            mean = float(np.mean([x.rows.data[row].item() for x, row in zip(losses, at)]))
            if not np.isfinite(mean):
                raise NonFiniteLoss(
                    f"step {self.updates}: loss is {mean}; parameters are as before"
                )
            self._learn(losses)
            self._patterns.step()
        finally:
            self.forget()
        return mean

    def _learn(self, losses: Sequence[Lazy]) -> None:
        """Go back through what ran, and update parameters and the rows of tables."""
        with self._timed("backward"):
            for rows in self._stores.values():
                if rows.spec.is_float:
                    rows.clear_gradients()
            for loss, row in zip(losses, self._rows_of(losses).tolist()):
                loss.rows.grads[row] += 1 / len(losses)
            for run in reversed(self._log):
                run.cell.back(run)
            self.graphs.work.do()
        with self._timed("weights"):
            feeds = self._updating().feeds
            sums = {name: feeds[_gradient(name)] for name in self._trained}
            for total in sums.values():
                total[...] = 0
            for runs in dict.fromkeys(run.cell for run in self._log):
                runs.sums(sums)
            used = [table.gradients() for table in self.tables.values()]
            self.optimizer.clip([*sums.values(), *used])
        with self._timed("update"):
            rate = self.optimizer.rate(self.updates)
            self.updates += 1
            if self._trained:
                bound = self._updating()
                bound.feeds[LEARNING_RATE][...] = rate
                if STEP in bound.feeds:
                    bound.feeds[STEP][...] = self.updates
                self.graphs.run(bound)
            for table, grad in zip(self.tables.values(), used):
                table.learn(grad, rate, self.updates)

    @property
    def _trained(self) -> tuple[str, ...]:
        """The parameters of all cells that ran."""
        return tuple(
            dict.fromkeys(n for runs in self._runs.values() for n in runs.cell.layout.trained)
        )

    def _updating(self) -> Bound:
        """Return the bound graph that updates all parameters."""
        names = self._trained
        if self._update is None or self._update[0] != names:
            shapes: dict[str, TensorSpec] = {}
            firsts: dict[str, Initial] = {}
            for runs in self._runs.values():
                graph = runs.cell.layout.forward
                shapes.update({n: graph.tensors[n] for n in graph.inputs(Role.PARAMETER)})
                firsts.update(graph.initials)
            builder = GraphBuilder(f"{self.name}.update")
            finite = update_inputs(builder)
            for name in names:
                spec = shapes[name]
                builder.input(name, spec.shape, spec.dtype, Role.PARAMETER, firsts.get(name))
                grad = builder.input(_gradient(name), spec.shape, spec.dtype)
                self.optimizer.emit(builder, name, grad, finite)
            builder.output(finite)
            graph = builder.build()
            bound = self.graphs.bind(graph, apart=True)
            bound.feeds[_LOSS][...] = 0
            self._update = names, bound
        return self._update[1]

    def forget(self) -> None:
        """End a step: its values are no more."""
        super().forget()
        self._undone = self._tiled = False
        self._log.clear()
        for table in self.tables.values():
            table.forget()
        if self._collecting:
            gc.collect(0)

    def report(self) -> Report:
        """Return what ran so far: cells, their calls and runs, and where time went."""
        rows = [
            CellReport(
                runs.cell.name or runs.cell.kind,
                runs.cell.operators,
                runs.calls,
                runs.runs,
                sum(map(len, (runs.forward, runs.backward, runs.weights, runs.inference))),
            )
            for runs in self._runs.values()
        ]
        return Report(self.reuse, self.updates, tuple(rows), dict(self.seconds))

    def state(self) -> dict[str, Array]:
        """Return copies of all parameters and their states, by name.

        What was loaded of cells that were not called since is among them.
        """
        tables = [table.state() for table in self.tables.values()]
        loaded, other = self.session.waiting, self.layers_of.left_over
        waiting = {name: value.copy() for name, value in loaded.items() if not other(name)}
        every = (waiting, self.session.state(), *tables)
        return {name: value for each in every for name, value in each.items()}

    def load_state(self, values: dict[str, Array]) -> None:
        """Replace parameters and their states.

        values: by name, as `state` returns them; cells that are not recorded yet begin with theirs.

        Raises:
            DataError, GraphError: another shape; then nothing is replaced.
        """
        of_tables = [table.own(values) for table in self.tables.values()]
        taken = {name for own in of_tables for name in own}
        self.session.load_state({n: value for n, value in values.items() if n not in taken})
        for table, own in zip(self.tables.values(), of_tables):
            table.load_state(own)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write parameters, their states, steps and position in the data, atomically.

        path: of a file that ends in .safetensors or .npz.

        Raises:
            CheckpointError: a path that does not serve, or values that are not finite.
        """
        checkpoints.save(self, path)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> Mapping[str, Any]:
        """Go on where a checkpoint was, and return of what data: its batches and their size.

        Args:
            path: of the file. Tables are to be made and cells decorated before; cells may be called
                later.
            strict: whether tables, cells and parameters must be the same; else those that the
                checkpoint does not have begin anew, and what it has besides is left.

        Raises:
            CheckpointError: truncated or changed, or of another model, seed, optimizer or place in
                other data, or with other tables, cells, layers or parameters in them, for which
                cells that are first called later raise it too. Nothing is loaded then.
            DataError, GraphError: another shape; nothing is loaded.
        """
        return checkpoints.load(self, path, strict).get("data") or {}


def update_inputs(builder: GraphBuilder) -> str:
    """Declare what updates read besides parameters and gradients; return the flag they look at."""
    builder.input(LEARNING_RATE, (), role=Role.SCALAR)
    builder.input(STEP, (), "int64", Role.SCALAR)
    return builder.apply("is_finite", builder.input(_LOSS, ()), name="finite")[0]


def _gradient(name: str) -> str:
    return f"{name}.gradient"
