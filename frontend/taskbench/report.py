"""One measurement of Task Bench on this runtime, from options to text."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from soapstone.frontend.taskbench.graph import TaskGraph
from soapstone.frontend.taskbench.metg import metg, summary, timed
from soapstone.frontend.taskbench.program import Body, Program
from soapstone.runtime import DefaultMapper, Machine
from soapstone.runtime.machines.start import machine_of, start

_UNITS = {"compute": "GFLOP/s", "imbalance": "GFLOP/s", "memory": "GB/s", "empty": "G tasks/s"}


def measure(
    *,
    pattern: str = "stencil_1d",
    kernel: str = "compute",
    body: Body = "native",
    workers: int | None = None,
    width: int | None = None,
    steps: int = 1000,
    iterations: int = 8192,
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
) -> dict[str, Any] | None:
    """Run task graphs; with `sweep`, at all sizes down to METG(50 %).

    workers: processors of each process. width: by default one task a processor. Returns a
    JSON-ready dictionary, or None in the processes of a run that are not the first.

    Raises: ValueError naming an option; TaskError when a task finds a wrong input.
    """
    if processes and executor != "local":
        raise ValueError(f"processes with executor {executor!r} found; the local one is needed")
    machine = (
        Machine.local(workers, processes=True) if processes else machine_of(executor, cpus=workers)
    )
    count = len(machine.processors)
    made = [
        TaskGraph(pattern, width or count, steps, radix, index=number) for number in range(graphs)
    ]
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
            found = metg(*arguments, largest=iterations, repeats=repeats)
        else:
            found = summary([timed(*arguments, iterations=iterations, repeats=repeats)], 0.5)
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


def text(found: dict[str, Any]) -> str:
    """What a person reads of a measurement."""
    about = found["task_bench"]
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
    for sample in found["samples"]:
        lines.append(
            f"{sample['iterations']:>10} {sample['granularity_us']:>12.3f} "
            f"{sample['rate'] / 1e9:>12.4g} {sample['efficiency']:>11.1%}"
        )
    if found["metg_us"] is not None and math.isfinite(found["metg_us"]):
        sign = "<=" if found["bound"] else "="
        lines.append(f"METG({found['target']:.0%}) {sign} {found['metg_us']:.3g} us")
    return "\n".join(lines)
