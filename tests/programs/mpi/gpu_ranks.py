"""GPUs of ranks: `NUMBA_ENABLE_CUDASIM=1 mpiexec -n 2 python gpu_ranks.py CHECK ...`.

Every rank runs the same and compares what it reads with sequential NumPy, or what training comes to
with the sequential run. In the simulator lanes are late, so that an order that nothing enforces
shows. Prints a line a check and rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from helpers.processes import say
from helpers.runtime.late_lanes import LateLane
from helpers.runtime.programs import random_program
from helpers.training_runs import compare
from programs.gpu_checks import Shuffled, add, fail, small, small_images

from soapstone.native.cuda.device import simulated
from soapstone.runtime import MachineError, Partition, Processor, Region, TaskError
from soapstone.runtime.devices import executor
from soapstone.runtime.errors import PeerError
from soapstone.runtime.executors.mpi.executor import connect, meet, rank
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.start import machine_of, start
from soapstone.runtime.observe.checker import check_log

PROGRAMS = 5


def machine(gpus: int, cpus: int) -> Machine:
    """Return the machine of all ranks, and processors of each host beside the GPUs."""
    found = machine_of("mpi", gpus=gpus)
    nodes = {each.name.split(".")[0]: each.node for each in found.processors}
    hosted = (
        Processor(f"{name}.cpu{number}", memory=name, node=node)
        for name, node in nodes.items()
        for number in range(cpus)
    )
    return replace(found, processors=(*hosted, *found.processors))


def random() -> None:
    """Random programs equal sequential NumPy, untraced and replayed; their logs are accepted."""
    folder = connect().bcast(TemporaryDirectory().name if rank() == 0 else None)
    Path(folder).mkdir(exist_ok=True)
    for seed in range(PROGRAMS):
        program = random_program(seed)
        mapper = Shuffled(seed, seed % 2 == 0, seed % 5 > 0, ranks=True)
        with start("mpi", machine(1 + seed % 2, seed % 3 // 2), mapper) as runtime:
            log = Path(folder) / f"{seed}.log"
            with runtime.log(log):
                program.compare(runtime, seed)
        meet("the logs")
        if rank() == 0:
            report = check_log(log)
            assert not report.violations, report.violations[0]


def training() -> None:
    """Steps on a GPU of each rank, and on two, equal the sequential run of the same graph."""
    for build, gpus in ((small, 1), (small_images, 1), (small, 2)):
        with build() as model:
            model.compile("sgd", executor="mpi", gpus=gpus)
            assert len({each.node for each in model.trainer.machine.processors}) == 1
            compare(model, steps=2)


def errors() -> None:
    """A body that raises stops all ranks with its name; machines that cannot be are refused."""
    try:
        machine_of("mpi", gpus=1, cpus=2)
        raise AssertionError("processors of the host beside GPUs")
    except MachineError as error:
        assert "1 gpus found beside 2 cpus" in str(error), error
    try:
        machine_of("mpi", gpus=40)
        raise AssertionError("more GPUs than there are")
    except MachineError as error:
        assert "process 1" in str(error) and "40 gpus asked for from number 40" in str(error), error
    try:
        machine_of("mpi", gpus=1 + rank())
        raise AssertionError("more GPUs of one rank than of another")
    except MachineError as error:
        assert "as many of each needed" in str(error), error
    x, y = Region((4, 6), np.float32, "x"), Region((4, 6), np.float32, "y")
    with start("mpi", machine_of("mpi", gpus=1), Shuffled(0, ranks=True)) as runtime:
        runtime.fill(x, 2)
        runtime.fill(y, 1)
        runtime.launch(add, Partition.tiled(x, (2, 2)), Partition.tiled(y, (2, 2)))
        np.testing.assert_array_equal(runtime.read(y), np.full(y.shape, 3, y.dtype))
        runtime.launch(fail, x)
        try:
            runtime.read(x)
            raise AssertionError("an error was lost")
        except (TaskError, PeerError) as error:
            assert "task 'fail', point 0" in str(error), error


if __name__ == "__main__":
    if simulated():
        executor.Lane = LateLane
    for name in sys.argv[1:]:
        {"random": random, "training": training, "errors": errors}[name]()
        say(name, "as it should be")
