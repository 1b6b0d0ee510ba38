"""oneDNN convolutions against the reference, in every layout they accept."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import (
    CONVOLUTIONS,
    LAYOUTS,
    bound,
    near,
    place,
    problem,
    random,
    reference,
    run,
    served,
)

from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.onednn import descriptors
from soapstone.kernels.cpu.onednn.descriptors import (
    Kept,
    Primitive,
    compile_primitive,
    implementation,
)
from soapstone.kernels.cpu.onednn.library import Handle
from soapstone.kernels.entry import Call

by_onednn = partial(served, only="onednn", tolerance=2e-4)
PLAIN = {"bias": False, "activation": None}


def convolved(x: Array, w: Array, at: Mapping[str, Any]) -> Array:
    """Return what a convolution without a bias gives."""
    return reference("conv2d", [x, w], {**PLAIN, **at})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_gradients(name: str, layout: str) -> None:
    x, w, at = problem(name)
    b, dy = random(w.shape[0], seed=2), random(*convolved(x, w, at).shape, seed=3)
    for operands, bias in (([x, w, b], True), ([x, w], False)):
        given = {**at, "bias": bias, "activation": None}
        assert by_onednn("conv2d", operands, given, layout=layout)
        given = {**at, "kernel": w.shape[2:], "bias": bias}
        assert by_onednn("conv2d_grad_weight", [x, dy], given, layout=layout)
    given = {**at, "size": x.shape[2:]}
    assert by_onednn("conv2d_grad_input", [dy, w], given, layout=layout)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "sigmoid", "tanh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolution_activations(layout: str, activation: str) -> None:
    x, w, at = problem("uneven")
    given = {**at, "bias": False, "activation": activation}
    assert by_onednn("conv2d", [x, w], given, layout=layout)


def test_convolution_of_part_of_the_channels() -> None:
    """Tiles cut along the channels of a channels-last array."""
    x, w, at = problem("wide")
    whole = place(random(2, 80, 7, 7), "last")
    tile = whole[:, 16:48]
    tile[...] = x
    out = place(np.zeros((2, 64, 7, 7), np.float32), "last")
    y = out[:, 8:56]
    run(bound(Call("conv2d", {**PLAIN, **at}, (tile, w), (y,))))
    near(y, convolved(x, w, at))
    assert not out[:, :8].any() and not out[:, 56:].any()


def test_constant_weights_are_packed_once() -> None:
    x, w, at = problem("wide")
    w = w.copy()
    first = convolved(x, w, at)
    y = np.empty(first.shape, np.float32)
    entry = bound(Call("conv2d", {**PLAIN, **at}, (x, w), (y,), constants=frozenset({1})))
    for _ in range(3):
        y.fill(0)
        w.fill(0)  # the copy that was packed with the entry serves
        run(entry)
        near(y, first)


@pytest.mark.parametrize("way", [(2, 2), (1, -1), (-2, 1)], ids=str)
def test_convolution_of_images_that_onednn_cannot_address(way: tuple[int, int]) -> None:
    """Every second pixel of an odd width: rows do not step over the last gap. Or backwards."""
    wide, w = random(1, 11, 11, 8), random(16, 8, 3, 3, seed=1)
    x = wide.transpose(0, 3, 1, 2)[:, :, :: way[0], :: way[1]]
    at = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    y = np.zeros((1, 16, *x.shape[2:]), np.float32)
    for threads in (1, 2):
        run(bound(Call("conv2d", {**PLAIN, **at}, (x, w), (y,), threads)))
        near(y, convolved(x, w, at))


def test_convolution_refuses_what_it_cannot_do() -> None:
    x, w, at = problem("plain")
    y = np.empty((2, 7, 9, 8), np.float32)
    ok = {**PLAIN, **at}
    assert bound(Call("conv2d", ok, (x, w), (y,))) is not None
    assert bound(Call("conv2d", ok, (x.astype(np.float64), w), (y,))) is None
    assert bound(Call("conv2d", ok, (x, w), (y[:, :, 1:],))) is None
    assert bound(Call("conv2d", {**ok, "activation": "swish"}, (x, w), (y,))) is None
    assert bound(Call("conv2d", {**ok, "groups": 2}, (x, w), (y,))) is None
    stretched = np.broadcast_to(x[:1], x.shape)
    assert bound(Call("conv2d", ok, (stretched, w), (y,))) is None
    negative = {**ok, "padding": (-1, 1, 1, 1)}
    assert bound(Call("conv2d", negative, (x, w), (np.empty((2, 7, 7, 8), np.float32),))) is None


@pytest.mark.parametrize("operator", ["conv2d", "conv2d_grad_input", "conv2d_grad_weight"])
def test_convolution_without_elements(operator: str) -> None:
    _, w, at = problem("plain")
    x, y = np.empty((0, 5, 9, 8), np.float32), np.empty((0, 7, 9, 8), np.float32)
    operands = {
        "conv2d": ((x, w), (y,)),
        "conv2d_grad_input": ((y, w), (x,)),
        "conv2d_grad_weight": ((x, y), (np.empty((0, 5, 3, 3), np.float32),)),
    }
    inputs, outputs = operands[operator]
    run(bound(Call(operator, {"bias": False, **at}, inputs, outputs)))


def test_kernels_that_onednn_does_not_free_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("soapstone.kernels.cpu.onednn.convolution")
    monkeypatch.setattr(module, "_MOST_KEPT", 0)
    made: list[str] = []

    def compiled(name: str, description: Handle, order: tuple[int, ...]) -> Primitive:
        made.append(implementation(description))
        return compile_primitive(name, description, order)

    monkeypatch.setattr(module, "compile_primitive", compiled)
    w = random(16, 16, 3, 3, seed=1)
    for height in (37, 38):  # of no other test
        x = random(1, 16, height, 9)
        at = {**PLAIN, "padding": (1, 1, 1, 1), "stride": (1, 1), "groups": 1, "dilation": (1, 1)}
        for given in (at, {**at, "activation": "relu"}):
            assert by_onednn("conv2d", [x, w], given, layout="last")
    assert made and not any("brgconv" in name for name in made)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_other_implementations_of_gradients_serve(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN reads the forward descriptor, of which the gradient's is made, when asked for them."""
    convolution = importlib.import_module("soapstone.kernels.cpu.onednn.convolution")
    described: list[Handle] = []

    def describe(kind: str, *arguments: Any, what: str) -> Handle:
        described.append(descriptors.describe(kind, *arguments, what=what))
        return described[-1]

    monkeypatch.setattr(convolution, "describe", describe)
    monkeypatch.setattr(convolution, "_MOST_KEPT", 0)
    monkeypatch.setattr(convolution, "_primitive", Kept(convolution._primitive._make))
    x, w, at = problem(name)
    dy = random(*convolved(x, w, at).shape, seed=3)
    given = {**at, "kernel": w.shape[2:], "bias": False, "activation": None}
    assert by_onednn("conv2d_grad_weight", [x, dy], given, layout="last")
    assert by_onednn("conv2d_grad_input", [dy, w], {**at, "size": x.shape[2:]}, layout="last")
    assert len(described) > 2
    assert all(forward in made.keep for forward, made in zip(described[::2], described[1::2]))


@pytest.mark.parametrize("layout", ["plain", "last", "tile"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_sums_and_activations_after_a_convolution_are_of_its_primitive(
    rank: int, layout: str
) -> None:
    size, name = (9, 8, 5)[:rank], f"conv{rank}d"
    at = {"stride": (1,) * rank, "padding": (1,) * (2 * rank), "dilation": (1,) * rank}
    own = {**at, "groups": 1, **PLAIN, "bias": True}
    x, w, b = random(2, 16, *size), random(24, 16, *(3,) * rank, seed=1), random(24, seed=2)
    more = random(2, 24, *size, seed=3)
    program = (("add", (0, 1), ()), ("relu", (2,), ()))
    given = {"operator": name, "items": tuple(own.items()), "arity": 3, "program": program}
    y = place(np.zeros_like(more), layout)
    operands = (place(x, layout), w, b, place(more, layout))
    run(bound(Call("with_epilogue", given, operands, (y,), 2)))
    near(y, np.maximum(reference(name, [x, w, b], own)[0] + more, 0), 2e-4)


def test_what_follows_makes_no_convolution_one_of_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number added for each sample and channel, of which not all generated code is capable."""
    made = []

    def compiled(*given: Any) -> Primitive:
        made.append(compile_primitive(*given))
        return made[-1]

    module = importlib.import_module("soapstone.kernels.cpu.onednn.convolution")
    monkeypatch.setattr(module, "compile_primitive", compiled)
    x, w = (place(random(2, 16, 8, 9), "last"), random(32, 16, 3, 3, seed=1))
    window = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    at = {
        "operator": "conv2d",
        "arity": 2,
        "items": tuple(sorted({**PLAIN, **window}.items())),
        "program": (("add", (0, 1), ()),),
        "wide": False,
    }
    y = place(np.empty((2, 32, 8, 9), np.float32), "last")
    added = random(2, 32, 1, 1, seed=2)
    call = Call("with_epilogue", at, (x, w, added), (y,), 1, frozenset({1}))
    bound(call, "onednn")
    assert not any("ref" in each.implementation for each in made)
    run(bound(call, "two_passes"))
    near(y, reference("conv2d", [x, w], {**PLAIN, **window})[0] + added, 1e-4)
