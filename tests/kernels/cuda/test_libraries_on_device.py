"""NVIDIA's libraries on a GPU: every case against its reference, and captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.operator_checks import subject

from soapstone.ir.spec import Case, operator
from soapstone.kernels.cuda.libraries import cublaslt, cudnn
from soapstone.kernels.cuda.libraries.convolutions import KINDS
from soapstone.kernels.cuda.libraries.products import SERVED
from soapstone.kernels.entry import TF32, Call
from soapstone.kernels.registry import variants

pytestmark = pytest.mark.gpu
LIBRARIES = ("cublaslt", "cudnn")
TOLERANCES = {"float16": 1e-2, "float32": 2e-4, "float64": 1e-9}
LARGER = (
    ("matmul", Case(("3 256 128", "3 128 192"))),
    ("linear", Case(("64 512", "512 256", "256"), {"bias": True, "activation": "relu"})),
    ("conv2d", Case(("8 64 14 14", "64 64 3 3", "64"), {"padding": (1, 1, 1, 1), "bias": True})),
    ("attention", Case(("2 64 4 64",) * 3, {"causal": True})),
    ("attention", Case((*("2 64 4 64",) * 3, "2 1 1 64"))),
    ("attention_grad", Case((*("2 64 4 64",) * 5, "2 4 64"), {"causal": True})),
)


def cases() -> Iterator[Any]:
    """Yield operators that libraries serve, their cases and element types."""
    names = (*SERVED, *KINDS, "with_epilogue", "attention", "attention_grad")
    every = [(name, case) for name in names for case in operator(name).cases]
    for name, case in (*every, *LARGER):
        for dtype in TOLERANCES:
            yield pytest.param(name, case, dtype, id=f"{name} {' '.join(case.inputs)} {dtype}")


def bound(name: str, case: Case, dtype: str, precision: str = "float32") -> Any:
    """Return the entry of a library on a GPU's arrays, these, and what is wanted of them."""
    from numba import cuda

    item = subject(operator(name), case, dtype)
    try:
        wanted = item.run()
    except Exception as error:
        pytest.skip(f"not an operator of {dtype}: {error}")
    inputs = tuple(map(cuda.to_device, item.arrays))
    outputs = tuple(cuda.to_device(np.full(x.shape, 7, x.dtype)) for x in wanted)
    call = Call(name, item.attributes, inputs, outputs, precision=precision)
    for variant in variants(name, "cuda"):
        entry = variant.bind(call) if variant.name in LIBRARIES else None
        if entry is not None:
            return entry, outputs, wanted
    pytest.skip("no library serves it")


@pytest.fixture(autouse=True)
def libraries() -> None:
    """Skip where the extra is not installed."""
    if cublaslt.bindings() is None or cudnn.bindings() is None:
        pytest.skip("the extra cuda-libs is not installed")


@pytest.mark.parametrize(("name", "case", "dtype"), list(cases()))
def test_results_are_those_of_the_reference(name: str, case: Case, dtype: str) -> None:
    entry, outputs, wanted = bound(name, case, dtype)
    entry.enqueue()
    near = TOLERANCES[dtype]
    for output, value in zip(outputs, wanted, strict=True):
        found = output.copy_to_host().astype(np.float64)
        np.testing.assert_allclose(found, value.astype(np.float64), rtol=near, atol=near)


@pytest.mark.parametrize(("name", "case"), LARGER)
def test_calls_are_captured_into_a_graph(name: str, case: Case) -> None:
    from soapstone.native.cuda.device import Device, Lane
    from soapstone.native.cuda.graphs import Graph

    lane = Lane(Device(0))
    entry, outputs, wanted = bound(name, case, "float16")
    lane.enqueue(entry)  # what is compiled and loaded at first
    lane.wait()
    graph = Graph(lane, lambda: lane.enqueue(entry))
    outputs[0].copy_to_device(np.zeros(wanted[0].shape, wanted[0].dtype))
    graph.launch()
    lane.wait()
    found = outputs[0].copy_to_host().astype(np.float64)
    np.testing.assert_allclose(found, wanted[0].astype(np.float64), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("name", "case"), LARGER[:3])
def test_tf32_rounds_and_float32_does_not(name: str, case: Case) -> None:
    errors = []
    for precision in ("float32", TF32):
        entry, (output,), (wanted,) = bound(name, case, "float32", precision)
        entry.enqueue()
        errors.append(float(np.abs(output.copy_to_host() - wanted).max() / np.abs(wanted).max()))
    assert errors[0] < 1e-5 < errors[1] < 5e-3
