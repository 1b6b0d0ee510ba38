"""The layer API: each method records one layer under a name and returns its tensor."""

from __future__ import annotations

from soapstone.frontend.layers.activations import ActivationLayers
from soapstone.frontend.layers.attention import AttentionLayers
from soapstone.frontend.layers.convolution import ConvolutionLayers
from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.frontend.layers.dense import DenseLayers
from soapstone.frontend.layers.edges import EdgeLayers
from soapstone.frontend.layers.movement import MovementLayers
from soapstone.frontend.layers.normalization import NormalizationLayers
from soapstone.frontend.layers.parameter import ParameterLayers
from soapstone.frontend.layers.pooling import PoolingLayers
from soapstone.frontend.layers.recurrent import RecurrentLayers
from soapstone.frontend.layers.sequences import SequenceLayers
from soapstone.frontend.layers.shared import SharedLayers


class Layers(
    ConvolutionLayers,
    PoolingLayers,
    NormalizationLayers,
    RecurrentLayers,
    SequenceLayers,
    AttentionLayers,
    MovementLayers,
    EdgeLayers,
    DenseLayers,
    ParameterLayers,
    SharedLayers,
    ActivationLayers,
    DeclaredLayers,
):
    """The layers of a model; `record` and the builder are the model's.

    Every layer takes and returns tensors of its model, and records one or more operators under
    `name`, by default the layer's own name and a number. An argument of another kind is a
    GraphError that names it, as is a name that is taken; operands of types or shapes that do not
    fit are a ShapeError that names the operator, the node and the dim.
    """
