"""The order of tasks on MPI ranks, which depends on the strategy.

The workers of one process run their tasks in program order. Across ranks, a trace delays tasks that
would wait for a message (`runtime.tracing.list_scheduling`), so tasks are ordered before a step is
simulated.
"""

from __future__ import annotations

import numpy as np

from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.problem.arrays import Choice, Problem
from soapstone.search.parallel.problem.operators import fans_of, waits_of
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation.schedule import State, arrange


def by_strategy(model: Model) -> bool:
    """Return whether the order of a machine's tasks depends on the strategy."""
    memories = {processor.memory for processor in model.machine.processors}
    return isinstance(model.machine, MeasuredMachine) and len(memories) > 1


class Arrangement:
    """Orders the tasks of a model."""

    def __init__(self, model: Model) -> None:
        self.problem = model.problem
        graph, tasks = model.graph, model.tasks
        waits = waits_of(graph, tasks, fans_of(graph))
        task_of = {node.name: i for i, (_, nodes) in enumerate(tasks) for node in nodes}
        for old, new in graph.updates.items():
            update = task_of.get(graph.producers[new].name)
            readers = {task_of.get(node.name) for node in graph.consumers[old]}
            if update is not None:  # it overwrites what they read
                waits.add_edges_from((i, update) for i in readers - {None, update})
        after = [sorted(waits.successors(i)) for i in range(len(tasks))]
        self._ptr = np.cumsum([0, *map(len, after)])
        self._after = np.array([j for each in after for j in each], np.int64)
        self._need = np.array([waits.in_degree(i) for i in range(len(tasks))], np.int64)

    def of(self, choice: Choice, state: State) -> Problem:
        """Return the problem with its tasks in the order of a strategy."""
        p, order = self.problem, np.zeros(len(self.problem.order), np.int64)
        call(arrange, p, choice, state, self._ptr, self._after, self._need.copy(), order)
        tasks = p.tasks.copy()
        tasks["place"][order] = np.arange(len(order))
        return p._replace(order=order, tasks=tasks)
