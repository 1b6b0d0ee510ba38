"""Recording: calls of cells and layers on values become nodes, equal ones the same node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.dynamic.cell import DRAW, Cell, RowRecording, recorded
from soapstone.frontend.dynamic.rows import Graphs, Rows
from soapstone.frontend.dynamic.runs import CellRuns
from soapstone.frontend.dynamic.saved import LayersOf
from soapstone.frontend.dynamic.values import RESULTS, Lazy, Occurrence, Parameter
from soapstone.frontend.layers import Layers
from soapstone.frontend.recording import Call, Tensor
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import TensorSpec, spec_of

_Part = tuple[Cell, tuple[int, ...], tuple[int, ...]]
_MOMENTS = count()  # so that no two steps have one, of whatever session


class Recorder:
    """What a session records; `DynamicSession` says how it is used and runs it.

    Args:
        graphs: which bind what cells become.
    """

    def __init__(self, name: str, seed: int, reuse: str, graphs: Graphs) -> None:
        self.name = name
        self.seed = seed
        self.reuse = reuse
        self.moment = next(_MOMENTS)  # of the step
        self.graphs = graphs
        self._stores: dict[TensorSpec, Rows] = {}
        self._cells: dict[Any, Cell] = {}  # by what they are recorded of
        self.layers_of = LayersOf()
        self._operators: dict[Any, Cell] = {}  # by structure
        self._layers: set[int] = set()  # the numbers of cells that are layers of the session
        self._split: dict[int, tuple[_Part, ...]] = {}
        self._runs: dict[int, CellRuns] = {}  # by the number of the cell
        self._seen: dict[Any, tuple[Lazy, ...]] = {}
        self._made: list[Occurrence] = []  # in this step
        self._begun = 0  # how many of these were handed on to be run
        self.updates = 0  # of parameters, so far
        self._draws = self.rows_of(DRAW)
        self._calls_drawing = 0  # in this step
        self._cross_entropy = self.cell(_cross_entropy)

    def cell(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are one node each: it is recorded once for some types.

        function: of the layers of a model, and of values; it must be pure. What it is given besides
        values (numbers, text) is part of what is recorded.
        """
        name = function.__name__
        if any(key[0] == name for key in self._cells):
            raise GraphError(f"cell {name!r}: the name is taken")
        self.layers_of.function(name)
        known: dict[tuple[Rows, ...], Cell] = {}  # by the types of operands that are all values
        fused = self.reuse in ("patterns", "all")

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                cell = None if kwargs else known.get(tuple([value.rows for value in args]))
            except AttributeError:  # an argument that is no value
                cell = None
            if cell is None:
                cell, operands = self._cell_of(name, function, args, kwargs)
                if not kwargs and operands == args:
                    known[tuple([value.rows for value in operands])] = cell
                args = operands
            if cell.drawing:
                args = (*args, self._drawn())
            outputs = self._record(cell, args) if fused else self._record_parts(cell, args)
            return outputs[0] if len(outputs) == 1 else outputs

        return call

    def __getattr__(self, layer: str) -> Callable[..., Any]:
        if layer.startswith("_") or not callable(getattr(Layers, layer, None)):
            raise AttributeError(f"session {self.name!r} has no layer or attribute {layer!r}")

        made = self._layer(layer)
        setattr(self, layer, made)  # where it is found at once
        return made

    def _drawn(self) -> Lazy:
        """Return a value that tells a call that draws from others of all steps, as it is made.

        So random numbers follow from the order of calls that Python makes, not of what runs.
        """
        made = Lazy(self, None, self._draws)
        made.row = self._draws.take(1)
        self._draws.data[made.row] = (self.updates << 32) + self._calls_drawing
        self._calls_drawing += 1
        return made

    def value(self, contents: Any, dtype: str | None = None) -> Lazy:
        """Return a value of one sample with the contents of an array, or a number.

        dtype: by default the array's own, but float32 and int32 for 64 bits.
        """
        try:
            array = np.asarray(contents, dtype)
        except (TypeError, ValueError) as error:
            raise DataError(f"value: {error}") from None
        if dtype is None and array.dtype.itemsize == 8:
            array = array.astype({"f": "float32", "i": "int32"}.get(array.dtype.kind, array.dtype))
        made = Lazy(self, None, self.rows_of(spec_of(array)))
        made.row = made.rows.put(array[np.newaxis])
        return made

    def cross_entropy(self, logits: Lazy, label: int) -> Lazy:
        """Return the cross-entropy of the logits, (1, classes), of one sample; label: its class."""
        classes = logits.shape[-1]
        if not hasattr(label, "__index__") or not 0 <= label < classes:
            raise DataError(f"cross_entropy: label {label!r} found, 0 to {classes - 1} needed")
        loss: Lazy = self._cross_entropy(logits, self.value(label, "int32"))
        return loss

    def parameter(
        self, name: str, shape: Sequence[int], initial: Initial | None = None
    ) -> Parameter:
        """Return a trained float32 tensor, an operand of layers, by its name.

        shape: of any rank; initial: what it begins as, zeros by default.
        """
        return Parameter(self, name, tuple(shape), initial)

    def _layer(self, layer: str) -> Callable[..., Any]:
        """Return what records calls of a layer."""
        known: dict[Any, Cell] = {}  # by arguments as they are written

        def function(recording: Any, *given: Any, **named: Any) -> Any:
            return getattr(recording, layer)(*given, **named)

        def call(*args: Any, **kwargs: Any) -> Any:
            operands: list[Lazy] = []
            key: Any = tuple([_frozen(item, operands) for item in args])
            first = len(operands)
            if kwargs:
                named = [_frozen(item, operands) for item in kwargs.values()]
                key = (key, *kwargs, *named)
            cell = known.get(key)
            if cell is None or len(operands) > first:  # named values are in the order of names
                cell, given = self._cell_of("", function, args, kwargs, layer)
                self._layers.add(cell.number)
                known[key] = cell
            else:
                given = tuple(operands)
            if cell.drawing:
                given = (*given, self._drawn())
            outputs = self._record(cell, given)
            return outputs[0] if len(outputs) == 1 else outputs

        return call

    def _cell_of(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layer: str = "",
    ) -> tuple[Cell, tuple[Lazy, ...]]:
        """Return what a function records of arguments, and which of them are values."""
        operands: list[Lazy] = []
        key = (name, layer, *(_frozen(item, operands) for item in args))
        for item in sorted(kwargs):
            key += (item, _frozen(kwargs[item], operands))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._recorded(name, function, args, kwargs, operands)
            given = {item.name for item in (*args, *kwargs.values()) if isinstance(item, Parameter)}
            own = not given.issuperset(cell.parameters)
            if layer and kwargs.get("name") is None and own:
                raise GraphError(f"{layer}: name needed: calls of one name share their parameters")
            if name:
                named = [f"{word}={_written(kwargs[word])}" for word in sorted(kwargs)]
                settings = [*map(_written, args), *named]
                self.layers_of.add(f"cell {name!r} of ({', '.join(settings)})", cell, name)
            elif own:
                taken = ", ".join(_written(operand) for operand in operands)
                self.layers_of.add(f"{kwargs['name']!r} of ({taken})", cell)
            self._cells[key] = cell
        return cell, tuple(operands)

    def _recorded(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[Lazy],
    ) -> Cell:
        def call(recording: RowRecording, *tensors: Tensor) -> Any:
            given = iter(tensors)

            def thaw(item: Any) -> Any:
                if isinstance(item, Lazy):
                    return next(given)
                if isinstance(item, Parameter):
                    return recording.parameter(item.name, item.shape, item.initial)
                if isinstance(item, tuple | list):
                    return type(item)(map(thaw, item))
                return item

            first = tuple(map(thaw, args))
            named = {key: thaw(kwargs[key]) for key in sorted(kwargs)}
            return function(recording, *first, **named)

        specs = [operand.rows.spec for operand in operands]
        cell = Cell(recorded(name, self.seed, specs, call), self._number())
        if name:
            twin = recorded(name, self.seed, specs, call).build(2, training=True)
            if twin.structural_hash != cell.build(2, training=True).structural_hash:
                raise GraphError(
                    f"cell {name!r}: it records something else when it is called again; a pure"
                    " function needed, to which numbers that are drawn are given as values"
                )
        return cell

    def _number(self) -> int:
        return len(self._cells) + len(self._operators)

    def _pattern(self, recording: RowRecording) -> Cell:
        """Return a cell of what was recorded of a pattern."""
        cell = Cell(recording, self._number())
        self._cells["pattern", cell.number] = cell
        return cell

    def _record(self, cell: Cell, operands: tuple[Lazy, ...]) -> tuple[Lazy, ...]:
        key = (cell, *operands)
        known = self._seen.get(key)
        if known is not None:
            return known
        moment = self.moment
        for operand in operands:
            if operand.step != moment:
                raise GraphError(
                    f"cell {cell.name or cell.kind!r}: a value found of another step or session;"
                    " values of this step needed"
                )
        stores = (self._runs.get(cell.number) or self._runs_of(cell)).outputs
        number = len(self._made)
        code = number * RESULTS
        made = Occurrence(cell, operands, number)
        if len(stores) == 1:
            outputs: tuple[Lazy, ...] = (Lazy(self, made, stores[0], code),)
        else:
            outputs = tuple([Lazy(self, made, rows, at) for at, rows in enumerate(stores, code)])
        made.outputs = outputs
        self._made.append(made)
        self._seen[key] = outputs
        return outputs

    def _runs_of(self, cell: Cell) -> CellRuns:
        """Return what runs a cell."""
        runs = self._runs.get(cell.number)
        if runs is None:
            stores = [[self.rows_of(spec) for spec in side] for side in (cell.inputs, cell.outputs)]
            runs = self._runs[cell.number] = CellRuns(self.graphs, cell, *stores)
        return runs

    def _record_parts(self, cell: Cell, operands: Sequence[Lazy]) -> tuple[Lazy, ...]:
        """Record the layers of a cell one by one."""
        parts = self._split.get(cell.number)
        if parts is None:
            parts = self._split[cell.number] = self._parts(cell)
        tape = dict(enumerate(operands))
        for part, inputs, outputs in parts:
            made = self._record(part, tuple(tape[index] for index in inputs))
            tape.update(zip(outputs, made))
        return tuple(tape[index] for index in cell.recording.output_indices)

    def _parts(self, cell: Cell) -> tuple[_Part, ...]:
        """Return the layers of a cell as cells, with the values that they take and make."""
        made: list[_Part] = []
        rows = dict(enumerate(cell.inputs))
        for calls in cell.steps:
            last = calls[-1]
            inputs = tuple(dict.fromkeys(i for i in last.inputs if i in rows))
            specs = [rows[index] for index in inputs]

            replay = partial(_replayed, calls, inputs)
            part = Cell(recorded("", self.seed, specs, replay), self._number())
            graph = part.build(2, training=True)
            key = (graph.structural_hash, part.parameters, graph.inputs())
            part = self._operators.setdefault(key, part)
            rows.update(zip(last.outputs, part.outputs))
            made.append((part, inputs, last.outputs))
        return tuple(made)

    def rows_of(self, spec: TensorSpec) -> Rows:
        """Return the array that values of a type are rows of. spec: of one row."""
        rows = self._stores.get(spec)
        if rows is None:
            rows = self._stores[spec] = Rows(spec, self.graphs.work)
        return rows

    def forget(self) -> None:
        """End a step: its values are no more."""
        self.moment = next(_MOMENTS)
        self.graphs.work.forget()
        for call in self._made:
            # Its outputs know it: a circle would wait for the collector. A value that somebody
            # still has would keep all that it was made of.
            call.outputs = call.operands = ()
        self._made.clear()
        self._begun = self._calls_drawing = 0
        self._seen.clear()
        for rows in self._stores.values():
            rows.size = 0
        for runs in self._runs.values():
            runs.reset()


def _replayed(
    calls: Sequence[Call], inputs: Sequence[int], recording: RowRecording, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Record calls of layers again, on other tensors, and return what the last one makes."""
    known = dict(zip(inputs, tensors))
    results: tuple[Tensor, ...] = ()
    for call in calls:
        results = recording.record(call.emit, [known[index] for index in call.inputs])
        known.update(zip(call.outputs, results))
    return results


def _cross_entropy(m: Any, logits: Tensor, label: Tensor) -> Tensor:
    chosen: Tensor = m.apply("pick", m.log_softmax(logits, axis=-1), label)
    return -chosen


def _frozen(item: Any, operands: list[Lazy]) -> Any:
    """Return what of an argument decides what is recorded; values go to the operands."""
    kind = type(item)
    if kind is Lazy:
        operands.append(item)
        return item.rows
    if kind is Parameter:
        return (item.name, item.shape, item.initial)
    if isinstance(item, (tuple, list)):
        return tuple([_frozen(each, operands) for each in item])
    if kind is Tensor:
        raise GraphError(
            f"{item!r} found, a tensor of a cell, among values of its session; inside of a cell,"
            " layers of its first argument needed"
        )
    if kind.__hash__ is None:
        raise GraphError(
            f"{kind.__name__} found among arguments of cells or layers; values (`session.value`"
            " makes one of an array), numbers, texts, and tuples or lists of these needed"
        )
    # 1, 1.0 and True are equal, as are 0.0 and -0.0, and record different things.
    return kind, item.hex() if kind is float else item


def _written(item: Any) -> str:
    """Return an argument as a name of a cell has it: a value by its type."""
    if isinstance(item, Lazy):
        return str(item.rows.spec)
    if isinstance(item, tuple | list):
        return f"[{', '.join(map(_written, item))}]"
    return repr(item)


__all__ = ["Recorder"]
