"""Task Bench: task graphs of given patterns and kernels, to measure what a task costs.

Source: Slaughter et al., "Task Bench: A Parameterized Benchmark for Evaluating Parallel Runtime
Performance", SC 2020. `graph` has the patterns, `kernels` what a task does, `program` runs graphs
on a runtime, `metg` measures the minimum effective task granularity.
"""

from soapstone.frontend.taskbench.graph import PATTERNS, TaskGraph
from soapstone.frontend.taskbench.metg import Metg, metg
from soapstone.frontend.taskbench.program import BODIES, KERNELS, Program

__all__ = ["BODIES", "KERNELS", "PATTERNS", "Metg", "Program", "TaskGraph", "metg"]
