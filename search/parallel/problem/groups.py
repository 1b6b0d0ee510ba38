"""Groups of operators that change together: equal ones, and those that share parameters."""

from __future__ import annotations

from soapstone.ir.tensor import Role
from soapstone.search.parallel.problem.prepare import Model


def classes(model: Model) -> dict[int, object]:
    """Return the class of each operator with a configuration of its own."""
    p = model.problem
    return {op: int(p.operators["class_"][op]) for op in p.free}


def sharing(model: Model) -> dict[int, object]:
    """Return a key of the parameters of each operator with a configuration of its own.

    Operators with equal keys have equal dims, so what is legal for one is for all. Without
    parameters, the key is the class.
    """
    found: dict[int, object] = {}
    for op, number in classes(model).items():
        node = model.operators[op].node
        signature = model.graph.signature(node)
        own = tuple(n for n in node.inputs if model.graph.roles.get(n) is Role.PARAMETER)
        found[op] = (own, signature.dims, signature.products) if own else number
    return found
