"""The operator declarations, one file per family; importing this package registers them all."""

from soapstone.ir.ops import (
    convolution,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    fused,
    loss,
    matmul,
    movement,
    normalization,
    pooling,
    reduction,
    slicing,
    softmax,
    update,
)

__all__ = [
    "convolution",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "fused",
    "loss",
    "matmul",
    "movement",
    "normalization",
    "pooling",
    "reduction",
    "slicing",
    "softmax",
    "update",
]
