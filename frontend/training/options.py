"""How a model is to be trained: what `Model.compile` is given, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from soapstone.frontend.memory_plans import Plans
from soapstone.frontend.precision import check_tf32
from soapstone.frontend.training.objective import Losses, Metrics
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.entry import TF32
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.mappers.plugins import StrategyMapper
from soapstone.mappers.ranges import RangesMapper
from soapstone.runtime import Machine
from soapstone.runtime.machines.start import machine_of, warn_of_turns

_FOLLOWING = ("data_parallel", StrategyMapper.name)  # the default gives way to a strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `Model.compile`, which says what each means and has the defaults."""

    optimizer: Optimizer | str
    loss: Losses
    metrics: Metrics
    loss_weights: Mapping[str, float] | None
    weighted: bool
    micro_batches: int
    precision: str
    machine: Machine | None
    executor: str
    cpus: int | None
    threads: int
    gpus: int
    mapper: object
    strategy: Strategy | str | Path | None
    optimize: bool
    step: Graph | str | Path | None
    choices: str | Path | None
    fast_memory: int | None
    plan: MemoryPlan | str | Path | None
    overlap: bool

    def __post_init__(self) -> None:
        if self.optimize and self.executor != "local":
            raise GraphError(
                f"optimize: found with executor {self.executor!r}, whose processes would find"
                " different steps; find one with executor 'local', and give its file as step"
            )
        if self.optimize and self.strategy is not None:
            raise GraphError("optimize: found with a strategy, which is of the original graph")
        streams = self.fast_memory is not None or self.plan is not None  # `plans` knows the mapper
        if self.strategy is not None and not streams and self.mapper not in _FOLLOWING:
            raise GraphError(
                f"strategy: found with mapper {self.mapper!r}, which follows none; one of both"
                " needed"
            )

    def plans(self) -> Plans | None:
        """Return who plans for a fast memory, None where there is none.

        Raises:
            GraphError: a mapper that follows no plan, or a plan that cannot be had.
        """
        if self.fast_memory is None and self.plan is None:
            if self.overlap:
                raise GraphError("overlap: found without a fast memory; its bytes needed")
            return None
        known = self.mapper in ("data_parallel", BoundedMemoryMapper.name)
        if not known and not isinstance(self.mapper, RangesMapper):
            raise GraphError(
                f"fast memory: found with mapper {self.mapper!r}; the default one, ranges of"
                " vertices, or a strategy, needed"
            )
        return Plans("dp" if self.plan is None else self.plan, self.fast_memory)

    def runs_on(self) -> Machine:
        """Return the machine that is described, or this one as it is asked for.

        Raises:
            MachineError: processors that are not there.
        """
        if self.machine is not None:
            return self.machine
        made = machine_of(self.executor, self.cpus, self.threads, self.gpus)
        if self.cpus is not None:
            warn_of_turns(self.cpus, self.threads)
        return made

    def rounding(self, processor: str) -> str:
        """Return in which precision a kind of processor may compute products.

        Raises:
            GraphError: one that it does not have.
        """
        if self.precision != TF32:
            return SINGLE
        check_tf32(processor)
        return TF32

    def read_strategy(self) -> Strategy | None:
        """Return the strategy that is given, read if it is a file."""
        if self.strategy is None or isinstance(self.strategy, Strategy):
            return self.strategy
        return Strategy.load(Path(self.strategy))
