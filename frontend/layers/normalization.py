"""Normalisation and dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import (
    LayerBase,
    Parameters,
    declare,
    layer_seed,
)
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Role

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


def _affine(channels: int) -> Parameters:
    return {"gamma": ((channels,), Initial("constant", 1.0)), "beta": ((channels,), Initial())}


class NormalizationLayers(LayerBase):
    """Layers that keep values in range, and dropout."""

    def batch_norm(
        self, x: Tensor, *, epsilon: float = 1e-5, momentum: float = 0.1, name: str | None = None
    ) -> Tensor:
        """Return x normalised over samples and positions, by channel, then scaled and shifted.

        x: (n, c, …); result: of that shape. Training uses the batch's mean and biased variance, and
        updates the running ones, which inference uses.

        Args:
            epsilon: added to the variance.
            momentum: the weight of the batch in running statistics: new = old (1 - momentum) +
                batch momentum, where the batch's variance is the unbiased one.
            name: of the node; parameters are `name.gamma` and `name.beta`, states `name.mean` and
                `name.variance`, each (c,).

        Raises:
            ShapeError: x has no axis of channels.
            GraphError: a momentum beyond 0 to 1.

        Source: Ioffe and Szegedy, Batch Normalization, ICML 2015.
        """
        node = self._name("batch_norm", name)
        if len(x.shape) < 2:
            raise ShapeError(f"batch_norm {node!r}: x has shape {x.shape}; n c … needed")
        if not 0 <= momentum <= 1:
            raise GraphError(f"batch_norm {node!r}: momentum {momentum!r} found, 0 to 1 needed")
        zeros, ones = (((x.shape[1],), Initial("constant", value)) for value in (0.0, 1.0))

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            states: Parameters = {"mean": zeros, "variance": ones}
            operands = [*values, *declare(builder, node, {"gamma": ones, "beta": zeros})]
            mean, variance = declare(builder, node, states, Role.STATE)
            operands += [mean, variance]
            if not training:
                return builder.apply("batch_norm_inference", *operands, name=node, epsilon=epsilon)
            made = builder.apply(
                "batch_norm", *operands, name=node, epsilon=epsilon, momentum=momentum
            )
            builder.update(mean, made[1])
            builder.update(variance, made[2])
            return made[:1]

        return self.record(emit, (x,))[0]

    def layer_norm(self, x: Tensor, *, epsilon: float = 1e-5, name: str | None = None) -> Tensor:
        """Return x normalised over its last axis, then scaled and shifted.

        x: (…, c); result: of that shape; parameters `name.gamma` and `name.beta`: (c,). epsilon is
        added to the variance.

        Raises:
            ShapeError: x is a scalar.

        Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
        """
        node = self._name("layer_norm", name)
        if not x.shape:
            raise ShapeError(f"layer_norm {node!r}: x is a scalar; one axis or more needed")
        return self._layer("layer_norm", x, _affine(x.shape[-1]), node, epsilon=epsilon)

    def rms_norm(self, x: Tensor, *, epsilon: float = 1e-5, name: str | None = None) -> Tensor:
        """Return x over the root of its mean square along the last axis, then scaled.

        x: (…, c); result: of that shape; the parameter `name.gamma`: (c,). epsilon is added to the
        mean square.

        Raises:
            ShapeError: x is a scalar.

        Source: Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019.
        """
        node = self._name("rms_norm", name)
        if not x.shape:
            raise ShapeError(f"rms_norm {node!r}: x is a scalar; one axis or more needed")
        gamma: Parameters = {"gamma": (x.shape[-1:], Initial("constant", 1.0))}
        return self._layer("rms_norm", x, gamma, node, epsilon=epsilon)

    def group_norm(
        self, x: Tensor, groups: int, *, epsilon: float = 1e-5, name: str | None = None
    ) -> Tensor:
        """Return x normalised over each sample's groups of channels and all positions.

        x: (n, c, …), c a multiple of groups; result: of that shape; parameters `name.gamma` and
        `name.beta`: (c,). epsilon is added to the variance.

        Raises:
            ShapeError: x has no axis of channels, or groups do not divide it.

        Source: Wu and He, Group Normalization, ECCV 2018.
        """
        node = self._name("group_norm", name)
        if len(x.shape) < 2 or groups < 1 or x.shape[1] % groups:
            raise ShapeError(
                f"group_norm {node!r}: x has shape {x.shape};"
                f" n c … needed, c a multiple of {groups}"
            )
        attributes = {"num_groups": groups, "epsilon": epsilon}
        return self._layer("group_norm", x, _affine(x.shape[1]), node, **attributes)

    def instance_norm(self, x: Tensor, *, epsilon: float = 1e-5, name: str | None = None) -> Tensor:
        """Return x normalised over the positions of each sample's channels.

        x: (n, c, l, …); result: of that shape; parameters `name.gamma` and `name.beta`: (c,).
        epsilon is added to the variance.

        Raises:
            ShapeError: x has no positions.

        Source: Ulyanov, Vedaldi and Lempitsky, Instance Normalization, 2016.
        """
        node = self._name("instance_norm", name)
        if len(x.shape) < 3:
            raise ShapeError(f"instance_norm {node!r}: x has shape {x.shape}; n c l … needed")
        return self._layer("instance_norm", x, _affine(x.shape[1]), node, epsilon=epsilon)

    def lp_norm(self, x: Tensor, p: int = 2, *, axis: int = -1, name: str | None = None) -> Tensor:
        """Return x over its p-norm along an axis.

        x: any shape; the axis counts from the end where it is negative. p: 1, the sum of
        magnitudes, or 2, the Euclidean length.

        Raises:
            ShapeError: there is no such axis.
            GraphError: another p.

        Source: ONNX's LpNormalization.
        """
        return self.apply("lp_norm", x, name=name, p=p, axis=self._axis("lp_norm", x, axis))

    def dropout(self, x: Tensor, rate: float = 0.5, *, name: str | None = None) -> Tensor:
        """Return x with elements dropped when training; x itself otherwise.

        x: floating-point, of any shape. Elements that stay are multiplied by 1 / (1 - rate). rate:
        the probability that an element is dropped. Which ones are depends on the model's seed, the
        layer's name, the step and the element's index, and on nothing else, so no strategy changes
        them.

        Raises:
            GraphError: a rate below 0, or 1 or more.

        Source: Srivastava et al., Dropout, JMLR 2014.
        """
        node = self._name("dropout", name)
        if not 0 <= rate < 1:
            raise GraphError(f"dropout {node!r}: rate {rate!r} found, 0 <= rate < 1 needed")
        from soapstone.ir.training.guard import step_number

        drawn = self._drawn(node)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            x, *draws = values
            if not training or rate == 0:
                return (x,)
            (step,) = draws or (step_number(builder),)
            seed = layer_seed(self.seed, drawn)
            return builder.apply("dropout", x, step, name=node, rate=rate, seed=seed)

        return self.record(emit, (x, *(self.draws() if rate else ())))[0]
