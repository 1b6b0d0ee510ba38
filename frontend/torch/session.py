"""`reuse`: a recursive PyTorch model whose operators are recorded, and run batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, update_wrapper
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from soapstone.frontend.arguments import count
from soapstone.frontend.dynamic.report import CellReport, Report
from soapstone.frontend.torch.modules import recorded_by
from soapstone.frontend.torch.operators import RULES
from soapstone.frontend.torch.record import REUSE, Recorder
from soapstone.ir.errors import GraphError
from soapstone.system import deep_recursion

_WRITES = {"__set__", "__setitem__", "__delete__"}
_CHANGES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITES |= {f"__i{name}__" for name in _CHANGES}


@dataclass(frozen=True)
class TorchReport(Report):
    """What ran since a model was wrapped; of cells, those are patterns.

    Attributes:
        plain: how often PyTorch's operators ran plainly on recorded values, by name and reason.
    """

    plain: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(
            [super().__str__(), *(f"plainly: {n} x {why}" for why, n in self.plain.items())]
        )


@lru_cache(1024)
def _writes(func: Any) -> bool:
    """Return whether a function changes its first tensor."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES


class _Mode(TorchFunctionMode):  # type: ignore[misc]
    """What records while it is active."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RULES:
            return self._recorder.apply(func, args, kwargs or {})
        if _writes(func) or (kwargs and kwargs.get("out") is not None):
            self._recorder.flush()  # what is recorded reads tensors as they are now
        if types and any(not issubclass(each, torch.Tensor) for each in types):
            return self._recorder.apply(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Reused:
    """A module or function that records what it calls, and runs it batched.

    Called, it returns tensors. In a `with` statement calls return values that are computed when
    they are looked at, so several share runs. Attributes are those of what it wraps.
    """

    def __init__(self, target: Callable[..., Any], reuse: str, frequency: int) -> None:
        self.target = target
        self._how = reuse
        self._recorder = Recorder(reuse, frequency)
        self._modes: list[Any] = []
        if not isinstance(target, torch.nn.Module):
            update_wrapper(self, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["target"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._modes or self._how == "off" or _autocast():
            if not self._modes and self._how != "off":
                self._recorder.plain["call: autocast"] += 1
            return self.target(*args, **kwargs)
        with self._active():
            made = self.target(*args, **kwargs)
        return self._recorder.forced(made)

    def __enter__(self) -> Self:
        if self._modes:
            raise GraphError("reuse: already entered")
        active = self._active() if self._how != "off" else nullcontext()
        active.__enter__()
        self._modes.append(active)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._modes.pop().__exit__(kind, error, at)

    @contextmanager
    def _active(self) -> Iterator[None]:
        recorder = self._recorder
        with deep_recursion(), _Mode(recorder), recorded_by(recorder), recorder.recording():
            yield

    def report(self) -> TorchReport:
        """Return what ran so far: patterns, their calls and runs, and where time went."""
        cells = [
            CellReport(
                template.steps[0].name if len(template.steps) == 1 else f"pattern{template.number}",
                len(template.steps),
                template.calls,
                template.runs,
                1,
            )
            for template in self._recorder.templates
        ]
        recorder = self._recorder
        seconds = dict(recorder.seconds)
        return TorchReport(self._how, recorder.flushes, tuple(cells), seconds, dict(recorder.plain))


def _autocast() -> bool:
    return bool(torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


def reuse(target: Callable[..., Any], *, reuse: str = "all", pattern_frequency: int = 10) -> Reused:
    """Return a module or function whose operators are recorded, and run batched.

    Args:
        target: called as before; what it returns has gradients as before.
        reuse: "all"; "batch", operator by operator; "off", which calls it plainly.
        pattern_frequency: how often a sequence of operators ends before it is a pattern.

    Raises:
        GraphError: an argument that does not fit.

    Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
    opportunities, 2019.
    """
    if reuse not in REUSE:
        raise GraphError(f"reuse {reuse!r} found, one of {', '.join(REUSE)} needed")
    if not callable(target):
        raise GraphError(f"reuse: {type(target).__name__} found, a module or function needed")
    return Reused(target, reuse, count("pattern_frequency", pattern_frequency))
