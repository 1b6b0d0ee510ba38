"""Arguments of PyTorch's functions: as keys, with places for tensors, and left unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from soapstone.frontend.torch.operators import Arg, NoRule
from soapstone.frontend.torch.values import Lazy, Spec, spec
from soapstone.ir.errors import GraphError

_HERE = "tensor"  # stands for one in keys


def refuse_in_place(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where a function would change a recorded value."""
    name = getattr(func, "__name__", "")
    changes = name.endswith("_") and not name.endswith("__") and args and type(args[0]) is Lazy
    inplace = kwargs.get("inplace") or type(kwargs.get("out")) is Lazy
    if not inplace and len(args) > 1 and any(each is True for each in args[1:]):
        try:
            inplace = inspect.signature(func).bind(*args, **kwargs).arguments.get("inplace")
        except (TypeError, ValueError):  # a function in C, which has no such parameter
            inplace = False
    if changes or inplace:
        raise GraphError(f"{name}: a recorded value to be changed in place found, a new one needed")


def frozen(given: Any, leaves: list[Any]) -> Any:
    """Return arguments as a key, and add their tensors to leaves."""
    kind = type(given)
    if kind is Lazy:
        leaves.append(given)
        return _HERE
    if kind is int or given is None or kind is str:
        return given
    if kind is tuple or kind is list:
        return (kind, *[frozen(each, leaves) for each in given])
    if isinstance(given, torch.Tensor):
        leaves.append(given)
        return _HERE
    if isinstance(given, tuple):  # a torch.Size, or one with names
        return (kind, *[frozen(each, leaves) for each in given])
    if kind is slice:
        parts = given.start, given.stop, given.step
        if not all(part is None or type(part) is int for part in parts):
            raise NoRule("a slice by numbers needed")
        return slice, *parts
    if kind is float:
        return kind, given.hex()  # 0.0 and -0.0 are equal, and compute different things
    if kind is bool or isinstance(given, (torch.dtype, torch.device, type(Ellipsis))):
        return kind, given
    raise NoRule(f"an argument of type {kind.__name__}")


def placed(given: Any, leaves: list[Any], shared: list[bool], order: Iterator[int]) -> Any:
    """Return arguments with an `Arg` for each tensor, in the order of `frozen`."""
    if type(given) is Lazy or isinstance(given, torch.Tensor):
        place = next(order)
        return Arg(place, tuple(leaves[place].shape), not shared[place])
    if isinstance(given, (list, tuple)):
        return tuple(placed(each, leaves, shared, order) for each in given)
    if isinstance(given, dict):
        return {name: placed(given[name], leaves, shared, order) for name in sorted(given)}
    return given


def spec_of(leaf: Any) -> Spec:
    """Return the type of a tensor or value."""
    return leaf.spec if type(leaf) is Lazy else spec(leaf.shape, leaf.dtype, leaf.device)


def meta(given: Spec) -> Any:
    """Return a tensor of a type and no contents."""
    return torch.empty(given.shape, dtype=given.dtype, device="meta")
