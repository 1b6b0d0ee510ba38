"""The error of arguments that do not fit a session of `soapstone.onnxruntime`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from soapstone.errors import DataError
from soapstone.ir.errors import GraphError


class InvalidArgument(DataError):
    """A name, type or shape that does not fit; names what was found and what was needed."""


@contextmanager
def as_invalid() -> Iterator[None]:
    """Let errors of sessions inside be `InvalidArgument`s of the same text."""
    try:
        yield
    except InvalidArgument:
        raise
    except (DataError, GraphError) as error:
        raise InvalidArgument(str(error)) from error
