"""Training steps on a GPU: soapstone's beside those of torch, eager and compiled.

    python benchmarks/execution/gpu_training.py [--models resnet,bert:mixed_float16] [--no-write]

Each library is in a process of its own, in turns; a ratio is the median over rounds. A step is
forward, loss, backward and SGD (Adam for the GCN), and ends when the loss is read. Its batch is
copied from the host, but for torch's GCN, whose features stay on the GPU: ours copies them in each
step. The GCN is over a graph of Reddit's shape (`graphs/epochs.py`), or over the next smaller one
where there is less memory; its peers are torch's product of a sparse matrix, and DGL where it is
installed. Why a peer has no figure stands in its column.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path += [
    str(Path(__file__).resolve().parents[1] / part) for part in ("", "execution", "graphs")
]

from arguments import FOLDER
from epochs import BUDGET_S, CLASSES, SIZES, graph_file
from gpu_figures import TINY, table_of
from harness import alternate, median, ratio
from training_step import Benchmarked, app, soapstone_peer, torch_peer, twin

from soapstone.apps.tables.dlrm import VOCABULARIES
from soapstone.frontend.optimization.peer_process import Peer, PeerEndedError
from soapstone.native.cuda.device import Device
from soapstone.system import available_bytes

SCRIPTS = Path(__file__).resolve().parents[1] / "graphs"  # whose scripts are peers
MODELS = ("resnet", "bert", "gcn", "dlrm", "resnet:mixed_float16", "bert:mixed_float16")
OURS, ROUNDS = "soapstone", 7
GRAPHS = {"reddit": (16e9, 40e9), "large": (4e9, 10e9), "small": (0, 0)}  # bytes of GPU, of host


def case(name: str, tiny: bool) -> Benchmarked:
    """Return a model on both sides."""
    sizes: Mapping[str, Any] = TINY[name] if tiny else {}
    if name == "resnet":
        size, classes, batch = (32, 4, 2) if tiny else (224, 1000, 64)
        theirs = ((2, 2, 2, 2), 8, 4) if tiny else ((3, 4, 6, 3), 64, 1000)
        return Benchmarked(
            app("resnet", batch_size=batch, **sizes),
            twin("cnn", "resnet", *theirs, basic=tiny),
            {"image": ((batch, 3, size, size), 0)},
            ((batch,), classes),
        )
    if name == "bert":
        batch, length, words = (2, 8, 60) if tiny else (16, 128, 30_522)
        twins = {key: size for key, size in sizes.items() if key != "length"}
        return Benchmarked(
            app("bert", batch_size=batch, dropout=0.0, **sizes),
            twin("sequence", "Bert", **twins),
            {"ids": ((batch, length), words), "types": ((batch, length), 2)},
            ((batch,), 2),
        )
    tables, batch = (sizes["vocabularies"], 4) if tiny else (VOCABULARIES, 256)
    sizes = {"vocabularies": tables, **sizes}
    return Benchmarked(
        app("dlrm", batch_size=batch, **sizes),
        twin("recommend", "Dlrm", **sizes),
        {"dense": ((batch, 13), 0), "ids": ((batch, len(tables)), min(tables))},
        ((batch, 1), 2),
        "bce_with_logits",
    )


def over_graph(tiny: bool) -> dict[str, Any]:
    """Return what the GCN's peers are told, with the largest graph that there is memory for."""
    free, host = Device(0).free_bytes, available_bytes() or 0
    size = next(name for name, least in GRAPHS.items() if free >= least[0] and host >= least[1])
    SIZES["tiny"] = (60, 300, 8, 4)
    size = "tiny" if tiny else size
    told = {"graph": str(graph_file(size, FOLDER)), "size": size, "model": "gcn", "infer": False}
    told |= {"features": SIZES[size][2], "hidden": SIZES[size][3], "classes": CLASSES, "heads": 1}
    return {**told, "threads": 1, "budget_s": BUDGET_S, "device": device(tiny)}


def device(tiny: bool) -> str:
    """Return torch's device; a GPU that is simulated is none of its own."""
    return "cpu" if tiny else "cuda"


def lacking(library: str, tiny: bool) -> str:
    """Return why a library has no figure, or nothing."""
    if importlib.util.find_spec(library) is None:
        return "not installed"
    if tiny:
        return ""
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


def row(model: str, tiny: bool) -> dict[str, Any]:
    """Return a model's row."""
    name, _, precision = model.partition(":")
    options = ["--tiny"] * tiny
    mine: dict[str, Sequence[str]] = {
        peer: [sys.executable, __file__, "--peer", peer, model, *options]
        for peer in (OURS, "torch", "torch.compile")
    }
    found: dict[str, Any] = {"precision": precision or "float32"}
    if name == "gcn":
        told = over_graph(tiny)
        texts = json.dumps(told), json.dumps({**told, "compiled": True})
        theirs = [sys.executable, str(SCRIPTS / "epochs_peers.py")]
        mine = {
            OURS: [sys.executable, str(SCRIPTS / "epochs.py"), "--peer", OURS, texts[0]],
            "torch": [*theirs, "torch", texts[0]],
            "torch.compile": [*theirs, "torch", texts[1]],
            "dgl": [*theirs, "dgl", texts[0]],
        }
        found["graph"] = told["size"]
    peers: dict[str, Peer] = {}
    try:
        for peer, command in mine.items():
            said = "" if peer == OURS else lacking(peer.split(".")[0], tiny)
            try:
                if not said:
                    peers[peer] = Peer(command)
            except PeerEndedError as error:
                if peer == OURS:
                    raise
                said = str(error)
            found[f"{peer} ms"] = said
        measured = alternate(peers, 1 if tiny else ROUNDS)
    finally:
        for each in peers.values():
            each.close()
    for peer, rounds in measured.items():
        found[f"{peer} ms"] = median(rounds, "ms")
        if peer != OURS:
            found[f"/ {peer}"] = ratio(measured[OURS], rounds)
    return found


def be(peer: str, model: str, tiny: bool) -> None:
    """Be a library on a model."""
    name, _, precision = model.partition(":")
    how = {"precision": precision or "float32"}
    if peer == OURS:
        soapstone_peer(case(name, tiny), gpus=1, **how)
    else:
        compiled = peer == "torch.compile"
        torch_peer(case(name, tiny), device=device(tiny), compiled=compiled, **how)


def main() -> int:
    if sys.argv[1:2] == ["--peer"]:
        be(*sys.argv[2:4], "--tiny" in sys.argv)
        return 0
    return table_of(__file__, __doc__, "Training steps on a GPU beside torch", MODELS, row)


if __name__ == "__main__":
    sys.exit(main())
