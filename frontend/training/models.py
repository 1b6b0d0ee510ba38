"""Models in files: layers, weights and, where asked for, an optimizer's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soapstone.frontend import script
from soapstone.frontend.model import Model
from soapstone.frontend.trainable import Trainable
from soapstone.frontend.training import checkpoint, compatibility
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.step_graph import GRADIENTS
from soapstone.ir.errors import GraphError

_ARCHITECTURE = "architecture"


def save(model: Trainable, path: str | Path, optimizer: bool) -> None:
    """Write a model; see `Model.save`."""
    calls, arguments = script.to_json(model)
    weights = model.weights()
    compatibility.check_finite(weights, f"model {str(path)!r}")
    metadata: dict[str, Any] = {
        "model": model.name,
        "seed": model.seed,
        _ARCHITECTURE: {
            "calls": calls,
            "outputs": list(model.output_indices),
            "frozen": sorted(model.frozen),
            "penalties": {name: list(each) for name, each in model.penalties.items()},
        },
        "made_for": model.made_for(model.batch_size),
    }
    if optimizer:
        trainer = model.trainer
        state = trainer.state()
        names = [name for name in state if not name.endswith(GRADIENTS)]
        weights |= {name: state[name] for name in names}
        step = trainer.steps_done
        metadata["optimizer"] = {
            "settings": compatibility.settings(trainer.optimizer),
            "step": step,
        }
    if model.first:
        checkpoint.save(path, {**weights, **arguments}, metadata)


def load(path: str | Path) -> Model:
    """Return a model from a file that `Model.save` wrote: layers, weights, not compiled.

    path: of a file that ends in .safetensors or .npz. States of an optimizer that it has are taken
    by the first `compile` with the same one.

    Raises:
        CheckpointError: truncated, changed, or a file of weights alone.
        GraphError: layers that this version does not have.
    """
    arrays, metadata = checkpoint.load(path)
    where = f"model {str(path)!r}"
    found = metadata.get(_ARCHITECTURE)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: no layers found; a file of model.save needed")
    model = Model(str(metadata.get("model")), int(metadata.get("seed", 0)))
    script.replay(model, found["calls"], arrays, where)
    try:
        model.output(*(model.tensors[index] for index in found["outputs"]))
        known = model.carried
        model.freeze(*found["frozen"])
        model.penalties.update({name: (l1, l2) for name, (l1, l2) in found["penalties"].items()})
        optimizer = metadata.get("optimizer")
        if optimizer is not None:
            model.begun = dict(optimizer["settings"]), int(optimizer["step"])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise GraphError(f"{where}: {error}") from None
    model.set_weights({name: arrays[name] for name in known if name in arrays})
    if model.begun is not None:
        rest = {n: array for n, array in arrays.items() if not n.startswith("argument.")}
        model.values |= {name: array for name, array in rest.items() if name not in known}
    return model
