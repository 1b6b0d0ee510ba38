"""What graphs cost on a target: costs, objectives, and the database of measured times."""

from __future__ import annotations

from soapstone.search.cost.cost import METRICS, Cost, CostModel, Limit, Objective, ObjectiveError
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.measure import Weights

__all__ = [
    "METRICS",
    "Cost",
    "CostModel",
    "ExecutorCost",
    "Limit",
    "Objective",
    "ObjectiveError",
    "Weights",
]
