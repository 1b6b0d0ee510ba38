"""Optimised graphs beside their originals: compared on random inputs, and timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from soapstone.frontend.inference import InferenceSession
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.layouts import Layouts
from soapstone.ir.tensor import Array, Role

_TOLERANCE = 1e-3  # of the largest magnitude; sums in another order differ by rounding
_ROUNDS, _RUNS = 10, 3
_ROUND_S = 1.0  # of which slow models get fewer runs
_REST_S = 0.05  # the threads of the session that ran before stop spinning
Pair = tuple[Graph, Mapping[str, Array]]


def verified(
    graph: Graph,
    weights: Mapping[str, Array],
    new: Graph,
    new_weights: Mapping[str, Array],
    layouts: Layouts | None = None,
) -> float:
    """Return the largest difference of outputs on random inputs, after comparing them all.

    layouts: axis orders in which the new graph runs.

    Raises:
        GraphError: names or shapes of outputs differ, or values by more than rounding.
    """
    if new.outputs != graph.outputs:
        raise GraphError(f"outputs {new.outputs} found after the search; {graph.outputs} needed")
    given = inputs_of(graph)
    with (
        InferenceSession(graph, weights) as first,
        InferenceSession(new, new_weights, layouts=layouts) as second,
    ):
        one, other = first.run(given), second.run(given)
    pairs = [(name, one[name], other[name]) for name in graph.outputs]
    worst = 0.0
    for name, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise GraphError(
                f"output {name!r}: {b.dtype}{b.shape} found, {a.dtype}{a.shape} needed"
            )
        if a.size == 0:
            continue
        error = float(np.abs(a.astype(np.float64) - b).max())
        if not error <= _TOLERANCE * max(1e-6, float(np.abs(a).max())):
            raise GraphError(f"output {name!r} differs by {error:.3g} after the search")
        worst = max(worst, error)
    return worst


def inputs_of(graph: Graph) -> dict[str, Array]:
    """Return seeded random inputs: numbers around 0, and 0 or 1 where whole numbers are taken."""
    return {name: drawn(graph, name) for name in graph.inputs(Role.INPUT)}


def drawn(graph: Graph, name: str) -> Array:
    """Return seeded random contents of an input."""
    spec = graph.tensors[name]
    random = np.random.default_rng([len(name), spec.size])
    if spec.is_float:
        drawn = random.standard_normal(spec.shape)
        return (np.abs(drawn) if graph.roles[name] is Role.STATE else drawn).astype(spec.dtype)
    return random.integers(0, 2, spec.shape).astype(spec.dtype)


def measured(
    target: str,
    before: Pair,
    after: Pair,
    threads: int | None = None,
    layouts: Layouts | None = None,
) -> tuple[float, float]:
    """Return the median time of a run of two graphs on a target, in microseconds, in turns.

    layouts: axis orders in which the second runs.
    """
    second = _runner(target, *after, threads, layouts)
    return in_turns(_runner(target, *before, threads), second)


def in_turns(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the time of each of two ways to run, in microseconds.

    That of the first is a median over rounds; that of the second is told from the median of what it
    took over the first in the same round, since a shared machine is faster in one than in another.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, medians in zip((first, second), times):
            kept = []
            time.sleep(_REST_S)
            begin = time.perf_counter()
            run()
            run()
            spent = (time.perf_counter() - begin) / 2
            for _ in range(max(1, min(_RUNS, int(_ROUND_S / spent)))):
                start = time.perf_counter()
                run()
                kept.append((time.perf_counter() - start) * 1e6)
            medians.append(statistics.median(kept))
    before = statistics.median(times[0])
    return before, before * statistics.median(b / a for a, b in zip(*times))


def _runner(
    target: str,
    graph: Graph,
    weights: Mapping[str, Array],
    threads: int | None,
    layouts: Layouts | None = None,
) -> Callable[[], object]:
    given = inputs_of(graph)
    if target == "soapstone":
        session = InferenceSession(graph, weights, threads=threads, layouts=layouts)
        return lambda: session.run(given)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    found = onnxruntime.InferenceSession(
        exported(graph, weights), options, providers=["CPUExecutionProvider"]
    )
    return lambda: found.run(None, given)


def exported(graph: Graph, weights: Mapping[str, Array]) -> bytes:
    """Return a graph and its weights as the bytes of an ONNX file."""
    from soapstone.frontend.onnx.export import onnx_graph
    from soapstone.frontend.onnx.tensors import as_tensor

    model, held = onnx_graph(graph, weights)
    model.graph.initializer.extend(as_tensor(array, name) for name, array in held.items())
    return bytes(model.SerializeToString())
