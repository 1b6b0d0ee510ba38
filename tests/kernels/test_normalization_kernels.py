"""Normalisations and softmax: every variant in every layout, on sizes with tails and far means."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.kernel_calls import BOTH, LAYOUTS, place, random, reference, served

from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory

IMAGES = [
    *((7, 5), (4, 17, 3), (2, 3, 5, 7), (3, 40, 9, 9), (16, 32, 20, 20), (2, 3, 2, 3, 4)),
    *((1, 1, 3, 3), (3, 17, 1, 1), (2, 130, 3, 4), (1, 64, 20, 9), (2, 6, 33), (2, 4, 3, 4, 5)),
]
images = pytest.mark.parametrize("shape", IMAGES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def rowless(shape: tuple[int, ...], layout: str) -> bool:
    """Return whether one number, and then a gap, is all that there is to sum along a row."""
    runs = {"last tile": shape[1], "tile": shape[-1]}
    return len(shape) > 2 and runs.get(layout) == 1


@layouts
@images
def test_batch_norm(shape: tuple[int, ...], layout: str) -> None:
    x, dy = random(*shape, shift=2.0), random(*shape, seed=5)
    gamma, beta, old_mean, old_var = (random(shape[1], seed=s) for s in range(1, 5))
    given = [x, gamma, beta, old_mean, old_var**2]
    at = {"epsilon": 1e-3, "momentum": 0.1}
    by = BOTH - {"numba"} if rowless(shape, layout) else BOTH
    assert served("batch_norm", given, at, layout=layout) == by
    assert served("batch_norm_inference", given, {"epsilon": 1e-3}, layout=layout) >= by
    mean, rstd = (v.astype(np.float32) for v in reference("batch_norm", given, at)[3:])
    operands = [dy, x, gamma, mean, rstd]
    assert served("batch_norm_grad", operands, layout=layout, tolerance=1e-3) == by


@layouts
@images
def test_parts_of_batch_norm(shape: tuple[int, ...], layout: str) -> None:
    """With means far from zero, of which a plain sum of squares would keep nothing."""
    x, dy = random(*shape, shift=1000.0), random(*shape, seed=1)
    mean = x.mean(axis=tuple(a for a in range(len(shape)) if a != 1))
    by = set() if rowless(shape, layout) else {"numba"}
    assert served("batch_norm_sums", [x, x], layout=layout, tolerance=1e-3) == by
    operands = [dy, x, mean]
    assert served("batch_norm_grad_sums", operands, layout=layout, tolerance=1e-2) == by
    vectors = [random(shape[1], seed=s) for s in (2, 3, 4)] + [np.ones(shape[1], np.float32)]
    sums = reference("batch_norm_sums", [x, x], {})[0].astype(np.float32)
    count = {"count": x.size // shape[1]}
    operands = [sums, x, *vectors]
    assert "numba" in served("batch_norm_statistics", operands, count, tolerance=2e-3)
    assert "numba" in served("batch_norm_slopes", [sums, vectors[0], vectors[3]], count)


def test_batch_norm_of_a_far_mean() -> None:
    x = random(64, 3, 8, 8, shift=1000.0)
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    assert "numba" in served("batch_norm", [x, ones, zeros, zeros, ones], tolerance=2e-3)


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize(
    "shape", [(5,), (3, 1), (4, 17), (6, 5, 100), (2, 3, 64), (200, 768), (2, 3, 4, 20)], ids=str
)
def test_layer_and_root_mean_square_norm(shape: tuple[int, ...], layout: str) -> None:
    x, dy = random(*shape, shift=2.0), random(*shape, seed=3)
    gamma, beta = random(shape[-1], seed=1), random(shape[-1], seed=2)
    by = BOTH if len(shape) > 1 else {"numba"}
    loose = 1e-4 if shape[-1] > 1 else 5e-3
    assert served("layer_norm", [x, gamma, beta], layout=layout, tolerance=loose) == by
    statistics = reference("layer_norm", [x, gamma, beta], {})[1:]
    operands = [dy, x, gamma, *(np.asarray(v, np.float32) for v in statistics)]
    assert served("layer_norm_grad", operands, layout=layout, tolerance=10 * loose) == by
    assert served("rms_norm", [x, gamma], layout=layout) == {"numba"}
    rstd = np.asarray(reference("rms_norm", [x, gamma], {})[1], np.float32)
    assert served("rms_norm_grad", [dy, x, gamma, rstd], layout=layout) == {"numba"}


def test_layer_norm_of_several_axes_is_that_of_one() -> None:
    operands = [random(3, 4, 5), random(4, 5, seed=1), random(4, 5, seed=2)]
    assert served("layer_norm", operands, {"axis": 1}) == BOTH
    assert served("layer_norm", operands, {"axis": 1}, layout="tile") == set()


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize("shape", [s for s in IMAGES if len(s) > 2 and not s[1] % 2], ids=str)
def test_group_and_instance_norm(shape: tuple[int, ...], layout: str) -> None:
    x, dy = random(*shape, shift=5.0), random(*shape, seed=3)
    gamma, beta = random(shape[1], seed=1), random(shape[1], seed=2)
    for name, given in (("group_norm", {"num_groups": 2}), ("instance_norm", {})):
        assert "numba" in served(name, [x, gamma, beta], given, layout=layout)
        statistics = reference(name, [x, gamma, beta], given)[1:]
        operands = [dy, x, gamma, *(v.astype(np.float32) for v in statistics)]
        assert "numba" in served(f"{name}_grad", operands, given, layout=layout, tolerance=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("beta", [0.75, 0.5, 0.6])
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("shape", [(2, 96, 5, 7), (1, 3, 33), (2, 18, 2, 3, 4)], ids=str)
def test_local_response_norm(shape: tuple[int, ...], size: int, beta: float, layout: str) -> None:
    x, dy = random(*shape), random(*shape, seed=1)
    given = {"size": size, "alpha": 0.4, "beta": beta, "bias": 1.5}
    assert served("lrn", [x], given, layout=layout) == {"numba"}
    assert served("lrn_grad", [dy, x], given, layout=layout) == {"numba"}


SOFTMAX = [((5, 18, 7, 67), axis) for axis in range(4)] + [((7, 10), -1), ((2, 3, 4, 50), 3)]
SOFTMAX += [((7, 10), 0), ((1, 1), 1), ((9,), 0)]


@pytest.mark.parametrize("layout", [*LAYOUTS, "reversed"])
@pytest.mark.parametrize(("shape", "axis"), SOFTMAX, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name: str, shape: tuple[int, ...], axis: int, layout: str) -> None:
    x, dy, at = 5 * random(*shape), random(*shape, seed=1), {"axis": axis}
    assert served(name, [x], at, layout=layout, tolerance=1e-5) == {"numba"}
    y = reference(name, [x], at)[0].astype(np.float32)
    assert served(f"{name}_grad", [dy, y], at, layout=layout) == {"numba"}


@layouts
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradient_of_softmax_in_place(name: str, axis: int, layout: str) -> None:
    shape, at = (5, 18, 7, 67), {"axis": axis}
    y = reference(name, [3 * random(*shape)], at)[0].astype(np.float32)
    dy = random(*shape, seed=1)
    (want,) = reference(f"{name}_grad", [dy, y], at)
    for variant in variants(f"{name}_grad"):
        for threads in (1, 2):
            dx, given = place(dy, layout), place(y, layout)
            entry = variant.bind(Call(f"{name}_grad", at, (dx, given), (dx,), threads))
            assert entry is not None and memory.run(entry) == 0
            np.testing.assert_allclose(dx, want, rtol=1e-5, atol=2e-5, err_msg=variant.name)


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_of_extremes(axis: int) -> None:
    x = np.zeros((20, 20), np.float32)
    for i, value in enumerate((1e30, -1e30, -np.inf, np.inf, np.nan)):
        x[i, i] = value
    x[7, :] = x[:, 9] = -np.inf
    assert "numba" in served("softmax", [x], {"axis": axis}, only="numba", tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("hidden", [-90.0, -95.0, -110.0, -1e4, -3e38, -np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_hidden_places_of_softmax_have_no_subnormal_weight(axis: int, hidden: float) -> None:
    x = random(19, 83)
    x[:, ::2] = hidden
    x[::3] = np.abs(x[::3, 1:2])  # rows that hide nothing
    y = np.empty_like(x)
    (kernel,) = variants("softmax")
    entry = kernel.bind(Call("softmax", {"axis": axis}, (x,), (y,)))
    assert entry is not None
    memory.run(entry)
    tiny = np.finfo(np.float32).tiny
    assert not ((y > 0) & (y < tiny)).any()
    np.testing.assert_allclose(y, reference("softmax", [x], {"axis": axis})[0], atol=1e-7)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_row_of_softmax_that_is_not_finite_is_nan(name: str) -> None:
    """Every variant has NaN where the reference has."""
    x = random(5, 20)
    x[0, 7], x[1, :], x[2, 3], x[3, 9] = np.inf, -np.inf, np.nan, -np.inf
    needed = np.isnan(reference(name, [x], {"axis": 1})[0])
    assert needed.any(axis=1).tolist() == [True, True, True, False, False]
    for variant in variants(name):
        y = np.zeros_like(x)
        entry = variant.bind(Call(name, {"axis": 1}, (x,), (y,)))
        assert entry is not None and memory.run(entry) == 0
        np.testing.assert_array_equal(np.isnan(y), needed, variant.name)
