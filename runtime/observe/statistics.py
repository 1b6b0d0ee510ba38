"""What a runtime has done, counted."""

from __future__ import annotations

from dataclasses import asdict

from soapstone.records import dataclass


@dataclass
class Statistics:
    """Counters of a runtime; all only grow.

    launches: index launches analysed (copies and folds not counted). points: their point tasks.
    edges: dependences found. interference_tests: pairs of tilings compared (each once).
    copies, bytes_copied: between instances, and what they moved. bytes_replayed: what copies of
    replayed steps moved between memories. folds: of partial results.
    allocations, bytes_allocated: instances and arenas. captures: steps captured. steps_replayed:
    completed trace replays. fixup_copies: those before a replay, of what the trace needs elsewhere.
    launches_traced: launches and fills that automatic tracing replayed. evictions: instances that
    left a memory to make room.
    """

    launches: int = 0
    points: int = 0
    edges: int = 0
    interference_tests: int = 0
    copies: int = 0
    bytes_copied: int = 0
    folds: int = 0
    allocations: int = 0
    bytes_allocated: int = 0
    captures: int = 0
    steps_replayed: int = 0
    fixup_copies: int = 0
    launches_traced: int = 0
    evictions: int = 0
    bytes_replayed: int = 0

    def describe(self) -> dict[str, int]:
        """The counters as a dictionary, in a stable order."""
        return asdict(self)
