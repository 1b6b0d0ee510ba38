"""Types of the layers that operators' declarations give, for readers and type checkers.

`python tests/programs/layer_stub.py` writes `frontend/layers/declared.pyi`.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from soapstone.frontend.layers import Layers
from soapstone.frontend.layers.declared import DeclaredLayers

STUB = Path(__file__).parents[2] / "frontend" / "layers" / "declared.pyi"
_HEAD = '''"""The layers that operators' declarations give, by tests/programs/layer_stub.py."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from soapstone.frontend.layers.base import LayerBase
from soapstone.frontend.recording import Tensor
from soapstone.ir.spec import OpSpec

def layer_signature(spec: OpSpec) -> inspect.Signature: ...
def layer_of(spec: OpSpec) -> Callable[..., Any]: ...

class DeclaredLayers(LayerBase):
'''


def stub() -> str:
    """Return the stub: every layer that no method of another class takes the place of."""
    lines = []
    for name, layer in vars(DeclaredLayers).items():
        if not name.startswith("_") and getattr(Layers, name) is layer:
            lines.append(_definition(name, inspect.signature(layer)))
    return _HEAD + "".join(lines)


def _definition(name: str, signature: inspect.Signature) -> str:
    parts, starred = ["self"], False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        text = f"{parameter.name}: {parameter.annotation}"
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, starred = f"*{text}", True
        if parameter.default is not parameter.empty:
            text += " = ..."
        parts.append(text)
    line = f"    def {name}({', '.join(parts)}) -> {signature.return_annotation}: ...\n"
    if len(line) <= 101:
        return line
    inner = f"        {', '.join(parts)}\n"
    if len(inner) > 101:
        inner = "".join(f"        {part},\n" for part in parts)
    return f"    def {name}(\n{inner}    ) -> {signature.return_annotation}: ...\n"


if __name__ == "__main__":
    STUB.write_text(stub())
