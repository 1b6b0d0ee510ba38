"""A deep graph convolutional network, with a residual connection around each layer.

A step is over the whole graph, as that of `gcn`; `--graph` names one, and its own is made up.

Source: Jia, Automated Discovery of Machine Learning Optimizations, 2020, section 4.7.5.
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
    layers: int = 4,
    dropout: float = 0.5,
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width between layers.
        layers: how many convolutions there are, the last of which has no residual connection.
        dropout: the share of inputs of a layer that a step leaves out.
    """
    graph = graphs.whole_graph("deepgcn", batch_size, graph)
    edges = graph.adjacency.normalised()
    model = Model("deepgcn")
    x = model.input("features", (batch_size, graph.width))
    for number in range(1, layers):
        x = model.dropout(x, dropout, name=f"drop{number}")
        x = model.residual_gcn_conv(x, edges, hidden, name=f"conv{number}")
    x = model.dropout(x, dropout, name=f"drop{layers}")
    model.output(model.gcn_conv(x, edges, graph.classes, name=f"conv{layers}"))
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
