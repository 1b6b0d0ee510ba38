"""The read-only view of a runtime that mappers decide by: what is valid where, and what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis.instance import Cells, Instances, union
from soapstone.runtime.errors import MapperError
from soapstone.runtime.model.partition import Partition

if TYPE_CHECKING:
    from soapstone.runtime.analysis.coherence import Coherence
    from soapstone.runtime.core import Runtime


class View:
    """What the analysis of a runtime in progress knows, of untraced launches or of a capture."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def capturing(self) -> bool:
        """Whether the launches are being captured, to be replayed as a trace."""
        return self._analysis is not self._runtime.analysis

    def valid_bytes(self, partition: Partition) -> Array:
        """The bytes of every tile of a partition that are valid in each memory.

        Returns int64 (points, memories).
        Memories are in the order of the machine's.
        """
        tiling, region = partition.tiling, partition.region
        memories = len(self._runtime.machine.memories)
        found = np.zeros((tiling.points, memories), dtype=np.int64)
        state = self._state(partition)
        if state is None:
            return found
        valid: dict[int, Cells] = {}
        for instance in state:
            if instance.valid is not False:
                memory = instance.storage.memory
                valid[memory] = union(valid.get(memory, False), instance.valid)
        overlaps: list[Array] | None = None
        for memory, cells in valid.items():
            if isinstance(cells, bool):
                found[:, memory] = tiling.volume
                continue
            if overlaps is None:
                overlaps = [
                    np.clip(
                        np.minimum(tiling.hi[:, axis, None], cut[None, 1:])
                        - np.maximum(tiling.lo[:, axis, None], cut[None, :-1]),
                        0,
                        None,
                    )
                    for axis, cut in enumerate(state.cuts)
                ]
            counts = np.broadcast_to(cells.astype(np.int64), (tiling.points, *cells.shape))
            for lengths in reversed(overlaps):
                shape = (lengths.shape[0], *(1,) * (counts.ndim - 2), lengths.shape[1])
                counts = (counts * lengths.reshape(shape)).sum(axis=-1)
            found[:, memory] = counts
        return found * region.dtype.itemsize

    def free_bytes(self, memory: str) -> int:
        """The bytes of a memory that are not in use now; each process has its own answer.

        Raises: MapperError for an unknown memory.
        """
        names = [place.name for place in self._runtime.machine.memories]
        if memory not in names:
            raise MapperError(f"view: memory {memory!r}, needed one of {sorted(names)}")
        return self._runtime.memory.free(names.index(memory))

    @property
    def _analysis(self) -> Coherence:
        return self._runtime.analysing

    def _state(self, partition: Partition) -> Instances | None:
        """The instances of a region as the analysis in progress sees them; makes none."""
        found = self._analysis.regions.get(partition.region)
        if found is None:
            found = self._runtime.analysis.regions.get(partition.region)
        return found
