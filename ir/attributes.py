"""Attributes of operators: their types, ranges and frozen form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from soapstone.errors import hint
from soapstone.ir.errors import GraphError
from soapstone.records import dataclass

Attributes = Mapping[str, Any]
REQUIRED = object()


@dataclass(frozen=True)
class Attribute:
    """The type and range of an operator's attribute.

    Attributes:
        kind: one of `KINDS`; `axis` and `axes` are integers that number axes of the first operand,
            which may be negative in layers and ONNX and are counted from the front here.
        default: its value where it is not given; without one it is required.
        choices: all values that it may have, where these are few.
        minimum: the least value, or the least of its numbers.
        extents: whether its numbers are extents, or positions along axes, which follow from shapes
            of inputs where a model is for any (`ir/extents.py`).
    """

    kind: str
    default: Any = REQUIRED
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    extents: bool = False

    def normalise(self, name: str, value: Any) -> Any:
        """Return the value in its frozen form.

        Raises:
            GraphError: the value has another kind or is out of range.
        """
        if value is None and self.default is None:
            return None
        try:
            result = KINDS[self.kind].freeze(value)
        except (TypeError, ValueError, OverflowError):
            raise GraphError(f"attribute {name}: {value!r} found, {self.kind} needed") from None
        if self.choices is not None and result not in self.choices:
            needed = ", ".join(map(repr, self.choices))
            near = hint(value, filter(None, map(str, self.choices)))
            raise GraphError(f"attribute {name}: {value!r} found, one of {needed} needed{near}")
        if self.minimum is not None:
            parts = result if isinstance(result, tuple) else (result,)
            if any(part < self.minimum for part in parts):
                raise GraphError(
                    f"attribute {name}: {value!r} found, at least {self.minimum} needed"
                )
        return result


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or int(value) != value:
        raise TypeError
    return int(value)


def _real(value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise TypeError
    return float(value)


def _boolean(value: Any) -> bool:
    if value not in (0, 1):
        raise TypeError
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, value))


class Kind(NamedTuple):
    """What attributes of a kind are: their frozen form, their type in layers, and it in words."""

    freeze: Callable[[Any], Any]
    annotation: str
    words: str


KINDS = {
    "int": Kind(_integer, "int", "an integer"),
    "axis": Kind(_integer, "int", "an axis, from the end where negative"),
    "float": Kind(_real, "float", "a number"),
    "bool": Kind(_boolean, "bool", "True or False"),
    "str": Kind(_text, "str", "str"),
    "ints": Kind(_integers, "Sequence[int]", "integers"),
    "axes": Kind(
        _integers, "int | Sequence[int]", "one axis or several, from the end where negative"
    ),
    "floats": Kind(lambda value: tuple(map(_real, value)), "Sequence[float]", "numbers"),
    "program": Kind(_freeze, "Any", "program"),
}
