"""oneDNN's C library: found, loaded and checked on first use, with its functions' types.

Only the C API of version 3 is used, which is stable over all of 3.x, so that the library of the
`onednn-cpu-gomp` wheel and a newer one of the system serve alike. Nothing is loaded on import.
"""

from __future__ import annotations

import ctypes as C
import os
import site
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from soapstone import system
from soapstone.kernels.entry import Declined
from soapstone.locks import Lock, wait_for
from soapstone.native.threads import openmp

VARIABLE = "SOAPSTONE_ONEDNN"
OFF = "off"
MAJOR = 3
_FILE = "libdnnl.so.3"
_CPU = 1
_IN_ORDER = 1
_COMPILING = ("primitive_desc_create", "primitive_create")
_PLACE = 4  # of the address among what `memory_create` is given, after the kind and its name
_CACHED = 64  # primitives that oneDNN keeps, of 1024 otherwise: families keep their own
# CPU runtimes of a build (`dnnl_version_t.cpu_runtime`) that run on plain memory and a plain
# stream. Thread pools must come from the caller and SYCL from its own runtime: both refused.
_RUNTIMES = {1: "sequential", 2: "OpenMP", 4: "TBB"}

STATUSES = {
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "no implementation left",
    5: "runtime error",
    6: "not required",
}

_UNSUPPORTED = (2, 3, 4)
# Bits of `instructions`.
_VNNI_256, _VNNI_512, _BF16_512, _BF16_TILES = 1 << 3, 1 << 6, 1 << 7, 1 << 11
LAST_IMPLEMENTATION = 4

POINTER = C.c_void_p
DIMS = C.POINTER(C.c_int64)
_OUT = C.POINTER(C.c_void_p)
_INT, _FLOAT, _UNSIGNED = C.c_int, C.c_float, C.c_uint
_P = POINTER
# Every function used, with its argument types; all return a status, which is checked after each
# call, unless `_RETURNS` says otherwise.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "dnnl_version": (),
    "dnnl_get_effective_cpu_isa": (),
    "dnnl_set_primitive_cache_capacity": (_INT,),
    "dnnl_engine_create": (_OUT, _INT, C.c_size_t),
    "dnnl_stream_create": (_OUT, _P, _UNSIGNED),
    "dnnl_stream_destroy": (_P,),
    "dnnl_memory_desc_create_with_strides": (_OUT, _INT, DIMS, _INT, DIMS),
    "dnnl_memory_desc_create_with_tag": (_OUT, _INT, DIMS, _INT, _INT),
    "dnnl_memory_desc_clone": (_OUT, _P),
    "dnnl_memory_desc_destroy": (_P,),
    "dnnl_memory_desc_get_size": (_P,),
    "dnnl_memory_desc_equal": (_P, _P),
    "dnnl_memory_desc_query": (_P, _INT, _P),
    "dnnl_memory_create": (_OUT, _P, _P, _P),
    "dnnl_memory_destroy": (_P,),
    "dnnl_primitive_attr_create": (_OUT,),
    "dnnl_primitive_attr_destroy": (_P,),
    "dnnl_primitive_attr_set_scratchpad_mode": (_P, _INT),
    "dnnl_primitive_attr_set_post_ops": (_P, _P),
    "dnnl_primitive_attr_set_scales_mask": (_P, _INT, _INT),
    "dnnl_primitive_attr_set_zero_points_mask": (_P, _INT, _INT),
    "dnnl_post_ops_create": (_OUT,),
    "dnnl_post_ops_destroy": (_P,),
    "dnnl_post_ops_append_eltwise": (_P, _INT, _FLOAT, _FLOAT),
    "dnnl_post_ops_append_binary": (_P, _INT, _P),
    "dnnl_primitive_desc_destroy": (_P,),
    "dnnl_primitive_desc_next_impl": (_P,),
    "dnnl_primitive_desc_query": (_P, _INT, _INT, _P),
    "dnnl_primitive_desc_query_md": (_P, _INT, _INT),
    "dnnl_primitive_create": (_OUT, _P),
    "dnnl_primitive_destroy": (_P,),
    "dnnl_primitive_execute": (_P, _P, _INT, _P),
    "dnnl_reorder_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P),
    "dnnl_convolution_forward_primitive_desc_create": (
        *(_OUT, _P, _INT, _INT, _P, _P, _P, _P),
        *(DIMS, DIMS, DIMS, DIMS, _P),
    ),
    "dnnl_convolution_backward_data_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _P),
        *(DIMS, DIMS, DIMS, DIMS, _P, _P),
    ),
    "dnnl_convolution_backward_weights_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _P, _P),
        *(DIMS, DIMS, DIMS, DIMS, _P, _P),
    ),
    "dnnl_matmul_primitive_desc_create": (_OUT, _P, _P, _P, _P, _P, _P),
    "dnnl_pooling_forward_primitive_desc_create": (
        *(_OUT, _P, _INT, _INT, _P, _P),
        *(DIMS, DIMS, DIMS, DIMS, DIMS, _P),
    ),
    "dnnl_pooling_backward_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P),
        *(DIMS, DIMS, DIMS, DIMS, DIMS, _P, _P),
    ),
    "dnnl_batch_normalization_forward_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _FLOAT, _UNSIGNED, _P),
    ),
    "dnnl_batch_normalization_backward_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _P, _FLOAT, _UNSIGNED, _P, _P),
    ),
    "dnnl_layer_normalization_forward_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _P, _FLOAT, _UNSIGNED, _P),
    ),
    "dnnl_layer_normalization_backward_primitive_desc_create": (
        *(_OUT, _P, _INT, _P, _P, _P, _P, _FLOAT, _UNSIGNED, _P, _P),
    ),
}
_RETURNS: dict[str, Any] = {
    "dnnl_version": None,  # set to a pointer to _Version when the library is loaded
    "dnnl_get_effective_cpu_isa": C.c_int,
    "dnnl_memory_desc_get_size": C.c_size_t,
    "dnnl_primitive_desc_query_md": C.c_void_p,
    "dnnl_memory_desc_equal": C.c_int,
    "dnnl_primitive_desc_next_impl": C.c_int,  # LAST_IMPLEMENTATION where there is none
}


class OneDnnError(RuntimeError):
    """oneDNN is absent, unusable, or refused a call; the message says which and why.

    `status` is the code of a refused call, 0 otherwise.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedError(OneDnnError, Declined):
    """oneDNN cannot do what was asked, rather than failed at it."""


def _refusal(status: int, what: object) -> OneDnnError:
    kind = UnsupportedError if status in _UNSUPPORTED else OneDnnError
    return kind(f"oneDNN {what}: {STATUSES.get(status, f'status {status}')}", status)


def _checked(status: int, function: Any, arguments: Any) -> int:
    """Raise unless a function that returns a status succeeded; ctypes asks after every call."""
    if status:
        raise _refusal(status, function.__name__)
    return status


class _Version(C.Structure):
    _fields_ = (
        ("major", C.c_int),
        ("minor", C.c_int),
        ("patch", C.c_int),
        ("hash", C.c_char_p),
        ("cpu_runtime", C.c_uint),
        ("gpu_runtime", C.c_uint),
    )


def candidates() -> tuple[str, ...]:
    """Return the names to load oneDNN by, in the order they are tried.

    The environment variable SOAPSTONE_ONEDNN, where set, is the only one; "off" is none.
    """
    return tuple(_candidates())


def _files() -> Iterator[str]:
    """Yield the files of Python's environments."""
    roots = dict.fromkeys((sys.prefix, site.getuserbase(), sys.base_prefix))
    files = [Path(root) / folder / _FILE for root in roots for folder in ("lib", "lib64")]
    yield from (str(file) for file in files if file.exists())


def _candidates() -> Iterator[str]:
    """Yield the names one by one: to ask the system for one takes programs that it runs."""
    named = os.environ.get(VARIABLE)
    if named:
        yield from () if named == OFF else (named,)
        return
    yield from _files()
    from ctypes.util import find_library

    installed = find_library("dnnl")
    yield from (installed, _FILE) if installed else (_FILE,)


def _load(name: str) -> C.CDLL:
    """Return the library `name`, typed and checked.

    Raises:
        OneDnnError: it does not load, lacks a function, or is of a version or runtime not usable.
    """
    try:
        handle = C.CDLL(name)
    except OSError as error:
        raise OneDnnError(f"{name}: {error}") from error
    for function, arguments in _FUNCTIONS.items():
        try:
            entry = getattr(handle, function)
        except AttributeError as error:
            raise OneDnnError(
                f"{name}: no function {function}; oneDNN {MAJOR}.x is needed"
            ) from error
        entry.argtypes = arguments
        entry.restype = _RETURNS.get(function, C.c_int)
        if function not in _RETURNS:
            entry.errcheck = _checked
    handle.dnnl_version.restype = C.POINTER(_Version)
    version = handle.dnnl_version().contents
    if version.major != MAJOR:
        raise OneDnnError(
            f"{name}: version {version.major}.{version.minor}, but {MAJOR}.x is needed"
        )
    if version.cpu_runtime not in _RUNTIMES:
        raise OneDnnError(
            f"{name}: built for CPU runtime {version.cpu_runtime}, but one of "
            f"{', '.join(_RUNTIMES.values())} is needed"
        )
    handle.dnnl_set_primitive_cache_capacity(_CACHED)
    return handle


class Loading(threading.Thread):
    """A thread that has the system load the library, while others import what will use it."""

    def run(self) -> None:
        """Load a file; what is wrong with it is told to who asks for the library."""
        with suppress(OSError, StopIteration):
            C.CDLL(os.environ.get(VARIABLE) or next(_files()))

    def begin(self) -> None:
        """Begin; a fork waits for the end."""
        with suppress(RuntimeError):  # no more threads
            self.start()
            wait_for(self)

    def wait(self) -> None:
        """Wait until the library is loaded."""
        self.join()


@cache
def _attempt() -> tuple[C.CDLL | None, str]:
    """Return the library and "", or None and why no candidate serves."""
    reasons = []
    for name in _candidates():
        try:
            return _load(name), ""
        except OneDnnError as error:
            reasons.append(str(error))
    return None, "; ".join(reasons) or f"{VARIABLE} is {OFF}"


def available() -> bool:
    """Return whether a usable oneDNN is installed (loads it)."""
    return _attempt()[0] is not None


def path() -> str:
    """Return the name by which the library was loaded."""
    return str(library()._name)


def functions() -> dict[int, str]:
    """Return the names of the library's functions by their addresses."""
    return {system.address(getattr(library(), name)): name for name in _FUNCTIONS}


def disabled() -> bool:
    """Return whether the user has asked for no oneDNN."""
    return os.environ.get(VARIABLE) == OFF


def library() -> C.CDLL:
    """Return the loaded library.

    Raises:
        OneDnnError: none is usable; the message lists what was tried and how to get one.
    """
    handle, reasons = _attempt()
    if handle is None:
        raise OneDnnError(
            f"oneDNN {MAJOR}.x not found ({reasons}); install the wheel onednn-cpu-gomp or set "
            f"{VARIABLE} to the path of {_FILE}"
        )
    return handle


def instructions() -> int:
    """Return the instructions that the library uses here, as bits of its `dnnl_cpu_isa_t`."""
    return int(library().dnnl_get_effective_cpu_isa())


def multiplies_bytes() -> bool:
    """Return whether sums of four products of bytes are one instruction, which is exact."""
    return bool(instructions() & (_VNNI_256 | _VNNI_512))


def multiplies_bfloat16() -> bool:
    """Return whether sums of two products of bfloat16 in float32 are one instruction."""
    return bool(instructions() & _BF16_512)


def gains_by_bfloat16() -> bool:
    """Return whether such sums take less time than those of float32, as by tiles (AMX) they do."""
    from soapstone.native.lanes import pairs_at_once

    return multiplies_bfloat16() and (pairs_at_once() or bool(instructions() & _BF16_TILES))


def channels_at_once() -> int:
    """Return how many channels of bfloat16 an instruction multiplies: 32 by tiles (AMX), or 2."""
    return 32 if instructions() & _BF16_TILES else 2


def version() -> str:
    """Return the loaded library's version and CPU runtime, as "3.2.0 OpenMP"."""
    found = library().dnnl_version().contents
    return f"{found.major}.{found.minor}.{found.patch} {_RUNTIMES[found.cpu_runtime]}"


class Handle:
    """An object of oneDNN's, destroyed with this one. `address` is the C handle.

    It is an argument of oneDNN's functions as it is, and so lives until they return.

    keep: what it is on. again: makes the like at another address, of what is to be kept then.
    """

    __slots__ = ("_destroy", "address", "again", "keep", "made")

    def __init__(self, address: int, destroy: Any = None, keep: object = None) -> None:
        self.address = address
        self.keep = keep
        self.again: Callable[..., Handle] | None = None
        self.made: Made | None = None
        self._destroy = destroy

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy(self.address)

    @property
    def _as_parameter_(self) -> int:  # what ctypes passes
        return self.address


class Made:
    """How an object was made, from which another process makes the like (`recipe`).

    Attributes:
        call: the kind, the function and its arguments. threads: of regions then. changes: of the
            object since, as functions with their arguments.
    """

    __slots__ = ("call", "changes", "threads")

    def __init__(self, call: tuple[Any, ...], threads: int) -> None:
        self.call, self.threads = call, threads
        self.changes: list[tuple[Any, ...]] = []

    def objects(self) -> Iterator[Handle]:
        """Yield the objects that it was made and changed with."""
        for each in (self.call, *self.changes):
            for argument in each:
                if isinstance(argument, Handle):
                    yield argument
                elif isinstance(argument, Borrowed):
                    yield argument.owner


class Borrowed(int):
    """A memory descriptor that a primitive descriptor owns."""

    owner: Handle
    query: tuple[int, int]


def borrowed(description: Handle, what: int, index: int) -> Borrowed:
    """Return the memory descriptor of an operand of a primitive descriptor, 0 where it has none."""
    found = library().dnnl_primitive_desc_query_md(description.address, what, index)
    made = Borrowed(found or 0)
    made.owner, made.query = description, (what, index)
    return made


Descriptor = int | Handle  # of a memory: one that a primitive owns, or one's own


def create(
    kind: str, function: str, *arguments: Any, what: object = "", keep: object = None
) -> Handle:
    """Return a new object made by `dnnl_<function>`, destroyed by `dnnl_<kind>_destroy`.

    Raises:
        OneDnnError: oneDNN refused; the message names `what` (or the function).
    """
    make, destroy = _maker(library(), function, kind)
    result = C.c_void_p()
    try:
        make(C.byref(result), *arguments)
    except OneDnnError as error:
        raise _refusal(error.status, what or function) from None
    handle = Handle(result.value or 0, destroy, keep)
    compiled = function.endswith(_COMPILING)  # for a number of threads
    handle.made = Made((kind, function, *arguments), openmp.asked() if compiled else 0)
    return handle


def change(handle: Handle, function: str, *arguments: Any) -> int:
    """Change an object by `dnnl_<function>`, and return the status."""
    status = int(getattr(library(), f"dnnl_{function}")(handle.address, *arguments))
    if not status and handle.made is not None:
        handle.made.changes.append((function, *arguments))
    return status


def recipe(
    handle: Handle, numbers: Mapping[int, int], place: Callable[[int], Any]
) -> tuple[Any, ...]:
    """Return as numbers and texts how an object was made; see `native.snapshot.taken`."""
    made, mine = handle.made, engine()
    assert made is not None

    def told(call: Sequence[Any]) -> tuple[Any, ...]:
        found: list[tuple[Any, ...]] = []
        for number, each in enumerate(call):
            if isinstance(each, Handle):
                found.append(("object", numbers[each.address]))
            elif isinstance(each, Borrowed):
                found.append(("borrowed", numbers[each.owner.address], *each.query))
            elif isinstance(each, C.Array):
                found.append(("dims", *each))
            elif number and each == mine:
                found.append(("engine",))
            elif call[1:2] == ("memory_create",) and number == _PLACE:
                found.append(("place", *place(each)))
            else:
                found.append(("", each))
        return tuple(found)

    return told(made.call), made.threads, tuple(map(told, made.changes))


def remade(
    recipe: tuple[Any, ...], objects: Sequence[Handle], place: Callable[[Any], int]
) -> Handle:
    """Return an object made by a recipe; see `native.snapshot.restored`.

    Raises:
        OneDnnError: oneDNN refused.
    """

    def given(call: Sequence[Any]) -> Iterator[Any]:
        for what, *each in call:
            if what == "":
                yield each[0]
            elif what == "object":
                yield objects[each[0]]
            elif what == "borrowed":
                yield borrowed(objects[each[0]], *each[1:])
            elif what == "dims":
                yield (C.c_int64 * len(each))(*each)
            else:
                yield engine() if what == "engine" else place(each)

    call, count, changes = recipe
    if count and count != openmp.asked():
        openmp.set_threads(count)
    made = create(*given(call))
    for each in changes:
        change(made, *given(each))
    return made


@cache
def _maker(dnnl: C.CDLL, function: str, kind: str) -> tuple[Any, Any]:
    """Return what makes an object and what destroys one of its kind."""
    return getattr(dnnl, f"dnnl_{function}"), getattr(dnnl, f"dnnl_{kind}_destroy")


def engine() -> int:
    """Return the CPU engine's handle: one for the process, which is never destroyed."""
    with _MAKING:
        return _engine()


_MAKING = Lock()  # objects of two engines do not go together


@cache
def _engine() -> int:
    openmp.adopt(library())  # whose regions are then in the threads that kernels' are in
    result = C.c_void_p()
    library().dnnl_engine_create(C.byref(result), _CPU, 0)
    return int(result.value or 0)


def stream() -> Handle:
    """Return a new in-order stream. One per entry: streams are not for concurrent use."""
    return create("stream", "stream_create", engine(), _IN_ORDER)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Make the calling thread's OpenMP teams `count` wide inside the block.

    oneDNN fixes a primitive's thread count when it is created. The setting belongs to the
    calling thread, so two threads may bind with different counts.
    """
    before = openmp.set_threads(count)
    try:
        yield
    finally:
        openmp.set_threads(before)
