"""What an operator is called in ONNX: the one entry that importer and exporter both read.

An entry says what differs. ONNX's own operators have their versions, types and default values in
the registry of the package `onnx`, which the translation asks; an operator of a custom domain has
those of its declaration here. `frontend/onnx/declared.py` is the translation in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from soapstone.records import dataclass


@dataclass(frozen=True)
class OnnxAttribute:
    """How ONNX gives an attribute.

    Attributes:
        name: ONNX's name for it; "" is the name here.
        input: the position of the input that gives it, in opsets where it is no attribute.
    """

    name: str = ""
    input: int | None = None


@dataclass(frozen=True)
class Onnx:
    """An operator's counterpart in ONNX.

    Attributes:
        name: what ONNX calls the operator.
        domain: where it is declared; "" is ONNX's own. An operator of any other domain, such as
            "com.example", needs no more than this entry: files name it by domain and version.
        version: the domain's version, written into files; files of other versions are refused.
            ONNX's own operators have theirs in ONNX's registry.
        attributes: by the name of an attribute here, how ONNX gives it: under another name, as an
            input, or not at all (None), so that only its default can be written. Attributes without
            an entry have the same name.
        implied: attributes that follow from which operands and outputs there are.
        inputs: where each operand stands among ONNX's inputs; by default in order.
        outputs: how many of the first outputs ONNX has too; by default all.
        casts: by operand, the type it is cast to where ONNX does not allow its own.
    """

    name: str
    domain: str = ""
    version: int = 1
    attributes: Mapping[str, str | OnnxAttribute | None] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    inputs: tuple[int, ...] | None = None
    outputs: int | None = None
    casts: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}" if self.domain else self.name

    def attribute(self, name: str) -> OnnxAttribute | None:
        """Return how ONNX gives the attribute that has this name here, or None: it does not."""
        entry = None if name in self.implied else self.attributes.get(name, name)
        if entry is None:
            return None
        entry = OnnxAttribute(entry) if isinstance(entry, str) else entry
        return entry if entry.name else OnnxAttribute(name, entry.input)

    def position(self, operand: int) -> int:
        """Return where an operand stands among ONNX's inputs."""
        return operand if self.inputs is None else self.inputs[operand]
