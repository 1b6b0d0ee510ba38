"""The most bytes that one file, or one value that a file asks for, may take: `SOAPSTONE_MAX_BYTES`.

By default that is the memory of this computer, or of the control group the process is in. Whatever
comes from a file is held against it before it is allocated.
"""

from __future__ import annotations

import os
from functools import cache

from soapstone.errors import DataError
from soapstone.system import physical_bytes

VARIABLE = "SOAPSTONE_MAX_BYTES"


@cache
def _physical() -> int:
    return physical_bytes()


def most_bytes() -> int:
    """Return the limit in bytes.

    Raises:
        DataError: the environment variable is no number of bytes.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return _physical()
    if not (text.isascii() and text.isdigit()):
        raise DataError(f"{VARIABLE}: {text!r} found, a number of bytes needed")
    return int(text)


def check_bytes(nbytes: int, what: str, error: type[ValueError]) -> None:
    """Raise the error, naming `what`, if so many bytes are more than the limit."""
    most = most_bytes()
    if nbytes > most:
        raise error(f"{what} needs {nbytes:,} bytes; {most:,} at most ({VARIABLE})")
