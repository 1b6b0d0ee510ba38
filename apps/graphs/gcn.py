"""A graph convolutional network that classifies the vertices of a citation graph.

A step is over the whole graph: its samples are the vertices, of which those that have a label take
part in the loss. With `--graph cora` and the public split it reaches about 81 % of the test
vertices, with `--graph citeseer` about 70 %; its own graph is made up.

Source: Kipf and Welling, Semi-supervised classification with graph convolutional networks, ICLR
2017; without biases, as their code.
"""

from __future__ import annotations

from soapstone import Adam, Model, run_app
from soapstone.apps._shared import graphs
from soapstone.frontend.graphs.dataset import GraphData

OPTIONS = {
    **graphs.OPTIONS,
    "optimizer": Adam(0.01, weight_decay=5e-4, decayed=("conv1.weight",)),
    "epochs": 200,
}


def build(
    batch_size: int = 2708,
    graph: GraphData | None = None,
    hidden: int = 16,
    layers: int = 2,
    dropout: float = 0.5,
) -> Model:
    """Return the network for the features of a graph's vertices, (batch_size, features).

    Args:
        batch_size: how many vertices there are.
        graph: its edges and sizes; by default a made-up one of that many vertices.
        hidden: the width between layers.
        layers: how many convolutions there are.
        dropout: the share of inputs of a layer that a step leaves out.
    """
    graph = graphs.whole_graph("gcn", batch_size, graph)
    edges = graph.adjacency.normalised()
    model = Model("gcn")
    x = model.input("features", (batch_size, graph.width))
    for number in range(1, layers + 1):
        x = model.dropout(x, dropout, name=f"drop{number}")
        last = number == layers
        width, activation = (graph.classes, None) if last else (hidden, "relu")
        name = f"conv{number}"
        x = model.gcn_conv(x, edges, width, activation=activation, bias=False, name=name)
    model.output(x)
    return model


data = graphs.citations

if __name__ == "__main__":
    run_app(__file__)
