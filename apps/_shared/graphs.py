"""What apps over one whole graph share: a made-up graph, and features as they are trained on."""

from __future__ import annotations

from dataclasses import replace

from soapstone import Adam, GraphError
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.generate import PRESETS, block_model

_OWN = PRESETS["cora-like"]
OPTIONS = {
    "optimizer": Adam(0.01, weight_decay=5e-4),
    "epochs": 100,
    "loss": "masked_cross_entropy",
    "metrics": ["accuracy"],
    "batch_size": _OWN.vertices,
    "shuffle": False,
}


def made_up(vertices: int = _OWN.vertices) -> GraphData:
    """Return a block model of that many vertices, otherwise of Cora's shape."""
    edges, classes = vertices * _OWN.edges // _OWN.vertices, min(_OWN.classes, vertices)
    shape = replace(_OWN, vertices=vertices, edges=edges, classes=classes)
    return block_model(shape, name="cora-like")


def whole_graph(app: str, batch_size: int, graph: GraphData | None) -> GraphData:
    """Return the graph of an app, whose batch is all its vertices.

    Raises:
        GraphError: another batch size, or a graph without features or labels.
    """
    if graph is None:
        return made_up(batch_size)
    if batch_size != graph.adjacency.vertices:
        raise GraphError(
            f"app {app!r}: batch size {batch_size} found; a step is over all"
            f" {graph.adjacency.vertices} vertices of graph {graph.name!r}"
        )
    if not graph.width or not graph.classes:
        raise GraphError(
            f"app {app!r}: graph {graph.name!r} has {graph.width} features and {graph.classes}"
            " classes; 1 or more of both needed"
        )
    return graph


def citations(graph: GraphData | None = None) -> Splits:
    """Return the features of the vertices, and the labels of those to train and to test on.

    graph: whose vertices they are; by default the made-up one. Words' counts are over their sum.
    """
    graph = made_up() if graph is None else graph
    counts = graph.features is not None and graph.features.min(initial=0) >= 0
    return (graph.row_normalised() if counts else graph).splits()
