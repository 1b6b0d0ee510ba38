"""The table of declared operators, as `soapstone ops` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soapstone.dtypes import DTYPES
from soapstone.ir.dims import Dim, Kind
from soapstone.ir.spec import Case, OpSpec, operators
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.registry import variants
from soapstone.text_table import lines_of


@dataclass(frozen=True)
class OperatorRow:
    """One operator: its operands, how its dims may be split, and what serves it.

    `dims` are those of the operator's first case, each a name and how it may be split: free,
    reduced by a monoid, whole (never split) or lowered (split as primitives). `laws` are equations
    of terms, by name.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[tuple[str, str], ...]
    variants: tuple[str, ...]
    laws: tuple[tuple[str, str], ...]
    onnx: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can say them."""
        return {**asdict(self), "dims": dict(self.dims), "laws": dict(self.laws)}


def operator_rows() -> list[OperatorRow]:
    """Return a row for every declared operator, by name."""
    return [_row(spec) for spec in operators()]


def operator_table(rows: Sequence[OperatorRow]) -> str:
    """Return the rows as text, one operator a line."""
    lines = [("operator", "inputs", "dims", "kernels", "laws", "ONNX")]
    for row in rows:
        dims = " ".join(n if kind == "free" else f"{n}:{kind}" for n, kind in row.dims)
        lines.append(
            (
                row.name,
                " ".join(row.inputs),
                dims,
                " ".join(row.variants),
                str(len(row.laws) or ""),
                row.onnx or "",
            )
        )
    return "\n".join(lines_of(lines))


def _row(spec: OpSpec) -> OperatorRow:
    dims: tuple[tuple[str, str], ...] = ()
    if spec.cases:
        case = spec.cases[0]
        attributes = spec.normalise(case.attributes)
        dims = tuple((dim.name, _kind(dim)) for dim in spec.bind(_specs(case), attributes).dims)
    names = (*(variant.name for variant in variants(spec.name)), "reference")
    return OperatorRow(
        spec.name,
        spec.inputs,
        spec.outputs,
        dims,
        tuple(dict.fromkeys(names)),
        tuple((law.name, str(law)) for law in spec.laws),
        None if spec.onnx is None else str(spec.onnx_entry),
    )


def _kind(dim: Dim) -> str:
    return dim.monoid or "" if dim.kind is Kind.REDUCED else str(dim.kind)


def _specs(case: Case) -> list[TensorSpec]:
    """Return what a case's inputs are: `"2 3"` or `"int32 4 <5"`."""
    specs = []
    for text in case.inputs:
        words = text.split()
        dtype = words[0] if words and words[0] in DTYPES else "float32"
        specs.append(TensorSpec(tuple(int(w) for w in words if w.isdigit()), dtype))
    return specs
