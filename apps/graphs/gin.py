"""A graph isomorphism network (GIN-0) that classifies the vertices of a citation graph.

A step is over the whole graph, as that of `gcn`; `--graph` names one, and its own is made up.

Source: Xu, Hu, Leskovec and Jegelka, How powerful are graph neural networks?, ICLR 2019.
"""

from __future__ import annotations

from soapstone import Model, run_app
from soapstone.apps._shared import graphs
from soapstone.frontend.graphs.dataset import GraphData

OPTIONS = graphs.OPTIONS


def build(
    batch_size: int = 2708,
    graph: GraphData | None = None,
    hidden: int = 32,
    dropout: float = 0.5,
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width of the layers between.
        dropout: the share of inputs of a layer that a step leaves out.
    """
    graph = graphs.whole_graph("gin", batch_size, graph)
    edges = graph.adjacency
    model = Model("gin")
    x = model.dropout(model.input("features", (batch_size, graph.width)), dropout, name="drop1")
    x = model.dense(x, hidden, name="embed")  # fewer columns to sum over edges
    x = model.relu(model.gin_conv(x, edges, hidden, name="conv1"), name="relu1")
    x = model.dropout(x, dropout, name="drop2")
    model.output(model.gin_conv(x, edges, graph.classes, name="conv2"))
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
