"""Imports the files of translations, so that their rules are registered.

Those of other domains than ONNX's own are imported once a model has such a node
(`support.register`).
"""

from soapstone.frontend.onnx.rules import (  # noqa: F401
    attention,
    control,
    detection,
    elementwise,
    indexing,
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
    windows,
)
