"""What passes between the nodes of an ONNX graph while it is translated, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.texts import TEXT
from soapstone.ir.by_extents import Choice
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.limits import check_bytes
from soapstone.records import dataclass

if TYPE_CHECKING:
    import onnx

    from soapstone.frontend.onnx.call import Call


class Extent(NamedTuple):
    """An extent in which the extents of other values are linear.

    Attributes:
        name, axis: an axis of an input, or of the result of an operator with strides, whose extent
            is not linear in those of inputs.
        extent: the extent of that axis.
        origin: the axes of inputs on which it depends.
    """

    name: str
    axis: int
    extent: int
    origin: frozenset[tuple[str, int]]

    @property
    def bent(self) -> bool:
        """Whether it is that of an operator's result, so not linear in extents of inputs."""
        return self.origin != {(self.name, self.axis)}


Extents = frozenset[Extent]  # those on which an extent depends


@dataclass(frozen=True, eq=False)
class Value:
    """A value while a graph is built: a value of the graph (`name`), known (`array`), or both.

    Texts are numbers in the graph: places in a `table`. Without a table, a run is given them.
    """

    spec: TensorSpec
    label: str  # as the file calls it
    name: str | None = None
    array: Array | None = None
    weight: bool = False  # known under its label in the file
    trained: bool = False  # a weight that is other contents in a later step, so nothing is folded
    table: Array | None = None
    of_extents: bool = False  # known numbers, computed from extents of inputs (`extent_notes.py`)
    follows: tuple[Extents, ...] = ()  # what each axis (of `of_extents`: element) depends on

    @property
    def lasting(self) -> Array | None:
        """The contents, if they may be taken as constant for all extents of inputs; else None.

        Contents that the graph makes as well depend on these extents. So do numbers `of_extents`,
        but what they are used for is noted (`extent_notes.py`).
        """
        return self.array if self.name is None or self.of_extents else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def is_text(self) -> bool:
        return self.spec.dtype == TEXT


class Absent:
    """What an optional value is that holds nothing."""

    def __repr__(self) -> str:
        return "an empty optional value"


ABSENT = Absent()
Slot = Value | tuple[Value, ...] | Absent  # a tensor, a sequence of tensors, or an optional without
Slots = Sequence[Slot | None]
Axes = tuple[Extents, ...] | None
Rule = Callable[["Call"], Any]
RULES: dict[tuple[str, str], Rule] = {}


@dataclass(frozen=True)
class Even:
    """How a translation depends on extents: by shapes alone, but for what `extent_notes.py` notes.

    Attributes:
        counts: results are extents of an operand.
        linear: the operands that may be computed from extents, with known results that are linear
            in them: only the first, or all.
        multiplied: results are products, which are linear in one operand; of several that are
            computed from extents, each is a number of its own.
        divided: returns the choice by which results stay linear.
        shape: the operand that may be computed from extents because it is a shape, or ends a range
            or a part of a constant.
        within: returns whether as many elements as lie between such ends are taken.
        cut: returns which parts are taken of the first operand, as notes say it, and the choice of
            how they lie, or None for that; None where too little is known.
        aligned: each extent of a result depends on those of the operands along the same axis,
            counted from the last.
        strided: results have the first operand's extents; those of windows are divided by strides.
        scaled: results have the first operand's extents; those of images are scaled by any factor.
        places: attributes of the emitted nodes may depend on extents of operands.
        axes: returns what each axis of results of a rank follows from; None where it does not say.
        elements: returns the same of elements, where an operand is a shape.
    """

    counts: bool = False
    linear: Literal["first", "all"] | None = None
    multiplied: bool = False
    divided: Callable[[Slots], Choice] | None = None
    shape: int | None = None
    within: Callable[[Slots], bool] | None = None
    cut: Callable[[Slots], tuple[tuple[str, ...], Choice | None] | None] | None = None
    aligned: bool = False
    strided: bool = False
    scaled: bool = False
    places: bool = False
    axes: Callable[[onnx.NodeProto, Slots, int], Axes] | None = None
    elements: Callable[[onnx.NodeProto, Slots], Axes] | None = None

    def linear_in(self, operands: list[int]) -> bool:
        """Return whether results are linear in these operands, which are made of extents."""
        return self.linear == "all" or (self.linear == "first" and operands == [0])


PLAIN, ALIGNED, STRIDED = Even(), Even(aligned=True), Even(strided=True)
EVEN: dict[tuple[str, str], Even] = {}
MICROSOFT = "com.microsoft"  # the domain of what ONNX Runtime declares


def domain_of(name: str) -> str:
    """Return a domain as the registry of ONNX calls it."""
    return "" if name == "ai.onnx" else name


def rule(*names: str, domain: str = "", even: Even | None = None) -> Callable[[Rule], Rule]:
    """Register the translation of ONNX operators; it returns a value, or a list of them.

    even: how it goes by extents; None where it may go by thresholds of them.
    """

    def add(function: Rule) -> Rule:
        for name in names:
            RULES[domain, name] = function
            if even is not None:
                EVEN[domain, name] = even
        return function

    return add


@dataclass(frozen=True)
class Wanted:
    """What is built of a file for training.

    Attributes:
        outputs: the names of the values that are made. roles: of weights, which are parameters or
            states; whatever else is known is a constant.
    """

    outputs: tuple[str, ...]
    roles: Mapping[str, Role]


@dataclass
class Scope:
    """The values that nodes see by name; a subgraph also sees those around it."""

    values: dict[str, Slot] = field(default_factory=dict)
    outer: Scope | None = None
    opsets: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[str, onnx.AttributeProto] = field(default_factory=dict)
    calls: tuple[tuple[str, str], ...] = ()  # functions being expanded
    depth: int = 0
    prefix: str = ""

    def find(self, name: str) -> Slot | None:
        """Return what a name stands for here, or None."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        return None


def unused(base: str, names: set[str]) -> str:
    """Return a name that is none of these, and add it to them."""
    name, count = base, 0
    while name in names:
        count += 1
        name = f"{base}.{count}"
    names.add(name)
    return name


def sized(spec: TensorSpec, where: str) -> TensorSpec:
    """Return the spec.

    Raises:
        OnnxError: it takes more bytes than `limits.most_bytes` allows.
    """
    check_bytes(spec.nbytes, f"{where}: {spec}", OnnxError)
    return spec
