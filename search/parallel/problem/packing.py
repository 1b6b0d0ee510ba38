"""Passing many arrays to compiled functions by one pointer.

Python code works with a `NamedTuple` of arrays. Passed as it is, every array in it would be an
argument of every compiled function, which takes minutes to compile. `call` passes the address of a
table with the places of the arrays instead. Compiled code borrows them without reference counts,
which would take most of its time; the tuple holds them during a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from soapstone.native.memory import pack


class PackedType(types.Type):  # type: ignore[misc, unused-ignore]
    """A table of arrays with names and known types."""

    def __init__(self, kind: str, fields: dict[str, types.Array]) -> None:
        self.fields = fields
        of = ", ".join(f"{name} {each.dtype} {each.ndim}" for name, each in fields.items())
        # Names of compiled functions hold those of their arguments' types: records' are long.
        super().__init__(f"{kind}({blake2b(of.encode(), digest_size=8).hexdigest()})")


@register_model(PackedType)
class _Model(models.OpaqueModel):  # type: ignore[misc, unused-ignore]
    """For each array, pointers to its data and its shape, as words of 64 bits."""


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc, unused-ignore]
    key = PackedType

    def generic_resolve(self, of: PackedType, name: str) -> types.Array | None:
        return of.fields.get(name)


@lower_getattr_generic(PackedType)  # type: ignore[untyped-decorator]
def _array(context: Any, builder: Any, of: PackedType, pointer: Any, name: str) -> Any:
    """Make a borrowed array, which has no reference count."""
    kind = of.fields[name]
    first = 0
    for other, each in of.fields.items():
        if other == name:
            break
        first += 1 + each.ndim
    word = context.get_value_type(types.intp)
    table = builder.bitcast(pointer, word.as_pointer())
    never_changes = builder.module.add_metadata([])

    def load(at: int) -> Any:
        value = builder.load(builder.gep(table, [ir.Constant(word, at)]))
        value.set_metadata("invariant.load", never_changes)
        return value

    shape = [load(first + 1 + axis) for axis in range(kind.ndim)]
    itemsize = ir.Constant(word, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for extent in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], extent))
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(load(first), array.data.type)
    populate_array(array, data, shape, strides, itemsize, meminfo=None)
    return array._getvalue()


class _Packed:
    """The table of a tuple's arrays, and its type."""

    def __init__(self, arrays: Any) -> None:
        kinds, words = list[tuple[str, Any, int]](), list[Any]()
        for name, array in zip(arrays._fields, arrays):
            if not array.flags.c_contiguous:
                raise ValueError(f"{name}: strides {array.strides} found, C order needed")
            kinds.append((name, array.dtype, array.ndim))
            words += [array, array.shape]
        self.block = pack(words)
        self.address = self.block.address
        self._numba_type_ = _type_of(type(arrays).__name__, tuple(kinds))


@cache
def _type_of(kind: str, fields: tuple[tuple[str, Any, int], ...]) -> PackedType:
    """Return the type of a table of arrays: names, types of numbers, ranks."""
    made = {name: types.Array(from_dtype(dtype), ndim, "C") for name, dtype, ndim in fields}
    return PackedType(kind, made)


@unbox(PackedType)  # type: ignore[untyped-decorator]
def _address(of: PackedType, given: Any, c: Any) -> NativeValue:
    address = c.pyapi.object_getattr_string(given, "address")
    pointer = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(pointer)


_kinds: set[type] = set()


def packed(kind: type) -> type:
    """Decorate a `NamedTuple` of arrays, whose tuples `call` then packs."""
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind,), own)  # without slots: a tuple keeps what it is packed to
    _kinds.add(made)
    return made


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function, with tuples of arrays packed."""
    return function(*(_pack(arg) if type(arg) in _kinds else arg for arg in args))


def _pack(arg: Any) -> Any:
    if "packed" not in arg.__dict__:
        arg.packed = _Packed(arg)
    return arg.packed
