"""Tensors of their own: trained ones, shared between layers or scaling them, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.frontend.arguments import integers
from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array, Role, spec_of

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


class ParameterLayers(LayerBase):
    """Parameters and constants that belong to no single layer."""

    def parameter(self, name: str, shape: Sequence[int], initial: Initial | None = None) -> Tensor:
        """Return a trained float32 tensor of a shape, by its name.

        initial: what it begins as, such as `Initial("normal", 0.02)`; zeros by default.

        Raises:
            GraphError: the name is taken, or an extent is below 1.
        """
        extents = integers(f"parameter {name!r}: shape", shape)
        if any(extent < 1 for extent in extents):
            raise GraphError(
                f"parameter {name!r}: shape {extents} found, extents of 1 or more needed"
            )
        first = initial or Initial()

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return (builder.input(name, extents, "float32", Role.PARAMETER, first),)

        return self.record(emit, ())[0]

    def constant(self, name: str, contents: Array) -> Tensor:
        """Return a tensor whose contents are given, and never change: no step copies or trains it.

        name: of the value. contents: numbers of any shape; they are not copied where that serves,
        and must not be written to.

        Raises:
            GraphError: the name is taken, or contents are no numbers.
            ShapeError: an element type that there is not.
        """
        array = np.asarray(contents, order="C")
        if kind_of(array.dtype) not in "biuf":
            raise GraphError(f"constant {name!r}: element type {array.dtype} found, numbers needed")
        spec = spec_of(array)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return (builder.input(name, spec.shape, spec.dtype, Role.CONSTANT),)

        made = self.record(emit, ())[0]
        self.constants[name] = array
        return made

    def prelu(self, x: Tensor, initial: float = 0.25, *, name: str | None = None) -> Tensor:
        """Return x where positive, elsewhere x times a trained slope by channel.

        x: (n, c, …); result: of that shape; the parameter `name.slope`: (c, 1, …), which begins as
        `initial`.

        Raises:
            ShapeError: x has no axis of channels.

        Source: He, Zhang, Ren and Sun, Delving deep into rectifiers, ICCV 2015.
        """
        node = self._name("prelu", name)
        if len(x.shape) < 2:
            raise ShapeError(f"prelu {node!r}: x has shape {x.shape}; n c … needed")
        shape = (x.shape[1], *(1,) * (len(x.shape) - 2))
        return self._layer("prelu", x, {"slope": (shape, Initial("constant", initial))}, node)
