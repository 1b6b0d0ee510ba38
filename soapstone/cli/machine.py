"""`soapstone machine`: machines that are described, and this one measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from soapstone.cli.common import Cpus, Devices, Json, Threads, answer, command, tell

app = typer.Typer(help="Machines, described and measured.", no_args_is_help=True)


@command(app, "list")
def list_(as_json: Json = False) -> None:
    """List the machines that are described already."""
    from soapstone.runtime.machines.cluster import load_machine, shipped

    rows: list[dict[str, Any]] = []
    for name in ("local", *shipped()):
        machine = load_machine(name)
        kinds = sorted({processor.kind for processor in machine.processors})
        rows.append({"name": name, "devices": len(machine.processors), "kinds": kinds})
    lines = [f"{r['name']:<12} {r['devices']} {', '.join(r['kinds'])} a node" for r in rows]
    answer("\n".join(lines), {"machines": rows}, as_json)


@command(app, "show")
def show(
    machine: Annotated[str, typer.Argument(help="A machine's name or file.")],
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Show a machine: processors, memories, links and the routes between devices."""
    from soapstone.frontend.strategies import finding
    from soapstone.runtime.machines.cluster import load_machine

    found = load_machine(machine, devices)
    tell(finding.machine_table(found), found.describe(), as_json)


@command(app, "measure")
def measure(
    cpus: Cpus = None,
    threads: Threads = 1,
    gpus: Annotated[
        int, typer.Option(min=0, help="Measure so many GPUs of this computer instead.")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the machine here (JSON).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this computer, its GPUs, or the ranks of mpiexec: processors, memories, links."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.strategies import finding
    from soapstone.runtime.machines.start import default_executor, rank_of
    from soapstone.search.cost.profile import measured_machine

    check_targets(output)
    check_suffix(output, ".json")
    executor = default_executor()
    found = measured_machine(cpus, threads, executor, gpus)
    if rank_of(executor):
        return
    if output is not None:
        found.save(output)
    lines, messages = [], []
    for (kind, members), by_size in found.messages.measured.items():
        among = ", ".join(found.memories[member].name for member in members)
        lines.append(f"  {kind} among {among}, by bytes of the value:")
        lines += [
            f"  {nbytes:>14,} bytes: {ns / 1e3:>10,.1f} us, {nbytes / ns:6.2f} GB/s"
            for nbytes, ns in by_size.items()
        ]
        by_bytes = {str(nbytes): ns / 1e3 for nbytes, ns in by_size.items()}
        messages.append({"kind": kind, "members": among, "us": by_bytes})
    value = {**found.describe(), **({"messages": messages} if messages else {})}
    tell("\n".join([finding.machine_table(found), *lines]), value, as_json)
