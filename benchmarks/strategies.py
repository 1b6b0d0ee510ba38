"""Searches for strategies on described clusters (FlexFlow: Jia, Table 3.4 and Figure 3.6).

    python benchmarks/strategies.py [--models alexnet,nmt] [--devices 4,16] [--machine p100]

Each model is searched with the paper's stop rule (half of the search without a better strategy), by
delta and by full simulation with as many proposals; steps are compared with those of data
parallelism and of experts. Everything is simulated, on a roofline of the devices.
"""

from __future__ import annotations

import argparse
from typing import Any

from harness import geometric_means, show, write

from soapstone.frontend.strategies import graph_of
from soapstone.runtime.cluster import load_machine
from soapstone.search.parallel import Options, search

# An app, its sizes, samples a device, and the paper's seconds by delta simulation at 4 to 64 GPUs.
MODELS: dict[str, tuple[str, dict[str, Any], int, tuple[float, ...]]] = {
    "alexnet": ("alexnet", {}, 256, (0.04, 0.13, 0.48, 1.8, 5.9)),
    "resnet101": ("resnet", {"depth": 101}, 64, (0.4, 1.4, 7.3, 33, 158)),
    "inception_v3": ("inception", {}, 64, (4.1, 17, 77, 298, 1278)),
    "rnntc": ("rnntc", {"unrolled": True}, 64, (7.5, 39, 170, 516, 1489)),
    "rnnlm": ("rnnlm", {"unrolled": True}, 64, (9.2, 31, 121, 342, 969)),
    "nmt": ("nmt", {"unrolled": True}, 64, (16, 65, 328, 701, 2190)),
}
DEVICES = (4, 8, 16, 32, 64)


def searched(name: str, devices: int, machine: str, seconds: float, seed: int) -> dict[str, Any]:
    """Return what a search of one model on so many devices finds, and how long it takes."""
    app, sizes, each, paper = MODELS[name]
    graph = graph_of(app, each * devices, sizes=sizes)
    where = load_machine(machine, devices)
    search(graph, where, Options(proposals=8, seconds=None))  # compiled code is loaded
    found = search(graph, where, Options(seconds=seconds, seed=seed))
    full = search(
        graph,
        where,
        Options(seconds=None, proposals=min(found.proposals, 400), simulation="full", seed=seed),
    )
    data, expert = found.initial_us["data"], found.initial_us["expert"]
    step = found.simulation.step_us
    return {
        "model": name,
        "devices": devices,
        "search s": found.seconds,
        "paper's s": paper[DEVICES.index(devices)] if devices in DEVICES else "",
        "proposals": found.proposals,
        "proposals/s": found.proposals / found.seconds,
        "full, proposals/s": full.proposals / full.seconds,
        "step ms": step / 1e3,
        "bound ms": found.simulation.lower_bound_us / 1e3,
        "over data": data / step,
        "over expert": expert / step,
        "MB moved": found.simulation.bytes_moved / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default="4,16,64")
    parser.add_argument("--machine", default="p100")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one search, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.models.split(","):
        for devices in map(int, given.devices.split(",")):
            row = searched(name, devices, given.machine, given.seconds, given.seed)
            show(row)
            rows.append(row)
    means = geometric_means(rows, ["over data", "over expert"])
    rows.append({"model": "geometric mean", **means})
    if not given.no_write:
        title = f"Strategies found by simulation on the described machine {given.machine}"
        command = f"python benchmarks/strategies.py --machine {given.machine}"
        write(f"strategies_{given.machine}", title, command, list(rows[0]), rows)


if __name__ == "__main__":
    main()
