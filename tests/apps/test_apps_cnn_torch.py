"""The convolutional apps against their twins in torch, with the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_apps_cnn import SMALL, small
from torch import nn
from torch_twins import cnn
from torch_twins.equal import check, statistics_for, weights_for
from torch_twins.inception import Inception, module
from torch_twins.margin import apart
from torch_twins.nasnet import NasNet

from soapstone import Model
from soapstone.apps.images import inception
from soapstone.ir.interpret import interpret

CLASSES = 4
TWINS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": lambda: cnn.alexnet(1, 8, 32, CLASSES),
    "vgg": lambda: cnn.vgg((2, 2, 3, 3, 3), 4, 32, CLASSES),
    "resnet18": lambda: cnn.resnet((2, 2, 2, 2), 8, CLASSES, basic=True),
    "resnet50": lambda: cnn.resnet((1, 2, 1, 1), 8, CLASSES),
    "resnext": lambda: cnn.resnet((1, 1, 1), 16, CLASSES, groups=4, group_width=4),
    "resnext as branches": lambda: cnn.resnet(
        (1, 1, 1), 16, CLASSES, groups=4, group_width=4, branches=True
    ),
    "wide_resnet": lambda: cnn.resnet((1, 1, 1), 8, CLASSES, group_width=128),
    "inception": lambda: Inception(8, CLASSES),
    "squeezenet 1.0": lambda: cnn.squeezenet("1.0", 4, CLASSES),
    "squeezenet 1.1": lambda: cnn.squeezenet("1.1", 4, CLASSES),
    "nasnet": lambda: NasNet(1, 96, 8, CLASSES),
    "densenet": lambda: cnn.densenet((2, 2, 2), 8, CLASSES),
}
FIRST = {"inception": 35}  # the first image that is apart, to save looking for it


def seeded(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Return a twin with weights that follow from the name, norms and statistics among them."""
    torch.manual_seed(zlib.crc32(name.encode()))
    twin = build()
    with torch.no_grad():
        for layer in twin.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.uniform_(-1.0, 1.0)
                layer.running_mean.uniform_(-0.2, 0.2)
                layer.running_var.uniform_(0.5, 1.5)
    return twin


def images(seed: int, size: int, count: int = 4) -> np.ndarray:
    """Return seeded images."""
    return normal(seed, (count, 3, size, size))


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return seeded normal samples."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def predicted(model: Model, twin: nn.Module, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first output of model and twin, with the twin's weights, at inference."""
    with model:
        model.compile("sgd", cpus=2)
        found = model.predict(x)  # makes the parameters
        model.set_weights({**weights_for(model, twin), **statistics_for(model, twin)})
        found = model.predict(x)
    with torch.no_grad():
        wanted = twin.double().eval()(torch.from_numpy(x).double())
    return found[0] if isinstance(found, tuple) else found, wanted.numpy()


@pytest.mark.parametrize("name", SMALL)
def test_training_step_equals_torch(name: str) -> None:
    twin = seeded(name, TWINS[name])
    first = FIRST.get(name, 0)
    x = apart(twin, lambda seed: images(first + seed, SMALL[name][1]))
    labels = np.arange(len(x), dtype=np.int32) % CLASSES
    check(small(name, len(x)), twin, {"image": x}, labels, "cross_entropy")


@pytest.mark.parametrize("name", SMALL)
def test_prediction_equals_torch(name: str) -> None:
    x = images(0, SMALL[name][1])
    found, wanted = predicted(small(name, len(x)), seeded(name, TWINS[name]), x)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_the_side_classifier_equals_torch() -> None:
    x = images(0, SMALL["inception"][1])
    graph = small("inception", len(x), auxiliary=True).build()
    side = graph.tensors["auxiliary.conv.weight"].shape[-1]
    twin = seeded("side", lambda: Inception(8, CLASSES, side))
    values = {**weights_for(small("inception", auxiliary=True), twin)}
    values |= statistics_for(small("inception", auxiliary=True), twin)
    found = interpret(graph, {**values, "image": x})
    twin = twin.double().eval()
    assert twin.side is not None
    with torch.no_grad():
        early = twin.early(torch.from_numpy(x).double())
        wanted = twin.late(early).numpy(), twin.side(early).numpy()
    for output, theirs in zip(graph.outputs, wanted, strict=True):
        assert np.abs(found[output] - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_the_inception_module_equals_torch() -> None:
    model = inception.module(4, 32, narrow=16)
    twin = seeded("module", lambda: module(32, 16))
    x = apart(twin, lambda seed: normal(seed, (4, 32, 8, 8)))
    target = normal(0, model.graph.tensors[model.graph.outputs[0]].shape)
    check(model, twin, {"image": x}, target, "mse")
