"""Dense layers on top of each other, as the recommenders use them."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import Model, Tensor


def dense_layers(
    model: Model, x: Tensor, widths: Sequence[int], name: str, last: str | None = "relu"
) -> Tensor:
    """Return x after rectified layers of these widths, numbered from 1; `last` ends the last."""
    for number, width in enumerate(widths, 1):
        activation = "relu" if number < len(widths) else last
        x = model.dense(x, width, activation=activation, name=f"{name}{number}")
    return x
