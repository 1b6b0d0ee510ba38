"""The operator declarations, a folder a family; importing this package registers them all."""

from soapstone.ir.ops.elementwise import (
    activation,
    arithmetic,
    bitwise,
    cast,
    comparison,
    epilogue,
    fused,
    trigonometry,
)
from soapstone.ir.ops.indexing import embedding, embedding_bag, gather, scatter, selection
from soapstone.ir.ops.movement import rearrange, reshaping, slicing
from soapstone.ir.ops.normalization import (
    batch_norm,
    dropout,
    group_norm,
    hardmax,
    layer_norm,
    response,
    softmax,
    unit_norm,
)
from soapstone.ir.ops.products import attention, matmul
from soapstone.ir.ops.recurrent import gru, lstm, nas, rnn, sru
from soapstone.ir.ops.reduction import composed, folds
from soapstone.ir.ops.training import cross_entropy, loss, update
from soapstone.ir.ops.windows import conv_transpose, convolution, lp_pool, pooling, resize

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "batch_norm",
    "bitwise",
    "cast",
    "comparison",
    "composed",
    "conv_transpose",
    "convolution",
    "cross_entropy",
    "dropout",
    "embedding",
    "embedding_bag",
    "epilogue",
    "folds",
    "fused",
    "gather",
    "group_norm",
    "gru",
    "hardmax",
    "layer_norm",
    "loss",
    "lp_pool",
    "lstm",
    "matmul",
    "nas",
    "pooling",
    "rearrange",
    "reshaping",
    "resize",
    "response",
    "rnn",
    "scatter",
    "selection",
    "slicing",
    "softmax",
    "sru",
    "trigonometry",
    "unit_norm",
    "update",
]
