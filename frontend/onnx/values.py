"""What passes between the nodes of an ONNX graph while it is translated, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.texts import TEXT
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.limits import check_bytes
from soapstone.records import dataclass

if TYPE_CHECKING:
    import onnx

    from soapstone.frontend.onnx.call import Call


class Extent(NamedTuple):
    """A number that extents of values are made of, on a line.

    Attributes:
        name, axis: of an input, or of what an operator made whose strides leave that line.
        extent: there. origin: the inputs, each with an axis, that it follows from.
    """

    name: str
    axis: int
    extent: int
    origin: frozenset[tuple[str, int]]

    @property
    def bent(self) -> bool:
        """Whether it is an operator's."""
        return self.origin != {(self.name, self.axis)}


Extents = frozenset[Extent]  # that one follows from


@dataclass(frozen=True, eq=False)
class Value:
    """A value while a graph is built: made by the graph (`name`), known (`array`), or both.

    Of texts, the graph makes places in a `table`; without one, a run is given them.
    """

    spec: TensorSpec
    label: str  # as the file calls it
    name: str | None = None
    array: Array | None = None
    weight: bool = False  # known under its label in the file
    trained: bool = False  # a weight that is other contents in a later step, so nothing is folded
    table: Array | None = None
    told: bool = False  # known, and made of extents of inputs (`extent_notes.py`)
    follows: tuple[Extents, ...] = ()  # by axis, or by element of what is `told`; () of none

    @property
    def lasting(self) -> Array | None:
        """The contents that it has for all extents of inputs, or None.

        What is known and made by the graph too goes along these. So do numbers that are `told`, but
        what becomes of those is noted (`extent_notes.py`).
        """
        return self.array if self.name is None or self.told else None

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
Rule = Callable[["Call"], Any]
RULES: dict[tuple[str, str], Rule] = {}


@dataclass(frozen=True)
class Even:
    """How a translation depends on extents: by shapes alone, but for what `extent_notes.py` notes.

    Attributes:
        linear: which operands may be made of extents, so that known results are linear in those:
            the first alone, any one, or all.
        shape: the operand that may be made of extents, as a shape or where a constant is cut.
        aligned: extents of results follow from those of the operands, axis by axis from the last.
        strided: results have the first operand's extents, those of windows divided by strides.
        scaled: results have the first operand's extents, those of images scaled by any number.
        places: attributes in the graph may be made of extents of operands.
    """

    linear: Literal["first", "one", "all"] | None = None
    shape: int | None = None
    aligned: bool = False
    strided: bool = False
    scaled: bool = False
    places: bool = False

    def linear_in(self, told: list[int]) -> bool:
        """Return whether results are linear in these operands, which are made of extents."""
        if self.linear == "first":
            return told == [0]
        return self.linear == "all" or (self.linear == "one" and len(told) == 1)


PLAIN, ALIGNED, STRIDED = Even(), Even(aligned=True), Even(strided=True)
EVEN: dict[tuple[str, str], Even] = {}


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
