"""GPUs of ranks: `NUMBA_ENABLE_CUDASIM=1 mpiexec -n 2 python gpu_ranks.py CHECK ...`.

Every rank runs the same and compares what it reads with sequential NumPy, or what training comes to
with the sequential run. In the simulator lanes are late, so that an order that nothing enforces
shows. Prints a line a check and rank.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from helpers.processes import say
from helpers.runtime.late_lanes import LateLane
from helpers.runtime.programs import random_program
from helpers.training_runs import compare
from programs.gpu_checks import Shuffled, add, fail, small, small_images

from soapstone.native.cuda.device import device_count, simulated
from soapstone.runtime import (
    DefaultMapper,
    MachineError,
    Partition,
    Processor,
    Region,
    TaskError,
    Write,
    task,
)
from soapstone.runtime.devices import executor
from soapstone.runtime.devices.ranks import VARIABLE, takes_addresses
from soapstone.runtime.errors import PeerError
from soapstone.runtime.executors.mpi.executor import connect, meet, rank
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.start import machine_of, start
from soapstone.runtime.model import launch as launches
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
        gpus = min(1 + seed % 2, device_count() // connect().Get_size())
        with start("mpi", machine(gpus, seed % 3 // 2), mapper) as runtime:
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


@task
def count(x: Write) -> None:
    x[...] = np.arange(x.size).reshape(x.shape)


class Across(DefaultMapper):
    """What counts is on the first rank's GPU, what adds on the second's."""

    def place(self, launch: launches.Launch, point: int) -> int:
        return int(launch.name == "add")

    def whole_instances(self, region: Region, memory: str) -> bool:
        return True


def messages() -> None:
    """Messages are between GPUs where MPI takes their addresses, without copies of what is one
    range of memory; otherwise between hosts, with a copy at each end.
    """
    direct, ends = takes_addresses(), []
    on = machine_of("mpi", gpus=1)
    first, second = (on.memories[memory].name for memory in on.devices)
    assert direct == any((link.source, link.target) == (first, second) for link in on.links)
    with start("mpi", on, Across()) as runtime:
        for tile, copies in (((2, 8), 0 if direct else 1), ((8, 2), 1)):
            x, y = Region((8, 8), np.float32, "x"), Region((8, 8), np.float32, "y")
            parts = [Partition.of(region, [[0, 0]], [tile]) for region in (x, y)]
            runtime.fill(y, 1)
            with runtime.capture("across") as found:
                runtime.launch(count, x)
                runtime.launch(add, *parts)
            found.trace.replay()
            mine = [o for o in found.trace.operations if o.launch.partitions[0].region is x]
            assert [o.kind for o in mine].count("copy") == copies, mine
            ends += [o for o in mine if o.kind in ("send", "post")]
            wanted = np.ones(y.shape)
            wanted[: tile[0], : tile[1]] += np.arange(64).reshape(8, 8)[: tile[0], : tile[1]]
            np.testing.assert_array_equal(runtime.read(y), wanted)
    assert len(ends) == 2
    for use in (each for operation in ends for each in operation.uses):
        assert (use.storage.memory in on.devices) == direct


def errors() -> None:
    """A body that raises stops all ranks with its name; machines that cannot be are refused."""
    try:
        machine_of("mpi", gpus=1, cpus=2)
        raise AssertionError("processors of the host beside GPUs")
    except MachineError as error:
        assert "1 gpus found beside 2 cpus" in str(error), error
    most = device_count() // 2 + 1
    try:
        machine_of("mpi", gpus=most)
        raise AssertionError("more GPUs than there are")
    except MachineError as error:
        said = f"{most} gpus asked for from number {most}"
        assert "process 1" in str(error) and said in str(error), error
    try:
        machine_of("mpi", gpus=1 + rank())
        raise AssertionError("more GPUs of one rank than of another")
    except MachineError as error:
        assert "as many of each needed" in str(error), error
    x, y = Region((4, 6), np.float32, "x"), Region((4, 6), np.float32, "y")
    try:
        with patch.dict(os.environ, {VARIABLE: "perhaps" if rank() else "on"}):
            machine_of("mpi", gpus=1)
        raise AssertionError("a variable of no meaning")
    except MachineError as error:
        assert f"variable {VARIABLE} of process 1 is 'perhaps'" in str(error), error
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


CHECKS = {"random": random, "training": training, "messages": messages, "errors": errors}

if __name__ == "__main__":
    if simulated():
        executor.Lane = LateLane
    for name in sys.argv[1:]:
        CHECKS[name]()
        say(name, "as it should be")
