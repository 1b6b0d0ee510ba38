"""What an ONNX file holds, and what of it soapstone supports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soapstone.dtypes import kind_of
from soapstone.frontend.onnx.errors import OnnxError, UnboundError
from soapstone.frontend.onnx.model import OnnxModel, from_onnx
from soapstone.frontend.onnx.pieces import Pieces
from soapstone.frontend.onnx.support import nodes_of, operator_name, unsupported
from soapstone.frontend.onnx.texts import blank


@dataclass(frozen=True)
class Report:
    """What `soapstone onnx check` shows of a file.

    `unsupported` names operators without a translation, in branches that are never taken too;
    `problem` says what keeps the graph from being built, or is None. `contents` names the inputs on
    whose contents shapes depend: sessions see those when they run. `flops` are known once all
    symbolic dims are, and no such input is left. `cuts` are the nodes at which a model that
    sessions run in pieces is cut first; what lies behind them has shapes that only a run tells.
    """

    name: str
    opsets: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: Mapping[str, int]
    unsupported: tuple[str, ...]
    parameters: int
    weight_bytes: int
    flops: float | None
    problem: str | None
    contents: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        opsets = ", ".join(f"{domain} {version}" for domain, version in self.opsets.items())
        lines = [f"model {self.name}, opset {opsets}"]
        lines += [f"  input  {value}" for value in self.inputs]
        lines += [f"  output {value}" for value in self.outputs]
        width = max(map(len, self.operators), default=0)
        lines += [
            f"  {name:<{width}}  {count}{'   not supported' * (name in self.unsupported)}"
            for name, count in self.operators.items()
        ]
        lines.append(f"{self.parameters:,} parameters, {self.weight_bytes / 1e6:,.1f} MB")
        if self.flops is not None:
            lines.append(f"{self.flops / 1e9:,.3f} GFLOP a run")
        if self.contents:
            lines.append(f"shapes depend on the contents of {', '.join(self.contents)}")
        if self.cuts:
            lines.append(f"run in pieces, first cut at {', '.join(self.cuts)}")
        lines.append(self.problem or "supported")
        return "\n".join(lines)


def check_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> Report:
    """Return what an ONNX file holds; `dims` gives symbolic dims extents.

    Raises:
        OnnxError: the file is malformed.
        OSError: it cannot be read.
    """
    model = from_onnx(path, dims=dims)
    source = model.source
    operators: Counter[str] = Counter()
    operators.update(map(operator_name, nodes_of(source.graph.node)))
    lacking = unsupported(source)
    flops, problem, contents, cuts = _built(model, dims or {})
    if lacking and problem is None and flops is None:  # a graph that was built lacks nothing
        problem = f"not supported: {', '.join(lacking)}"
    weights = source.weights.values()
    return Report(
        name=model.name,
        opsets={domain or "ai.onnx": version for domain, version in source.opsets.items()},
        inputs=tuple(map(str, model.inputs)),
        outputs=tuple(map(str, model.outputs)),
        operators=dict(operators.most_common()),
        unsupported=lacking,
        parameters=sum(array.size for array in weights if kind_of(array.dtype) == "f"),
        weight_bytes=sum(array.nbytes for array in weights),
        flops=flops,
        problem=problem,
        contents=contents,
        cuts=cuts,
    )


def _built(
    model: OnnxModel, dims: Mapping[str, int]
) -> tuple[float | None, str | None, tuple[str, ...], tuple[str, ...]]:
    """Return the graph's work if known, what kept it from being built, `contents` and `cuts`.

    Sessions build it for the contents of inputs of one axis at most: vectors, such as shapes.
    """
    try:
        return model.graph().flops(), None, (), ()
    except UnboundError as error:
        vectors = {declared.name for declared in model.inputs if len(declared.shape) <= 1}
        if error.inputs and vectors.issuperset(error.inputs) and not error.apart:
            return None, None, error.inputs, ()
        if not error.dims and not error.value:
            return None, str(error), (), ()
        try:
            return None, None, (), _cuts(model, dims)
        except OnnxError as other:
            return None, None if error.dims else str(other), (), ()
    except OnnxError as error:
        return None, str(error), (), ()


def _cuts(model: OnnxModel, dims: Mapping[str, int]) -> tuple[str, ...]:
    """Return where a session would cut a model first, dims without an extent being 1."""
    given = {}
    if not all(declared.ranked for declared in model.inputs):
        return ()  # how many tensors or axes there are is told by a run
    for declared in model.inputs:
        shape = [each if isinstance(each, int) else dims.get(each, 1) for each in declared.shape]
        given[declared.name] = blank(shape, declared.dtype)
    return tuple(Pieces(model.source, None).cuts(given))
