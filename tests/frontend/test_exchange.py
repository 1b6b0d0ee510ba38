"""Tensors of torch in and out of sessions, by DLPack: nothing is copied on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from soapstone import InferenceSession, Model
from soapstone.errors import DataError

torch = pytest.importorskip("torch", reason="pip install soapstone[test]")


@pytest.fixture(scope="module")
def session() -> Iterator[InferenceSession]:
    model = Model("net", seed=0)
    x = model.input("x", (1, 8))
    model.output(model.dense(x, 3))
    with model.inference(threads=1) as session:
        yield session


def test_tensors_are_read_where_they_are(session: InferenceSession) -> None:
    tensor = torch.randn(4, 8)
    for given in (tensor, {"x": tensor}, tensor.T.contiguous().T):
        array = session.checked(given)["x"]
        shared = given["x"] if isinstance(given, dict) else given
        assert array.__array_interface__["data"][0] == shared.data_ptr()
        (found,) = session.run(given).values()
        (needed,) = session.run(tensor.numpy()).values()
        np.testing.assert_array_equal(found, needed)


def test_a_sign_that_is_pending_is_read(session: InferenceSession) -> None:
    """PyTorch keeps the imaginary part of a conjugate as it was, with a mark."""
    tensor = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    (found,) = session.run(tensor).values()
    (needed,) = session.run(tensor.clone().numpy()).values()
    np.testing.assert_array_equal(found, needed)
    into = torch.empty(4, 3, dtype=torch.complex64).conj().imag
    with pytest.raises(DataError, match="read-only"):
        session.run(tensor, out={session.outputs[0]: into})


def test_outputs_are_tensors_without_a_copy(session: InferenceSession) -> None:
    tensor = torch.randn(4, 8)
    (found,) = session.run(tensor).values()
    taken = torch.from_dlpack(found)
    assert taken.data_ptr() == found.__array_interface__["data"][0]
    into = torch.empty(4, 3)
    session.run(tensor, out={session.outputs[0]: into})
    assert torch.equal(into, taken)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: t.clone().requires_grad_(), r"torch.Tensor found.*tensor\.detach"),
        (lambda t: t.to(torch.complex64), r"complex64"),
        (lambda t: t.to(torch.bfloat16), r"bfloat16\[4, 8\] found, x: float32"),
        (lambda t: t.to("meta"), "in the CPU's memory needed"),
        (lambda t: t.double(), r"float64\[4, 8\] found"),
        (lambda t: t[0], r"float32\[8\] found"),
    ],
)
def test_tensors_that_cannot_be_read_are_named(
    session: InferenceSession, make: Any, message: str
) -> None:
    with pytest.raises(DataError, match=f"input 'x': .*{message}"):
        session.run(make(torch.randn(4, 8)))
