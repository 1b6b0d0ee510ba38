"""Training that writes a checkpoint after every epoch, to be killed: `fault_training.py FILE N`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from soapstone.frontend.training import checkpoint
from soapstone.runtime import Machine, Partition, ReadWrite, Region, Runtime, task


@task
def train(step: int, weight: ReadWrite) -> None:
    """A step whose result depends on every step before it."""
    weight *= 1.0 + 1.0 / (step + 2)
    weight += np.sin(weight) + (step == 0)


def main(path: Path, steps: int) -> None:
    """Train from the checkpoint if there is one, and write one after each step."""
    weight = Region((40000,), "f8", "weight")
    tiles = Partition.tiled(weight, 4)
    first = 0
    with Runtime(Machine.local(2)) as runtime:
        if path.exists():
            arrays, metadata = checkpoint.load(path)
            runtime.write(weight, arrays["weight"])
            first = metadata["step"]
        for step in range(first, steps):
            runtime.launch(train, step, tiles)
            found = runtime.read(weight)
            checkpoint.save(path, {"weight": found}, {"step": step + 1})
            print(step + 1, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
