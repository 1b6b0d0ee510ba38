"""The convolutional apps: parameters at the papers' sizes, and training at small ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from soapstone import Adam, GraphError, Model
from soapstone.apps.images import (
    alexnet,
    densenet,
    inception,
    nasnet,
    resnet,
    resnext,
    squeezenet,
    vgg,
    wide_resnet,
)
from soapstone.frontend.app import load_app
from soapstone.frontend.data.sets import synthetic_images

# Counts of torchvision's models, and of NASNet-A's published weights (trained parameters).
COUNTS: dict[str, tuple[Callable[[], Model], int]] = {
    "alexnet": (lambda: alexnet.build(2, 224), 61_100_840),
    "vgg16": (lambda: vgg.build(2), 138_357_544),
    "vgg11": (lambda: vgg.build(2, depth=11), 132_863_336),
    "resnet18": (lambda: resnet.build(2, depth=18), 11_689_512),
    "resnet50": (lambda: resnet.build(2), 25_557_032),
    "resnet101": (lambda: resnet.build(2, depth=101), 44_549_160),
    "resnext50": (lambda: resnext.build(2), 25_028_904),
    "resnext50 as branches": (lambda: resnext.build(2, branches=True), 25_028_904),
    "wide resnet 101-2": (lambda: wide_resnet.build(2, group_width=128), 126_886_696),
    "wide resnet of 7.3 GB": (lambda: wide_resnet.build(2), 1_823_809_160),
    "inception": (lambda: inception.build(2), 23_834_568),
    "inception with its side": (lambda: inception.build(2, auxiliary=True), 27_161_264),
    "squeezenet 1.0": (lambda: squeezenet.build(2), 1_248_424),
    "squeezenet 1.1": (lambda: squeezenet.build(2, version="1.1"), 1_235_496),
    "nasnet mobile": (lambda: nasnet.build(2), 5_289_978),
    "nasnet large": (lambda: nasnet.build(2, size="large"), 88_753_150),
    "densenet121": (lambda: densenet.build(2), 7_978_856),
    "densenet201": (lambda: densenet.build(2, depth=201), 20_013_928),
}

# Small forms: image size, then options; all of them see every kind of layer of the network.
SMALL: dict[str, tuple[Callable[..., Model], int, dict[str, object]]] = {
    "alexnet": (alexnet.build, 48, {"width": 8, "hidden": 32}),
    "vgg": (vgg.build, 32, {"width": 4, "hidden": 32, "dropout": 0.0}),
    "resnet18": (resnet.build, 32, {"depth": 18, "width": 8}),
    "resnet50": (resnet.build, 32, {"width": 8, "blocks": (1, 2, 1, 1)}),
    "resnext": (resnext.build, 32, {"width": 16, "groups": 4, "blocks": (1, 1, 1)}),
    "resnext as branches": (
        resnext.build,
        32,
        {"width": 16, "groups": 4, "blocks": (1, 1, 1), "branches": True},
    ),
    "wide_resnet": (wide_resnet.build, 32, {"width": 8, "group_width": 128, "blocks": (1, 1, 1)}),
    "inception": (inception.build, 107, {"narrow": 8, "dropout": 0.0}),
    "squeezenet 1.0": (squeezenet.build, 36, {"narrow": 4, "dropout": 0.0}),
    "squeezenet 1.1": (squeezenet.build, 48, {"narrow": 4, "version": "1.1", "dropout": 0.0}),
    "nasnet": (nasnet.build, 32, {"cells": 1, "channels": 96, "stem": 8, "dropout": 0.0}),
    "densenet": (densenet.build, 32, {"growth": 8, "blocks": (2, 2, 2)}),
}


def small(name: str, batch: int = 8, classes: int = 4, **more: object) -> Model:
    """Return the small form of an app's network."""
    builder, size, options = SMALL[name]
    return builder(batch, size, classes, **{**options, **more})


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_at_the_papers_size(name: str) -> None:
    build, count = COUNTS[name]
    model = build()
    assert sum(math.prod(shape) for shape in model.parameters().values()) == count
    assert model.graph.tensors[model.graph.outputs[0]].shape == (2, 1000)


# One step of each, all gradients included, is compared with torch's in test_apps_cnn_torch.
@pytest.mark.parametrize(
    "name", [pytest.param("vgg", marks=pytest.mark.long), "resnet18", "densenet"]
)
def test_loss_falls(name: str) -> None:
    size = SMALL[name][1]
    splits = synthetic_images(40, (3, size, size), 4, seed=1, noise=0.5)
    with small(name) as model:
        model.compile(Adam(3e-3), cpus=2)
        result = model.fit(splits.train_x, splits.train_y, epochs=5, progress=False)
        losses = [record["loss"] for record in result.epochs]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def test_apps_have_data_of_the_networks_shape() -> None:
    for name in ("resnet", "resnext", "wide_resnet", "vgg", "squeezenet", "densenet", "nasnet"):
        app = load_app(name)
        assert app.data is not None
        assert app.options["batch_size"] >= 16
        assert app.summary


def test_the_inception_module_alone() -> None:
    model = inception.module()
    assert model.graph.tensors[model.graph.outputs[0]].shape == (1, 2048, 8, 8)
    assert sum(node.operator == "conv2d" for node in model.graph.nodes) == 9


def test_branches_are_convolutions() -> None:
    whole, split = resnext.build(1), resnext.build(1, branches=True)
    counted = [sum(n.operator == "conv2d" for n in m.graph.nodes) for m in (whole, split)]
    assert counted == [53, 53 + 16 * 31]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: resnet.build(depth=20), "depth 20"),
        (lambda: vgg.build(depth=12), "depth 12"),
        (lambda: densenet.build(depth=1), "depth 1"),
        (lambda: squeezenet.build(version="2.0"), "version '2.0'"),
        (lambda: nasnet.build(size="small"), "size 'small'"),
    ],
)
def test_unknown_options_are_named(build: Callable[[], Model], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build()
