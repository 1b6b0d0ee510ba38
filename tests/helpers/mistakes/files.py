"""Weights, files and ONNX.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.mistakes.models import X, net

import soapstone as sp
from soapstone import SGD, Adam

FILES: list[tuple[Any, ...]] = [
    (lambda: Adam("0.1"), "Adam: learning_rate: '0.1' found, a number needed"),
    (lambda: SGD(-1), "SGD: learning_rate -1 found, a number of 0 or more needed"),
    (lambda: SGD(lr=0.1), "SGD: unknown argument 'lr'", "did you mean 'learning_rate'?"),
    (lambda: Adam(beta_1=0.9), "Adam: unknown argument 'beta_1'", "did you mean 'beta1'?"),
    (lambda: SGD(float("nan")), "SGD: learning_rate: nan found, a finite number needed"),
    (
        lambda: net().relu(net().tensors[0]),
        "model 'net' is compiled; layers are added before compile",
    ),
    (lambda: net().set_weights({"q": X}), "parameter 'q' does not exist in model 'net'"),
    (
        lambda: net().set_weights({"h.weight": X}),
        "parameter 'h.weight': float32 of shape (20, 6) found, float32[6, 5]",
    ),
    (lambda: net().set_weights([X]), "set_weights: list found, arrays by name needed"),
    (
        lambda: net().set_weights({"h.bias": np.ones(5, complex)}),
        "parameter 'h.bias': complex128 of shape (5,) found, float32[5] needed",
    ),
    (
        lambda: net().save("m.pt"),
        "checkpoint 'm.pt': suffix '.pt' found, .safetensors or .npz needed",
    ),
    (
        lambda: net().save("no/m.safetensors"),
        "checkpoint 'no/m.safetensors': there is no folder 'no'",
    ),
    (lambda: sp.from_onnx("none.onnx"), "file 'none.onnx': no such file"),
    (lambda: sp.InferenceSession("none.onnx"), "file 'none.onnx': no such file"),
    (lambda: sp.load("none.safetensors"), "checkpoint 'none.safetensors': no such file"),
    (lambda: net().load_checkpoint("none.npz"), "checkpoint 'none.npz': no such file"),
    (lambda: net().load_weights("none.safetensors"), "weights 'none.safetensors': no such file"),
    (lambda: net().load_weights(3), "weights: int found, a path or arrays needed"),
    (lambda: net().freeze("hh"), "freeze: no parameter 'hh'; 'h' is there"),
    (lambda: net().freeze(["h"]), "freeze: patterns: list ['h'] found, a string needed"),
    (lambda: net().regularize("h", l2=-1), "regularize: l2 -1 found, a number of 0 or more needed"),
    (lambda: sp.to_onnx(net(), "no/x.onnx"), "file 'no/x.onnx': folder 'no' does not exist"),
    (lambda: sp.to_onnx(net()), "to_onnx: path: None found, the path of a file needed"),
    (
        lambda: sp.to_onnx(3, "x.onnx"),
        "to_onnx: int found, a Model, a Graph or an OnnxModel needed",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims={"n": 3}),
        "to_onnx: dims: 'n' found, 'batch' alone needed of a Model",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims={"batch": 0}),
        "to_onnx: dims: batch: 0 found, an integer of 1 or more needed",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims=["batch"]),
        "to_onnx: dims: ['batch'] found, extents",
    ),
    (lambda: sp.to_onnx(net(), "x.onnx", dims={"batch": ""}), "dims: batch: '' found, an integer"),
    (lambda: sp.to_onnx(net(), "x.onnx", opset=3), "opset 3 found; 20 to 23 are written"),
]
