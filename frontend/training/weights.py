"""Weights of other models: taken by name from files of soapstone, PyTorch and ONNX, and arrays.

PyTorch calls parts of layers otherwise, and keeps the weights of linear layers transposed. Its
recurrent and attention layers order theirs otherwise too; these are not translated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.files import check_file
from soapstone.frontend.data import npz
from soapstone.frontend.exchange import as_array
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.compatibility import Loaded, infinite
from soapstone.frontend.training.names import matches, matching
from soapstone.ir.files import storage
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

_THEIRS = {  # what PyTorch calls parts of layers
    "gamma": "weight",
    "beta": "bias",
    "mean": "running_mean",
    "variance": "running_var",
    "table": "weight",
    "slope": "weight",
}
_TRANSPOSED = ("linear",)  # operators whose weight PyTorch keeps as (out, in)
_COUNTERS = "num_batches_tracked"  # no part of what a model computes


@dataclass(frozen=True)
class Given:
    """Arrays by name.

    Attributes:
        label: what errors call them.
        foreign: whether names are PyTorch's. transposed: which weights of linear layers are
            (out, in); None for all.
    """

    label: str
    arrays: Mapping[str, Array]
    foreign: bool = False
    transposed: Collection[str] | None = ()


def given(source: Any) -> Given:
    """Return the arrays of a file or a mapping.

    source: a path that ends in .safetensors, .npz, .pt, .pth or .onnx, or arrays or tensors by name
    such as a `state_dict()`.

    Raises:
        CheckpointError: the file cannot be read, or another kind of source.
    """
    if isinstance(source, Mapping):
        torch = any(hasattr(value, "detach") for value in source.values())
        return _of_mapping("weights", source, torch)
    if not isinstance(source, str | Path):
        raise CheckpointError(f"weights: {type(source).__name__} found, a path or arrays needed")
    path = Path(source)
    label = f"weights {str(path)!r}"
    suffixes = (".safetensors", ".npz", ".pt", ".pth", ".onnx")
    if path.suffix not in suffixes:
        raise CheckpointError(f"{label}: one of {', '.join(suffixes)} needed")
    check_file(path, label, CheckpointError)
    if path.suffix == ".safetensors":
        texts, arrays = storage.read_safetensors(path, label, CheckpointError)
        if checkpoint.KEY in texts:
            return Given(label, checkpoint.load(path)[0])
        return Given(label, arrays, True, None)
    if path.suffix == ".npz":
        fields = npz.headers(path, label, CheckpointError, (checkpoint.KEY,))
        if checkpoint.KEY in fields:
            return Given(label, checkpoint.load(path)[0])
        return Given(label, npz.read(path, label, CheckpointError))
    if path.suffix == ".onnx":
        return _of_onnx(path, label)
    return _of_torch(path, label)


def _of_mapping(label: str, source: Mapping[str, Any], torch: bool) -> Given:
    arrays = {}
    for name, value in source.items():
        where = f"{label}: {name!r}"
        tensor = hasattr(value, "detach")
        array = as_array(value.detach().cpu(), where) if tensor else np.asarray(value)
        if kind_of(array.dtype) not in "biuf":
            raise CheckpointError(f"{where}: {type(value).__name__} found, numbers needed")
        arrays[str(name)] = array
    return Given(label, arrays, torch, None if torch else ())


def _of_torch(path: Path, label: str) -> Given:
    try:
        import torch
    except ImportError:
        raise CheckpointError(f"{label}: needs torch: pip install 'soapstone[torch]'") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickles: whatever is in the file decides which
        raise CheckpointError(f"{label}: no state dict of PyTorch: {error}") from None
    for name in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{label}: {type(found).__name__} found, a state dict needed")
    return _of_mapping(label, found, True)


def _of_onnx(path: Path, label: str) -> Given:
    from soapstone.frontend.onnx.errors import OnnxError
    from soapstone.frontend.onnx.file.read import read

    try:
        source = read(path)
    except OnnxError as error:
        raise CheckpointError(f"{label}: {error}") from None
    transposed = [
        node.input[1]
        for node in source.graph.node
        if node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
    ]
    return Given(label, source.weights, True, transposed)


def take(
    graph: Graph,
    carried: Collection[str],
    found: Given,
    *,
    strict: bool,
    skip: Collection[str],
    names: Mapping[str, str],
) -> tuple[dict[str, Array], Loaded]:
    """Return what a model takes of arrays, and what was done; see `Model.load_weights`.

    Raises:
        CheckpointError: strict, and something is missing, unknown or of another shape.
        GraphError: a layer to skip or to call otherwise that the model does not have.
    """
    for pattern in skip:
        matching("load_weights: skip", pattern, carried)
    for layer in names:
        matching("load_weights: names", layer, carried)
    wanted = [name for name in carried if not any(matches(pattern, name) for pattern in skip)]
    taken: dict[str, Array] = {}
    used: set[str] = set()
    missing, left = [], {}
    for name in wanted:
        theirs = next((each for each in _called(name, found, names) if each in found.arrays), None)
        if theirs is None:
            missing.append(name)
            continue
        used.add(theirs)
        array, spec = found.arrays[theirs], graph.tensors[name]
        turned = found.transposed is None or theirs in found.transposed
        if turned and array.ndim == 2 and _of_layer(graph, name):
            array = array.T
        if array.shape != spec.shape:
            left[theirs] = f"shape {array.shape} found, {spec.shape} of {name!r} needed"
        elif infinite({theirs: array}):
            left[theirs] = "values that are not finite"
        else:
            taken[name] = np.ascontiguousarray(array, spec.dtype).reshape(spec.shape)
    wrong = {**left}
    for name in found.arrays:
        if name not in used and not name.endswith(_COUNTERS):
            left[name] = "not in this model, or skipped"
    if strict:
        said = [f"{name!r} is missing" for name in missing]
        said += [f"{name!r}: {why}" for name, why in wrong.items()]
        unknown = [name for name in left if name not in wrong] if not skip else []
        said += [f"{name!r} is not in this model" for name in unknown]
        if said:
            more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
            raise CheckpointError(
                f"{found.label}: {'; '.join(said[:3])}{more} (strict=False takes what fits,"
                " skip=[…] leaves layers as they are)"
            )
    return taken, Loaded(tuple(taken), tuple(missing), left, False)


def _of_layer(graph: Graph, name: str) -> bool:
    """Return whether a parameter is a linear layer's own, and no matrix of an imported file."""
    layer = name.rpartition(".")[0] + "."
    readers = [f"{n.name}." for n in graph.consumers[name] if n.operator in _TRANSPOSED]
    return any(own.startswith(layer) or layer.startswith(own) for own in readers)


def _called(name: str, found: Given, names: Mapping[str, str]) -> Iterator[str]:
    """Yield what a parameter may be called there."""
    layer, _, part = name.rpartition(".")
    renamed = names.get(layer, layer)
    own = f"{renamed}.{part}" if renamed else part
    yield names.get(name, own)
    if found.foreign and part in _THEIRS:
        yield f"{renamed}.{_THEIRS[part]}"
