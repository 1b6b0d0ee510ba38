"""Other oneDNN kernels, and what the library and its entries say and share."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import bound, near, place, problem, random, reference, run, served

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
    run(bound(Call("linear", {"bias": False, "activation": operator}, (x, w), (z,))))
    at = dict(bias=False, activation=operator, **problem("pointwise")[2])
    for layout in ("plain", "last"):
        out = place(np.zeros((1, 8, 2, 2), np.float32), layout)
        run(bound(Call("conv2d", at, (place(image, layout), kernel), (out,))))
        assert np.isnan(out).any(axis=(2, 3)).all()
    assert np.isnan(z[1]).all() and not np.isnan(z[0]).any()


@pytest.mark.parametrize("permutation", [(0, 2, 3, 1), (3, 0, 1, 2)])
def test_transpose(permutation: tuple[int, ...]) -> None:
    at = {"permutation": permutation}
    for layout in ("plain", "tile"):
        assert served("transpose", [random(4, 5, 6, 7)], at, layout=layout, only="onednn")
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert served("transpose", [ids], {"permutation": (1, 0)}, only="onednn")


def test_reshape_of_channels_last() -> None:
    x, flat = random(4, 5, 6, 7), np.empty((4, 210), np.float32)
    run(bound(Call("reshape", {"shape": flat.shape}, (place(x, "last"),), (flat,))))
    np.testing.assert_array_equal(flat, x.reshape(4, 210))
    back = place(np.zeros_like(x), "last")
    run(bound(Call("reshape", {"shape": x.shape}, (flat,), (back,))))
    np.testing.assert_array_equal(back, x)


# ---------------------------------------------------------------- entries


def test_two_threads_run_two_entries_of_one_primitive() -> None:
    x, w, at = problem("wide")
    given = {"bias": False, **at}
    (expected,) = reference("conv2d", [x, w], given)
    calls = [Call("conv2d", given, (x * k, w), (np.empty(expected.shape, "f4"),)) for k in (1, 2)]
    entries = [bound(call) for call in calls]
    failures: list[int] = []

    def repeat(entry: Entry) -> None:
        failures.extend(status for _ in range(200) if (status := memory.run(entry)))

    workers = [threading.Thread(target=repeat, args=(entry,)) for entry in entries]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for k, call in zip((1, 2), calls):
        near(call.outputs[0], k * expected)


def test_equal_problems_share_a_primitive_and_repeat_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w, at = problem("groups")
    given = {"bias": False, **at}
    shape = reference("conv2d", [x, w], given)[0].shape
    outs = [np.empty(shape, np.float32) for _ in range(2)]
    made: list[descriptors.Primitive] = []
    compiled = descriptors.compile_primitive

    def compile_primitive(*of: Any) -> descriptors.Primitive:
        made.append(compiled(*of))
        return made[-1]

    monkeypatch.setattr(convolution, "compile_primitive", compile_primitive)
    for out in outs:
        run(bound(Call("conv2d", given, (x, w), (out,), 2)))
    assert len(made) < 2
    assert (outs[0] == outs[1]).all()


def test_equal_copies_share_a_primitive() -> None:
    def copies(rows: int) -> descriptors.Primitive:
        ends = descriptors.Layout((rows, 3), (1, rows)), descriptors.Layout((rows, 3), (3, 1))
        descriptors._descriptor.cache_clear()  # other descriptors of equal layouts
        return descriptors.reorder_primitive(*(descriptors._descriptor(end) for end in ends), 1)

    assert copies(5) is copies(5)
    assert copies(5) is not copies(7)


def test_a_primitive_in_use_is_shared_however_many_were_made_since() -> None:
    made: list[str] = []

    def compiled(what: str) -> descriptors.Primitive:
        made.append(what)
        handle = library.Handle(0)
        return descriptors.Primitive(what, handle, handle, 0, "")

    kept = descriptors.Kept(compiled)
    first = kept("first")
    kept("second")
    for number in range(descriptors._RECENT):
        kept(f"other {number}")
    assert kept("first") is first
    assert made.count("first") == made.count("second") == 1
    kept("second")
    assert made.count("second") == 2


@pytest.mark.parametrize("named", ["off", "/nowhere/libdnnl.so.3", None])
def test_what_loads_the_library_ahead_leaves_errors_to_who_asks(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    if named is None:
        monkeypatch.delenv(library.VARIABLE, raising=False)
        monkeypatch.setattr(library, "_files", lambda: iter(()))
    else:
        monkeypatch.setenv(library.VARIABLE, named)
    raised = list[Any]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    loading = library.Loading()
    loading.begin()
    loading.wait()
    assert not loading.is_alive() and not raised


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
        entry = declining(lambda call, chain=chain: matmul.matmul(call, chain))(call)
        assert (entry is not None) == serves
        if entry is not None:
            assert memory.run(entry) == 0
            np.testing.assert_array_equal(y, np.full((3, 5), 8.0, np.float32))


def test_every_status_is_checked() -> None:
    """No function of the library returns a status that a caller could drop."""
    for name in library._FUNCTIONS:
        function = getattr(library.library(), name)
        assert name in library._RETURNS or function.errcheck is library._checked, name
