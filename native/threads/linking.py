"""Calls of a loaded library led elsewhere: its table of the functions that it imports is rewritten.

A shared library calls functions of others by addresses in a table, which the system fills in when
it loads it (and which it lets nobody write to afterwards, as a rule).

Source: System V Application Binary Interface, chapter 5, "Dynamic Linking"
"""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Mapping

import numpy as np

from soapstone import system

_LINK_MAP = 2  # RTLD_DI_LINKMAP
_STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_BYTES, _CALLS_BYTES, _CALLS = 5, 6, 7, 8, 2, 23
_PLACES = {_STRINGS, _SYMBOLS, _RELOCATIONS, _CALLS}  # the others of these are numbers of bytes
_RELOCATION = np.dtype([("place", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_IMPORTS = (6, 7, 1025, 1026)  # R_X86_64_GLOB_DAT, _JUMP_SLOT, and those of R_AARCH64
_SYMBOL_BYTES = 24  # Elf64_Sym, whose first four are where its name is
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_READ_ONLY = 0x6474E552  # PT_GNU_RELRO


def replace(library: C.CDLL, functions: Mapping[str, int], prefixes: tuple[str, ...]) -> bool:
    """Let a library call others of the functions that it imports by names; return whether it does.

    functions: addresses by names. prefixes: of names which must all be among them. Where one is
    missing, or the system has no such tables, nothing is changed.
    """
    try:
        base, table = _loaded(library)
        symbols, strings = table[_SYMBOLS], table[_STRINGS]
    except (AttributeError, OSError, LookupError):
        return False
    slots: dict[int, int] = {}
    for start, nbytes in ((_CALLS, _CALLS_BYTES), (_RELOCATIONS, _RELOCATIONS_BYTES)):
        if start not in table:
            continue
        held = (C.c_char * table[nbytes]).from_address(table[start])
        entries = np.frombuffer(memoryview(held), _RELOCATION)
        for place, _, symbol, _ in entries[np.isin(entries["kind"], _IMPORTS)].tolist():
            at = C.c_uint32.from_address(symbols + _SYMBOL_BYTES * symbol).value
            name = C.string_at(strings + at).decode()
            if name in functions:
                slots[base + place] = functions[name]
            elif name.startswith(prefixes):
                return False
    closed = {place for place in slots if _closed(base, place)}
    if not all(system.protect(place, 8, system.READ | system.WRITE) for place in closed):
        return False
    for place, address in slots.items():
        C.c_uint64.from_address(place).value = address
    for place in closed:
        system.protect(place, 8, system.READ)
    return bool(slots)


class _LinkMap(C.Structure):
    """What the system says of a loaded library (`struct link_map`), as far as it is used."""

    _fields_ = (("base", C.c_size_t), ("name", C.c_char_p), ("dynamic", C.c_void_p))


def _loaded(library: C.CDLL) -> tuple[int, dict[int, int]]:
    """Return where a library lies, and the words of its dynamic section by their tags."""
    found = C.POINTER(_LinkMap)()
    tell = C.CDLL(None).dlinfo
    if tell(C.c_void_p(library._handle), _LINK_MAP, C.byref(found)):
        raise OSError("the system does not tell where a library lies")
    place, table = found.contents.dynamic, {}
    while (tag := C.c_int64.from_address(place).value) != 0:
        table[tag] = C.c_uint64.from_address(place + 8).value
        place += 16
    base = found.contents.base
    for tag in _PLACES & table.keys():  # some systems leave them as they are in the file
        table[tag] += base if table[tag] < base else 0
    return base, table


def _closed(base: int, place: int) -> bool:
    """Return whether a library lets an address of it not be written to once it is loaded.

    What it asks for so holds for whole pages: the last one, if only in part, is left as it is.
    """
    header = _HEADER.unpack(C.string_at(base, _HEADER.size))
    for number in range(header[10]):
        kind, _, _, address, _, _, nbytes, _ = _SEGMENT.unpack(
            C.string_at(base + header[5] + number * header[9], _SEGMENT.size)
        )
        end = (base + address + nbytes) // system.PAGE * system.PAGE
        if kind == _READ_ONLY and base + address <= place < end:
            return True
    return False
