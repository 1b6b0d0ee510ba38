"""Batch normalisation split over samples, and what windows and resizes refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from soapstone.engine.lower import lower
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.training.autodiff import gradients


def normalised() -> Graph:
    """Return batch normalisation, relu and a loss with their gradients."""
    builder = GraphBuilder()
    builder.input("x", (6, 8, 5, 5))
    vectors = [builder.input(name, (8,)) for name in ("gamma", "beta", "mean", "var")]
    y, *statistics = builder.apply("batch_norm", "x", *vectors, name="norm")
    (z,) = builder.apply("relu", y, name="relu")
    (z,) = builder.apply("mul", z, "x", name="weighted")
    (loss,) = builder.apply("reduce_mean", z, axes=(0, 1, 2, 3), name="loss")
    found = gradients(builder, loss, ["x", "gamma", "beta"])
    builder.output(loss, *found.values(), *statistics[:2])
    return builder.build()


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_batch_normalisation_over_samples_is_sums_statistics_and_a_chain(shift: float) -> None:
    graph = normalised()
    split = {"norm": Configuration({"n": 2}), "relu": Configuration({"d0": 2})}
    lowered = lower(graph, Strategy(split))
    names = [node.operator for node in lowered.nodes]
    for name in ("sums", "statistics", "grad_sums", "slopes"):
        assert names.count(f"batch_norm_{name}") == 1
    assert not any(name in ("batch_norm", "batch_norm_grad", "power", "sqrt") for name in names)
    chain = next(node for node in lowered.nodes if "relu" in node.outputs)
    assert [step[0] for step in chain.attributes["program"]] == ["mul", "add", "relu"]
    generator = np.random.default_rng(0)
    values = {
        "x": generator.standard_normal((6, 8, 5, 5)) + shift,
        **{name: generator.uniform(0.5, 1.5, 8) for name in ("gamma", "beta", "mean", "var")},
    }
    whole, parts = interpret(graph, values), interpret(lowered, values)
    for a, b in zip(graph.outputs, lowered.outputs, strict=True):
        np.testing.assert_allclose(parts[b], whole[a], rtol=1e-7, atol=1e-8 * (1 + shift))


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "message"),
    [
        ("conv1d", ((1, 3, 8), (4, 2, 3)), {"bias": False}, "dim ci is 3 in input 0 but 2"),
        ("conv3d", ((1, 3, 8, 8), (4, 3, 3, 3)), {"bias": False}, "input 0 has rank 4"),
        ("conv1d", ((1, 3, 8), (4, 3, 3)), {"bias": False, "stride": (1, 2)}, "stride: 2 numbers"),
        (
            "conv_transpose2d",
            ((1, 4, 3, 3), (4, 2, 2, 2)),
            {"bias": False, "output_padding": (0, 1)},
            "dim w: output_padding 1 found, less than the stride 1",
        ),
        (
            "conv_transpose1d",
            ((1, 4, 1), (4, 2, 2)),
            {"bias": False, "padding": (2, 2)},
            "dim w: an output of -2 positions",
        ),
        ("max_pool1d", ((1, 2, 2),), {"kernel": (4,)}, "dim w: the window spans 4 positions"),
        ("avg_pool3d", ((1, 2, 4, 4, 4),), {"kernel": (2, 2)}, "kernel: 2 numbers found, 3"),
        ("lp_pool", ((1, 2, 4),), {"kernel": ()}, "kernel: 0 numbers found, 1 to 3 needed"),
        ("group_norm", ((2, 6, 4), (6,), (6,)), {"num_groups": 4}, "dim g: 4 groups do not div"),
        ("layer_norm", ((2, 3), (3,), (3,)), {"axis": 2}, "no axis 2"),
        ("lrn", ((2, 3),), {"size": 3}, "rank 2"),
        ("resize", ((1, 2, 4),), {"sizes": (1, 2)}, "attribute sizes has 2 numbers, 3 needed"),
        (
            "resize",
            ((1, 2),),
            {"sizes": (1, 2), "coordinate_transformation_mode": "tf_crop_and_resize"},
            "roi: None found",
        ),
        ("resize", ((1, 2),), {"sizes": (1, 4), "scales": (1.0, 0.0)}, "scales: 0.0 found"),
    ],
)
def test_errors_name_the_dim_or_attribute(
    name: str, shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any], message: str
) -> None:
    builder = GraphBuilder()
    values = [builder.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
    with pytest.raises((ShapeError, GraphError), match=f"{name} 'layer': .*{re.escape(message)}"):
        builder.apply(name, *values, name="layer", **attributes)
