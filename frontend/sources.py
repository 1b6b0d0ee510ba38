"""What a session serves: models, ONNX files, and graphs with their weights, all asked alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from soapstone.errors import DataError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.frontend.onnx.read import Source as OnnxSource

Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Field:
    """An input as a model declares it.

    Attributes:
        name: of the input. dtype: its element type, such as "float32".
        shape: a number, a symbolic name or None for each axis.
    """

    name: str
    dtype: str
    shape: Dims

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype}[{dims}]"


@dataclass(frozen=True)
class Source:
    """What a session serves: declared inputs, weights, and a graph for the inputs of a run.

    `graph` also returns those inputs on whose contents, not only shapes, the graph depends.
    """

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[str, ...]
    graph: Callable[[Mapping[str, Array]], tuple[Graph, Mapping[str, Array]]]
    weights: Callable[[], Mapping[str, Array]]
    layouts: Layouts | None = None  # axis orders that came with the model
    onnx: OnnxSource | None = None  # the file, which can be run in pieces

    @staticmethod
    def of(model: Model | OnnxModel | Graph | str | Path, weights: Mapping[str, Array]) -> Source:
        """Return the source of a model, an ONNX file, or a graph with its weights."""
        if isinstance(model, Graph):
            return _of_graph(model, dict(weights))
        if not isinstance(model, str | Path):  # a file needs nothing of layers
            from soapstone.frontend.model import Model

            if isinstance(model, Model):
                return _of_model(model, weights)
        from soapstone.frontend.onnx import OnnxModel, from_onnx

        if weights:
            raise DataError("weights found with an ONNX model, which has its own; none needed")
        found = model if isinstance(model, OnnxModel) else from_onnx(model)
        return Source(
            found.name,
            tuple(Field(v.name, v.dtype, v.shape) for v in found.inputs),
            tuple(v.name for v in found.outputs),
            lambda given: found.graph_for(given, rare=True),
            lambda: found.weights,
            found.layouts,
            found.source,
        )


def _of_graph(graph: Graph, weights: Mapping[str, Array]) -> Source:
    fields = tuple(
        Field(name, graph.tensors[name].dtype, graph.tensors[name].shape)
        for name in graph.inputs(Role.INPUT)
    )
    return Source(graph.name, fields, graph.outputs, lambda given: (graph, {}), lambda: weights)


def _of_model(model: Model, weights: Mapping[str, Array]) -> Source:
    graph = model.graph
    fields = tuple(
        Field(name, graph.tensors[name].dtype, ("batch", *graph.tensors[name].shape[1:]))
        for name in graph.inputs(Role.INPUT)
    )

    def build(given: Mapping[str, Array]) -> tuple[Graph, Mapping[str, Array]]:
        sizes = {name: array.shape[0] for name, array in given.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"model {model.name!r}: batch sizes {sizes} found; one needed")
        return model.build(next(iter(sizes.values()))), {}

    held = weights or model.weights()  # constants may come with another batch size
    return Source(model.name, fields, graph.outputs, build, lambda: {**held, **model.constants})
