"""Object files of kernels made callable: placed in memory, the addresses in them filled in.

LLVM's loader does this for every processor and format, and takes 30 ms to load itself. What LLVM
makes of kernels on x86-64 needs little: code and constants in ELF, and words that hold addresses of
these, or of functions of C. Whatever else a file asks for is left to LLVM (`objects`).

Source: System V Application Binary Interface, chapter 4; its AMD64 supplement, section 4.4
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

from soapstone import system

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_RELOCATION = struct.Struct("<QQq")  # Elf64_Rela
_ELF64 = b"\x7fELF\x02\x01\x01"
_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA, _REL = 1, 2, 4, 9
_WRITE, _ALLOC, _TLS = 1, 2, 0x400
_UNDEFINED = 0
_WORD = 1  # R_X86_64_64: the address of a symbol and an addend
_LARGEST_ALIGNMENT = 4096
_UNWINDING = ".eh_frame"  # kernels raise nothing that is to be unwound
DEFINED: dict[str, int] = {}  # addresses that the process gives names, for compiled code


def define(name: str, address: int) -> None:
    """Give an address a name, for code that is loaded from now on."""
    DEFINED[name] = address


def load(code: bytes, name: str) -> int | None:
    """Return the address of a function of an object file, which stays in memory.

    None where the file needs more than is done here, or the system does not let memory be executed.
    """
    try:
        return _placed(code, name)
    except (struct.error, LookupError, UnicodeDecodeError):  # not as the format has it
        return None


def _placed(code: bytes, name: str) -> int | None:
    ident, kind, machine, _, _, _, at, _, _, _, _, size, count, names = _HEADER.unpack_from(code)
    if ident[:7] != _ELF64 or (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        return None
    sections = [_SECTION.unpack_from(code, at + size * number) for number in range(count)]
    titles = sections[names][4]
    places: dict[int, int] = {}  # of a section, from the start of all
    end = 0
    for number, (title, kind, flags, _, _, nbytes, _, _, alignment, _) in enumerate(sections):
        if not flags & _ALLOC or not nbytes or _text(code, titles + title) == _UNWINDING:
            continue
        if kind != _PROGBITS or flags & (_WRITE | _TLS) or alignment > _LARGEST_ALIGNMENT:
            return None
        end = -(-end // max(alignment, 1)) * max(alignment, 1)
        places[number] = end
        end += nbytes
    memory = system.writable(end)
    base = system.start(memory)
    for number, place in places.items():
        first, nbytes = sections[number][4:6]
        memory[place : place + nbytes] = code[first : first + nbytes]
    for _, kind, _, _, first, nbytes, link, target, _, _ in sections:
        if kind == _REL and target in places:
            return None
        if kind != _RELA or target not in places:
            continue
        _, _, _, _, symbols, _, strings, *_ = sections[link]
        for offset, info, addend in _RELOCATION.iter_unpack(code[first : first + nbytes]):
            symbol = _SYMBOL.unpack_from(code, symbols + _SYMBOL.size * (info >> 32))
            address = _address(code, symbol, sections[strings][4], places, base)
            if info & 0xFFFF_FFFF != _WORD or address is None:
                return None
            word = (address + addend) & 0xFFFF_FFFF_FFFF_FFFF
            struct.pack_into("<Q", memory, places[target] + offset, word)
    found = None
    for _, kind, _, _, first, nbytes, link, *_ in sections:
        if kind == _SYMTAB:
            for symbol in _SYMBOL.iter_unpack(code[first : first + nbytes]):
                if symbol[3] in places and _text(code, sections[link][4] + symbol[0]) == name:
                    found = base + places[symbol[3]] + symbol[4]
    return found if found is not None and system.make_executable(memory) else None


def _address(
    code: bytes, symbol: tuple[int, ...], strings: int, places: dict[int, int], base: int
) -> int | None:
    """Return the address that a symbol stands for: here, or a function of C; None for others."""
    title, _, _, section, value, _ = symbol
    if section == _UNDEFINED:
        name = _text(code, strings + title)
        return DEFINED.get(name) or _function(name)
    return base + places[section] + value if section in places else None


@cache
def _function(name: str) -> int | None:
    """Return the address of a function that this process has."""
    try:
        return system.address(getattr(ctypes.pythonapi, name)) or None
    except AttributeError:
        return None


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()
