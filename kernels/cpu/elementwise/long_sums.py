"""Sums of more operands than the element-wise machine holds, such as of all gradients' squares.

Their first operands are added up before, in order, so that the result has the bits of one sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.kernels.cpu.elementwise.programs import Node
from soapstone.records import dataclass

MOST = 24  # operands of a sum


@dataclass(frozen=True)
class Split:
    """A program, and the sums that come before it.

    Attributes:
        sums: the operands of each. An operand of these, and of `inputs`, is the number of an input,
            or of the n-th sum -1 - n.
        inputs: of the program. nodes, results: of the program, whose numbers count its inputs.
    """

    sums: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    results: tuple[int, ...]


def split(count: int, nodes: Sequence[Node], results: Sequence[int]) -> Split:
    """Return a program of `count` inputs whose sums of inputs have `MOST` operands at most."""
    sums: list[tuple[int, ...]] = []
    held: list[Node] = []
    for operator, operands, attributes in nodes:
        if operator == "accumulate" and max(operands) < count:
            while len(operands) > MOST:
                sums.append(operands[:MOST])
                operands = (-len(sums), *operands[MOST:])
        held.append((operator, operands, attributes))
    read = [key for _, operands, _ in held for key in operands] + list(results)
    inputs = tuple(dict.fromkeys(key for key in read if key < count))
    number = {key: place for place, key in enumerate(inputs)}
    number |= {count + place: len(inputs) + place for place in range(len(held))}
    return Split(
        tuple(sums),
        inputs,
        tuple((name, tuple(number[key] for key in own), more) for name, own, more in held),
        tuple(number[key] for key in results),
    )
