"""A graph attention network that classifies the vertices of a citation graph.

A step is over the whole graph, as that of `gcn`; `--graph` names one, and its own is made up.

Source: Velickovic et al., Graph attention networks, ICLR 2018, section 3.3; its two layers, and a
fixed number of epochs in place of a choice among them by validation.
"""

from __future__ import annotations

from soapstone import Adam, Model, run_app
from soapstone.apps._shared import graphs
from soapstone.frontend.graphs.dataset import GraphData

OPTIONS = {
    **graphs.OPTIONS,
    "optimizer": Adam(0.005, weight_decay=5e-4),
    "epochs": 500,
}


def build(
    batch_size: int = 2708,
    graph: GraphData | None = None,
    hidden: int = 8,
    heads: int = 8,
    dropout: float = 0.6,
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width of a head of the first layer; the second has one head.
        heads: how many the first layer has.
        dropout: the share of inputs of a layer, and of weights of edges, that a step leaves out.
    """
    graph = graphs.whole_graph("gat", batch_size, graph)
    edges = graph.adjacency.with_self_edges()
    model = Model("gat")
    x = model.dropout(model.input("features", (batch_size, graph.width)), dropout, name="drop1")
    x = model.gat_conv(x, edges, hidden, heads, dropout=dropout, activation="elu", name="conv1")
    x = model.dropout(x, dropout, name="drop2")
    x = model.gat_conv(x, edges, graph.classes, dropout=dropout, concat=False, name="conv2")
    model.output(x)
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
