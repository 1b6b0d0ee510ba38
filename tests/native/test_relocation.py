"""Entries of equal calls: they compute what bound ones do, and only what is understood is moved."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest

from soapstone import InferenceSession, Model
from soapstone.kernels.entry import Call
from soapstone.kernels.entry_cache import EntryCache
from soapstone.kernels.select import select
from soapstone.native import memory
from soapstone.native.arrays import start
from soapstone.native.blocks import Fields
from soapstone.native.entries import bind, native, sequence
from soapstone.native.intrinsics import f32p
from soapstone.native.memory import Entry, address, run
from soapstone.native.promises import Promise, contents, held
from soapstone.native.shared import packed

pytestmark = pytest.mark.skipif(memory.CHECKED, reason="checked entries are bound one by one")

_SCALED = Fields("x y count", reals="factor")
_of = _SCALED.at


@native()
def _scaled(block):
    w = _of(block)
    for i in range(w.count):
        f32p(w.y)[i] = f32p(w.x)[i] * np.float32(w.factor)
    return 0


@native()
def _behind(block):
    w = _of(block)
    for i in range(w.count):
        f32p(w.y)[i] = f32p(w.x)[i + 16] * np.float32(w.factor)
    return 0


def scaled(x, y, factor=2.0) -> Entry:
    return bind(_scaled, _SCALED.pack(x=x, y=y, count=x.size, factor=factor))


KEPT = []


class Calls:
    """Calls of one form, and how often one was bound."""

    def __init__(self, kernel: Callable, constants: frozenset[int] = frozenset()) -> None:
        self.kernel, self.constants, self.bound, self.cache = kernel, constants, 0, EntryCache()
        self.name = f"kernel {id(self)}"  # what others have shown is not of this one
        KEPT.append(self)

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        y = memory.aligned_array(inputs[0].shape, np.float32)
        KEPT.append((inputs, y))  # so that the next lie elsewhere

        def made():
            self.bound += 1
            return "kernel", self.kernel(*inputs, y)

        name, entry = self.cache.select(self.name, "", inputs, (y,), self.constants, made)
        assert name == "kernel" and run(entry) == 0
        return y


def numbers(seed: int) -> np.ndarray:
    found = memory.aligned_array((8,), np.float32)
    found[...] = np.random.default_rng(seed).random(8, np.float32)
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_the_third_equal_call_is_not_bound(nested):
    def kernel(x, y):
        if not nested:
            return scaled(x, y)
        middle = memory.aligned_array(x.shape, np.float32)
        return sequence([scaled(x, middle, 3.0), scaled(middle, y, 5.0)])

    calls = Calls(kernel)
    for seed in range(5):
        x = numbers(seed)
        np.testing.assert_allclose(calls(x), x * (15 if nested else 2), rtol=1e-6)
    assert calls.bound <= 2


def test_calls_whose_operands_lie_otherwise_are_no_equal_ones():
    calls = Calls(
        lambda x, z, y: sequence([scaled(x, y), scaled(z, y) if z is x else scaled(x, y)])
    )
    for seed in range(3):
        calls(numbers(seed), numbers(seed + 1))
    before, x = calls.bound, numbers(9)
    calls(x, x)
    assert calls.bound == before + 1


@pytest.mark.parametrize("constants", [frozenset(), frozenset({0, 1})])
def test_operands_that_are_one_are_not_taken_for_two(constants):
    """In other calls it may be another of them, or none."""

    def kernel(x, z, y):
        middle = memory.aligned_array(x.shape, np.float32)
        return sequence([scaled(x, middle, 3.0), scaled(z, y, 1.0), scaled(z, middle, 3.0)])

    calls = Calls(kernel, constants)
    for _ in range(3):
        x = numbers(1)
        calls(x, x)
    x, z = numbers(2), numbers(3)
    np.testing.assert_array_equal(calls(x, z), z)


def test_what_lies_in_its_first_operand_is_told_from_what_lies_in_its_second():
    calls = Calls(lambda x, z, y: sequence([scaled(x, y, 1.0), scaled(z, y)]))
    for inside in (0, 0, 0, 1):
        given = numbers(1), numbers(2)
        KEPT.append(given)
        y = given[inside]
        expected = 2 * given[0] if inside == 1 else 2 * given[1]
        _, entry = calls.cache.select(
            *(calls.name, "", given, (y,), frozenset()),
            lambda given=given, y=y: ("kernel", calls.kernel(*given, y)),
        )
        assert run(entry) == 0
        np.testing.assert_array_equal(y, expected)


def test_an_address_that_is_in_no_operand_stays_unmoved():
    """A place before an operand is taken for a number of its own, so all such calls are bound."""

    def kernel(x, y):
        before = int(address(x)) - 64
        return bind(_behind, _SCALED.pack(x=before, y=y, count=x.size, factor=2.0))

    calls = Calls(kernel)
    for seed in range(4):
        x = numbers(seed)
        np.testing.assert_allclose(calls(x), 2 * x, rtol=1e-6)
    assert calls.bound == 4


def test_addresses_in_a_table_of_numbers_are_not_moved():
    def kernel(x, y):
        table = np.array([int(address(x)), int(address(y))], np.int64)
        block = _SCALED.pack(x=x, y=y, count=x.size, factor=2.0, keep=(table,))
        return bind(_scaled, block)

    calls = Calls(kernel)
    for seed in range(4):
        x = numbers(seed)
        np.testing.assert_allclose(calls(x), 2 * x, rtol=1e-6)
    assert calls.bound == 4


def test_what_reads_a_constant_is_bound():
    calls = Calls(lambda x, c, y: scaled(x, y, float(held(c)[0])), frozenset({1}))
    for seed in range(4):
        x, c = numbers(seed), numbers(seed + 10)
        np.testing.assert_allclose(calls(x, c), x * c[0], rtol=1e-6)
    assert calls.bound == 4


def test_what_is_read_of_a_promised_constant_moves_though_it_is_a_view():
    """What was read of one is not taken for what is read of another."""

    def kept(whole: np.ndarray) -> np.ndarray:
        @contextmanager
        def lend():
            yield whole

        known = weakref.WeakValueDictionary()
        return Promise.of((8,), np.float32, lambda: whole[:8], lend, known, threading.RLock())

    calls = Calls(lambda x, w, y: sequence([scaled(x, y), scaled(w, y)]), frozenset({1}))
    whole = np.random.default_rng(0).random((2, 16), np.float32)
    one, two = map(kept, whole)
    for seed, (w, expected) in enumerate([(one, 0), (one, 0), (one, 0), (two, 1)]):
        np.testing.assert_array_equal(calls(numbers(seed), w), 2 * whole[expected, :8])
    assert start(contents(one)) == start(contents(one[2:])) - 8


def promised(whole: np.ndarray) -> np.ndarray:
    """A constant whose contents are lent and not kept."""

    @contextmanager
    def lend():
        yield whole

    known = weakref.WeakValueDictionary()
    return Promise.of(
        whole.shape, np.float32, lambda: pytest.fail("made"), lend, known, threading.RLock()
    )


@pytest.mark.parametrize("of", [promised, lambda whole: whole])
@pytest.mark.parametrize("part", [slice(None), slice(8, 16)])
def test_what_an_equal_call_packs_is_of_its_own_constant(of, part):
    def kernel(x, w, y):
        made = packed(w[part], "twice", lambda w: np.array(2 * held(w[:8])))
        return sequence([scaled(x, y), scaled(made, y, 3.0)])

    calls = Calls(kernel, frozenset({1}))
    for seed in range(5):
        whole = np.random.default_rng(seed).random(16, np.float32)
        np.testing.assert_array_equal(calls(numbers(seed), of(whole)), 6 * whole[part][:8])
    assert calls.bound <= 2


def test_what_was_decided_by_what_is_packed_is_decided_anew():
    small, large = np.zeros(1, np.float32), np.ones(1, np.float32)

    def kernel(x, w, y):
        is_large = packed(w, "large", lambda w: large if held(w).max() > 1 else small) is large
        return scaled(x, y, 3.0 if is_large else 2.0)

    calls = Calls(kernel, frozenset({1}))
    for seed, most in enumerate([1, 1, 1, 2, 1, 2]):
        x, w = numbers(seed), np.full(8, most, np.float32)
        np.testing.assert_array_equal(calls(x, promised(w)), x * (1 + most))


@pytest.mark.onednn
def test_equal_layers_of_a_model_are_bound_once_to_show_how_and_not_again(monkeypatch):
    model, bound = Model("equal", seed=0), []
    x = model.input("x", (1, 32, 8, 8))
    for _ in range(6):
        x = model.conv2d(x, 32, kernel=3, padding=1, bias=False)
    model.output(x)
    given = np.random.default_rng(0).standard_normal((1, 32, 8, 8)).astype(np.float32)
    with InferenceSession(model, plain=True) as session:
        (expected,) = session.run(given).values()

    def counted(*arguments):
        bound.append(None)
        return select(*arguments)

    monkeypatch.setattr("soapstone.engine.expand.select", counted)
    with InferenceSession(model, threads=1) as session:
        (found,) = session.run(given).values()
    assert len(bound) < 6
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_number_that_differs_between_equal_calls_is_not_taken_over():
    factors = iter([2.0, 3.0, 4.0, 5.0])
    calls = Calls(lambda x, y: scaled(x, y, next(factors)))
    for factor in (2.0, 3.0, 4.0, 5.0):
        x = numbers(int(factor))
        np.testing.assert_allclose(calls(x), factor * x, rtol=1e-6)


def test_an_operand_that_was_always_the_same_is_not_known_to_move():
    def kernel(x, z, y):
        return sequence(
            [
                scaled(x, y),
                bind(_behind, _SCALED.pack(x=int(address(z)) - 64, y=y, count=8, factor=1.0)),
            ]
        )

    calls, z = Calls(kernel), numbers(7)
    for seed in range(4):
        np.testing.assert_array_equal(calls(numbers(seed), z), z)
    assert calls.bound == 2
    for seed in range(3):
        other = numbers(seed + 20)
        np.testing.assert_array_equal(calls(numbers(seed), other), other)


def test_operands_outlive_their_arrays():
    calls = Calls(scaled)
    x = numbers(0)
    for _ in range(2):
        calls(x)
    y = memory.aligned_array(x.shape, np.float32)
    _, entry = calls.cache.select(
        calls.name, "", (x,), (y,), frozenset(), lambda: pytest.fail("bound")
    )
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is not None and run(entry) == 0
    np.testing.assert_allclose(y, 2 * gone())


def test_numbers_that_steps_of_a_product_read_are_their_own():
    """A pair of numbers of each chain is in its primitive: equal products of others share none."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    step = ("dequantize", (0, 1, 2), ())
    for scales in ([0.5] * 4, [0.5, 0.25, 2.0, 1.0]):  # equal ones show how such entries move
        cache, w = EntryCache(), rng.standard_normal((32, 32)).astype(np.float32)
        for scale in scales:
            zero, y = np.float32(0.25), memory.aligned_array((16, 32), np.float32)
            given = (x.copy(), w, np.full((), scale, np.float32), np.full((), zero, np.float32))
            call = Call(
                "with_epilogue",
                {"operator": "matmul", "items": (), "arity": 2, "program": (step,)},
                *(given, (y,), 1, frozenset({2, 3})),
            )
            _, entry = cache.select(
                *("with_epilogue", step, given, (y,), call.constants),
                lambda call=call: select(call, variant="onednn"),
            )
            KEPT.append((given, y))
            assert run(entry) == 0
            np.testing.assert_allclose(y, (given[0] @ w - zero) * scale, rtol=1e-4, atol=1e-4)
