"""Native kernels of windows, normalisation and resize on sizes with tails, against references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, spec_of
from soapstone.kernels.cpu.products.forms import plain
from soapstone.kernels.cpu.substrate import native
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

LIBRARY = (plain() or ("reference", None))[0]  # whose products there are
LAYOUTS = ["plain", "last", "tile"]


def place(array: Array, layout: str) -> Array:
    """Return a copy in the layout; a `tile` is part of a larger plain array."""
    if array.ndim < 3 or layout == "plain":
        return array.copy()
    if layout == "last":
        order = (0, *range(2, array.ndim), 1)
        return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    wide = np.zeros([extent + 2 for extent in array.shape], array.dtype)
    part = wide[tuple(slice(1, 1 + extent) for extent in array.shape)]
    part[...] = array
    return part


def served(
    name: str, arrays: list[Array], layout: str, *, tolerance: float = 1e-4, **attributes: Any
) -> set[str]:
    """Run every variant with one and two threads against the reference; return who served."""
    spec = operator(name)
    given = spec.normalise(attributes)
    signature = spec.bind([spec_of(array) for array in arrays], given)
    expected = spec.run(given, *arrays)
    names = set()
    for variant in variants(name):
        for threads in (1, 2):
            outputs = [
                place(np.full(made.shape, 77, made.dtype), layout)
                for made in signature.output_specs
            ]
            inputs = tuple(place(array, layout) for array in arrays)
            entry = variant.bind(Call(name, given, inputs, tuple(outputs), threads))
            if entry is None:
                continue
            names.add(variant.name)
            assert native.run(entry) == native.run(entry) == 0
            for output, value in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(
                    output, value, rtol=tolerance, atol=tolerance, err_msg=variant.name
                )
    return names


def random(*shape: int, seed: int = 0, shift: float = 0.0) -> Array:
    made = np.random.default_rng(seed).standard_normal(shape) + shift
    return made.astype(np.float32)


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 70, 9, 11), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    ((1, 130, 6, 7), {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 2, 1, 1)}),
    ((1, 44, 8, 8), {"kernel": (3, 3), "stride": (2, 2), "ceil_mode": True}),
    ((2, 5, 40, 9), {"kernel": (2, 2), "dilation": (3, 2), "stride": (1, 2)}),
    ((1, 3, 5, 90), {"kernel": (3, 3), "stride": (3, 3), "padding": (0, 1, 2, 1)}),
    ((2, 20, 31), {"kernel": (3,), "stride": (2,), "padding": (1, 0)}),
    ((1, 3, 17), {"kernel": (4,), "stride": (3,), "ceil_mode": True}),
    ((1, 20, 5, 6, 7), {"kernel": (2, 3, 2), "stride": (2, 2, 1), "padding": (1, 0, 1, 0, 1, 0)}),
    ((2, 3, 4, 4, 4), {"kernel": (2, 2, 2), "dilation": (2, 1, 1), "stride": (1, 2, 2)}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "window"), POOLS)
def test_pooling(shape: tuple[int, ...], window: dict[str, Any], layout: str) -> None:
    rank = len(shape) - 2
    x = random(*shape)
    x[0, 0] = np.round(x[0, 0])  # ties
    x[0, 1, ..., :3] = -np.inf
    x[-1, -1, ..., 2] = np.nan
    x[0, 2, ..., 1] = np.inf
    assert "numba" in served(f"max_pool{rank}d", [x], layout, indices=False, **window)
    assert "numba" in served(f"max_pool{rank}d", [x], layout, indices=True, **window)
    x = random(*shape)
    spec = operator(f"max_pool{rank}d")
    y, index = spec.run(spec.normalise({**window, "indices": True}), x)
    dy, size = random(*y.shape, seed=1), shape[2:]
    assert "numba" in served(f"max_pool{rank}d_grad", [dy, index], layout, size=size, **window)
    for include_pad in (True, False):
        given = {**window, "include_pad": include_pad}
        assert "numba" in served(f"avg_pool{rank}d", [x], layout, **given)
        assert "numba" in served(f"avg_pool{rank}d_grad", [dy], layout, size=size, **given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_convolution(rank: int, groups: int, layout: str) -> None:
    size, kernel = (9, 6, 7)[3 - rank :], (2, 3, 3)[3 - rank :]
    x, w = random(2, 4, *size), random(8, 4 // groups, *kernel, seed=1)
    window = {
        "stride": (2, 1, 2)[:rank],
        "dilation": (1, 2, 1)[:rank],
        "padding": (*(1, 2, 0)[:rank], *(0, 1, 2)[:rank]),
        "groups": groups,
    }
    name, b = f"conv{rank}d", random(8, seed=2)
    given = {**window, "bias": True, "activation": "relu"}
    assert served(name, [x, w, b], layout, **given) == {LIBRARY}
    spec = operator(name)
    dy = random(*spec.run(spec.normalise(given), x, w, b)[0].shape, seed=3)
    assert served(f"{name}_grad_input", [dy, w], layout, size=size, **window) == {LIBRARY}
    given = {**window, "kernel": kernel, "bias": True}
    assert served(f"{name}_grad_weight", [x, dy], layout, tolerance=1e-3, **given) == {LIBRARY}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolution(rank: int, groups: int, layout: str) -> None:
    x, w = random(2, 6, *(5, 4, 3)[:rank]), random(6, 5, *(3, 2, 4)[:rank], seed=1)
    given = {
        "stride": (2, 3, 2)[:rank],
        "padding": (*(1, 0, 1)[:rank], *(0, 1, 2)[:rank]),
        "output_padding": (1, 1, 0)[:rank],
        "groups": groups,
    }
    bias = random(5 * groups, seed=2)
    assert served(f"conv_transpose{rank}d", [x, w, bias], layout, **given) == {LIBRARY}
    assert served(f"conv_transpose{rank}d", [x, w], layout, bias=False, **given) == {LIBRARY}


IMAGES = [(3, 6, 5, 7), (2, 130, 3, 4), (1, 64, 20, 9), (2, 6, 33), (2, 4, 3, 4, 5)]


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize("shape", IMAGES)
def test_group_and_instance_normalisation(shape: tuple[int, ...], layout: str) -> None:
    channels = shape[1]
    x, dy = random(*shape, shift=5.0), random(*shape, seed=3)
    gamma, beta = random(channels, seed=1), random(channels, seed=2)
    for name, given in (("group_norm", {"num_groups": 2}), ("instance_norm", {})):
        assert "numba" in served(name, [x, gamma, beta], layout, **given)
        spec = operator(name)
        _, mean, rstd = spec.run(spec.normalise(given), x, gamma, beta)
        operands = [dy, x, gamma, mean, rstd]
        assert "numba" in served(f"{name}_grad", operands, layout, tolerance=1e-3, **given)


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize("shape", [(6, 5), *IMAGES])
def test_parts_of_batch_normalisation(shape: tuple[int, ...], layout: str) -> None:
    """With means far from zero, of which a plain sum of squares would keep nothing."""
    channels = shape[1]
    x, dy = random(*shape, shift=1000.0), random(*shape, seed=1)
    mean = x.mean(axis=tuple(a for a in range(len(shape)) if a != 1))
    assert "numba" in served("batch_norm_sums", [x, x], layout, tolerance=1e-3)
    assert "numba" in served("batch_norm_grad_sums", [dy, x, mean], layout, tolerance=1e-2)
    vectors = [random(channels, seed=s) for s in (2, 3, 4)] + [np.ones(channels, np.float32)]
    count = x.size // channels
    spec = operator("batch_norm_sums")
    (sums,) = spec.run({}, x.astype(np.float64), x.astype(np.float64))
    operands = [sums.astype(np.float32), x, *vectors]
    assert "numba" in served("batch_norm_statistics", operands, layout, tolerance=2e-3, count=count)
    operands = [sums.astype(np.float32), vectors[0], vectors[3]]
    assert "numba" in served("batch_norm_slopes", operands, layout, count=count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beta", [0.75, 0.5, 0.6])
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("shape", [(2, 96, 5, 7), (1, 3, 33), (2, 18, 2, 3, 4)])
def test_local_response_normalisation(
    shape: tuple[int, ...], size: int, beta: float, layout: str
) -> None:
    x = random(*shape)
    given = {"size": size, "alpha": 0.4, "beta": beta, "bias": 1.5}
    assert served("lrn", [x], layout, **given) == {"numba"}
    assert served("lrn_grad", [random(*shape, seed=1), x], layout, **given) == {"numba"}


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("sizes", [(9, 40), (3, 5), (6, 17)])
def test_resize(sizes: tuple[int, int], mode: str, layout: str) -> None:
    x = random(2, 20, 6, 17)
    for coordinates in ("half_pixel", "align_corners", "asymmetric"):
        given = {
            "sizes": (2, 20, *sizes),
            "mode": mode,
            "coordinate_transformation_mode": coordinates,
        }
        assert served("resize", [x], layout, **given) == {"numba"}


def test_layer_norm_of_several_axes_is_that_of_one() -> None:
    x, gamma, beta = random(3, 4, 5), random(4, 5, seed=1), random(4, 5, seed=2)
    by = {"numba", LIBRARY} - {"openblas", "reference"}
    assert served("layer_norm", [x, gamma, beta], "plain", axis=1) == by
    assert served("layer_norm", [x, gamma, beta], "tile", axis=1) == set()


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 130), (64, 48), (9,)])
def test_root_mean_square_normalisation(shape: tuple[int, ...]) -> None:
    x, gamma, dy = random(*shape), random(shape[-1], seed=1), random(*shape, seed=2)
    assert served("rms_norm", [x, gamma], "tile") == {"numba"}
    spec = operator("rms_norm")
    rstd = spec.run(spec.normalise({}), x, gamma)[1]
    assert served("rms_norm_grad", [dy, x, gamma, np.asarray(rstd)], "plain") == {"numba"}
