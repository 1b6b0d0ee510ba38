"""Modules of PyTorch that are one operator: their calls are recorded without going through them.

While something is recorded, calls of the classes of `_SETTINGS` come here first. One with hooks, or
on values of types that were not seen, goes through the module's code. If that recorded one operator
of just the module's arguments, and returned what it made (`Recorder.module`), then later calls with
the same parameters and settings are recorded as that operator.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from soapstone.frontend.torch.values import Lazy
from soapstone.locks import Lock

if TYPE_CHECKING:
    from soapstone.frontend.torch.record import Recorder

_SETTINGS: dict[type, tuple[str, ...]] = {  # attributes that decide what is computed
    nn.Linear: (),
    nn.Embedding: ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.LSTMCell: (),
    nn.GRUCell: (),
    nn.RNNCell: ("nonlinearity",),
}
_CHANGES = (  # attributes of one module by which it does something else than its class
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_compiled_call_impl", "forward"),
)
_TENSORS = frozenset((Lazy, torch.Tensor))
_active = threading.local()  # the recorder of this thread
_lock = Lock()
_recording = 0  # how many recorders there are


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Send the calls of modules in this thread to a recorder, inside the `with` block."""
    global _recording
    before = getattr(_active, "recorder", None)
    with _lock:
        _recording += 1
        for kind in _SETTINGS:
            if "__call__" not in vars(kind):  # somebody else's stays
                kind.__call__ = _called  # type: ignore[method-assign]
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = before
        with _lock:
            _recording -= 1
            for kind in _SETTINGS if not _recording else ():
                if vars(kind).get("__call__") is _called:
                    del kind.__call__


def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = getattr(_active, "recorder", None)
    settings = _SETTINGS.get(type(module))
    own = module.__dict__
    if (
        recorder is None
        or settings is None
        or kwargs
        or any(map(own.get, _CHANGES))
        or of_all._has_any_global_hook()
    ):
        return nn.Module.__call__(module, *args, **kwargs)
    static = [own[name] for name in settings]
    static += map(id, own["_parameters"].values())
    if len(args) == 1 and type(args[0]) in _TENSORS:
        return recorder.module(module, tuple(static), args, args)
    leaves: list[Any] = []
    for arg in args:
        several = arg if type(arg) is tuple else (arg,)
        if not _TENSORS.issuperset(map(type, several)):
            return nn.Module.__call__(module, *args)
        static.append(len(several) if type(arg) is tuple else None)
        leaves += several
    return recorder.module(module, tuple(static), leaves, args)
