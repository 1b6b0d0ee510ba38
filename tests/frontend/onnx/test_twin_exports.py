"""The twins that benchmarks export: what ONNX Runtime makes of the files equals torch."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch_twins import recurrent, sequence

Twin = Callable[[], nn.Module]

EXPORTS: dict[str, tuple[Twin, tuple[torch.Tensor, ...]]] = {
    "bert": (
        lambda: sequence.Bert(2, 32, 4, vocabulary=60, positions=20),
        (torch.arange(10)[None], (torch.arange(10) // 5)[None]),
    ),
    "bert with a mask": (
        lambda: sequence.Bert(2, 32, 4, vocabulary=60, positions=20, classes=None),
        (torch.arange(10)[None], (torch.arange(10) // 5)[None], torch.ones(1, 10)),
    ),
    "nasrnn": (lambda: recurrent.NasRnn(16, 5), (torch.randn(1, 5, 16),)),
    "nmt step": (
        lambda: recurrent.NmtStep(2, 16, 60),
        (torch.tensor([7]), torch.randn(1, 40, 16), *torch.randn(4, 1, 16)),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTS)
def test_the_benchmarks_twins_export_to_onnx(name: str) -> None:
    make, arguments = EXPORTS[name]
    torch.manual_seed(0)
    twin = make().eval()
    file = io.BytesIO()
    torch.onnx.export(twin, arguments, file, dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(file.getvalue())
    fed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), arguments, strict=True)}
    with torch.no_grad():
        wanted = twin(*arguments)
    outputs = wanted if isinstance(wanted, tuple) else (wanted,)
    for found, value in zip(session.run(None, fed), outputs, strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-5)
