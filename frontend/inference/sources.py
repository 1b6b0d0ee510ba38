"""One interface for the models of inference sessions: models, ONNX files, graphs with weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.exchange import as_array, as_texts
from soapstone.frontend.onnx.texts import TEXT
from soapstone.ir.tensor import Array, Role
from soapstone.records import dataclass, replace

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.frontend.onnx.extent_notes import Note
    from soapstone.frontend.onnx.file.read import Source as OnnxSource
    from soapstone.frontend.purpose import Purpose
    from soapstone.ir.files.layouts import Layouts
    from soapstone.ir.graph import Graph
    from soapstone.native.files import MappedFile

Notes = tuple["Note", ...]  # of what is done with extents
Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Field:
    """An input as a model declares it.

    Attributes:
        name: of the input. dtype: its element type, such as "float32".
        shape: a number, a symbolic name or None for each axis.
        holds: ("sequence",) for a list of tensors of any shape, ("optional",) for a value that may
            be None, or both, the outer one first; ("map",) for a dict of numbers or texts.
        ranked: whether it is known how many axes there are; if not, shape is empty.
    """

    name: str
    dtype: str
    shape: Dims
    holds: tuple[str, ...] = ()
    ranked: bool = True

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        dims = dims if self.ranked else "..."
        return f"{self.name}: {''.join(f'{each} ' for each in self.holds)}{self.dtype}[{dims}]"

    @property
    def open_rank(self) -> str | None:
        """The name under which extents give the rank that is not known, such as "x.rank"."""
        return None if self.ranked or self.holds else f"{self.name}.rank"

    @property
    def symbolic(self) -> tuple[str, ...]:
        """The names of what extents give: of symbolic dims, or of the rank."""
        if self.open_rank is not None:
            return (self.open_rank,)
        return tuple(dim for dim in self.shape if isinstance(dim, str))

    def axes(self, rank: int) -> Dims:
        """Return its shape where it has `rank` axes; of an unknown rank, those are x.0, x.1, ..."""
        if self.open_rank is None:
            return self.shape
        return tuple(f"{self.name}.{axis}" for axis in range(rank))

    def with_rank(self, extents: Mapping[str, int]) -> Self:
        """Return it with the rank that extents give, if its own is not known."""
        rank = extents.get(self.open_rank) if self.open_rank is not None else None
        return self if rank is None else replace(self, shape=self.axes(rank), ranked=True)


def _no_file() -> None:
    """Check nothing: runs read no file."""


@dataclass(frozen=True)
class Source:
    """A model as an inference session reads it: inputs, weights, a graph for the inputs of a run.

    Attributes:
        noted: returns the graph for inputs; those inputs on whose contents, not only shapes, it
            depends; and notes on extents. If two graphs have equal notes, which are not None, the
            graph depends on extents only through shapes. The second argument is what it is for.
        weights: returns the weights by name.
    """

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[str, ...]
    noted: Callable[[Mapping[str, Array], Purpose], tuple[Graph, Mapping[str, Array], Notes | None]]
    weights: Callable[[], Mapping[str, Array]]
    layouts: Layouts | None = None  # axis orders that came with the model
    onnx: OnnxSource | None = None  # the file, which can be run in pieces
    check: Callable[[], None] = _no_file  # that files which runs read are as they were opened

    def graph(
        self, given: Mapping[str, Array], purpose: Purpose = "run"
    ) -> tuple[Graph, Mapping[str, Array]]:
        """Return the graph for inputs, and the inputs on whose contents it depends."""
        return self.noted(given, purpose)[:2]

    @property
    def rows(self) -> str | None:
        """The symbolic dim that is the first one of all inputs, or None."""
        firsts = {field.shape[0] if field.shape else None for field in self.inputs}
        first = firsts.pop() if len(firsts) == 1 else None
        return first if isinstance(first, str) else None

    def checked(self, inputs: Mapping[str, Any] | Any) -> dict[str, Array]:
        """Return inputs as runs take them: an array of the declared type for each.

        inputs: arrays or tensors by name, or the only one.

        Raises:
            DataError: a missing or unknown input, or one of another type, rank or extent.
        """
        fields = self.inputs
        label = f"model {self.name!r}"
        if not isinstance(inputs, Mapping):
            if len(fields) != 1:
                have = ", ".join(field.name for field in fields)
                raise DataError(f"{label}: one array found, a dict of {have} needed")
            inputs = {fields[0].name: inputs}
        unknown = sorted(set(inputs) - {field.name for field in fields})
        if unknown:
            have = ", ".join(map(str, fields)) or "none"
            raise DataError(f"{label}: unknown input {unknown[0]!r}; inputs are {have}")
        given: dict[str, Any] = {}
        for field in fields:
            if field.name not in inputs:
                raise DataError(f"{label}: input {field.name!r} is missing; {field} needed")
            if field.holds:
                where = f"{label}: input {field.name!r}"
                given[field.name] = _held(inputs[field.name], field, field.holds, where)
                continue
            array = _as_array(inputs[field.name], field, f"{label}: input {field.name!r}")
            axes = field.axes(array.ndim)
            fits = array.ndim == len(axes) and all(
                not isinstance(d, int) or d == extent for d, extent in zip(axes, array.shape)
            )
            dtype = TEXT if field.dtype == TEXT else array.dtype.name
            if dtype != field.dtype or not fits:
                found = f"{dtype}{list(array.shape)}"
                raise DataError(f"{label}: input {field.name!r}: {found} found, {field} needed")
            given[field.name] = array
        return given

    @staticmethod
    def of(
        model: Model | OnnxModel | Graph | str | Path,
        weights: Mapping[str, Array],
        file: MappedFile | None = None,
    ) -> Source:
        """Return the source of a model, an ONNX file, or a graph with its weights.

        file: the bytes of the file if they are mapped already; the file itself may have been
            replaced since.
        """
        if not isinstance(model, str | Path):  # a file needs nothing of layers
            from soapstone.frontend.model import Model
            from soapstone.ir.graph import Graph

            if isinstance(model, Graph):
                return _of_graph(model, dict(weights))
            if isinstance(model, Model):
                return _of_model(model, weights)
        from soapstone.frontend.onnx import OnnxError, OnnxModel, from_onnx

        if weights:
            raise DataError("weights found with an ONNX model, which has its own; none needed")
        if isinstance(model, OnnxModel):
            found = model
        elif file is None:
            found = from_onnx(model)
        else:
            file.check(OnnxError)
            found = from_onnx(memoryview(file), name=Path(model).stem)
            found.source.files.add(file)
        return Source(
            found.name,
            found.inputs,
            tuple(v.name for v in found.outputs),
            partial(_of_onnx, found),
            lambda: found.weights,
            found.layouts,
            found.source,
            partial(found.source.files.check, running=True),
        )


def _held(value: Any, field: Field, holds: tuple[str, ...], where: str) -> Any:
    """Return a sequence as a tuple of arrays; an optional as its value or None."""
    if not holds:
        array = _as_array(value, field, where)
        dtype = TEXT if field.dtype == TEXT else array.dtype.name
        if dtype != field.dtype:
            raise DataError(f"{where}: {dtype}{list(array.shape)} found, {field} needed")
        return array
    if holds[0] == "optional":
        return None if value is None else _held(value, field, holds[1:], where)
    if holds[0] == "map":
        return _as_map(value, field, where)
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: {type(value).__name__} found, a list of arrays needed")
    return tuple(_held(v, field, holds[1:], f"{where}[{i}]") for i, v in enumerate(value))


def _as_map(value: Any, field: Field, where: str) -> tuple[Array, Array]:
    """Return the keys of a dict, texts or integers, and its values, as runs take them."""
    keys = list(value) if isinstance(value, Mapping) else [None]
    if not all(isinstance(k, str) for k in keys) and not all(type(k) is int for k in keys):
        kind = type(value).__name__
        raise DataError(f"{where}: {kind} found, a dict whose keys are all str or all int needed")
    values = list(value.values())
    if field.dtype == TEXT:
        held = as_texts(values, where)
    else:
        held = np.asarray(values, None if values else field.dtype)
        if not np.can_cast(held.dtype, field.dtype, "same_kind"):
            raise DataError(f"{where}: values of {held.dtype} found, {field} needed")
        held = held.astype(field.dtype)
    if held.ndim != 1:
        raise DataError(f"{where}: values of shape {held.shape[1:]} found, numbers or texts needed")
    return np.array(keys, object if keys and isinstance(keys[0], str) else np.int64), held


def _as_array(value: Any, field: Field, where: str) -> Array:
    return as_texts(value, where) if field.dtype == TEXT else as_array(value, where)


def _of_graph(graph: Graph, weights: Mapping[str, Array]) -> Source:
    fields = tuple(
        Field(name, graph.tensors[name].dtype, graph.tensors[name].shape)
        for name in graph.inputs(Role.INPUT)
    )
    noted = (graph, dict[str, Array](), None)
    return Source(graph.name, fields, graph.outputs, lambda given, purpose: noted, lambda: weights)


def _of_onnx(
    model: OnnxModel, given: Mapping[str, Array], purpose: Purpose
) -> tuple[Graph, Mapping[str, Array], Notes | None]:
    from soapstone.frontend.onnx.extent_notes import UNEVEN

    graph, contents, notes = model.noted_for(given, rare=True, purpose=purpose)
    return graph, contents, None if UNEVEN in notes else notes


def _of_model(model: Model, weights: Mapping[str, Array]) -> Source:
    graph = model.graph
    fields = tuple(
        Field(name, graph.tensors[name].dtype, ("batch", *graph.tensors[name].shape[1:]))
        for name in graph.inputs(Role.INPUT)
    )

    def build(
        given: Mapping[str, Array], purpose: Purpose
    ) -> tuple[Graph, Mapping[str, Array], Notes]:
        sizes = {name: array.shape[0] for name, array in given.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"model {model.name!r}: batch sizes {sizes} found; one needed")
        return model.build(next(iter(sizes.values()))), {}, ()

    held = weights or model.weights()  # constants may come with another batch size
    return Source(model.name, fields, graph.outputs, build, lambda: {**held, **model.constants})
