"""Products and convolutions by OpenBLAS at usual extents, in every layout, on several threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Array, Call
from soapstone.kernels.registry import variants
from soapstone.native import memory

WINDOW = ("stride", "padding", "dilation", "groups")


def _last(array: Array) -> Array:
    """The array with its channels side by side."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def _agree(name: str, given: dict[str, Any], inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Run the variant in all layouts on one to three threads; return what the reference gives."""
    spec = operator(name)
    attributes = spec.normalise(given)
    wanted = spec.run(attributes, *inputs)
    (variant,) = [item for item in variants(name) if item.name == "openblas"]
    for turned, made_turned, threads in itertools.product((False, True), (False, True), (1, 2, 3)):
        put = [_last(x) if turned and x.ndim > 2 else x.copy() for x in inputs]
        made = [np.full_like(x, 77) for x in wanted]
        made = [_last(x) if made_turned and x.ndim > 2 else x for x in made]
        entry = variant.bind(Call(name, attributes, tuple(put), tuple(made), threads))
        assert entry is not None
        assert memory.run(entry) == memory.run(entry) == 0
        for found, value in zip(made, wanted, strict=True):
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(found, value, rtol=2e-4, atol=2e-4 * scale)
    return wanted


def _cases() -> Iterator[tuple[int, int]]:
    yield from itertools.product((1, 2, 3), range(4))


@pytest.mark.parametrize(("rank", "seed"), list(_cases()))
def test_convolution_and_gradients(rank: int, seed: int) -> None:
    chance = np.random.default_rng([rank, seed])

    def numbers(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(int(value) for value in chance.integers(low, high, count))

    groups, deep, wide = (int(chance.choice(of)) for of in ((1, 2, 4), (1, 8, 17), (1, 16, 33)))
    kernel = (1,) * rank if seed == 0 else numbers(1, 4)
    given = {
        "stride": (1,) * rank if seed == 0 else numbers(1, 3),
        "padding": (0,) * 2 * rank if seed == 0 else numbers(0, 3, 2 * rank),
        "dilation": numbers(1, 3),
        "groups": groups,
        "bias": bool(seed % 2),
    }
    size = numbers(5, 11 if rank == 3 else 24)
    x = chance.standard_normal((*numbers(1, 4, 1), groups * deep, *size), np.float32)
    w = chance.standard_normal((groups * wide, deep, *kernel), np.float32)
    bias = (chance.standard_normal(len(w)).astype(np.float32),) if given["bias"] else ()
    (y,) = _agree(f"conv{rank}d", {**given, "activation": "relu"}, (x, w, *bias))
    dy = chance.standard_normal(y.shape, np.float32)
    window = {name: given[name] for name in WINDOW}
    _agree(f"conv{rank}d_grad_input", {**window, "size": size}, (dy, w))
    more = {"kernel": kernel, "bias": given["bias"]}
    _agree(f"conv{rank}d_grad_weight", {**window, **more}, (x, dy))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_products_of_any_strides(kind: type) -> None:
    chance = np.random.default_rng(3)
    (variant,) = [item for item in variants("matmul") if item.name == "openblas"]
    for turn in range(40):
        m, n, k = (int(value) for value in chance.integers(1, 90, 3))
        batch = [(), (3,), (2, 3)][turn % 3]
        a = chance.standard_normal((*batch, m, 2 * k)).astype(kind)[..., :: 1 + turn % 2][..., :k]
        b = chance.standard_normal(((*batch, n, k), (n, k))[turn // 3 % 2]).astype(kind)
        y = np.full((*batch, 2 * m, n + 3), 77, kind)[..., ::2, :n]
        given = operator("matmul").normalise({"transpose_b": True})
        entry = variant.bind(Call("matmul", given, (a, b), (y,), 1 + turn % 3))
        assert entry is not None and memory.run(entry) == 0
        expected = np.matmul(a.astype(np.float64), np.swapaxes(b, -1, -2).astype(np.float64))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)
        whole = y.base
        assert whole is not None and (whole[..., 1::2, :] == 77).all()
        assert (whole[..., n:] == 77).all()
