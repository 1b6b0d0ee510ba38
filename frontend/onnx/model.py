"""Imported ONNX models: graphs for any extents of their symbolic dims, and the weights."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.frontend.onnx.build import Importer
from soapstone.frontend.onnx.errors import OnnxError, UnboundError
from soapstone.frontend.onnx.extent_notes import Note
from soapstone.frontend.onnx.file.read import Declared, Source, read
from soapstone.frontend.onnx.file.tensors import frozen
from soapstone.frontend.onnx.support import register
from soapstone.frontend.onnx.values import Wanted
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    import onnx

    from soapstone.frontend.purpose import Purpose

MOST_CONTENTS = 1 << 12  # elements of an input whose contents may be part of a graph
MOST_SHAPE = 64  # such elements where a model can be run in pieces instead
_GRAPHS = 64  # whose constants are kept: those that were built last


class OnnxModel:
    """A parsed ONNX file; `graph` builds a graph for given extents of the symbolic dims.

    Weights are read-only views of the mapped file (which may be unaligned), and the small constants
    that are folded when a graph is built; both have the names of the graph's parameters and state.
    Constants of the last 64 graphs are kept, and others as long as they are in use.

    It may be used from several threads.

    Args:
        source: the checked file. dims: extents of symbolic dims of its inputs, by name.

    Raises:
        OnnxError: dims that the inputs do not have.
    """

    def __init__(self, source: Source, dims: Mapping[str, int]) -> None:
        register(source)
        self._source = source
        self._dims = dict(dims)
        self._constants: WeakValueDictionary[str, Array] = WeakValueDictionary()
        self._last: deque[dict[str, Array]] = deque(maxlen=_GRAPHS)  # constants of each graph
        self._named: Counter[str] = Counter()  # names made of each label, none of them twice
        self._lock = threading.Lock()
        inputs = [each.with_rank(dims) for each in source.inputs]
        known = dict.fromkeys(d for i in (*source.inputs, *inputs) for d in i.symbolic)
        if unknown := dims.keys() - known.keys():
            have = ", ".join(known) or "none"
            raise OnnxError(f"dims: {sorted(unknown)[0]!r} found; symbolic dims are {have}")
        self._inputs = tuple(
            replace(each, shape=tuple(self._dims.get(str(d), d) for d in each.shape))
            for each in inputs
        )

    @property
    def name(self) -> str:
        """The name of the graph in the file."""
        return self._source.name

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return self._source.opsets.get("", 0)

    @property
    def source(self) -> Source:
        """The checked file."""
        return self._source

    @property
    def inputs(self) -> tuple[Declared, ...]:
        """The graph's inputs as declared, without weights; free symbolic dims by name."""
        return self._inputs

    @property
    def outputs(self) -> tuple[Declared, ...]:
        """The graph's outputs as declared, symbolic dims by name."""
        return self._source.outputs

    @property
    def values(self) -> tuple[str, ...]:
        """The names of all intermediate values, in the file's order; see `Model.onnx`."""
        made = (node for node in self._source.graph.node if node.op_type != "Constant")
        return tuple(name for node in made for name in node.output if name)

    @property
    def layouts(self) -> Layouts | None:
        """The axis orders that the file gives for its values, or None."""
        return self._source.layouts

    @property
    def symbolic(self) -> tuple[str, ...]:
        """The names of the symbolic dims of the inputs, and of ranks that are not known."""
        return tuple(dict.fromkeys(d for declared in self.inputs for d in declared.symbolic))

    @property
    def weights(self) -> Mapping[str, Array]:
        """The file's weights and the constants of the graphs built last, read-only."""
        with self._lock:
            return MappingProxyType({**self._source.weights, **dict(self._constants.items())})

    def bind(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the extents of the symbolic dims, and open ranks, for these shapes of the inputs.

        Raises:
            OnnxError: a shape is missing or does not fit the declared one, or two extents of a dim
                differ; names the input.
        """
        dims: dict[str, int] = {}
        for declared in self.inputs:
            if declared.holds:
                continue
            where = f"input {declared.name!r}"
            shape = shapes.get(declared.name)
            if shape is None:
                raise OnnxError(f"{where} is missing")
            if declared.open_rank is not None:
                dims[declared.open_rank] = len(shape)
            axes = declared.axes(len(shape))
            if len(shape) != len(axes):
                raise OnnxError(f"{where}: shape {tuple(shape)} found; rank {len(axes)} needed")
            for axis, (found, needed) in enumerate(zip(shape, axes)):
                extent = dims.setdefault(needed, found) if isinstance(needed, str) else needed
                if extent != found:
                    named = f" ({needed})" if isinstance(needed, str) else ""
                    raise OnnxError(f"{where}: axis {axis} is {found}; {extent} needed{named}")
        return dims

    def graph(
        self,
        dims: Mapping[str, int] | None = None,
        *,
        contents: Mapping[str, Array] | None = None,
        wanted: Wanted | None = None,
    ) -> Graph:
        """Return the graph for these extents of the symbolic dims.

        dims: extents by name. contents: of inputs that shapes depend on (a shape to reshape to, a
        number of rows); the graph is then for those contents only. wanted: which part of the model
        is built, and from which weights; by default all. Weights are parameters (floating-point) or
        state, and inputs and outputs have the file's names.

        Raises:
            UnboundError: a dim or such an input is not given; names it.
            OnnxError: a node is malformed or not supported; names the node and its operator.
        """
        return self._built(dims or {}, contents or {}, wanted)[0]

    def _built(
        self,
        dims: Mapping[str, int],
        contents: Mapping[str, Array],
        wanted: Wanted | None = None,
        purpose: Purpose = "run",
    ) -> tuple[Graph, tuple[Note, ...]]:
        extents = {**self._dims, **dims}
        used: dict[str, Array] = {}
        with self._lock:
            self._last.append(used)
        keep = partial(self._keep, used)
        importer = Importer(self._source, extents, contents, keep, wanted, purpose=purpose)
        return importer.build(), tuple(importer.notes)

    def graph_for(self, arrays: Mapping[str, Array]) -> tuple[Graph, dict[str, Array]]:
        """Return the graph for these inputs, and those inputs for whose contents it is made.

        arrays: one for each input, by name, with the shapes of the graph.

        Raises:
            OnnxError: as `bind` and `graph`.
        """
        return self.noted_for(arrays)[:2]

    def noted_for(
        self, arrays: Mapping[str, Array], *, rare: bool = False, purpose: Purpose = "run"
    ) -> tuple[Graph, dict[str, Array], tuple[Note, ...]]:
        """Return what `graph_for` does, and the notes on its extents (`extent_notes.py`).

        arrays: as of `graph_for`. rare: whether the contents that the graph depends on must be a
        few integers that form a shape, which seldom change, and no data. purpose: what the graph
        is for (`frontend/purpose.py`).
        """
        self._source.files.check()
        most = MOST_SHAPE if rare else MOST_CONTENTS
        plain = {declared.name for declared in self.inputs if not declared.holds}
        dims = self.bind({n: np.asarray(array).shape for n, array in arrays.items() if n in plain})
        contents: dict[str, Array] = {}
        while True:
            try:
                graph, notes = self._built(dims, contents, purpose=purpose)
                return graph, contents, notes
            except UnboundError as error:
                new = [n for n in error.inputs if n in arrays and n not in contents]
                fits = all(arrays[n].ndim <= 1 and arrays[n].size <= most for n in new)
                data = error.apart or any(kind_of(arrays[n].dtype) == "f" for n in new)
                if not new or not fits or (rare and data):
                    raise
                contents |= {name: arrays[name] for name in new}

    def _keep(
        self, used: dict[str, Array], label: str, array: Array, taken: Callable[[str], bool]
    ) -> str:
        """Keep a folded constant as a weight and return its name; equal constants share one.

        used: the constants of the graph that it is for. label: the beginning of its name.
        """
        with self._lock:
            for name, known in self._constants.items():
                same_label = name == label or name.startswith(f"{label}.")
                if same_label and _same(known, array) and not taken(name):
                    used[name] = known
                    return name
            name = ""
            while not name or taken(name):
                name = f"{label}.{self._named[label]}" if self._named[label] else label
                self._named[label] += 1
            self._constants[name] = used[name] = frozen(array)
            return name

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        outputs = ", ".join(map(str, self.outputs))
        return f"OnnxModel({self.name!r}, opset {self.opset}, {inputs} -> {outputs})"


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def from_onnx(
    model: str | Path | bytes | memoryview | onnx.ModelProto,
    *,
    dims: Mapping[str, int] | None = None,
    name: str = "model",
) -> OnnxModel:
    """Return an ONNX model from a file, its bytes, or a parsed message.

    model: any of these. dims: extents of symbolic dims, for every graph that is built. name: of a
    model without a file, if its graph has none. Weights stay in the file and are mapped; the rest
    is parsed and checked.

    Raises:
        OnnxError: the file is malformed, or needs what is not supported.
        OSError: the file cannot be read.
    """
    return OnnxModel(read(model, name=name), dims or {})
