"""Outputs for any number of samples, run in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.errors import DataError
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference.session import InferenceSession


def predict(session: InferenceSession, x: Any, batch_size: int) -> Array | tuple[Array, ...]:
    """Return the outputs for all samples of x, run in batches; see `Model.predict`.

    Raises:
        DataError: no samples, or samples that do not fit the model.
    """
    from soapstone.frontend.data.batches import Batches

    declared = {field.name: field.dtype for field in session.inputs}

    def run(inputs: Mapping[str, Array]) -> list[Array]:
        if len(inputs) == len(declared) == 1:
            inputs = {session.inputs[0].name: next(iter(inputs.values()))}
        cast = {
            name: array.astype(declared[name], copy=False)
            if name in declared and np.can_cast(array.dtype, declared[name], "same_kind")
            else array
            for name, array in inputs.items()
        }
        found = session.run(cast)
        return [found[name] for name in session.outputs]

    in_order(x)
    batches = Batches(x, None, batch_size, shuffle=False, seed=0)
    return concatenated(run(inputs) for inputs, _ in batches.epoch(0))


def in_order(x: object) -> None:
    """Refuse data whose batches have an order of their own, which outputs would not match.

    Raises:
        DataError: x is such data.
    """
    from soapstone.frontend.data.buckets import Buckets
    from soapstone.frontend.data.samples import Samples

    if isinstance(x, Buckets):
        raise DataError(
            "predict: buckets found, whose batches have an order of their own; x.arrays()[0] needed"
        )
    if isinstance(x, Samples) and x.balanced:
        raise DataError(
            "predict: samples with a balance found, whose order is drawn; samples without needed"
        )


def concatenated(parts: Iterable[Sequence[Array]]) -> Array | tuple[Array, ...]:
    """Return the outputs of all batches joined: one array, or a tuple for several outputs.

    Raises:
        DataError: there was no batch.
    """
    outputs = tuple(np.concatenate(part) for part in zip(*parts))
    if not outputs:
        raise DataError("predict: no samples found, 1 or more needed")
    return outputs[0] if len(outputs) == 1 else outputs
