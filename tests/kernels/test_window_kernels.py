"""Pools, convolutions of every rank, and resizing: every variant, in every layout, with tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import BOTH, LAYOUTS, LIBRARY, place, random, reference, served

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory

Window = dict[str, Any]
# Shapes, windows, and whether oneDNN serves them too.
WINDOWS: list[Window] = [
    {"kernel": (2, 2), "stride": (2, 2)},
    {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)},
    {"kernel": (3, 3), "padding": (1, 1, 1, 1)},
    {"kernel": (3, 2), "stride": (2, 3), "padding": (0, 1, 1, 0)},
    {"kernel": (5, 5), "stride": (1, 3), "padding": (2, 2, 2, 2)},
    {"kernel": (1, 1), "stride": (2, 2)},
    {"kernel": (2, 2), "stride": (3, 4), "padding": (0, 1, 0, 1)},
]
POOLS: list[tuple[tuple[int, ...], Window, bool]] = [
    *((shape, w, False) for shape in ((2, 3, 7, 9), (1, 17, 9, 70)) for w in WINDOWS),
    ((2, 6, 8, 10), {"kernel": (2, 2), "stride": (2, 2)}, True),
    ((2, 20, 9, 9), {"kernel": (3, 3), "stride": (2, 2)}, True),
    ((1, 5, 7, 6), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}, True),
    ((2, 16, 6, 7), {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 2, 1, 1)}, True),
    ((2, 3, 7, 6), {"kernel": (2, 1), "stride": (3, 2)}, True),
    ((3, 4, 5, 5), {"kernel": (1, 1)}, True),
    ((2, 33, 4, 4), {"kernel": (4, 4)}, True),
    ((2, 70, 9, 11), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}, True),
    ((1, 130, 6, 7), {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 2, 1, 1)}, True),
    ((1, 44, 8, 8), {"kernel": (3, 3), "stride": (2, 2), "ceil_mode": True}, False),
    ((2, 5, 40, 9), {"kernel": (2, 2), "dilation": (3, 2), "stride": (1, 2)}, False),
    ((1, 3, 5, 90), {"kernel": (3, 3), "stride": (3, 3), "padding": (0, 1, 2, 1)}, False),
    ((2, 20, 6, 40), {"kernel": (3, 3), "padding": (1, 1, 1, 1)}, True),
    ((2, 20, 31), {"kernel": (3,), "stride": (2,), "padding": (1, 0)}, False),
    ((1, 3, 17), {"kernel": (4,), "stride": (3,), "ceil_mode": True}, False),
    (
        *((1, 20, 5, 6, 7), {"kernel": (2, 3, 2), "stride": (2, 2, 1)}),
        False,
    ),
    (
        *((2, 3, 4, 4, 4), {"kernel": (2, 2, 2), "dilation": (2, 1, 1), "stride": (1, 2, 2)}),
        False,
    ),
]


@pytest.mark.parametrize(
    ("shape", "window", "both", "layout"),
    [
        (*pool, layout)
        for number, pool in enumerate(POOLS)
        for layout in (("last", "tile") if number % 2 else ("plain", "last tile"))
    ],
    ids=str,
)
def test_pooling(shape: tuple[int, ...], window: Window, both: bool, layout: str) -> None:
    """Two of four layouts for each: each of `WINDOWS` meets all, on one shape or the other."""
    rank = len(shape) - 2
    pool, average = f"max_pool{rank}d", f"avg_pool{rank}d"
    window = {"stride": (1,) * rank, "padding": (0,) * (2 * rank), **window}
    least = BOTH if both else {"numba"}
    x = random(*shape)
    x[0, 0] = np.round(x[0, 0])  # ties
    assert least <= served(pool, [x], {**window, "indices": False}, layout=layout)
    dense = least if "tile" not in layout else {"numba"}
    assert dense <= served(pool, [x], {**window, "indices": True}, layout=layout)
    y, index = reference(pool, [x], {**window, "indices": True})
    dy, back = random(*y.shape, seed=1), {**window, "size": shape[2:]}
    assert dense <= served(f"{pool}_grad", [dy, index], back, layout=layout)
    for include_pad in ({"include_pad": True}, {"include_pad": False}):
        assert least <= served(average, [x], window | include_pad, layout=layout)
        assert least <= served(f"{average}_grad", [dy], back | include_pad, layout=layout)
    # NaN wins, and a window of -inf has its first element inside x as its maximum.
    x[0, 1 % shape[1], ..., :3] = -np.inf
    x[-1, -1, ..., 2] = np.nan
    x[0, 2 % shape[1], ..., 1] = np.inf
    assert least <= served(pool, [x], {**window, "indices": False}, layout=layout)
    assert dense <= served(pool, [x], {**window, "indices": True}, layout=layout)


def test_pooling_of_nothing_and_what_is_not_served() -> None:
    empty = np.zeros((0, 3, 4, 4), np.float32)
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0, 0, 0), "include_pad": True}
    assert "numba" in served("avg_pool2d", [empty], window)
    wide = Call("avg_pool2d", window, (np.zeros((1, 1, 4, 4)),), (np.zeros((1, 1, 2, 2)),))
    assert not [v.name for v in variants("avg_pool2d") if v.bind(wide)]


def test_average_pool_refuses_tiles_with_hidden_borders() -> None:
    x = random(1, 2, 6, 6)
    at = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1, 1, 1), "include_pad": False}
    call = Call("avg_pool2d", {**at, "origin": (4, 0), "full_size": (12, 6)}, (x,), (x.copy(),))
    assert not [v.name for v in variants("avg_pool2d") if v.bind(call)]


@pytest.mark.onednn
def test_max_pool_with_dense_indices_of_a_tile() -> None:
    x, y = place(random(2, 20, 9, 9), "tile"), place(np.zeros((2, 20, 4, 4), np.float32), "tile")
    at = {"kernel": (3, 3), "stride": (2, 2), "padding": (0, 0, 0, 0), "indices": True}
    (variant,) = (v for v in variants("max_pool2d") if v.name == "onednn")
    index = np.zeros(y.shape, np.uint8)
    entry = variant.bind(Call("max_pool2d", at, (x,), (y, index)))
    assert entry is not None and memory.run(entry) == 0
    for made, wanted in zip((y, index), reference("max_pool2d", [x], at)):
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
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
    assert served(name, [x, w, b], given, layout=layout) == {LIBRARY}
    dy = random(*reference(name, [x, w, b], given)[0].shape, seed=3)
    given = {**window, "size": size}
    assert served(f"{name}_grad_input", [dy, w], given, layout=layout) == {LIBRARY}
    given = {**window, "kernel": kernel, "bias": True}
    by = served(f"{name}_grad_weight", [x, dy], given, layout=layout, tolerance=1e-3)
    assert by == {LIBRARY}


@pytest.mark.parametrize("layout", LAYOUTS[:3])
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
    name, bias = f"conv_transpose{rank}d", random(5 * groups, seed=2)
    assert served(name, [x, w, bias], given, layout=layout) == {LIBRARY}
    assert served(name, [x, w], given | {"bias": False}, layout=layout) == {LIBRARY}


@pytest.mark.parametrize("layout", ["plain", "last"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("sizes", [(9, 40), (3, 5), (6, 17)])
def test_resize(sizes: tuple[int, int], mode: str, layout: str) -> None:
    for coordinates in ("half_pixel", "align_corners", "asymmetric"):
        given = {
            "sizes": (2, 20, *sizes),
            "mode": mode,
            "coordinate_transformation_mode": coordinates,
        }
        assert served("resize", [random(2, 20, 6, 17)], given, layout=layout) == {"numba"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maxima_of_bfloat16(layout: str) -> None:
    """NaN of either sign wins, and minus infinity is a number."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes")
    x = random(2, 37, 7, 9)
    x[0, :, 0], x[1, ::5] = -np.inf, -np.inf
    x[1, 3, 2, 2], x[1, 4, 5, 5] = np.nan, np.copysign(np.nan, -1)
    x = x.astype(ml_dtypes.bfloat16)
    at = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0, 1, 1), "dilation": (1, 1)}
    at |= {"ceil_mode": False, "indices": False}
    (wanted,) = operator("max_pool2d").run(at, x)
    y = place(np.zeros_like(wanted), layout)
    (variant,) = (v for v in variants("max_pool2d") if v.name == "numba")
    assert memory.run(variant.bind(Call("max_pool2d", at, (place(x, layout),), (y,), 2))) == 0
    np.testing.assert_array_equal(y.astype(np.float32), wanted.astype(np.float32))
