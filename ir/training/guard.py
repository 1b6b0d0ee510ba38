"""The guard of a step: whatever outlives it keeps its old contents where a flag is false.

Operators such as `sgd` read the flag themselves; what any other operator makes of a state passes
through a `store` that reads it, so no operator has to know that steps can be refused.
"""

from __future__ import annotations

from collections.abc import Collection

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Affine
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Role

# The scalars of a step that the host sets before each
LEARNING_RATE = "learning_rate"
STEP = "step"


def step_number(builder: GraphBuilder) -> str:
    """Return the number of the step, a scalar input of the host, declaring it the first time."""
    if not builder.has(STEP):
        builder.input(STEP, (), "int64", Role.SCALAR)
    return STEP


def guarded(graph: Graph, flag: str, free: Collection[str] = ()) -> Graph:
    """Return the graph with every update held back where the value `flag`, of type bool, is false.

    free: states that are updated all the same.

    Raises:
        GraphError: there is no such value, or it is no bool scalar.
    """
    builder = GraphBuilder(base=graph)
    for name, value in graph.updates.items():
        maker = graph.producers.get(value)
        if name in free:
            continue
        if maker is not None and flag in maker.inputs and maker.overwrites.get(value) == name:
            continue
        origin, rename = (None, {}) if maker is None else followed(graph, maker, value)
        made = builder.apply(
            "store", value, name, flag, name=f"{name}.next", origin=origin, rename=rename
        )
        builder.update(name, made[0])
    return builder.build()


def followed(graph: Graph, maker: Node, value: str) -> tuple[str, dict[str, str]]:
    """Return the node that a store or copy of a value follows, and how its dims are renamed."""
    axes = graph.signature(maker).outputs[maker.outputs.index(value)].axes
    rename, known = {}, dict(maker.rename)
    for position, axis in enumerate(axes):
        dim = axis.dims[0] if isinstance(axis, Affine) and len(axis.dims) == 1 else ""
        rename[f"d{position}"] = known.get(dim, dim)
    return maker.origin or maker.name, rename
