"""The errors of ONNX files: each names the node or field, what was found and what was needed."""

from __future__ import annotations

from soapstone.ir.errors import GraphError


class OnnxError(GraphError):
    """An ONNX file that is malformed, or that holds something soapstone does not support."""


class UnboundError(OnnxError):
    """Something must be known to fix the graph's shapes, and is not.

    `inputs` names graph inputs of which a shape depends on the *contents*; `dims` names symbolic
    dims without an extent. `value` is the graph's name of the value whose contents are needed, and
    `apart` says that no graph should be made for certain contents of it (`pieces.py`).
    """

    def __init__(
        self,
        message: str,
        *,
        inputs: tuple[str, ...] = (),
        dims: tuple[str, ...] = (),
        value: str | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__(message)
        self.inputs = inputs
        self.dims = dims
        self.value = value
        self.apart = apart


class UnsupportedError(OnnxError):
    """An operator, attribute or type that soapstone does not support; the file may be right."""
