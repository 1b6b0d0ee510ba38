"""Tables of what moves between two operators, against what the simulator makes of each pair."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.frontend.strategies.finding import graph_of, machine_of
from soapstone.search.parallel.exact.tables import Choices, Pair, edges_of
from soapstone.search.parallel.frontier.meshes import configurations_of
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.prepare import prepare

SIZES = {"hidden": 16, "layers": 1, "length": 4, "vocabulary": 48}


@pytest.mark.parametrize("app", ["lenet", "rnnlm", "transformer"])
def test_tables_of_pairs_hold_what_the_messages_of_each_pair_take(app: str) -> None:
    sizes = {} if app == "lenet" else dict(SIZES)
    if app == "transformer":
        sizes |= {"heads": 4, "inner": 32}
    model = prepare(graph_of(app, 16, sizes=sizes), machine_of("v100", 8))
    choices, random = configurations_of(model), np.random.default_rng(0)
    for ends in edges_of(model):
        few = [_sample(choices[op], 6, random) for op in ends]
        pair = Pair(model, ends)
        found = pair.moving(*few)
        assert found.any()
        for i, j in np.ndindex(found.shape):
            assert found[i, j] == _sent_ns(pair, few, (i, j))


def _sample(choices: Choices, many: int, random: np.random.Generator) -> Choices:
    rows = random.permutation(len(choices))[:many]
    return Choices(choices.degrees[rows].copy(), choices.placed[rows].copy())


def _sent_ns(pair: Pair, choices: list[Choices], at: tuple[int, int]) -> int:
    """Return the time of the messages that the simulator makes for two configurations."""
    settled = Settled(pair.model)
    for op, each, row in zip(pair.ops, choices, at):
        settled.choice.operators[op] = each.degrees[row]
        settled.choice.placed[op] = each.placed[row]
    settled.settle()
    p, c = pair.model.problem, settled.choice
    total = 0
    for value in pair.between["value"]:
        made = set(range(*p.values[value]["writers"]))
        free: dict[int, int] = {}
        latest = 0
        for message in c.live:
            giver = int(message["givers"])
            if giver < 0 or int(c.givers[giver]["row"]) not in made:
                continue
            begins = max(
                (free.get(channel, 0) for channel in _channels(pair, c, message)), default=0
            )
            for channel in _channels(pair, c, message):
                free[channel] = begins + int(message["busy"])
            latest = max(latest, begins + int(message["busy"]) + int(message["latency"]))
        total += latest
    return total


def _channels(pair: Pair, c: object, message: np.void) -> list[int]:
    p = pair.model.problem
    if message["source"] < 0:
        first = int(message["channels"])
        ends = np.flatnonzero(c.channels[first:] < 0)[0]  # type: ignore[attr-defined]
        return c.channels[first : first + ends].tolist()  # type: ignore[attr-defined]
    if message["source"] == message["target"]:
        return []
    way = int(message["source"]) * len(p.devices) + int(message["target"])
    return p.route[p.route_ptr[way] : p.route_ptr[way + 1]].tolist()
