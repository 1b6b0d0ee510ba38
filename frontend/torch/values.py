"""Values of PyTorch programs that are computed later, and the calls that make them.

A value is like a tensor by PyTorch's protocol (`__torch_function__`) and no subclass: code in C++
that does not know the protocol refuses it instead of reading a tensor that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from soapstone.frontend.torch.operators import ARITHMETIC, RULES
from soapstone.ir.errors import GraphError

if TYPE_CHECKING:
    from soapstone.frontend.torch.patterns import Template
    from soapstone.frontend.torch.record import Recorder
    from soapstone.frontend.torch.runs import Run

_grad_enabled = torch.is_grad_enabled
QUICK = frozenset((int, type(None), torch.nn.Parameter))  # arguments that are keys themselves


class Spec:
    """Shape, dtype and device of a value; one object for each (`spec`), so it is a quick key.

    Attributes:
        counted: whether a tensor of it is one whole number, told from others by its contents.
    """

    __slots__ = ("counted", "device", "dtype", "shape")

    def __init__(self, shape: Any, dtype: Any, device: Any) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = device
        self.counted = (
            math.prod(shape) == 1
            and not (dtype.is_floating_point or dtype.is_complex)
            and device.type == "cpu"
        )


_SPECS: dict[Any, Spec] = {}


def spec(shape: Any, dtype: Any, device: Any) -> Spec:
    """Return the one object of a shape, dtype and device."""
    key = shape, dtype, device
    known = _SPECS.get(key)
    return known if known is not None else _SPECS.setdefault(key, Spec(*key))


class Call:
    """One occurrence of a pattern: operators that were recorded one after the other.

    Attributes:
        inputs: of each, the call that makes it and which of its results, or None and a tensor.
        operands: the calls among them that are not done. index: among those that wait.
        same: an earlier call that computes the same. run, row: where its results are.
    """

    __slots__ = (
        "cell",
        "done",
        "index",
        "inputs",
        "lost",
        "operands",
        "recorder",
        "row",
        "run",
        "same",
    )

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.cell: Template | None = None
        self.inputs: list[tuple[Call | None, Any]] = []
        self.operands: dict[Call, None] = {}
        self.same: Call | None = None
        self.run: Run | None = None
        self.done = self.lost = False
        self.row = self.index = 0


class Lazy:
    """A tensor that is computed when it is looked at, or when the recorded function returns.

    Attributes:
        call, place: what makes it and which of its results. spec: its shape, dtype and device.
        viewed: whether another value shares its memory where PyTorch runs plainly.
    """

    __slots__ = ("call", "place", "spec", "viewed")

    def __init__(self, call: Call, place: int, spec: Spec) -> None:
        self.call = call
        self.place = place
        self.spec = spec
        self.viewed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in _lazies(args):
            return each.call.recorder.apply(func, args, kwargs or {})
        for each in _lazies(tuple((kwargs or {}).values())):
            return each.call.recorder.apply(func, args, kwargs or {})
        return NotImplemented

    def tensor(self) -> Any:
        """Return the tensor itself; all that is recorded is computed first."""
        return self.call.recorder.tensor(self)

    @property
    def shape(self) -> Any:
        """The extents."""
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        """The element type."""
        return self.spec.dtype

    @property
    def device(self) -> Any:
        """Where it is computed."""
        return self.spec.device

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.spec.shape)

    def dim(self) -> int:
        """Return how many dims it has."""
        return len(self.spec.shape)

    def numel(self) -> int:
        """Return how many elements it has."""
        return math.prod(self.spec.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the extents, or that of one dim."""
        return self.spec.shape if dim is None else self.spec.shape[dim]

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError("len: a value without dims found, one with dims needed")
        extent: int = self.spec.shape[0]
        return extent

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.unbind(self))

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __float__(self) -> float:
        return float(self.tensor())

    def __int__(self) -> int:
        return int(self.tensor())

    def __index__(self) -> int:
        index: int = self.tensor().__index__()
        return index

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor().__array__(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.tensor())

    def __format__(self, how: str) -> str:
        return format(self.tensor(), how)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.Tensor, name)  # its error where there is none
        if name.endswith("_") and not name.endswith("__"):
            raise GraphError(f"{name}: a recorded value found, {name[:-1]!r} needed, not in place")
        if not callable(found):
            return getattr(self.tensor(), name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self.call.recorder.apply(found, (self, *args), kwargs)

        return method

    def __setitem__(self, at: Any, value: Any) -> None:
        raise GraphError("assignment to elements: a recorded value found, a tensor needed")

    def become(self, made: Any) -> Lazy:
        """Be what an operator in place makes of it; values that share its memory would too."""
        if self.viewed or not isinstance(made, Lazy) or made.spec is not self.spec:
            raise GraphError("in place: a value of own memory, shape and type needed")
        self.call, self.place = made.call, made.place
        return self


def _lazies(args: Any) -> Iterator[Lazy]:
    """Yield the recorded values among arguments."""
    for each in args:
        if isinstance(each, Lazy):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _lazies(each)


def _unary(func: Any) -> Callable[[Lazy], Any]:
    def method(self: Lazy) -> Any:
        call = self.call
        recorder = call.recorder
        if recorder.call is call and _grad_enabled() is recorder.grad:
            step = recorder.step.edges.get((func, (), self.place))
            if step is not None:
                recorder.step = step
                step.passes += 1
                if step.cut:
                    recorder.close()
                return Lazy(call, step.first, step.spec)
        return recorder.apply(func, (self,), {})

    return method


def _binary(func: Any, *, turned: bool = False) -> Callable[[Lazy, Any], Any]:
    def method(self: Lazy, other: Any) -> Any:
        call = self.call
        recorder = call.recorder
        current = recorder.call
        if turned:
            if other == 0 and type(other) is int and func is torch.add:
                return Lazy(call, self.place, self.spec)  # where sum() begins
            return recorder.apply(func, (other, self), {})
        if type(other) is Lazy and current is not None and _grad_enabled() is recorder.grad:
            known = recorder.inputs
            left = self.place if call is current else known.get((call, self.place))
            right = other.place if other.call is current else known.get((other.call, other.place))
            if left is not None and right is not None:
                step = recorder.step.edges.get((func, None, left, right))
                if step is not None:
                    recorder.step = step
                    step.passes += 1
                    if step.cut:
                        recorder.close()
                    return Lazy(current, step.first, step.spec)
        return recorder.apply(func, (self, other), {})

    return method


def _other(func: Any) -> Callable[..., Any]:
    def method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        recorder = self.call.recorder
        if not kwargs and QUICK.issuperset(map(type, args)):
            return recorder.record(func, args, (self,), (self, *args), kwargs)
        return recorder.apply(func, (self, *args), kwargs)

    return method


def _in_place(func: Any) -> Callable[[Lazy, Any], Lazy]:
    def method(self: Lazy, other: Any) -> Lazy:
        if self.viewed:
            raise GraphError("in place: a value found whose memory another shares")
        return self.become(self.call.recorder.apply(func, (self, other), {}))

    return method


def _methods() -> None:
    for func in RULES:
        name = getattr(func, "__name__", "")
        if getattr(torch.Tensor, name, None) is func:
            setattr(Lazy, name, _other(func))
    for name in ("sigmoid", "tanh", "relu", "exp", "log", "neg", "sqrt", "square", "abs"):
        setattr(Lazy, name, _unary(getattr(torch, name)))
    for name, of in (ARITHMETIC | {"matmul": "matmul"}).items():
        setattr(Lazy, f"__{name}__", _binary(getattr(torch, of)))
        setattr(Lazy, f"__r{name}__", _binary(getattr(torch, of), turned=True))
    for name in ("add", "sub", "mul", "truediv"):
        setattr(Lazy, f"__i{name}__", _in_place(getattr(torch, ARITHMETIC[name])))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Lazy, f"__{name}__", _binary(getattr(torch, name)))
    Lazy.__hash__ = object.__hash__  # type: ignore[method-assign]

    def getitem(self: Lazy, at: Any) -> Any:
        return self.call.recorder.apply(torch.Tensor.__getitem__, (self, at), {})

    for name, method in {"__neg__": _unary(torch.neg), "__getitem__": getitem}.items():
        setattr(Lazy, name, method)


_methods()
