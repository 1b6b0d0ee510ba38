"""A found graph on trial: compared with the original, and timed in turns, as users run them.

Both run in processes of their own, since two sessions that take turns in one disturb each other
(pools, caches, workers that spin), and since a process can be ended when the budget is. Where no
process can be had, both run in this one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.deadline import Deadline, TimeUpError
from soapstone.frontend.optimization.check import Arrays, agree, check_outputs, draws
from soapstone.frontend.optimization.peer_process import Peer, PeerEndedError, serve
from soapstone.frontend.optimization.runners import Runner, Side, here
from soapstone.frontend.optimization.training import Ground, agree_steps
from soapstone.ir.errors import GraphError
from soapstone.ir.files.graphs import load_graph, load_layouts, save_graph
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine

ROUNDS = 10
_REST_S = 0.05  # the threads of the process that ran before stop spinning
_MAIN = (
    "import sys; sys.path[:] = {path!r}; "
    "from soapstone.frontend.optimization.trial import main; main()"
)


@dataclass(frozen=True)
class Outcome:
    """What a trial says.

    Attributes:
        error: the largest difference of an output; None where outputs were not compared to the end.
        before_us, after_us: medians over rounds; None where there was none.
        problem: what speaks against the found graph, or why nothing can be said; else empty.
    """

    error: float | None = None
    before_us: float | None = None
    after_us: float | None = None
    problem: str = ""


def trial(before: Side, after: Side, timed: bool, deadline: Deadline) -> Outcome:
    """Return what running two graphs says of the second, by a deadline; an interrupt ends it too.

    Args:
        timed: whether they are timed, on their target, if they agree.
    """
    try:
        check_outputs(before.graph, after.graph)
    except GraphError as error:
        return Outcome(problem=str(error))
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="soapstone-trial-") as folder, ExitStack() as stack:

        def started(side: Side) -> Runner:
            made = _started(side, Path(folder), deadline)
            stack.callback(made.close)
            return made

        try:
            given = (before, after)
            first, second = (started(replace(side, target="soapstone")) for side in given)
            if before.ground is not None:
                worst = agree_steps(before.graph, first, second)
            else:
                graph = before.graph
                worst = agree(graph.outputs, draws(graph), first.run, second.run)
            outcome = Outcome(worst)
            if timed and before.target != "soapstone":
                first, second = (started(side) for side in given)
            if timed:
                outcome = Outcome(worst, *in_turns(first, second, deadline))
        except GraphError as found:
            return Outcome(problem=str(found))
        except PeerEndedError as found:
            return replace(outcome, problem=f"it cannot be run: {found}")
        except TimeUpError:
            return _cut(outcome, "the budget ended")
        except KeyboardInterrupt:
            return _cut(outcome, "an interrupt came")
    return outcome


def _cut(outcome: Outcome, why: str) -> Outcome:
    if outcome.error is None:
        return Outcome(problem=f"{why} before what was found was checked")
    return outcome


def in_turns(
    first: Runner, second: Runner, deadline: Deadline
) -> tuple[float, float] | tuple[None, None]:
    """Return the time of a run of each, in microseconds; none where the deadline was over first.

    That of the first is a median over rounds; that of the second is told from the median of what it
    took over the first in the same round, since a shared machine is faster in one than in another.
    """
    times: list[tuple[float, float]] = []
    try:
        for number in range(ROUNDS):
            deadline.check()
            found = {}
            for side in (first, second) if number % 2 == 0 else (second, first):
                time.sleep(_REST_S)
                found[side] = side.round()
            times.append((found[first], found[second]))
    except (TimeUpError, KeyboardInterrupt):
        if not times:
            return None, None
    before = statistics.median(one for one, _ in times)
    return before, before * statistics.median(other / one for one, other in times)


def _started(side: Side, folder: Path, deadline: Deadline) -> Runner:
    """Return a side in a process of its own, or where there can be none, in this one.

    Raises:
        GraphError: it does not run.
    """
    where = folder / str(len(list(folder.iterdir())))
    where.mkdir()
    try:
        _write(side, where)
        return _Apart(side.graph, where, deadline)
    except (OSError, _NoProcessError):
        return here(side)


class _NoProcessError(Exception):
    """No process can be started."""


class _Apart:
    """A side in a process of its own; it is started anew where inputs have ended it."""

    def __init__(self, graph: Graph, folder: Path, deadline: Deadline) -> None:
        self._graph, self._folder, self._deadline = graph, folder, deadline
        self._command = [sys.executable, "-P", "-c", _MAIN.format(path=sys.path), str(folder)]
        self._peer = self._begun()

    def _begun(self) -> Peer:
        try:
            peer = Peer(self._command, deadline=self._deadline, apart=True)
        except PeerEndedError as error:
            if "cannot be started" in str(error):
                raise _NoProcessError(str(error)) from None
            raise
        _refused(peer.ask("bind"), peer)
        return peer

    def run(self, given: Arrays) -> Arrays | None:
        _put(self._folder / "given", given)
        try:
            answer = self._peer.ask(f"run {json.dumps(list(given))}")
        except PeerEndedError:  # by a signal, as some divisions of integers do
            self._peer = self._begun()
            return None
        if "refused" in answer:
            return None
        return _got(self._folder / "made", answer["names"], self._graph)

    def state(self) -> Arrays:
        answer = self._peer.ask("state")
        return _got(self._folder / "made", answer["names"], self._graph)

    def round(self) -> float:
        answer = self._peer.ask("round")
        _refused(answer, self._peer)
        return float(answer["us"])

    def close(self) -> None:
        self._peer.kill()


def _refused(answer: Mapping[str, Any], peer: Peer) -> None:
    if "refused" in answer:
        peer.kill()
        raise GraphError(f"it cannot be run: {answer['refused']}")


def _put(path: Path, arrays: Arrays) -> None:
    """Write arrays one after the other; who reads them knows their types."""
    with path.open("wb") as file:
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _got(path: Path, names: Sequence[str], graph: Graph) -> dict[str, Array]:
    """Return what `_put` wrote of values of a graph."""
    found, at, data = {}, 0, path.read_bytes()
    for name in names:
        spec = graph.tensors[name]
        flat = np.frombuffer(data, spec.dtype, spec.size, at)
        found[name] = flat.reshape(spec.shape)
        at += spec.nbytes
    return found


def _write(side: Side, folder: Path) -> None:
    job: dict[str, Any] = {"target": side.target, "threads": side.threads}
    if side.ground is not None:
        job["machine"] = side.ground.machine.describe()
        side.ground.mapper.strategy(side.graph, side.ground.machine).save(folder / "strategy.json")
        known = side.ground.constants
        _put(folder / "constants", {name: known[name] for name in side.graph.inputs(Role.CONSTANT)})
    save_graph(side.graph, folder / "graph.json", dict(side.weights) or None, side.layouts)
    (folder / "job.json").write_text(json.dumps(job))


def _read(folder: Path) -> Side:
    job = json.loads((folder / "job.json").read_text())
    graph, weights = load_graph(folder / "graph.json")
    ground = None
    if "machine" in job:
        strategy = Strategy.load(folder / "strategy.json")
        mapper = load_mapper("strategy", strategy)
        constants = _got(folder / "constants", graph.inputs(Role.CONSTANT), graph)
        ground = Ground(Machine.from_json(job["machine"]), mapper, constants)
    layouts = load_layouts(folder / "graph.json")
    return Side(graph, weights, layouts, job["target"], job["threads"], ground)


def main() -> None:
    """Be the process of a side, whose folder is the only argument."""
    folder = Path(sys.argv[1])
    side: Side | None = None
    runner: Runner | None = None

    def answer(line: str) -> dict[str, Any]:
        nonlocal side, runner
        what, _, rest = line.partition(" ")
        try:
            if side is None or runner is None:
                side = _read(folder)
                runner = here(side)
            if what == "run":
                made = runner.run(_got(folder / "given", json.loads(rest), side.graph))
            elif what == "state":
                made = runner.state()
            elif what == "round":
                return {"us": runner.round()}
            else:
                return {}
        except Exception as error:  # said where it is known what it means
            return {"refused": f"{error}" or type(error).__name__}
        if made is None:
            return {"refused": ""}
        _put(folder / "made", made)
        return {"names": list(made)}

    serve(answer)
