"""Kernels of GPUs on disk: machine code for a compute capability, found there or kept once made.

A kernel's file is named by all that its code is made of: its text, what the text names besides, the
types of its arguments, the compute capability, Numba's options, and the versions of what compiles.
The folder is named by environment and sources, as those of functions of the host are
(`cache.places`). So a process in which all are found compiles none: it gives the driver their code.

Numba asks a dispatcher's cache before it compiles and tells it after; its own needs functions that
are in files, and generated ones are not. What is rebuilt here is Numba's kernel around that code.
Where a version of Numba CUDA has it otherwise, nothing is found and nothing kept, which is said.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from soapstone.cache import kept as files
from soapstone.cache.environment import digest, installed
from soapstone.cache.places import closed_over, place_for, say
from soapstone.cache.sources import modules_of
from soapstone.native.cuda.device import simulated

FOUND: Counter[str] = Counter()  # kernels of this process: of the "cache", "compiled"
GENERATED = "soapstone.kernels.cuda.generated"  # the module that generated kernels are in
_COMPILERS = ("numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")


def kept(dispatcher: Any, source: str, values: Mapping[str, Any], *modules: str) -> Any:
    """Return a dispatcher of Numba's whose kernels are kept on disk; the simulator has none.

    Args:
        source: the text of its function. values: what the text names besides: functions of devices,
            numbers. modules: whose sources it depends on, beside those of `values`.
    """
    if simulated():
        return dispatcher
    functions = {name: _function(value) for name, value in values.items()}
    named = [each for each in functions.values() if each is not None]
    told = "\n".join([source, *(_told(n, values[n], functions[n]) for n in sorted(values))])
    dispatcher._cache = Disk(dispatcher, told, {*modules, *modules_of(*named)})
    return dispatcher


def _function(value: Any) -> Callable[..., Any] | None:
    """Return the Python function of what kernels call, or None of anything else."""
    found = getattr(value, "py_func", None)
    return found if callable(found) else None


def _told(name: str, value: Any, function: Callable[..., Any] | None) -> str:
    if function is None:
        return f"{name} {value!r}"
    line = function.__code__.co_firstlineno
    closed = closed_over(function)
    return f"{name} {function.__module__} {function.__qualname__} {line} {closed}"


class Disk:
    """What Numba asks for a compiled kernel, and gives one to: `NullCache` and others of its own.

    Args:
        dispatcher: whose it is. told: all that tells its function from others.
        modules: its sources.
    """

    def __init__(self, dispatcher: Any, told: str, modules: Iterable[str]) -> None:
        self._dispatcher, self._told = dispatcher, told
        self._modules = tuple(sorted(modules))

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(place_for(self._modules, GENERATED))

    def load_overload(self, argtypes: Any, target: Any) -> Any:
        """Return the kernel for types of arguments and the current device, or None."""
        try:
            path = self._path(argtypes)
            held = files.read(path) if path is not None else None
            if held is None:
                return None
            made = self._rebuilt(held, argtypes)
        except Exception as error:  # names of Numba's that are not public
            say(f"{type(error).__name__}: {error}; kernels of GPUs are compiled anew")
            return None
        FOUND["cache"] += 1
        return made

    def save_overload(self, argtypes: Any, kernel: Any) -> None:
        """Keep a kernel that was compiled for the current device."""
        FOUND["compiled"] += 1
        try:
            path = self._path(argtypes)
            code = kernel._codelibrary.get_cubin()
            about = {"entry": kernel.entry_name, "cooperative": bool(kernel.cooperative)}
            if path is not None:
                files.write(path, json.dumps(about).encode() + b"\n" + bytes(code.code))
        except Exception as error:
            say(f"{type(error).__name__}: {error}; kernels of GPUs are not kept")

    def flush(self) -> None:
        """Forget nothing: what is of other sources has other names."""

    enable = disable = flush

    def _path(self, argtypes: Any) -> Path | None:
        """Return the file of a kernel for the current device, or None where none can be."""
        from numba.cuda import dispatcher as numba_dispatcher

        major, minor = numba_dispatcher.get_current_device().compute_capability
        place = place_for(self._modules, GENERATED)
        if place is None:
            return None
        options = repr(sorted(self._dispatcher.targetoptions.items()))
        versions = " ".join(f"{name} {installed(name)}" for name in _COMPILERS)
        what = digest(self._told, repr(argtypes), f"sm_{major}{minor}", options, versions)
        name = f"{self._dispatcher.py_func.__name__}_{what}{files.DEVICE_SUFFIX}"
        return place / name

    def _rebuilt(self, held: bytes, argtypes: Any) -> Any:
        """Return Numba's kernel around the code that a file holds."""
        from cuda.core import ObjectCode
        from numba import types
        from numba.cuda import dispatcher as numba_dispatcher
        from numba.cuda.codegen import CUDACodeLibrary

        disk, others = self, {}

        class Library(CUDACodeLibrary):  # type: ignore[misc]
            """Code of one compute capability; for another device, what is compiled for it."""

            def get_cufunc(self) -> Any:
                own = self._ensure_cc(None)
                if own in self._cubin_cache:
                    return super().get_cufunc()
                if own not in others:
                    made = disk._dispatcher
                    others[own] = numba_dispatcher._Kernel(
                        made.py_func, argtypes, **made.targetoptions
                    )
                return others[own]._codelibrary.get_cufunc()

        head, _, code = held.partition(b"\n")
        about = json.loads(head)
        library = Library(None, about["entry"], entry_name=about["entry"])
        library._cubin_cache[library._ensure_cc(None)] = ObjectCode.from_cubin(code)
        library._finalized, library.use_cooperative = True, about["cooperative"]
        return numba_dispatcher._Kernel._rebuild(
            cooperative=about["cooperative"],
            name=about["entry"],
            signature=types.void(*argtypes),
            codelibrary=library,
            debug=False,
            lineinfo=False,
            call_helper=None,
            extensions=self._dispatcher.targetoptions.get("extensions", []),
        )
