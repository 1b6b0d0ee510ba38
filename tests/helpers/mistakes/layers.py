"""Layers and tensors, and names of other libraries.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.mistakes.models import X, net, of

import soapstone as sp
from soapstone import Model

LAYERS: list[tuple[Any, ...]] = [
    (
        lambda: of(lambda m: Model.dense(m.input("x", (8, 3)), 4)),
        "dense: Tensor of shape (8, 3) found in place of a model; it is called of one that was",
    ),
    (lambda: Model("n").compile(), "model 'n' has no output; call model.output(tensor)"),
    (lambda: Model(3), "model: name 3 found, a string needed"),
    (lambda: Model("n", seed=1.5), "model 'n': seed: 1.5 found, an integer of 0 or more needed"),
    (
        lambda: Model("n").input("x", (-1, 3)),
        "input 'x': an extent: -1 found, an integer of 0 or more needed",
    ),
    (
        lambda: Model("n").input("x", (None, 3)),
        "input 'x': an extent: None found, an integer of 0 or more needed",
    ),
    (
        lambda: Model("n").input("x", 3),
        "input 'x': shape 3 found; extents needed, the batch size first",
    ),
    (
        lambda: Model("n").input("x", "33"),
        "input 'x': shape '33' found; extents needed, the batch size first",
    ),
    (
        lambda: Model("n").input("x", (8, 3), "float33"),
        "dtype 'float33' is not one of float32, float64, float16, int8, int16,",
    ),
    (
        lambda: Model("n").input((8, 3)),
        "input: missing a required argument: 'shape'; input(name, shape, dtype, varying=…)",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), units=3)),
        "dense: unknown argument 'units'",
        "did you mean 'width'?",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 0)),
        "dense 'dense': width 0 and x float32[8, 3] found; 1 or more needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 8.7)),
        "dense: width: float 8.7 found, an integer needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 3, "relo")),
        "linear 'dense': attribute activation: 'relo'",
        "did you mean 'relu'?",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 3, m.relu)),
        "dense: activation: function 'relu' found, a string needed",
    ),
    (
        lambda: Model("n").dense(X, 3),
        "dense: x: ndarray of shape (20, 6) found, a tensor of the model needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)))),
        "dense: missing a required argument: 'width'; dense(x, width,",
    ),
    (
        lambda: Model("n").relu(net(compiled=False).tensors[0]),
        "model 'n': Tensor(x: float32[8, 6]) is not a tensor of this model",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 28, 28)), 3, 3)),
        "conv2d 'conv2d': x has rank 3 (shape (8, 28, 28)); n c h w needed",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 3, 9)),
        "conv2d 'conv2d': dim h: the window spans 9 positions, but the padded",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 3, 3, padding="sme")),
        'padding: \'sme\' found; "same", "valid", 1, 2 or 4 integers needed',
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 4, 3, groups=2)),
        "conv2d 'conv2d': 3 input and 4 output channels found; multiples of",
    ),
    (
        lambda: of(lambda m: m.max_pool2d(m.input("x", (8, 3, 8, 8)), 0)),
        "max_pool2d 'max_pool2d': attribute kernel: (0, 0) found, at least 1",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 4, 3, 0)),
        "conv2d 'conv2d': attribute stride: (0, 0) found, at least 1 needed",
    ),
    (
        lambda: of(lambda m: m.concat([m.input("x", (8, 3, 2)), m.input("y", (8, 3, 3))])),
        "concat 'concat': dim d2 is 2 in input 0 but 3 in input 1",
    ),
    (
        lambda: of(lambda m: m.concat(m.input("x", (8, 3, 2)), 1)),
        "concat: Tensor(x: float32[8, 3, 2]) found, a list of tensors needed",
    ),
    (
        lambda: of(lambda m: m.input("x", (8, 3)) + m.input("y", (8, 4))),
        "add 'add': dim d1 is 4 but 3 in input 0 (shape (8, 3))",
    ),
    (
        lambda: of(lambda m: m.reshape(m.input("x", (8, 3)), (8, 4))),
        "reshape 'reshape': shape (8, 4) of 32 elements found, 24 needed as in",
    ),
    (
        lambda: of(lambda m: m.dropout(m.input("x", (8, 3)), 1.0)),
        "dropout 'dropout': rate 1.0 found, 0 <= rate < 1 needed",
    ),
    (
        lambda: of(lambda m: m.dropout(m.input("x", (8, 3)), 50)),
        "dropout 'dropout': rate 50 found, 0 <= rate < 1 needed",
    ),
    (
        lambda: of(lambda m: m.embedding(m.input("x", (8, 3)), 10, 4)),
        "embedding 'embedding': input 0 has type float32; int32 or int64 needed",
    ),
    (
        lambda: of(lambda m: m.lstm(m.input("x", (8, 3)), 4)),
        "lstm 'lstm': x has shape (8, 3); n t k needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.lstm(m.input("x", (8, 3, 2)), 4), 3)),
        "dense: x: tuple of 2 values, such as a layer of several outputs",
    ),
    (
        lambda: of(lambda m: m.softmax(m.input("x", (8, 3)), 2)),
        "softmax: axis 2 found, -2 to 1 needed for float32[8, 3]",
    ),
    (
        lambda: of(lambda m: m.matmul(m.input("x", (8, 3)), m.input("y", (8, 3)))),
        "matmul 'matmul': dim k is 3 in input 0 but 8 in input 1",
    ),
    (
        lambda: of(lambda m: 1 if m.input("x", (8, 3)) else 2),
        "Tensor(x: float32[8, 3]) has no contents where layers are recorded; a",
    ),
    (
        lambda: of(lambda m: m.input("x", (8, 3))[0]),
        "[0]: axis 0 runs over samples and is kept whole; [:, …] cuts the others",
    ),
    (
        lambda: of(lambda m: (lambda t: t[t > 0])(m.input("x", (8, 3)))),
        "[Tensor(greater: bool[8, 3])]: Tensor found; integers, slices, None and",
    ),
    (
        lambda: of(lambda m: m.transpose(m.input("x", (8, 3, 2)), (0, 1))),
        "transpose 'transpose': input 0 has rank 3 (shape (8, 3, 2)); attribute",
    ),
    (
        lambda: of(lambda m: m.output([m.input("x", (8, 3))])),
        "output: tensors: list [Tensor(x: float32[8, 3])] found, a tensor of the",
    ),
    (
        lambda: of(lambda m: m.output(None)),
        "output: tensors: NoneType None found, a tensor of the model needed",
    ),
    (lambda: Model("n").output(), "model 'n': output of no tensors found, 1 or more needed"),
    (
        lambda: of(lambda m: (m.input("x", (8, 3)), m.input("x", (8, 3)))),
        "input 'x': the name is taken",
    ),
    (
        lambda: of(lambda m: m.batch_norm(m.input("x", (8, 3)), momentum=3)),
        "batch_norm 'batch_norm': momentum 3 found, 0 to 1 needed",
    ),
    (
        lambda: of(lambda m: m.concat([m.input("a", (8, 3)), m.input("b", (8, 3))], 0)),
        "concat: axis 0 runs over samples, which are not joined; 1 or more needed",
    ),
    (
        lambda: of(lambda m: m.reshape(m.input("x", (8, 3)), "ab")),
        "reshape 'reshape': shape 'ab' found, integers needed",
    ),
    (lambda: of(lambda m: m.parameter("p", -3)), "parameter 'p': shape -3 found, integers needed"),
    (lambda: of(lambda m: m.constant("c", "a")), "constant 'c': element type <U1 found, numbers"),
    (
        lambda: of(lambda m: m.input("x", (8, 3)).view(4, 6)),
        "Tensor has no 'view'; layers are methods of its model",
        "did you mean 'reshape'?",
    ),
    (lambda: of(lambda m: m.input("x", (8, 3)).numpy()), "Tensor has no 'numpy'"),
    (lambda: net().eval(), "Model has no 'eval'", "did you mean 'evaluate'?"),
    (lambda: net().get_weights(), "Model has no 'get_weights'", "did you mean 'weights'?"),
    (lambda: net().cuda(), "Model has no 'cuda'", "did you mean 'compile'?"),
    (
        lambda: sp.Sequential,
        "module 'soapstone' has no attribute 'Sequential'; soapstone.Model has",
    ),
    (lambda: sp.nn, "module 'soapstone' has no attribute 'nn'; soapstone.Model has the layers as"),
    (lambda: sp.loses, "did you mean 'losses'?"),
    (lambda: of(lambda m: np.sum(m.input("x", (8, 3)))), "numpy.sum: a tensor found, arrays"),
    (lambda: of(lambda m: np.cbrt(m.input("x", (8, 3)))), "numpy.cbrt: a tensor found, arrays"),
    (lambda: sp.Modle, "module 'soapstone' has no attribute 'Modle'", "did you mean 'Model'?"),
]
