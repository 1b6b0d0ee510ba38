"""What a checkpoint was made for, and what of it a model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.errors import warn
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.ir.files.graphs import graph_to_json
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, TensorSpec

_LATER = ("clip_norm", "clip_value", "rates")  # settings that older files do not have
_SHOWN = 3  # differences that one error names


@dataclass(frozen=True)
class Loaded:
    """What a model took of a checkpoint.

    Attributes:
        taken: arrays that the model has now.
        missing: parameters and states of the model that the file does not have; they stay.
        left: arrays of the file that were not taken, and why.
        position: whether step, epoch and place in the data were taken too.
    """

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    left: Mapping[str, str]
    position: bool

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} arrays taken, {len(self.missing)} missing"]
        lines += [f"missing: {name}" for name in self.missing]
        lines += [f"left: {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's name and settings, but for the learning rate, which may change."""
    names = [item.name for item in fields(optimizer) if item.name != "learning_rate"]
    found = {name: getattr(optimizer, name) for name in names}
    found = {n: value for n, value in found.items() if value is not None or n not in _LATER}
    found |= {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return {"name": type(optimizer).__name__, **found}


def layers(forward: Graph) -> dict[str, Any]:
    """Return the layers of a model's graph by name, for JSON: operator, inputs and attributes."""
    kept = ("operator", "inputs", "attributes")
    nodes: list[dict[str, Any]] = graph_to_json(forward)["nodes"]
    return {node["name"]: {key: node[key] for key in kept} for node in nodes}


def differences(theirs: Mapping[str, Any], needed: Mapping[str, Any]) -> list[str]:
    """Return in what two descriptions of training differ: layers, loss, optimizer and seed.

    Of `cells`, whose layers are known once they are called, those that both have are compared.
    """
    # Layers that draw have seeds that follow from the model's, compared once or not at all.
    drawn = "seed" in needed and theirs.get("seed") == needed["seed"]
    without = () if drawn else ("seed",)
    result = _layer_differences(theirs["layers"], needed["layers"], without)
    for name, cell in theirs.get("cells", {}).items():
        if name in needed.get("cells", {}):
            found = _layer_differences(cell, needed["cells"][name], without)
            result += [f"{name}: {each}" for each in found]
    for name in ("loss", "seed"):
        if name in needed and theirs.get(name) != needed[name]:
            result.append(f"{name} {theirs.get(name)!r} found, {needed[name]!r} needed")
    if "optimizer" in needed and theirs.get("optimizer") != needed["optimizer"]:
        one, other = theirs.get("optimizer") or {}, needed["optimizer"]
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                shown = "" if name == "name" else f"{name} "
                result.append(
                    f"optimizer: {shown}{one.get(name)!r} found, {other.get(name)!r} needed"
                )
                break
    return result


def _layer_differences(
    theirs: Mapping[str, Any], needed: Mapping[str, Any], without: tuple[str, ...]
) -> list[str]:
    result = []
    for name, layer in needed.items():
        if name not in theirs:
            result.append(f"layer {name!r} is missing")
            continue
        other = theirs[name]
        for key in ("operator", "inputs"):
            if other[key] != layer[key]:
                result.append(f"layer {name!r}: {key} {other[key]!r} found, {layer[key]!r} needed")
        one, two = other["attributes"], layer["attributes"]
        for key in {**two, **one}:
            if key not in without and one.get(key) != two.get(key):
                what = f"{key} {one.get(key)!r} found, {two.get(key)!r} needed"
                result.append(f"layer {name!r}: {what}")
    return result + [f"layer {name!r} found, none needed" for name in theirs if name not in needed]


def refuse(path: str | Path, found: Sequence[str], hint: str = "") -> None:
    """Raise CheckpointError where a checkpoint differs from what is needed; it says in what."""
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        text = f"{'; '.join(found[:_SHOWN])}{more}{hint}"
        raise CheckpointError(f"checkpoint {str(path)!r}: {text}")


def infinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names of arrays with values that are not finite, which no strict read takes."""
    return [name for name, array in arrays.items() if not np.isfinite(array).all()]


def check_finite(arrays: Mapping[str, Array], label: str) -> None:
    """Refuse to write arrays with values that are not finite. label: of the file."""
    if bad := infinite(arrays):
        raise CheckpointError(
            f"{label}: not written: {len(bad)} of {len(arrays)} arrays have values that are not"
            f" finite, {bad[0]!r} the first; what was there is as it was"
        )


def read(
    path: str | Path,
    made_for_here: Callable[[int], Mapping[str, Any]],
    specs: Mapping[str, TensorSpec],
    strict: bool,
) -> tuple[dict[str, Array], dict[str, Any], Loaded]:
    """Return the arrays that a model takes of a checkpoint, its metadata, and what was done.

    Args:
        made_for_here: what the checkpoint should have been made for, by batch size; see
            `differences`. Without an optimizer only parameters and states of the model are taken.
        specs: the parameters and states that the model has.
        strict: whether all must be as needed; else whatever has a name and a shape of the model's
            is taken, and optimizer states only where the optimizer is the same.

    Raises:
        CheckpointError: the file cannot be read, or strict and not all is as needed; names what.
    """
    arrays, metadata = checkpoint.load(path)
    label = f"checkpoint {str(path)!r}"
    made_for = metadata.get("made_for")
    if not isinstance(made_for, dict) or not isinstance(made_for.get("layers"), dict):
        made_for = None
    needed = made_for_here((made_for or {}).get("batch_size") or 1)
    found = [] if made_for is None else differences(made_for, needed)
    same_optimizer = made_for is None or made_for.get("optimizer") == needed.get("optimizer")
    if strict:
        if made_for is None:
            warn(
                f"{label} does not say what it was made for; only names and shapes are checked",
            )
            if "seed" in needed and metadata.get("seed") != needed["seed"]:
                found = [f"seed {metadata.get('seed')!r} found, {needed['seed']!r} needed"]
        found += [f"array {name!r}: values that are not finite found" for name in infinite(arrays)]
        refuse(path, found, " (strict=False takes what fits: model.load_checkpoint)")
        own = arrays if "optimizer" in needed else {n: arrays[n] for n in arrays if n in specs}
        checkpoint.check(own, {n: (spec.shape, spec.dtype) for n, spec in specs.items()}, label)
    taken, left = {}, {}
    trained = set() if same_optimizer else _slots(arrays, needed)
    for name, array in arrays.items():
        spec = specs.get(name)
        if spec is None:
            left[name] = "not in this model"
        elif array.shape != spec.shape:
            left[name] = f"shape {array.shape} found, {spec.shape} needed"
        elif name in trained:
            left[name] = "of another optimizer"
        else:
            taken[name] = array.astype(spec.dtype, copy=False)
    missing = tuple(name for name in specs if name not in taken)
    done = Loaded(tuple(taken), missing, left, not (found or left or missing))
    return taken, metadata, done


def _slots(arrays: Mapping[str, Array], needed: Mapping[str, Any]) -> set[str]:
    """Return the arrays that are no parameter or state of the model itself."""
    return set(arrays) - set(needed["weights"])
