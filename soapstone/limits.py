"""The most bytes that one file, or one value that a file asks for, may take: `SOAPSTONE_MAX_BYTES`.

By default that is the memory of this computer, or of the control group the process is in. Whatever
comes from a file is held against it before it is allocated.
"""

from __future__ import annotations

import os
import re
from functools import cache

from soapstone.errors import DataError
from soapstone.system import physical_bytes

VARIABLE = "SOAPSTONE_MAX_BYTES"
UNITS = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("b", 1000), ("ib", 1024))
}


def size_of(name: str, text: str) -> int:
    """Return the bytes that a text such as `200MB`, `1.5GiB` or `4096` says.

    name: of the option or variable that has it.

    Raises:
        DataError: another form, or less than a byte.
    """
    number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        factor = UNITS[unit.lower()]
        found = int(number) * factor if number.isdigit() else int(float(number) * factor)
    except (KeyError, ValueError, OverflowError):
        found = 0
    if not 1 <= found < 1 << 63:
        raise DataError(f"{name} {text!r} found; bytes such as 200MB, 1.5GiB or 4096 needed")
    return found


@cache
def _physical() -> int:
    return physical_bytes()


def most_bytes() -> int:
    """Return the limit in bytes.

    Raises:
        DataError: the environment variable is no size.
    """
    text = os.environ.get(VARIABLE)
    return _physical() if text is None else size_of(VARIABLE, text)


def check_bytes(nbytes: int, what: str, error: type[ValueError]) -> None:
    """Raise the error, naming `what`, if so many bytes are more than the limit."""
    most = most_bytes()
    if nbytes > most:
        raise error(f"{what} needs {nbytes:,} bytes; {most:,} at most ({VARIABLE})")
