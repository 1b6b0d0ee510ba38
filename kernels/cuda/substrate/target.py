"""Numba's CUDA compiler, or its simulator: one set of names for what kernels are written in.

With `NUMBA_ENABLE_CUDASIM=1` kernels are Python that threads run, so mathematical functions are
NumPy's, which give infinities where `math` raises, and what works by shuffles goes through shared
memory. `cuda` looks the simulator's running kernel up at each use, since Numba's own replacement of
the name in a function's globals is undone while other threads are inside of a helper.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numpy as np
from numba import config, cuda as _numba_cuda, types

from soapstone.dtypes import learn
from soapstone.native.cuda.kernel_cache import GENERATED, kept

SIMULATED = bool(config.ENABLE_CUDASIM)
WARP = 32

float16, float32, float64 = types.float16, types.float32, types.float64
TYPES: dict[str, Any] = {
    name: types.boolean if name == "bool" else getattr(types, name)
    for name in (
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}


if SIMULATED:
    TYPES["bfloat16"] = rounded = np.dtype(learn("bfloat16")).type
else:
    from soapstone.kernels.cuda.substrate.bfloat16 import bfloat16, rounded

    TYPES["bfloat16"] = bfloat16

if SIMULATED:  # numbers may wrap, and be infinite, as on a GPU
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=GENERATED)
_REALS = ("float32", "float64")


class _Shared:
    """Shared memory of the simulated block: one array a line of source, made by one thread."""

    lock = threading.Lock()

    def array(self, shape: int, dtype: Any, alignment: int | None = None) -> Any:
        """Return the array of the line that asks; the simulator's own may be made twice."""
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        with self.lock:
            made = cuda.of_block._allocations
            if place not in made:
                made[place] = np.empty(shape, np.dtype(str(dtype)))
            return made[place]


class _Simulated:
    """The module `cuda` as the kernel that is being simulated sees it."""

    shared = _Shared()

    @property
    def of_block(self) -> Any:
        """The simulator's own shared memory."""
        return self.__getattr__("shared")

    def __getattr__(self, name: str) -> Any:
        from numba.cuda.simulator.kernel import _get_kernel_context

        return getattr(_get_kernel_context() or _numba_cuda, name)


cuda: Any = _Simulated() if SIMULATED else _numba_cuda


def device(function: Callable[..., Any]) -> Any:
    """Return a function as kernels call it."""
    return function if SIMULATED else _numba_cuda.jit(device=True)(function)


class Kernel:
    """A kernel that is compiled for the types of its arguments when it is first launched.

    Its machine code is kept on disk.

    Args:
        function: what is compiled. source: its text. values: what the text names besides.
    """

    def __init__(
        self, function: Callable[..., Any], source: str, values: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.name = function.__name__
        self._source, self._values = source, values

    @cached_property
    def dispatcher(self) -> Any:
        """What Numba makes of it."""
        return kept(_numba_cuda.jit(self.function), self._source, self._values, __name__)

    def __getitem__(self, configuration: Any) -> Any:
        return self.dispatcher[configuration]

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


_SHARED = (
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "tanh",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "fmod",
)
_ARCS = ("asin", "acos", "atan", "asinh", "acosh", "atanh")
_ROUNDED = ("floor", "ceil", "rint")
if SIMULATED:
    FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in _SHARED}
    FUNCTIONS |= {name: getattr(np, name.replace("a", "arc", 1)) for name in _ARCS}
    FUNCTIONS |= {f"{name}_{kind}": getattr(np, name) for name in _ROUNDED for kind in _REALS}
    FUNCTIONS |= {"erf": math.erf, "erfc": math.erfc, "power": np.power, "fmax": np.fmax}
else:
    FUNCTIONS = {name: getattr(math, name) for name in (*_SHARED, *_ARCS, "erf", "erfc")}
    FUNCTIONS |= {"power": math.pow, "fmax": device(lambda x, y: _numba_cuda.libdevice.fmaxf(x, y))}
    # Of Numba's own, floor and ceil make integers of 64 bits.
    FUNCTIONS |= {
        "floor_float32": device(lambda x: _numba_cuda.libdevice.floorf(x)),
        "floor_float64": device(lambda x: _numba_cuda.libdevice.floor(x)),
        "ceil_float32": device(lambda x: _numba_cuda.libdevice.ceilf(x)),
        "ceil_float64": device(lambda x: _numba_cuda.libdevice.ceil(x)),
        "rint_float32": device(lambda x: _numba_cuda.libdevice.rintf(x)),
        "rint_float64": device(lambda x: _numba_cuda.libdevice.rint(x)),
    }
exp, log, sqrt = FUNCTIONS["exp"], FUNCTIONS["log"], FUNCTIONS["sqrt"]


def built(name: str, source: str, **values: Any) -> Kernel:
    """Return the kernel that a text of ours defines under a name; values: other names in it."""
    space = {
        "__name__": GENERATED,
        "cuda": cuda,
        "inf": math.inf,
        "nan": math.nan,
        **TYPES,
        **FUNCTIONS,
        "bfloat16": rounded,
        **values,
    }
    exec(compile(source, f"<kernel {name}>", "exec"), space)
    return Kernel(space[name], source, values)


_CUT_FOR: ContextVar[int | None] = ContextVar("multiprocessors", default=None)


@contextmanager
def cut_for(multiprocessors: int) -> Iterator[None]:
    """Let grids be cut for a GPU that is not there, in this thread and in this block."""
    before = _CUT_FOR.set(multiprocessors)
    try:
        yield
    finally:
        _CUT_FOR.reset(before)


def processors() -> int:
    """Return how many multiprocessors grids are cut for: those of the current GPU, or `cut_for`.

    Two in the simulator, so that small problems have several blocks whose threads loop; those of
    an H100 where kernels are compiled without a GPU.
    """
    asked = _CUT_FOR.get()
    if asked is not None:
        return asked
    if SIMULATED:
        return 2
    try:
        return int(_numba_cuda.get_current_device().MULTIPROCESSOR_COUNT)
    except Exception:  # no driver: nothing will be launched
        return 132


def capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU; an H100's where there is none."""
    try:
        major, minor = _numba_cuda.get_current_device().compute_capability
    except Exception:  # no driver: nothing will be launched
        return 9, 0
    return int(major), int(minor)
