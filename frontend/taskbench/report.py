"""One measurement of Task Bench on this runtime, from options to text."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from soapstone.frontend.taskbench.graph import TaskGraph
from soapstone.frontend.taskbench.metg import metg, summary, timed
from soapstone.frontend.taskbench.program import Body, Program
from soapstone.runtime import DefaultMapper, Machine
from soapstone.runtime.machines.start import machine_of, start

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_EDGES = 1 << 24  # tasks and inputs of a run: each takes memory, and time to analyse
MOST_ITERATIONS = 1 << 40  # of all tasks of all runs of one size: some hours on one processor
_ENOUGH_S = 2.0  # in which runs of a size are repeated
LARGEST = 8192  # iterations of the largest tasks where nobody says how many, and of
LARGEST_OF_MEMORY = 128  # the memory kernel, whose iterations take some 60 times as long
_UNITS = {"compute": "GFLOP/s", "imbalance": "GFLOP/s", "memory": "GB/s", "empty": "G tasks/s"}


def measure(
    *,
    pattern: str = "stencil_1d",
    kernel: str = "compute",
    body: Body = "native",
    workers: int | None = None,
    width: int | None = None,
    steps: int = 1000,
    iterations: int | None = None,
    graphs: int = 1,
    output_bytes: int = 16,
    radix: int = 3,
    scratch_bytes: int = 1 << 22,
    imbalance: float = 1.0,
    traced: bool = True,
    executor: str = "local",
    processes: bool = False,
    sweep: bool = True,
    repeats: int = 5,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> dict[str, Any] | None:
    """Run task graphs; with `sweep`, at all sizes down to METG(50 %).

    workers: processors of each process. width: by default one task a processor. iterations: by
    default 8192, and 128 of the memory kernel. progress: called with the size that is measured.
    Returns a JSON-ready dictionary, or None in the processes of a run that are not the first.

    Raises: ValueError naming an option, or saying that a run is too large; TaskError when a task
    finds a wrong input.
    """
    if graphs < 1:
        raise ValueError(f"graphs is {graphs}, needed at least 1")
    if processes and executor != "local":
        raise ValueError(f"processes with executor {executor!r} found; the local one is needed")
    machine = (
        Machine.local(workers, processes=True) if processes else machine_of(executor, cpus=workers)
    )
    count = len(machine.processors)
    if iterations is None:
        iterations = LARGEST_OF_MEMORY if kernel == "memory" else LARGEST
    first = TaskGraph(pattern, width or count, steps, radix)
    _check_size(first, graphs, iterations, repeats)
    if progress is not None and traced:
        progress("analysing and compiling the tasks", 0, 1)
    made = [replace(first, index=number) for number in range(graphs)]
    with start(executor, machine, DefaultMapper()) as runtime:
        program = Program(
            runtime,
            made,
            kernel,
            body,
            traced=traced,
            output_bytes=output_bytes,
            scratch_bytes=scratch_bytes,
            imbalance=imbalance,
        )
        program.run(1)  # compiles, and touches memory
        arguments = (program.run, program.work, program.tasks, count)
        if sweep and kernel != "empty":
            found = metg(
                *arguments,
                largest=iterations,
                repeats=repeats,
                enough_s=_ENOUGH_S,
                progress=progress,
            )
        else:
            one = timed(*arguments, iterations=iterations, repeats=repeats, enough_s=_ENOUGH_S)
            found = summary([one], 0.5)
        if not found.interrupted:
            program.check_outputs()
        if runtime.executor.world.rank:
            return None
        about = {**asdict(made[0]), "graphs": graphs, "kernel": kernel, "body": body}
        about |= {"traced": traced, "executor": executor, "workers": count, "processes": processes}
        about |= {"output_bytes": output_bytes, "tasks": program.tasks}
        about |= {"prepared_s": program.prepared_s, "repeats": repeats}
        result = found.to_json()
        if len(found.samples) == 1:  # nothing to compare with
            result["metg_us"] = None
        return {"task_bench": about, **result}


def _check_size(graph: TaskGraph, graphs: int, iterations: int, repeats: int) -> None:
    """Raise ValueError where runs of such graphs would not end, or have no room."""
    tasks = graphs * graph.width * graph.steps
    for what, found, most in (
        ("tasks and inputs", tasks * (1 + graph.most_inputs), MOST_EDGES),
        ("iterations in all", tasks * iterations * repeats, MOST_ITERATIONS),
    ):
        if found > most:
            raise ValueError(
                f"{graphs} graphs of pattern {graph.pattern!r}, {graph.width} wide, of"
                f" {graph.steps} steps, {repeats} runs of {iterations} iterations a task: {found:,}"
                f" {what} found, needed at most {most:,}"
            )


def text(measurement: dict[str, Any]) -> str:
    """What a person reads of a measurement."""
    about = measurement["task_bench"]
    lines = [
        f"{about['pattern']}, {about['graphs']} x {about['width']} wide, {about['steps']} steps: "
        f"{about['tasks']} tasks, each checks its inputs",
        f"{about['kernel']} kernel, {about['body']} bodies, "
        f"{'traced' if about['traced'] else 'untraced'}, {about['executor']} executor, "
        f"{about['workers']} workers{' (processes)' if about['processes'] else ''}",
    ]
    if about["traced"]:
        lines.append(f"analysed and compiled in {about['prepared_s']:.2f} s")
    unit = _UNITS[about["kernel"]]
    lines.append(f"{'iterations':>10} {'us a task':>12} {unit:>12} {'efficiency':>11}")
    for sample in measurement["samples"]:
        lines.append(
            f"{sample['iterations']:>10} {sample['granularity_us']:>12.3f} "
            f"{sample['rate'] / 1e9:>12.4g} {sample['efficiency']:>11.1%}"
        )
    if measurement["metg_us"] is not None and math.isfinite(measurement["metg_us"]):
        sign = "<=" if measurement["bound"] else "="
        ending = ", interrupted before smaller tasks" if measurement["interrupted"] else ""
        found = f"METG({measurement['target']:.0%}) {sign} {measurement['metg_us']:.3g} us"
        lines.append(f"{found}{ending}")
    return "\n".join(lines)
