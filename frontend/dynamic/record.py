"""Recording: calls of cells and layers on values become nodes, equal ones the same node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from soapstone.errors import DataError, warn
from soapstone.frontend.dynamic.cell import DRAW, Cell, RowRecording, recorded
from soapstone.frontend.dynamic.checkpoints import LayersOf
from soapstone.frontend.dynamic.rows import Graphs, Rows
from soapstone.frontend.dynamic.runs import CellRuns
from soapstone.frontend.dynamic.tape import RESULTS, Tape, code_of
from soapstone.frontend.dynamic.values import Column, Lazy, Parameter
from soapstone.frontend.layers import Layers
from soapstone.frontend.recording import Call, Tensor
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import TensorSpec, spec_of

_Part = tuple[Cell, tuple[int, ...], tuple[int, ...]]
_column, _code, _rows = attrgetter("column"), attrgetter("code"), attrgetter("rows")
_MANY = 100  # recordings of a cell, of which those for changing numbers are told
_EXACT = {int, bool, str, type(None)}  # types whose equal values record the same


class _Use(NamedTuple):
    """What recording needs to know of a cell in a step. columns: of the types of its results."""

    number: int
    columns: tuple[Column, ...]
    drawing: bool


class Recorder:
    """What a session records; `DynamicSession` says how it is used and runs it.

    Args:
        graphs: which bind what cells become.
    """

    def __init__(self, name: str, seed: int, reuse: str, graphs: Graphs) -> None:
        self.name = name
        self.seed = seed
        self.reuse = reuse
        self.graphs = graphs
        self._stores: dict[TensorSpec, Rows] = {}
        self._cells: dict[Any, Cell] = {}  # by what they are recorded of
        self.layers_of = LayersOf()
        self._operators: dict[Any, Cell] = {}  # by structure
        self._numbers: dict[str, list[set[Any]]] = {}  # by cell or layer, of each recording
        self._layers: set[int] = set()  # the numbers of cells that are layers of the session
        self._split: dict[int, tuple[_Part, ...]] = {}
        self._runs: dict[int, CellRuns] = {}  # by the number of the cell
        # What follows is of a step. Its calls, in order: of each its cell and its operands' codes.
        self._calls: dict[tuple[int, ...], Lazy | tuple[Lazy, ...]] = {}
        self._columns: dict[Rows, Column] = {}
        self._uses: dict[int, _Use] = {}  # by the number of the cell
        self._known: list[dict[Any, _Use]] = []  # by columns of operands, of each function
        self._tape = Tape()  # of the calls that were handed on to be run
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
        record = self._record if self.reuse in ("patterns", "all") else self._record_parts
        return wraps(function)(self._recording(name, function, "", record))

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
        row = self._draws.take(1)
        self._draws.data[row] = (self.updates << 32) + self._calls_drawing
        self._calls_drawing += 1
        return self.given(self._draws, row)

    def given(self, rows: Rows, row: int) -> Lazy:
        """Return a value of this step that no call makes.

        rows, row: the array, of those that `rows_of` returns, and the row of it that it is.
        """
        return Lazy(self._column(rows), code_of(row, rows.number))

    def _column(self, rows: Rows) -> Column:
        column = self._columns.get(rows)
        if column is None:
            column = self._columns[rows] = Column(self, rows)
        return column

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
        rows = self.rows_of(spec_of(array))
        return self.given(rows, rows.put(array[np.newaxis]))

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

        def function(recording: Any, *given: Any, **named: Any) -> Any:
            return getattr(recording, layer)(*given, **named)

        return self._recording("", function, layer, self._record)

    def _recording(
        self,
        name: str,
        function: Callable[..., Any],
        layer: str,
        record: Callable[[_Use, tuple[Lazy, ...]], Any],
    ) -> Callable[..., Any]:
        """Return what records calls of a function. name, layer: of a cell, or a layer."""
        known: dict[Any, _Use] = {}  # by arguments, of values their columns
        self._known.append(known)

        def found(args: Any, kwargs: Any) -> tuple[_Use, tuple[Lazy, ...]]:
            operands: list[Lazy] = []
            key = [_frozen(item, operands, _column) for item in args]
            first = len(operands)
            if kwargs:
                key += kwargs
                key += [_frozen(item, operands, _column) for item in kwargs.values()]
            use = known.get(tuple(key))
            if use is not None and len(operands) == first:
                return use, tuple(operands)
            cell, given = self._cell_of(name, function, args, kwargs, layer)
            if layer:
                self._layers.add(cell.number)
            use = known[tuple(key)] = self._use(cell)
            return use, given  # named values by order of their names

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                use = None if kwargs else known.get(tuple(map(_column, args)))
            except AttributeError:  # an argument that is no value
                use = None
            if use is None:
                use, args = found(args, kwargs)
            if use.drawing:
                args = (*args, self._drawn())
            return record(use, args)

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
        key = (name, layer, *(_frozen(item, operands, _rows) for item in args))
        for item in sorted(kwargs):
            key += (item, _frozen(kwargs[item], operands, _rows))
        for operand in operands:
            if operand.model is not self or not operand.column.live:
                raise GraphError(
                    f"cell {name or layer!r}: a value found of another step or session;"
                    " values of this step needed"
                )
        cell = self._cells.get(key)
        if cell is None:
            cell = self._recorded(name, function, args, kwargs, operands)
            label = f"cell {name!r}" if name else f"layer {layer!r}"
            takes = getattr(Layers, layer) if layer else function
            self._count_numbers(label, takes, args, kwargs)
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

    def _count_numbers(
        self, label: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Warn once of a cell or layer that is recorded for one number after another.

        function: whose arguments after the first, the layers, are those given.
        """
        seen = self._numbers.setdefault(label, [])
        if len(seen) == _MANY:
            return
        given = signature(function).bind(None, *args, **kwargs).arguments
        seen.append({(word, item) for word, item in given.items() if type(item) in (int, float)})
        if len(seen) < _MANY:
            return
        for word, numbers in Counter(word for word, _ in set().union(*seen)).most_common(1):
            if numbers > _MANY // 2:
                warn(
                    f"{label}: {_MANY} recordings found, for {numbers} numbers as its argument"
                    f" {word!r}; each is recorded and compiled anew, and an array is not:"
                    f" session.value([{word}]) needed"
                )

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
        self._runs_of(cell)
        return cell

    def _use(self, cell: Cell) -> _Use:
        use = self._uses.get(cell.number)
        if use is None:
            columns = tuple(map(self._column, self._runs_of(cell).outputs))
            use = self._uses[cell.number] = _Use(cell.number, columns, cell.drawing)
        return use

    def _record(self, use: _Use, operands: tuple[Lazy, ...]) -> Lazy | tuple[Lazy, ...]:
        key = (use.number, *map(_code, operands))
        made = self._calls.get(key)
        if made is None:
            code, columns = len(self._calls) * RESULTS, use.columns
            if len(columns) == 1:
                made = Lazy(columns[0], code)
            else:
                made = tuple([Lazy(column, at) for at, column in enumerate(columns, code)])
            self._calls[key] = made
        return made

    def _runs_of(self, cell: Cell) -> CellRuns:
        """Return what runs a cell."""
        runs = self._runs.get(cell.number)
        if runs is None:
            stores = [[self.rows_of(spec) for spec in side] for side in (cell.inputs, cell.outputs)]
            runs = self._runs[cell.number] = CellRuns(self.graphs, cell, *stores)
        return runs

    def _record_parts(self, use: _Use, operands: tuple[Lazy, ...]) -> Any:
        """Record the layers of a cell one by one."""
        cell = self._runs[use.number].cell
        parts = self._split.get(cell.number)
        if parts is None:
            parts = self._split[cell.number] = self._parts(cell)
        made = dict(enumerate(operands))
        for part, inputs, outputs in parts:
            results = self._record(self._use(part), tuple([made[index] for index in inputs]))
            made.update(zip(outputs, results if isinstance(results, tuple) else (results,)))
        asked = tuple([made[index] for index in cell.recording.output_indices])
        return asked[0] if len(asked) == 1 else asked

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
            rows = self._stores[spec] = Rows(spec, self.graphs.work, len(self._stores))
        return rows

    def forget(self) -> None:
        """End a step: its values are no more."""
        for column in self._columns.values():
            column.live = False
        of_step: list[dict[Any, Any]] = [self._columns, self._uses, self._calls, *self._known]
        for known in of_step:
            known.clear()
        self._tape = Tape()
        self._calls_drawing = 0
        self.graphs.work.forget()
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


def _frozen(item: Any, operands: list[Lazy], of: Callable[[Lazy], Any]) -> Any:
    """Return what of an argument decides what is recorded; values go to the operands.

    of: what decides of a value.
    """
    kind = type(item)
    if kind is Lazy:
        operands.append(item)
        return of(item)
    if kind in _EXACT:
        return kind, item
    if kind is Parameter:
        return (item.name, item.shape, item.initial)
    if isinstance(item, (tuple, list)):
        kinds = tuple(map(type, item))
        if _EXACT.issuperset(kinds):
            return kinds, tuple(item)
        return tuple([_frozen(each, operands, of) for each in item])
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
