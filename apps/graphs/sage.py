"""GraphSAGE over the whole of a citation graph: means over all neighbours beside a vertex's own.

A step is over the whole graph, as that of `gcn`; `--graph` names one, and its own is made up.

Source: Hamilton, Ying and Leskovec, Inductive representation learning on large graphs, NeurIPS
2017.
"""

from __future__ import annotations

from soapstone import Model, run_app
from soapstone.apps._shared import graphs
from soapstone.frontend.graphs.dataset import GraphData

OPTIONS = {**graphs.OPTIONS, "epochs": 200}


def build(
    batch_size: int = 2708,
    graph: GraphData | None = None,
    hidden: int = 16,
    dropout: float = 0.5,
    reduction: str = "mean",
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width between the two layers.
        dropout: the share of inputs of a layer that a step leaves out.
        reduction: "mean", "max" or "sum" over neighbours.
    """
    graph = graphs.whole_graph("sage", batch_size, graph)
    edges = graph.adjacency
    model = Model("sage")
    x = model.dropout(model.input("features", (batch_size, graph.width)), dropout, name="drop1")
    x = model.sage_conv(x, edges, hidden, reduction=reduction, activation="relu", name="conv1")
    x = model.dropout(x, dropout, name="drop2")
    model.output(model.sage_conv(x, edges, graph.classes, reduction=reduction, name="conv2"))
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
