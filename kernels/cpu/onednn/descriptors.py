"""Memory descriptors, memories and primitives: the vocabulary the families are written in.

A `Layout` is a hashable shape with strides (or "any": oneDNN chooses), so primitives can be cached
by layouts; a `Primitive` is shared by all entries of equal layouts, memories belong to one entry.
"""

from __future__ import annotations

import ctypes as C
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

from soapstone.dtypes import name_of
from soapstone.ir.ops.products.matmul import ACTIVATIONS as FUSED
from soapstone.ir.spec import operator
from soapstone.kernels.cpu.onednn.library import (
    LAST_IMPLEMENTATION,
    Borrowed,
    Descriptor,
    Handle,
    OneDnnError,
    borrowed,
    change,
    create,
    engine,
    library,
    threads,
)
from soapstone.kernels.cpu.substrate.layout import overlapping
from soapstone.kernels.entry import BFLOAT16, Array
from soapstone.locks import Lock
from soapstone.native.memory import address, aligned
from soapstone.records import dataclass

BF16, F32, S32, U8, S8 = 2, 3, 4, 6, 5
TYPES = {"bfloat16": BF16, "float32": F32, "int32": S32, "uint8": U8, "int8": S8}
_ANY = 1
_USER_SCRATCHPAD = 1
_IMPLEMENTATION = 8

# What `Primitive.descriptor` asks for (dnnl_query_t).
SOURCE, DIFF_SOURCE, WEIGHTS, DIFF_WEIGHTS = 129, 130, 131, 132
TARGET, DIFF_TARGET, WORKSPACE, SCRATCHPAD = 133, 134, 135, 136

# Execution arguments (DNNL_ARG_*).
ARG_SRC, ARG_DST, ARG_WEIGHTS, ARG_BIAS = 1, 17, 33, 41
ARG_MEAN, ARG_VARIANCE, ARG_SCALE, ARG_SHIFT = 49, 50, 51, 52
ARG_WORKSPACE, ARG_SCRATCHPAD = 64, 80
ARG_DIFF_SRC, ARG_DIFF_DST, ARG_DIFF_WEIGHTS, ARG_DIFF_BIAS = 129, 145, 161, 169
ARG_DIFF_SCALE, ARG_DIFF_SHIFT = 255, 256
ARG_SCALES, ARG_ZEROS = 4096, 8192  # added to the argument that they are of

PLAIN_4D = (0, 1, 2, 3)
CHANNELS_LAST_4D = (0, 2, 3, 1)


def dims(values: Sequence[int]) -> Any:
    """Return the values as a C array of int64."""
    return (C.c_int64 * len(values))(*values)


@dataclass(frozen=True)
class Layout:
    """A tensor's shape and strides in elements; `strides` None lets the primitive choose."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str = "float32"

    @staticmethod
    def any(shape: Sequence[int], dtype: str = "float32") -> Layout:
        """Return a layout left to the primitive."""
        return Layout(tuple(shape), None, dtype)

    @staticmethod
    def dense(
        shape: Sequence[int], order: Sequence[int] | None = None, dtype: str = "float32"
    ) -> Layout:
        """Return the dense layout whose axes run outermost to innermost in `order`."""
        return _dense(tuple(shape), None if order is None else tuple(order), dtype)

    @staticmethod
    def of(array: Array, order: Sequence[int] | None = None) -> Layout:
        """Return the array's layout; axes of size 1 get the stride they have in `order`.

        NumPy gives axes of size 1 any stride, while oneDNN compares strides with those of its
        known formats; `order` (default: the axes' own) decides which format that should be.
        """
        axes = None if order is None else tuple(order)
        kind = name_of(array.dtype)
        return Layout.laid(array.shape, array.strides, array.itemsize, kind, axes)

    @staticmethod
    @lru_cache(maxsize=1024)
    def laid(
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        dtype: str,
        order: tuple[int, ...] | None,
    ) -> Layout:
        """Return the layout of an array of this shape, with strides in bytes; see `of`."""
        steps = [stride // itemsize for stride in strides]
        inner = 1
        for axis in reversed(range(len(shape)) if order is None else order):
            if shape[axis] == 1:
                steps[axis] = inner
            inner = steps[axis] * shape[axis]
        return Layout(shape, tuple(steps), dtype)

    @cached_property
    def overlaps(self) -> bool:
        """Whether elements may share memory (a broadcast axis): never right for an output."""
        return self.strides is not None and overlapping(self.shape, self.strides, 1)

    @cached_property
    def descriptor(self) -> Handle:
        """The memory descriptor; oneDNN copies it into what is made with it."""
        return _descriptor(self)


@lru_cache(maxsize=1024)
def _dense(shape: tuple[int, ...], order: tuple[int, ...] | None, dtype: str) -> Layout:
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= shape[axis]
    return Layout(shape, tuple(strides), dtype)


@lru_cache(maxsize=512)
def _descriptor(layout: Layout) -> Handle:
    rank, shape, kind = len(layout.shape), dims(layout.shape), TYPES[layout.dtype]
    if layout.strides is None:
        return create(
            "memory_desc", "memory_desc_create_with_tag", rank, shape, kind, _ANY, what="format any"
        )
    return create(
        "memory_desc",
        "memory_desc_create_with_strides",
        *(rank, shape, kind, dims(layout.strides)),
        what=layout,
    )


def usable(array: Array, halves: bool = False) -> bool:
    """Return whether oneDNN can address the array: a known type, strides whole and positive.

    halves: whether it may be bfloat16, of which a copy makes 0 of what is subnormal.
    """
    kind = array.dtype
    name = name_of(kind)
    return (
        name in TYPES
        and (halves or name != BFLOAT16)
        and kind.isnative
        and array.flags.aligned
        and _steps_whole(array.shape, array.strides, kind.itemsize)
    )


@lru_cache(maxsize=1024)
def _steps_whole(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    axes = [(stride, size) for stride, size in zip(strides, shape) if size > 1]
    whole = all(stride > 0 and stride % itemsize == 0 for stride, _ in axes)
    return _nested(shape, strides) and (whole or 0 in shape)


def is_nested(array: Array) -> bool:
    """Return whether every axis steps over all that the axes inside it hold.

    Every second pixel of an odd width does not: the last one's gap belongs to the next row.
    """
    return _nested(array.shape, array.strides)


@lru_cache(maxsize=1024)
def _nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    within = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape) if n > 1):
        if stride < within:
            return False
        within = stride * size
    return True


_KNOWN: dict[int, list[Handle]] = {}  # descriptors by bytes
_MOST_KNOWN = 1024  # that are made before all are forgotten
_MADE = itertools.count(1)
_KNOWING = Lock()


def known(descriptor: Descriptor) -> Handle:
    """Return the one descriptor that stands for all equal ones, a while at least."""
    size = nbytes(descriptor)
    with _KNOWING:
        for each in _KNOWN.get(size, ()):
            if equal(each, descriptor):
                return each
        if next(_MADE) % _MOST_KNOWN == 0:
            _KNOWN.clear()
        made = create("memory_desc", "memory_desc_clone", descriptor)
        _KNOWN.setdefault(size, []).append(made)
        return made


def nbytes(descriptor: Descriptor) -> int:
    """Return the bytes a memory of this descriptor needs."""
    return int(library().dnnl_memory_desc_get_size(descriptor))


def is_channels_first(array: Array) -> bool:
    """Return whether an (n, c, h, w) array is stored row by row rather than channels-last."""
    _, channels, _, width = array.strides
    return bool(array.shape[1] == 1 or channels >= width)


def equal(first: Descriptor, second: Descriptor) -> bool:
    """Return whether two memory descriptors describe the same layout."""
    return bool(library().dnnl_memory_desc_equal(first, second))


def buffer(size: int) -> Array:
    """Return `size` private bytes on a cache line's boundary, uninitialised."""
    return aligned(max(size, 1))


@dataclass(frozen=True)
class Activation:
    """An element-wise function: oneDNN's algorithm with its two parameters."""

    algorithm: int
    alpha: float = 0.0
    beta: float = 0.0


# Algorithms (dnnl_alg_kind_t) by the names that operators' formulas have for them.
ALGORITHMS = {
    "relu": 0x20,
    "tanh": 0x21,
    "elu": 0x22,
    "abs": 0x24,
    "sqrt": 0x25,
    "linear": 0x26,
    "hard_sigmoid": 0x28,
    "logistic": 0x29,
    "exp": 0x2A,
    "gelu_tanh": 0x2B,
    "swish": 0x2C,
    "clip": 0x2E,
    "pow": 0x30,
    "gelu_erf": 0x31,
    "round": 0x32,
    "hard_swish": 0x34,
    "binary_add": 0x1FFF0,
    "binary_mul": 0x1FFF1,
    "binary_max": 0x1FFF2,
    "binary_min": 0x1FFF3,
    "binary_div": 0x1FFF4,
    "binary_sub": 0x1FFF5,
}
_UNBOUNDED = {"low": -math.inf, "high": math.inf}  # where an attribute is None


def activation(name: str, attributes: Mapping[str, Any]) -> Activation | None:
    """Return oneDNN's function for an element-wise operator, None where it has none."""
    spec = operator(name)
    if spec.formula is None or not spec.formula.onednn:
        return None
    given = spec.normalise(attributes)
    algorithm, *numbers = spec.formula.onednn.get(spec.formula.value(given), (None,))
    if not isinstance(algorithm, str) or algorithm.startswith("binary_"):
        return None
    values = [given[one] if isinstance(one, str) else one for one in numbers]
    bounds = [_UNBOUNDED[str(n)] if v is None else float(v) for n, v in zip(numbers, values)]
    return Activation(ALGORITHMS[algorithm], *bounds)


ACTIVATIONS: dict[str | None, Activation | None] = {
    None: None,
    **{name: activation(name, {}) for name in FUSED},
}


@dataclass(frozen=True)
class Binary:
    """An element-wise step with an operand: oneDNN's algorithm, and the operand's layout."""

    algorithm: int
    operand: Layout


Post = Activation | Binary
Step = Activation | tuple[int, Array]  # on a result: a function, or an algorithm and its operand


def on_operands(
    steps: Sequence[Step], change: Callable[[Array], Array | None]
) -> list[Step] | None:
    """Return the steps with other operands, each made of an earlier one; None where one is not."""
    found: list[Step] = []
    for step in steps:
        if not isinstance(step, Activation):
            operand = change(step[1])
            if operand is None:
                return None
            step = step[0], operand
        found.append(step)
    return found


def post_argument(index: int) -> int:
    """Return the argument number of the operand of the post-operator at a position."""
    return 32768 * (index + 1) | 2


@dataclass(frozen=True)
class Integers:
    """The types of a product of bytes, and which of its operands have scales and zeros.

    Attributes:
        mask: of the weights' axes that have scales of their own; None: there are none.
        source_zero, weights_zero: whether 0 is called otherwise in the source and the weights.
    """

    source: str
    target: str
    mask: int | None
    source_zero: bool
    weights_zero: bool


@lru_cache(maxsize=256)
def attributes(*posts: Post, integers: Integers | None = None) -> Handle:
    """Return primitive attributes: the caller's scratchpad, strict float32, then the `posts`."""
    result = create("primitive_attr", "primitive_attr_create")
    change(result, "primitive_attr_set_scratchpad_mode", _USER_SCRATCHPAD)
    if integers is not None:
        if integers.mask is not None:
            change(result, "primitive_attr_set_scales_mask", ARG_WEIGHTS, integers.mask)
        for used, argument in (
            (integers.source_zero, ARG_SRC),
            (integers.weights_zero, ARG_WEIGHTS),
        ):
            if used:
                change(result, "primitive_attr_set_zero_points_mask", argument, 0)
    if posts:
        chain = create("post_ops", "post_ops_create")
        for post in posts:
            if isinstance(post, Activation):
                numbers = post.algorithm, post.alpha, post.beta
                change(chain, "post_ops_append_eltwise", *numbers)
            else:
                operand = post.operand.descriptor
                change(chain, "post_ops_append_binary", post.algorithm, operand)
        change(result, "primitive_attr_set_post_ops", chain)
    return result


@dataclass(frozen=True, eq=False)
class Primitive:
    """A compiled oneDNN primitive; safe to run from several threads, each with its own memory.

    order: of the axes of its activations, where that was chosen with it.
    """

    name: str
    primitive: Handle
    description: Handle
    scratch_bytes: int
    implementation: str
    order: tuple[int, ...] = ()

    def descriptor(self, what: int, index: int = 0) -> Borrowed:
        """Return the memory descriptor the primitive uses for an operand (owned by it)."""
        return borrowed(self.description, what, index)


def describe(name: str, *arguments: Any, what: object = "") -> Handle:
    """Return the primitive descriptor made by `dnnl_<name>_primitive_desc_create`.

    It keeps what it is made of: a forward descriptor, the hint of a backward one, is read again
    when the next implementation is asked for.
    """
    function = f"{name}_primitive_desc_create"
    made_of = [each for each in arguments if isinstance(each, Handle)]
    return create("primitive_desc", function, *arguments, what=what or name, keep=made_of)


class Kept:
    """A function that makes primitives: those that are in use, or were asked for last, are kept.

    One takes up to 100 KB, most of it machine code for its shapes, so that ever more shapes would
    take ever more memory. make: returns one, or None; its arguments tell primitives apart.
    """

    def __init__(self, make: Callable[..., Primitive | None]) -> None:
        self._make = make
        self._used: WeakValueDictionary[Hashable, Primitive] = WeakValueDictionary()
        self._last: OrderedDict[Hashable, Primitive | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *key: Any) -> Primitive | None:
        with self._lock:
            known = key in self._last
            found = self._last.pop(key, None) if known else self._used.get(key)
        if not known and found is None:
            found = self._make(*key)
        with self._lock:
            self._last[key] = found
            if found is not None:
                self._used[key] = found
            if len(self._last) > _RECENT:
                self._last.popitem(last=False)
        return found

    def forget(self) -> None:
        """Keep none that nobody uses."""
        with self._lock:
            self._last.clear()


_RECENT = 128  # primitives of a kind that are kept although nobody uses them


def compile_primitive(name: str, description: Handle, order: tuple[int, ...] = ()) -> Primitive:
    """Return the primitive of a descriptor; order: see `Primitive`."""
    primitive = create("primitive", "primitive_create", description, what=name)
    scratch = library().dnnl_primitive_desc_query_md(description.address, SCRATCHPAD, 0)
    room = nbytes(scratch) if scratch else 0
    return Primitive(name, primitive, description, room, implementation(description), order)


def implementation(description: Handle) -> str:
    """Return the name of the implementation a primitive descriptor chose."""
    text = C.c_char_p()
    library().dnnl_primitive_desc_query(description.address, _IMPLEMENTATION, 0, C.byref(text))
    return (text.value or b"").decode()


def next_implementation(description: Handle) -> bool:
    """Move a primitive descriptor on to oneDNN's next implementation; return whether there is."""
    status = change(description, "primitive_desc_next_impl")
    if status not in (0, LAST_IMPLEMENTATION):
        raise OneDnnError(f"oneDNN next implementation: status {status}", status)
    return not status


def memory(descriptor: Descriptor, array: Array) -> Handle:
    """Return a memory object on an array, which it keeps."""
    place = address(array)
    again = partial(create, "memory", "memory_create", descriptor, engine())
    made = again(int(place), keep=place.owner)
    made.again = again
    return made


def reorder_primitive(source: Descriptor, target: Descriptor, count: int) -> Primitive:
    """Return the primitive that copies between two descriptors, made for `count` threads."""
    made = _reorder(known(source), known(target), count)
    assert made is not None
    return made


@Kept
def _reorder(source: Handle, target: Handle, count: int) -> Primitive:
    with threads(count):
        description = describe(
            "reorder",
            *(source, engine(), target, engine(), attributes()),
        )
        return compile_primitive("reorder", description)
