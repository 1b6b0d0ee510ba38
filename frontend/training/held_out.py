"""Samples that are held out of training, to evaluate on after each epoch: given, or drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.batches import is_stream, named_arrays, permutation, rows_of
from soapstone.frontend.data.buckets import Buckets
from soapstone.frontend.data.samples import Samples
from soapstone.ir.tensor import Array

_STREAM = 1 << 32  # the stream of random numbers that splits draw from


def held_out_of(data: object) -> tuple[Any, Any, Any]:
    """Return x, y and the weights of a data set to evaluate on.

    Raises:
        DataError: something else than data, or data that one epoch uses up.
    """
    if isinstance(data, Iterator):
        raise DataError(
            f"validation_data: {type(data).__name__} found, which one epoch uses up; a list of"
            " batches, or a function that returns an iterator, needed"
        )
    if isinstance(data, str | Path | Samples | Buckets):
        return data, None, None
    if isinstance(data, tuple | list) and len(data) in (2, 3) and not isinstance(data[0], tuple):
        return data[0], data[1], data[2] if len(data) == 3 else None
    if is_stream(data):
        return data, None, None
    raise DataError(
        f"validation_data: {type(data).__name__} found, a pair (x, y) or the path of npz files"
        " needed, or batches"
    )


def split(
    x: Any, y: Any, weights: Any, share: float, seed: int
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return the samples to train on, and those that are held out, drawn by the seed.

    x, y, weights: arrays, or dicts of them. share: of the samples, what is held out.

    Raises:
        DataError: a share that is not between 0 and 1, data that are no arrays, or too few.
    """
    if isinstance(share, bool) or not isinstance(share, float) or not 0 < share < 1:
        raise DataError(f"validation_split: {share!r} found, a number between 0 and 1 needed")
    if isinstance(x, str | Path) or y is None:
        raise DataError("validation_split: arrays x and y needed; give validation_data instead")
    rows = rows_of(named_arrays(x, y, weights)[0])
    held = round(rows * share)
    if not 0 < held < rows:
        raise DataError(f"validation_split: {share} of {rows} samples leaves one part empty")
    order = permutation(seed, 0, _STREAM, rows)

    def taken(value: Any, chosen: Array) -> Any:
        if isinstance(value, Mapping):
            return {name: np.asarray(each)[chosen] for name, each in value.items()}
        return None if value is None else np.asarray(value)[chosen]

    kept, apart = np.sort(order[held:]), np.sort(order[:held])
    first, second = (tuple(taken(each, rows) for each in (x, y, weights)) for rows in (kept, apart))
    return first, second
