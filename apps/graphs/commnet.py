"""CommNet: vertices that tell their neighbours what they know, round by round.

A step is over the whole graph, as that of `gcn`; `--graph` names one, and its own is made up.

Source: Sukhbaatar, Szlam and Fergus, Learning multiagent communication with backpropagation,
NeurIPS 2016; agents are vertices, and those that they hear are their neighbours.
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
    rounds: int = 2,
    dropout: float = 0.5,
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width of what a vertex knows.
        rounds: how often vertices hear their neighbours.
        dropout: the share of features, and of what a vertex knows last, that a step leaves out.
    """
    graph = graphs.whole_graph("commnet", batch_size, graph)
    edges = graph.adjacency
    model = Model("commnet")
    x = model.dropout(model.input("features", (batch_size, graph.width)), dropout, name="drop1")
    first = x = model.dense(x, hidden, activation="tanh", name="encode")
    for number in range(1, rounds + 1):
        x = model.comm_conv(x, edges, hidden, first=first, name=f"round{number}")
    x = model.dropout(x, dropout, name="drop2")
    model.output(model.dense(x, graph.classes, name="decode"))
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
