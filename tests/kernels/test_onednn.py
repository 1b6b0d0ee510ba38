"""Other oneDNN kernels against small independent NumPy references, in every layout they accept."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading

import numpy as np
import pytest
from helpers.onednn_calls import (
    bind,
    close,
    convolve,
    execute,
    place,
    problem,
    random,
    run,
)

from soapstone.kernels.cpu import onednn
from soapstone.kernels.cpu.onednn import convolution, descriptors, library, matmul
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import declining
from soapstone.native import memory


@pytest.mark.parametrize("operator", ["relu", "sigmoid", "tanh", "gelu", "leaky_relu"])
def test_not_a_number_is_never_hidden(operator: str) -> None:
    """A step predicated on a finite loss needs NaN to reach it."""
    x = random(4, 20)
    x[1, 3] = np.nan
    w, z = random(20, 6), np.empty((4, 6), np.float32)
    image, kernel = x.reshape(1, 20, 2, 2), random(8, 20, 1, 1)
    entries = [bind(Call("linear", {"bias": False, "activation": operator}, (x, w), (z,)))]
    at = dict(bias=False, activation=operator, **problem("pointwise")[2])
    for layout in ("plain", "channels_last"):
        out = place(np.zeros((1, 8, 2, 2), np.float32), layout)
        entries.append(bind(Call("conv2d", at, (place(image, layout), kernel), (out,))))
        assert entries[-1] is not None
        assert run(entries[-1]) == 0
        assert np.isnan(out).any(axis=(2, 3)).all()
    assert entries[0] is not None
    assert run(entries[0]) == 0
    assert np.isnan(z[1]).all() and not np.isnan(z[0]).any()


def test_transpose_and_reshape() -> None:
    x = random(4, 5, 6, 7)
    (y,) = execute("transpose", (x,), [(4, 6, 7, 5)], "tile", permutation=(0, 2, 3, 1))
    np.testing.assert_array_equal(y, x.transpose(0, 2, 3, 1))
    (y,) = execute("transpose", (x,), [(7, 4, 5, 6)], threads=2, permutation=(3, 0, 1, 2))
    np.testing.assert_array_equal(y, x.transpose(3, 0, 1, 2))
    last = place(x, "channels_last")
    flat = np.empty((4, 210), np.float32)
    entry = bind(Call("reshape", {"shape": flat.shape}, (last,), (flat,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(flat, x.reshape(4, 210))
    back = place(np.zeros_like(x), "channels_last")
    entry = bind(Call("reshape", {"shape": x.shape}, (flat,), (back,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(back, x)
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    out = np.empty((4, 3), np.int32)
    entry = bind(Call("transpose", {"permutation": (1, 0)}, (ids,), (out,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(out, ids.T)


# ---------------------------------------------------------------- entries


def test_two_threads_run_two_entries_of_one_primitive() -> None:
    x, w, at = problem("wide")
    expected = convolve(x, w, at)
    calls = [
        Call("conv2d", dict(bias=False, **at), (x * k, w), (np.empty(expected.shape, "f4"),))
        for k in (1, 2)
    ]
    entries = [bind(call) for call in calls]
    failures: list[int] = []

    def repeat(entry: Entry) -> None:
        failures.extend(status for _ in range(200) if (status := run(entry)))

    workers = [threading.Thread(target=repeat, args=(entry,)) for entry in entries]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for k, call in zip((1, 2), calls):
        close(call.outputs[0], k * expected)


def test_equal_problems_share_a_primitive_and_repeat_to_the_bit() -> None:
    x, w, at = problem("groups")
    outs = [np.empty(convolve(x, w, at).shape, np.float32) for _ in range(2)]
    for out in outs:
        before = convolution._primitive.cache_info().misses
        entry = bind(Call("conv2d", dict(bias=False, **at), (x, w), (out,), 2))
        assert entry is not None
        assert run(entry) == 0
    assert convolution._primitive.cache_info().misses == before
    assert (outs[0] == outs[1]).all()


def test_the_library_is_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn.available()
    assert onednn.version().startswith("3.")
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libdnnl.so.3")
    library._attempt.cache_clear()
    try:
        assert not onednn.available()
        with pytest.raises(onednn.OneDnnError, match=r"/nowhere/libdnnl\.so\.3.*onednn-cpu-gomp"):
            library.library()
        monkeypatch.setenv(library.VARIABLE, ctypes.util.find_library("c") or "libc.so.6")
        library._attempt.cache_clear()
        with pytest.raises(onednn.OneDnnError, match="no function dnnl_"):
            library.library()
    finally:
        monkeypatch.undo()
        library._attempt.cache_clear()


@pytest.mark.parametrize(
    "posts",
    [
        (descriptors.Activation(0x7FFF),),  # no such function
        (descriptors.Binary(0x7FFF, descriptors.Layout.dense((1, 4))),),
        (descriptors.Activation(descriptors.ALGORITHMS["linear"], 1.5),)
        * 40,  # more than a chain holds
    ],
)
def test_refused_steps_are_errors_that_name_the_function(
    posts: tuple[descriptors.Post, ...],
) -> None:
    with pytest.raises(onednn.OneDnnError, match=r"oneDNN dnnl_post_ops_append_\w+: "):
        descriptors.attributes(*posts)


def test_a_variant_whose_steps_are_refused_declines() -> None:
    """The alternative is a product without its activation, and nothing that says so."""
    a, b, y = (np.ones(shape, np.float32) for shape in ((3, 4), (4, 5), (3, 5)))
    flags = {"transpose_a": False, "transpose_b": False}
    call = Call("matmul", flags, (a, b), (y,))
    for steps, serves in (
        ([(descriptors.ALGORITHMS["linear"], 2.0)], True),
        ([(0x7FFF, 2.0)], False),
    ):
        chain = [descriptors.Activation(*step) for step in steps]
        entry = declining(lambda call, chain=chain: matmul.matmul(call, "first", chain))(call)
        assert (entry is not None) == serves
        if entry is not None:
            assert memory.run(entry) == 0
            np.testing.assert_array_equal(y, np.full((3, 5), 8.0, np.float32))


def test_every_status_is_checked() -> None:
    """No function of the library returns a status that a caller could drop."""
    for name in library._FUNCTIONS:
        function = getattr(library.library(), name)
        assert name in library._RETURNS or function.errcheck is library._checked, name
