"""Training on features in a file, where memory is left for half of them: mapped_features.py FOLDER.

Prints the losses of runs on the features in memory and in the file, and what the latter may take.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from soapstone import Adam
from soapstone.apps.graphs import gcn
from soapstone.frontend.graphs.files import read_graph, write_graph
from soapstone.frontend.graphs.generate import Shape, block_model
from soapstone.ir.tensor import Array

VERTICES, WIDTH = 4_000, 8_192


def losses(folder: Path, features: Array | None = None) -> list[float]:
    """Return the losses of a few steps and of an evaluation. features: in place of the file's."""
    graph = read_graph(folder / "a.npz")
    splits = graph.splits()
    x = splits.train_x if features is None else features
    with gcn.build(VERTICES, graph, hidden=4, dropout=0.0) as model:
        model.compile(Adam(0.01), loss="masked_cross_entropy", cpus=1)
        fitted = model.fit(x, splits.train_y, epochs=3, shuffle=False, progress=False)
        tested = model.evaluate(x, splits.test_y)
    return [*(record["loss"] for record in fitted.epochs), tested["loss"]]


def main() -> None:
    folder = Path(sys.argv[1])
    made = block_model(Shape(vertices=VERTICES, edges=10_000, features=64, classes=4))
    write_graph(folder / "a.npz", replace(made, features=None))
    shape = (VERTICES, WIDTH)
    found = np.lib.format.open_memmap(folder / "a.features.npy", "w+", np.float32, shape)
    found[:, :64] = made.features  # the rest are holes in the file
    del found
    held = losses(folder, np.load(folder / "a.features.npy"))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    nbytes = 4 * VERTICES * WIDTH
    room = taken + nbytes + nbytes // 2  # the file, as it is mapped, and half of it
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    print(held, losses(folder), sep="\n")


if __name__ == "__main__":
    main()
