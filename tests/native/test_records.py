"""`records.dataclass` against the standard library's, and that a first answer has no others."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from soapstone.records import dataclass, replace


@dataclass(frozen=True)
class Point:
    """A point."""

    x: int
    y: float = 0.5
    tags: dict[str, int] = dataclasses.field(default_factory=dict, hash=False, compare=False)
    seen: ClassVar[list[int]] = []


def _classes(make: Callable[..., Any]) -> list[Any]:
    @make(frozen=True)
    class Frozen:
        a: int
        b: tuple[int, ...] = ()
        c: list[int] = dataclasses.field(default_factory=list, repr=False, compare=False)
        shared: ClassVar[int] = 3

    @make(frozen=True)
    class Derived(Frozen):
        d: str = "d"
        e: float = dataclasses.field(default=1.0, kw_only=True)

    @make
    class Plain:
        a: int
        b: int = dataclasses.field(init=False, default=4)
        c: dict[str, int] = dataclasses.field(default_factory=dict)
        d: list[int] = dataclasses.field(init=False, repr=False)

        def __post_init__(self) -> None:
            self.d = [self.a]

    @make(eq=False)
    class Same:
        a: int = 0

    @make(frozen=True, repr=False)
    class Own:
        a: float

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @make(frozen=True, eq=False, init=False)
    class Written:
        a: int

        def __init__(self, both: int) -> None:
            object.__setattr__(self, "a", both)

    @make(frozen=True)
    class Empty:
        pass

    @make(frozen=True, slots=True)
    class Slotted:
        a: int

    return [Frozen, Derived, Plain, Same, Own, Written, Empty, Slotted]


_CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}),
    ((1,), {}),
    ((1, (2,)), {}),
    ((1, (2,), [3]), {}),
    ((1, (2,), [3], "x"), {}),
    ((1, (2,), [3], "x", 2.0), {}),
    ((), {"a": 1, "e": 2.0}),
    ((float("nan"),), {}),
    (([],), {}),
)


def _outcome(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a call gives, as text, or the error that it raises."""
    try:
        return work(*arguments, **named)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("number", range(8))
def test_classes_behave_as_the_standard_librarys(number: int) -> None:
    ours, theirs = _classes(dataclass)[number], _classes(dataclasses.dataclass)[number]
    assert [(f.name, f.init, f.repr, f.kw_only) for f in dataclasses.fields(ours)] == [
        (f.name, f.init, f.repr, f.kw_only) for f in dataclasses.fields(theirs)
    ]
    assert ours.__match_args__ == theirs.__match_args__
    for arguments, named in _CALLS:
        one, other = (_outcome(cls, *arguments, **named) for cls in (ours, theirs))
        if isinstance(other, type):
            assert one is other
            continue
        again = ours(*arguments, **named), theirs(*arguments, **named)
        assert (one == again[0], one == 3) == (other == again[1], other == 3)
        assert isinstance(_outcome(hash, one), int) == isinstance(_outcome(hash, other), int)
        if isinstance(_outcome(hash, other), int):
            assert (hash(one) == hash(again[0])) == (hash(other) == hash(again[1]))
        if type(other).__repr__ is not object.__repr__:
            assert repr(one) == repr(other)
        told = [_outcome(dataclasses.asdict, made) for made in (one, other)]
        assert told[0] == told[1]
        changed = [_outcome(dataclasses.replace, made, a=9) for made in (one, other)]
        assert getattr(changed[0], "a", changed[0]) == getattr(changed[1], "a", changed[1])
        assert _outcome(setattr, one, "a", 9) == _outcome(setattr, other, "a", 9)
        assert repr(getattr(one, "a", "")) == repr(getattr(other, "a", ""))
    signatures = [list(inspect.signature(cls).parameters.values()) for cls in (ours, theirs)]
    assert [(p.name, p.kind) for p in signatures[0]] == [(p.name, p.kind) for p in signatures[1]]


def test_frozen_instances_are_pickled_copied_and_not_changed() -> None:
    point = Point(1, tags={"a": 1})
    assert pickle.loads(pickle.dumps(point)) == point == copy.deepcopy(point)
    assert repr(point) == "Point(x=1, y=0.5, tags={'a': 1})"
    assert {point: 1}[Point(1)] == 1 and Point(1) != Point(2)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'y'"):
        del point.y
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    assert Point.__doc__ == "A point." and Point.seen == []


def test_classes_of_both_kinds_inherit_from_each_other() -> None:
    @dataclasses.dataclass(frozen=True)
    class Outer(Point):
        z: int = 3

    @dataclass(frozen=True)
    class Inner(Outer):
        w: int = 4

    made = Inner(1, w=5)
    assert (made.x, made.z, made.w) == (1, 3, 5) and made == dataclasses.replace(Inner(2), x=1, w=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.x = 2  # type: ignore[misc]
    for make in (dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="frozen"):

            @make
            class Loose(Point):  # type: ignore[misc]
                z: int = 3


def test_copies_with_other_fields_are_those_of_the_standard_library() -> None:
    for made, standard in zip(_classes(dataclass), _classes(dataclasses.dataclass)):
        if "a" not in inspect.signature(standard).parameters or hasattr(standard, "__slots__"):
            continue  # an __init__ of its own
        one, other = made(1), standard(1)
        vars(one)["kept"] = vars(other)["kept"] = "no field, as of a cached property"
        told = vars(dataclasses.replace(other, a=2))
        assert vars(replace(one, a=2)) == told
        assert type(replace(one)) is made and vars(replace(one)) == vars(dataclasses.replace(other))
        with pytest.raises(TypeError):
            replace(one, unknown=3)
    point = Point(1, tags={"a": 1})
    assert replace(point, y=2.0) == Point(1, 2.0) and replace(point, y=2.0).tags is point.tags

    class Checked(Point):
        def __init__(self, x: int, y: float = 0.0, tags: object = None) -> None:
            super().__init__(x + 1, y)

    assert replace(Checked(1)).x == dataclasses.replace(Checked(1)).x == 3
