"""Memory that is kept once for all that ask for the same contents."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from contextlib import nullcontext
from threading import RLock
from weakref import WeakValueDictionary

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from soapstone import InferenceSession
from soapstone.native import shared as module
from soapstone.native.memory import Array
from soapstone.native.promises import Promise, held
from soapstone.native.shared import packed, shared


def test_equal_bytes_are_one_array_while_somebody_has_it() -> None:
    first = np.arange(5000, dtype=np.float32)
    assert shared(first) is first
    assert shared(first.copy()) is first
    turned = shared(first.copy().reshape(50, 100))
    assert turned.shape == (50, 100) and np.shares_memory(turned, first)
    other = first.copy()
    other[1] = -1  # no byte that is looked at first
    assert shared(other) is other
    assert shared(other.copy()) is other
    small = np.arange(10)
    assert shared(small) is small and shared(small.copy()) is not small
    nothing = np.full(5000, np.nan, np.float32)
    assert shared(nothing.copy()) is not nothing and shared(nothing) is shared(nothing.copy())
    size = len(module._known)
    del first, turned, other, nothing
    gc.collect()
    assert len(module._known) < size


def test_what_is_a_view_is_kept_by_views_of_it() -> None:
    whole = np.arange(9000, dtype=np.float32)
    first = shared(whole[1:5001])[3:]
    other = shared(np.arange(1, 5001, dtype=np.float32))
    assert np.shares_memory(first, other)
    assert not shared(np.frombuffer(bytes(8192), np.float32)).flags.writeable


def test_what_was_made_beside_a_constant_is_not_taken_for_another_that_lies_there() -> None:
    """What is made of a constant and of a second one may outlive the second."""
    ones = np.ones(4096, np.float32)

    def promised(value: float, known: WeakValueDictionary[Hashable, Array]) -> Array:
        made = ones * np.float32(value)
        return Promise.of(
            made.shape, "float32", made.copy, lambda: nullcontext(made), known, RLock()
        )

    first = promised(1, WeakValueDictionary())

    def sum_with(second: Array) -> Array:
        return packed(first, "sum", lambda one: held(one) + held(second), [second])

    known: WeakValueDictionary[Hashable, Array] = WeakValueDictionary()
    place, kept = id(known), sum_with(promised(2, known))
    del known
    gc.collect()
    several: list[WeakValueDictionary[Hashable, Array]] = [WeakValueDictionary() for _ in range(99)]
    known = next((each for each in several if id(each) == place), several[0])
    assert sum_with(promised(3, known))[0] == 4
    assert kept[0] == 3


def test_sessions_and_shapes_share_what_they_packed() -> None:
    random = np.random.default_rng(0)
    w = random.standard_normal((256, 512)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 512])],
        [numpy_helper.from_array(w, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    data = proto.SerializeToString()
    x = random.standard_normal((64, 256)).astype(np.float32)

    def kept() -> int:
        gc.collect()
        return sum(len(refs) for refs in module._known.values())

    with InferenceSession(data, threads=1, tune=False) as first:
        expected = first.run(x)["y"]
        once = kept()
        with InferenceSession(data, threads=1, tune=False) as second:
            np.testing.assert_array_equal(second.run(x)["y"], expected)
            second.run(np.concatenate([x, x]))
            assert kept() <= once + 1, "at most another layout"
    np.testing.assert_allclose(expected, x @ w, rtol=1e-4, atol=1e-4)
