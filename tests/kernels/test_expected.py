"""What is chosen where nothing is measured: by what is expected of each variant for that call."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from soapstone.kernels.cpu.onednn.library import available
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import Variant, variants

pytestmark = pytest.mark.skipif(not available(), reason="no oneDNN")


def last(*shape: int) -> np.ndarray:
    """An image (n, c, h, w) that is channels-last."""
    n, c, h, w = shape
    return np.zeros((n, h, w, c), np.float32).transpose(0, 3, 1, 2)


def fused(step: str) -> Call:
    """A convolution that an element-wise step follows."""
    items = {"bias": False, "groups": 1, "stride": (1, 1), "dilation": (1, 1)}
    items |= {"padding": (2, 2, 2, 2), "activation": None}
    attributes = {
        "operator": "conv2d",
        "items": tuple(items.items()),
        "arity": 2,
        "program": ((step, (0,), ()),),
    }
    weights = np.zeros((48, 32, 5, 5), np.float32)
    operands = (last(1, 32, 12, 12), weights)
    return Call("with_epilogue", attributes, operands, (last(1, 48, 12, 12),), 1, frozenset({1}))


@pytest.mark.parametrize(("step", "chosen"), [("relu", "onednn"), ("silu", "two_passes")])
def test_steps_that_the_library_is_slow_at_are_a_pass_of_their_own(step: str, chosen: str) -> None:
    by_name = {each.name: each.expects(fused(step)) for each in variants("with_epilogue")}
    rival = {"onednn": "two_passes", "two_passes": "onednn"}[chosen]
    assert by_name[chosen] < by_name[rival]


@pytest.mark.parametrize(("side", "chosen"), [(1, "onednn_product"), (16, "onednn")])
def test_a_convolution_of_very_few_pixels_is_a_product(side: int, chosen: str) -> None:
    attributes = {"bias": False, "groups": 1, "stride": (1, 1), "dilation": (1, 1)}
    attributes |= {"padding": (0, 0, 0, 0), "activation": None}
    operands = (last(1, 32, side, side), np.zeros((8, 32, 1, 1), np.float32))
    call = Call("conv2d", attributes, operands, (last(1, 8, side, side),), 1, frozenset({1}))
    by_name = {each.name: each.expects(call) for each in variants("conv2d")}
    names = ("onednn", "onednn_product")  # of equal ones the first
    assert min(names, key=by_name.__getitem__) == chosen


def test_an_expectation_may_be_a_number() -> None:
    call = fused("relu")
    assert Variant("with_epilogue", "own", "cpu", lambda call: None, 0.7).expects(call) == 0.7


def test_a_call_that_was_asked_for_its_inner_one_is_let_go_of_at_once() -> None:
    plain, wrapping = Call("relu", {}, (last(1, 1, 2, 2),), (last(1, 1, 2, 2),)), fused("relu")
    assert plain.inner is plain and wrapping.inner is wrapping.inner
    assert (wrapping.inner.operator, len(wrapping.inner.inputs)) == ("conv2d", 2)
    seen = [weakref.ref(plain.inputs[0]), weakref.ref(wrapping.inputs[0])]
    del plain, wrapping
    assert all(each() is None for each in seen)
