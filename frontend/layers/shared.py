"""Layers that are called several times, with the same parameters each time.

A layer is a function that records operators under names. The names that its first call gives out
are kept, and given out again, in order, by each later call: parameters and states of a known name
are then the known ones, and nodes get numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.errors import GraphError


class SharedLayer:
    """A layer, or a function of several, whose calls share parameters; `Model.shared` makes one.

    Call it with tensors; it returns what the layer does. A state, such as the running statistics of
    a batch norm, follows one call after the other. Dropout draws anew for each call.

    Raises:
        GraphError: when called again, a function that records other layers than the first time.
        ShapeError: when called again, tensors for which a parameter would have another shape.
    """

    def __init__(self, model: SharedLayers, layer: Callable[..., Any], label: str) -> None:
        self._model = model
        self._layer = layer
        self._names: tuple[tuple[str, str], ...] | None = None
        self._calls = 0
        self.label = label

    def __call__(self, *tensors: Any) -> Any:
        """Return the layer's outputs for tensors."""
        with self._model.naming(self._names, self._calls, self.label) as names:
            made = self._layer(*tensors)
        self._names = tuple(names)
        self._calls += 1
        return made

    def __repr__(self) -> str:
        return f"SharedLayer({self.label}, called {self._calls} times)"


class SharedLayers(LayerBase):
    """What calls a layer again."""

    def shared(self, layer: Callable[..., Any], *args: Any, **arguments: Any) -> SharedLayer:
        """Return a layer that may be called several times, and has one set of parameters.

        Args:
            layer: a method of the model, such as `model.dense`, or a function that takes tensors
                and calls several.
            args, arguments: what it is given after the tensors.

        Raises:
            GraphError: no function.

        Example:
            >>> encode = model.shared(model.dense, 64, activation="relu", name="encode")
            >>> apart = encode(left) - encode(right)
        """
        if not callable(layer):
            raise GraphError(
                f"shared: layer: {layer!r} found; a layer such as model.dense, or a function,"
                " needed"
            )
        label = str(arguments.get("name") or getattr(layer, "__name__", type(layer).__name__))
        return SharedLayer(self, lambda *tensors: layer(*tensors, *args, **arguments), label)
