"""Peers of `epochs.py`: the same networks in torch, PyG and DGL, on the same edges.

They run in interpreters of their own, which need not have soapstone. `torch` multiplies by a CSR
matrix whose transpose is given, forward and backward; PyG and DGL take their own layers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("DGLBACKEND", "pytorch")


def arrays_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the edges of a file, both ways alike, with features and labels drawn by a seed."""
    with np.load(case["graph"]) as found:
        indptr, indices = found["indptr"], found["indices"]
    count = len(indptr) - 1
    random = np.random.default_rng(0)
    x = random.standard_normal((count, case["features"]), np.float32)
    labels = random.integers(0, case["classes"], count).astype(np.int32)
    degrees = np.sqrt(1 / np.diff(indptr)).astype(np.float32)
    weights = degrees[np.repeat(np.arange(count), np.diff(indptr))] * degrees[indices]
    return {"indptr": indptr, "indices": indices, "weights": weights, "x": x, "labels": labels}


def device_of(case: dict[str, Any]) -> str:
    """Return where a peer computes: the host, or `device`."""
    return str(case.get("device", "cpu"))


def rounds(step: Callable[[], float], budget_s: float) -> Callable[[], dict[str, float]]:
    """Return a round: the median of steps that fill the budget, by the clock and of the cores."""
    step()

    def one() -> dict[str, float]:
        wall, cores, value = list[float](), list[float](), 0.0
        while not wall or sum(wall) < budget_s:
            start, busy = time.perf_counter(), time.process_time()
            value = step()
            wall.append(time.perf_counter() - start)
            cores.append(time.process_time() - busy)
        middle = len(wall) // 2
        return {
            "ms": sorted(wall)[middle] * 1e3,
            "cpu_ms": sorted(cores)[middle] * 1e3,
            "value": value,
        }

    return one


def _matrix(torch: Any, found: dict[str, Any], device: str = "cpu") -> Any:
    indptr, indices = (torch.from_numpy(found[k].astype(np.int64)) for k in ("indptr", "indices"))
    size = (len(found["x"]),) * 2
    values = torch.from_numpy(found["weights"])
    return torch.sparse_csr_tensor(indptr, indices, values, size, device=device)


def torch_net(torch: Any, case: dict[str, Any], found: dict[str, Any]) -> Any:
    """Return the network in plain torch; what leads both ways is its own transpose."""
    nn, matrix = torch.nn, _matrix(torch, found, device_of(case))
    plain = torch.sparse_csr_tensor(
        matrix.crow_indices(), matrix.col_indices(), torch.ones_like(matrix.values()), matrix.shape
    )

    class Product(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(context: Any, which: Any, x: Any) -> Any:
            context.which = which
            return torch.mm(which, x)

        @staticmethod
        def backward(context: Any, grad: Any) -> Any:
            return None, torch.mm(context.which, grad.contiguous())

    k, hidden, classes = case["features"], case["hidden"], case["classes"]

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            if case["model"] == "gcn":
                self.layers = nn.ModuleList([nn.Linear(k, hidden), nn.Linear(hidden, classes)])
            else:
                self.layers = nn.ModuleList([_perceptron(k, hidden), _perceptron(hidden, classes)])

        def forward(self, x: Any) -> Any:
            for number, layer in enumerate(self.layers):
                if case["model"] == "gin":
                    x = layer(x + Product.apply(plain, x))
                elif layer.out_features < layer.in_features:
                    x = Product.apply(matrix, x @ layer.weight.T) + layer.bias
                else:
                    x = layer(Product.apply(matrix, x))
                x = x.relu() if number == 0 else x
            return x

    return Net()


def _perceptron(k: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(k, width), nn.ReLU(), nn.Linear(width, width))


def pyg_net(torch: Any, case: dict[str, Any], found: dict[str, Any]) -> Any:
    """Return the network of PyG's layers, over a CSR matrix where the layer takes one."""
    from torch_geometric import nn as layers

    k, hidden, classes = case["features"], case["hidden"], case["classes"]
    nn = torch.nn
    edges = matrix = _matrix(torch, found, device_of(case))
    if case["model"] == "gcn":
        made = [
            layers.GCNConv(k, hidden, normalize=False),
            layers.GCNConv(hidden, classes, normalize=False),
        ]
    elif case["model"] == "gin":
        matrix.values().fill_(1)
        made = [
            layers.GINConv(_perceptron(k, hidden)),
            layers.GINConv(_perceptron(hidden, classes)),
        ]
    else:
        rows = np.repeat(np.arange(len(found["x"])), np.diff(found["indptr"]))
        ends = np.stack([found["indices"], rows]).astype(np.int64)
        edges = torch.from_numpy(ends).to(device_of(case))
        own = {"add_self_loops": False}
        heads = case["heads"]
        made = [
            layers.GATConv(k, hidden // heads, heads, **own),
            layers.GATConv(hidden, classes, **own),
        ]

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(made)

        def forward(self, x: Any) -> Any:
            x = self.layers[0](x, edges)
            x = torch.nn.functional.elu(x) if case["model"] == "gat" else x.relu()
            return self.layers[1](x, edges)

    return Net()


def _dgl_graph(torch: Any, dgl: Any, found: dict[str, Any]) -> Any:
    offsets, indices = (torch.from_numpy(found[n].astype(np.int64)) for n in ("indptr", "indices"))
    numbers = torch.arange(len(indices))  # what DGL makes of none fails in its attention
    return dgl.graph(("csc", (offsets, indices, numbers)), num_nodes=len(found["x"]))


def dgl_net(torch: Any, case: dict[str, Any], found: dict[str, Any]) -> Any:
    """Return the network of DGL's layers."""
    import dgl
    from dgl import nn as layers

    k, hidden, classes, heads = (case[n] for n in ("features", "hidden", "classes", "heads"))
    graph = _dgl_graph(torch, dgl, found).to(device_of(case))
    graph.create_formats_()
    nn = torch.nn
    if case["model"] == "gcn":
        made = [layers.GraphConv(k, hidden), layers.GraphConv(hidden, classes)]
    elif case["model"] == "gin":
        made = [
            layers.GINConv(_perceptron(k, hidden), "sum"),
            layers.GINConv(_perceptron(hidden, classes), "sum"),
        ]
    else:
        made = [layers.GATConv(k, hidden // heads, heads), layers.GATConv(hidden, classes, 1)]

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(made)

        def forward(self, x: Any) -> Any:
            x = self.layers[0](graph, x).flatten(1)
            x = torch.nn.functional.elu(x) if case["model"] == "gat" else x.relu()
            return self.layers[1](graph, x).flatten(1)

    return Net()


def step_of(library: str, case: dict[str, Any]) -> Callable[[], float]:
    """Return what is timed: an epoch, an inference, or the product alone; it gives a number."""
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    found = arrays_of(case)
    x, labels = torch.from_numpy(found["x"]), torch.from_numpy(found["labels"]).long()
    if case["model"] == "spmm":
        if library == "torch":
            matrix = _matrix(torch, found)
            return lambda: float(torch.mm(matrix, x)[0, 0])
        import dgl

        offsets, indices = (
            torch.from_numpy(found[n].astype(np.int64)) for n in ("indptr", "indices")
        )
        graph = dgl.graph(("csc", (offsets, indices, [])), num_nodes=len(x))
        weights = torch.from_numpy(found["weights"])
        return lambda: float(dgl.ops.u_mul_e_sum(graph, x, weights)[0, 0])
    net = {"torch": torch_net, "pyg": pyg_net, "dgl": dgl_net}[library](torch, case, found)
    x, labels, net = (each.to(device_of(case)) for each in (x, labels, net))
    run = torch.compile(net) if case.get("compiled") else net
    if case["infer"]:
        net.eval()

        def infer() -> float:
            with torch.no_grad():
                return float(net(x)[0, 0])

        return infer
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return epoch


if __name__ == "__main__":
    chosen = json.loads(sys.argv[2])
    one = rounds(step_of(sys.argv[1], chosen), chosen["budget_s"])
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(one()), flush=True)
