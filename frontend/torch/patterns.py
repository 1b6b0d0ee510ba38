"""The tree of all sequences of operators that were recorded, and the patterns in it."""

from __future__ import annotations

from typing import Any

from soapstone.frontend.torch.values import Spec


class Step:
    """A node of the tree of sequences: an operator that was recorded after those above it.

    Attributes:
        edges: the operators that came next.
        passes, ends: how often it was recorded, and how often as the last one of a sequence.
        cut: whether a pattern ends here.
        first, specs: the place of its first result, and the types of its results.
        run: its rule.
        operands: where its tensors are: results from 0 up, inputs from -1 down, or a tensor that
            all calls share.
        inputs: the types of all inputs up to here.
        views, random: whether an operator up to here returns a view, or draws random numbers.
    """

    def __init__(self, before: Step | None, name: str) -> None:
        self.before = before
        self.name = name
        self.edges: dict[Any, Step] = {}
        self.passes = self.ends = 0
        self.cut = self.views = False
        self.random: bool = before is not None and before.random
        self.depth: int = before.depth + 1 if before is not None else 0
        self.first: int = before.first + len(before.specs) if before is not None else 0
        self.specs: tuple[Spec, ...] = ()
        self.spec: Any = None  # of the first
        self.several = False  # whether its results are a tuple
        self.run: Any = None
        self.operands: list[Any] = []
        self.inputs: tuple[Spec, ...] = before.inputs if before is not None else ()
        self.template: Template | None = None


class Template:
    """A pattern: the sequence of operators that ends at a step.

    Attributes:
        number: of it. steps: in order. grad: whether gradients were enabled.
        calls, runs: how often it occurred, and ran.
    """

    def __init__(self, number: int, last: Step, grad: bool) -> None:
        self.number = number
        self.inputs = last.inputs
        self.random = last.random
        self.grad = grad
        self.steps: list[Step] = []
        self.calls = self.runs = 0
        step: Step | None = last
        while step is not None and step.before is not None:
            self.steps.insert(0, step)
            step = step.before
