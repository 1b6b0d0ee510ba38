"""Strategies found by simulation: the SOAP space (Jia, chapter 3; FlexFlow)."""

from __future__ import annotations

from soapstone.search.parallel.mcmc.initial import NAMED
from soapstone.search.parallel.mcmc.options import Options
from soapstone.search.parallel.mcmc.search import StrategyResult, search
from soapstone.search.parallel.methods import METHODS, method_named
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.simulation.simulate import Simulation, Simulator, simulate

__all__ = [
    "METHODS",
    "NAMED",
    "Options",
    "ParallelError",
    "Simulation",
    "Simulator",
    "StrategyResult",
    "method_named",
    "search",
    "simulate",
]
