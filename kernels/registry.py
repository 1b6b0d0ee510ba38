"""The table of kernel variants: which kernels can serve an operator on a kind of processor.

As in Legion, one task may have several variants; which of them runs is decided by measured cost
(`kernels.select`), never by the operator's meaning.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from soapstone.ir.ops import declared
from soapstone.ir.spec import importing
from soapstone.kernels.entry import Array, Call, Declined, Entry
from soapstone.native import memory
from soapstone.native.promises import contents, held
from soapstone.records import dataclass

# An Entry, of a GPU's kernel a DeviceEntry (`kernels/cuda/entry.py`), or None.
Bind = Callable[[Call], Any]
Expected = float | Callable[[Call], float]
B = TypeVar("B", bound=Callable[..., Any])

# Modules that register variants of a processor kind when imported.
MODULES: dict[str, tuple[str, ...]] = {
    "cpu": ("soapstone.kernels.cpu",),
    "cuda": ("soapstone.kernels.cuda",),
}


@dataclass(frozen=True)
class Variant:
    """A kernel that may serve `operator` on processors of one kind.

    Attributes:
        operator, name, processor: what it serves, its name, and the kind of processor.
        kernel: returns the entry of a call, or None if it does not serve it (dtype, strides,
            sizes).
        expected: its usual time relative to the operator's plain kernel, or a function of a call
            that returns it; the least is chosen where nothing is measured.
        promises: whether it takes constants whose contents are promised (`native.promises`) and
            reads them only by `held`; others get contents. Any may read constants of one number.
    """

    operator: str
    name: str
    processor: str
    kernel: Bind
    expected: Expected = 1.0
    promises: bool = False

    def expects(self, call: Call) -> float:
        """Return the relative time that is expected for a call; see `expected`."""
        return self.expected(call) if callable(self.expected) else self.expected

    def bind(self, call: Call) -> Any:
        """Return the kernel's entry of a call, or None; in checked mode, a CPU's is fenced."""
        if memory.CHECKED and self.processor == "cpu":
            return fenced(call, self.entry)
        return self.entry(call)

    def entry(self, call: Call) -> Any:
        """Return the kernel's entry of a call, or None."""
        if call.constants:
            inputs = enumerate(call.inputs)
            given = tuple([self._taken(x) if i in call.constants else x for i, x in inputs])
            if any(taken is not x for taken, x in zip(given, call.inputs)):
                call = replace(call, inputs=given)
        return self.kernel(call)

    def _taken(self, constant: Array) -> Array:
        """Return a constant as the kernel takes it: a promise, or its contents."""
        if constant.size == 1:
            return contents(constant)
        return constant if self.promises else held(constant)


def fenced(call: Call, kernel: Bind) -> Entry | None:
    """Return a kernel's entry on fenced copies of a call's operands; see `native.checked`."""
    from soapstone.native.checked import Argument, fenced as bound

    given = [number for number in range(len(call.inputs)) if number not in call.constants]
    arguments = [
        Argument(f"input {number} of {call.operator}", call.inputs[number], True, False)
        for number in given
    ] + [
        Argument(f"output {number} of {call.operator}", array, False, True)
        for number, array in enumerate(call.outputs)
    ]

    def bind(arrays: Sequence[Array]) -> Entry | None:
        inputs = list(call.inputs)
        for number, array in zip(given, arrays):
            inputs[number] = array
        outputs = tuple(arrays[len(given) :])
        made: Entry | None = kernel(replace(call, inputs=tuple(inputs), outputs=outputs))
        return made

    found: Entry | None = bound(arguments, bind)
    return found


_VARIANTS: dict[tuple[str, str], list[Variant]] = {}
_HOMES: dict[tuple[str, str, str], str] = {}  # operator, kind, name: the module that registers it


def declining(bind: Bind) -> Bind:
    """Wrap a bind function so that it serves no call which its kernel library declines."""

    @wraps(bind)
    def bound(call: Call) -> Any:
        try:
            return bind(call)
        except Declined:
            return None

    return bound


def variant(
    operators: str | Iterable[str],
    name: str,
    *,
    processor: str = "cpu",
    expected: Expected = 1.0,
    promises: bool = False,
    runs: bool = True,
) -> Callable[[B], B]:
    """Return a decorator that registers a bind function as a variant of the operators.

    The function takes a `Call`, the arrays and attributes of one point task, and returns an
    `Entry`, or None for a call that it does not serve.

    Args:
        operators: one name or several. name: of the variant. processor: the kind that it is for.
        expected: see `Variant`; of equal ones, the one registered first is preferred.
        promises: see `Variant`; it reads constants only by `promises.held`, `memory.address` and
            `shared.packed`.
        runs: whether this processor runs it; where it does not, no call gets it.
    """
    names = (operators,) if isinstance(operators, str) else tuple(operators)
    home = importing()

    def register(bind: B) -> B:
        for operator in names:
            _HOMES[operator, processor, name] = home
            made = Variant(operator, name, processor, declining(bind), expected, promises)
            if runs:
                _VARIANTS.setdefault((operator, processor), []).append(made)
        return bind

    return register


def variants(operator: str, processor: str = "cpu") -> tuple[Variant, ...]:
    """Return the native variants of an operator for a processor kind, in registration order."""
    _load(processor, operator)
    return tuple(_VARIANTS.get((operator, processor), ()))


def homes(processor: str) -> dict[str, list[tuple[str, str]]]:
    """Return the package's variants of each operator, in registration order: module and name.

    They are those of all processors of a kind. Variants that a program registers are not included.
    """
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in declared()}
    for (operator, kind, name), module in _HOMES.items():
        own = module.startswith(f"{__package__}.{kind}.")
        if own and kind == processor and operator in found:
            found[operator].append((module, name))
    return found


def foreign() -> bool:
    """Return whether a program has registered variants besides the package's."""
    return any(not home.startswith(f"{__package__}.") for home in _HOMES.values())


def home(variant: Variant) -> str:
    """Return the module that registers a variant of the package, "" for other variants."""
    return _HOMES.get((variant.operator, variant.processor, variant.name), "")


def arrange(operator: str, processor: str, names: Sequence[str]) -> None:
    """Reorder some variants of an operator; others keep their places.

    processor: the kind that they are for. names: of variants, in the new order.
    """
    known = _VARIANTS.get((operator, processor), [])
    own = iter(sorted((v for v in known if v.name in names), key=lambda v: names.index(v.name)))
    known[:] = [next(own) if each.name in names else each for each in known]


def registered(processor: str = "cpu") -> tuple[Variant, ...]:
    """Return all native variants for a processor kind."""
    _load(processor)
    return tuple(v for (_, kind), found in _VARIANTS.items() if kind == processor for v in found)


def _load(processor: str, operator: str | None = None) -> None:
    """Import the modules that register the variants of an operator, or of all."""
    for module in MODULES.get(processor, ()):
        package = sys.modules.get(module) or importlib.import_module(module)
        if hasattr(package, "load"):  # it does not register all when it is imported
            package.load(operator)
