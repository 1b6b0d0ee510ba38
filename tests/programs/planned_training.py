"""Training in a fast memory of each rank, as memory plans say, beside training without a bound.

mpiexec -n 2 python planned_training.py CPUS METHOD...: a line a rank and method, of what its plan
moves, what its copies move, the bytes of its fast memory, and what it would need to hold all.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from helpers.processes import say

from soapstone import SGD, Model
from soapstone.ir.errors import GraphError
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.tensor import Array
from soapstone.runtime.machines.start import rank_of

CAPACITY = 60_000


def network() -> Model:
    """Return a residual network with what several ranks sum: losses, statistics, gradients."""
    model = Model("net", seed=1)
    x = model.input("image", (12, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu")
    x = model.relu(x + model.batch_norm(model.conv2d(x, 8, kernel=3, padding=1)))
    x = model.max_pool2d(x, 2)
    x = model.dense(model.flatten(x), 32, activation="relu")
    model.output(model.dense(x, 5))
    return model


def trained(cpus: int, **options: Any) -> tuple[dict[str, Array], Model]:
    """Train on batches of which the last is smaller, and evaluate; return what is carried."""
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((31, 3, 8, 8), np.float32), random.integers(0, 5, 31)
    model = network()
    model.compile(SGD(0.05, momentum=0.9), executor="mpi", cpus=cpus, **options)
    model.fit(images, labels, batch_size=12, epochs=2, progress=False)
    model.evaluate(images, labels)
    return model.trainer.state(), model


def main() -> None:
    """Compare, and print what is moved."""
    cpus, *methods = sys.argv[1:]
    rank = rank_of("mpi")
    wanted, model = trained(int(cpus))
    held = model.trainer.session.peak_bytes
    model.close()
    for method in methods:
        found, model = trained(int(cpus), fast_memory=CAPACITY, plan=method)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
        session = model.trainer.session
        names = [memory.name for memory in session.machine.memories]
        fast = session.used_bytes[names.index(f"rank{rank}.bounded")]
        planned, copied = model.trainer.moved_bytes or (0, 0)
        model.close()
        say(rank, method, planned, copied, fast, held)
    plan = MemoryPlan(CAPACITY, ())
    for options in ({"fast_memory": 3000}, {"plan": plan}):
        try:
            trained(int(cpus), **options)
        except GraphError as error:
            say(rank, error)


if __name__ == "__main__":
    main()
