"""Imports every file of translations, so that their rules are registered.

Those in `microsoft/` are imported once a model has a node of their domains (`support.register`).
"""

from soapstone.frontend.onnx.rules import (  # noqa: F401
    attention,
    control,
    detection,
    elementwise,
    indexing,
    kernel_machines,
    learned,
    movement,
    normalization,
    products,
    quantized,
    random,
    recurrent,
    reduction,
    sampling,
    scan,
    signal,
    text,
    training,
    trees,
    windows,
)
