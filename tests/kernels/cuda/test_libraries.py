"""What NVIDIA's libraries are asked for, against references; none of them is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import FILL, place
from helpers.operator_checks import subject

from soapstone.ir.spec import Case, operator
from soapstone.kernels.cuda.entry import Expected
from soapstone.kernels.cuda.libraries.attention import described
from soapstone.kernels.cuda.libraries.convolutions import KINDS
from soapstone.kernels.cuda.libraries.cudnn import convolving, executed
from soapstone.kernels.cuda.libraries.device import alignment
from soapstone.kernels.cuda.libraries.images import convolution
from soapstone.kernels.cuda.libraries.matrices import Matrix, MatrixProduct, column_major
from soapstone.kernels.cuda.libraries.products import SERVED
from soapstone.kernels.cuda.products.matmul import PROBLEMS
from soapstone.kernels.cuda.substrate.arrays import Described, View
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native.memory import address

PROGRAM = Path(__file__).parents[2] / "programs" / "cuda_libraries.py"
Array = np.ndarray[Any, Any]
CASES = [
    ("matmul", Case(("2 4 3 5", "2 4 5 6"))),
    ("matmul", Case(("2 1 3 5", "4 5 6"))),
    ("matmul", Case(("4 5", "3 5 6"))),
    ("matmul", Case(("2 3 5 1", "2 3 1 4"))),
    ("linear", Case(("2 3 5", "5 4", "4"), {"bias": True})),
    *((name, case) for name in SERVED for case in operator(name).cases),
]


def store(array: Array) -> Array:
    """Return all elements of the memory that an array is a view of, in one row."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1)


def viewed(array: Array) -> View:
    """Return an array of the host as kernels see one of a GPU, within `store`."""
    item = array.itemsize
    away = int(address(array)) - int(address(store(array)))
    strides = tuple(0 if e == 1 else s // item for e, s in zip(array.shape, array.strides))
    return View(None, array.shape, strides, array.dtype.name, away // item)


def elements(flat: Array, first: int, matrix: Matrix, batch: int) -> Array:
    """Return one batch's matrix, of columns that lie `ld` apart."""
    start, item = first + batch * matrix.batch_stride, flat.itemsize
    last = start + matrix.rows - 1 + (matrix.columns - 1) * matrix.ld
    assert matrix.ld >= matrix.rows and 0 <= start <= last < flat.size
    shape, strides = (matrix.rows, matrix.columns), (item, matrix.ld * item)
    return np.lib.stride_tricks.as_strided(flat[start:], shape, strides)


def multiply(of: MatrixProduct, a: Array, b: Array, y: Array) -> None:
    """Compute a product as it is described, on the memory of operands."""
    first, second = (b, a) if of.swapped else (a, b)
    begins = [viewed(x).offset for x in (first, second, y)]
    for places in of.places:
        at = [begin + place for begin, place in zip(begins, places)]
        for batch in range(of.batch):
            one = elements(store(first), at[0], of.a, batch)
            two = elements(store(second), at[1], of.b, batch)
            out = elements(store(y), at[2], of.d, batch)
            assert not of.d.transposed
            out[...] = (one.T if of.a.transposed else one) @ (two.T if of.b.transposed else two)


@pytest.mark.parametrize("layout", ["plain", "tile", "reversed", "last tile"])
@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=f"{n} {' '.join(c.inputs)}") for n, c in CASES]
)
def test_products_in_columns_are_those_of_the_operator(name: str, case: Case, layout: str) -> None:
    item = subject(operator(name), case, "float64")
    attributes = {**item.attributes, "activation": None, "bias": False}
    a, b = (place(x, layout) for x in item.arrays[:2])
    wanted = item.spec.run(attributes, *item.arrays[:2])[0] if name != "linear" else a @ b
    y = place(np.full(wanted.shape, FILL, wanted.dtype), layout)
    around = np.ones(store(y).shape, bool)
    flat = np.arange(store(y).size).reshape(store(y).shape)
    inside = np.lib.stride_tricks.as_strided(
        flat[viewed(y).offset :], y.shape, [s // y.itemsize * flat.itemsize for s in y.strides]
    )
    around[inside] = False
    problem = PROBLEMS[name](attributes, (viewed(a), viewed(b)), viewed(y))
    of = column_major(problem)
    if of is None:
        assert layout != "plain" or 0 in (*a.shape, *b.shape)
        return
    multiply(of, a, b, y)
    np.testing.assert_allclose(y, wanted, rtol=1e-12, atol=1e-12)
    assert (store(y)[around] == FILL).all()
    by_columns = column_major(problem, by_columns=True)
    assert by_columns is None or by_columns.swapped
    if layout == "plain":
        assert by_columns is not None  # a bias is one of the library's own


def test_batches_that_have_no_one_stride_are_several_calls() -> None:
    heads = np.zeros((3, 7, 2, 5)).transpose(0, 2, 1, 3)  # samples, heads, positions, elements
    y = np.zeros((3, 2, 7, 7))
    attributes = {"transpose_a": False, "transpose_b": True}
    of = column_major(PROBLEMS["matmul"](attributes, (viewed(heads), viewed(heads)), viewed(y)))
    assert of is not None
    assert (of.batch, of.places) == (2, ((0, 0, 0), (70, 70, 98), (140, 140, 196)))
    many = np.zeros((65, 7, 2, 5)).transpose(0, 2, 1, 3)
    y = np.zeros((65, 2, 7, 7))
    given = (viewed(many), viewed(many))
    assert column_major(PROBLEMS["matmul"](attributes, given, viewed(y))) is None


def test_what_surrounds_an_image_is_found_from_extents() -> None:
    def of(size: int, kernel: int, count: int, low: int, stride: int) -> Any:
        at = {"stride": (stride,), "padding": (low, 0), "dilation": (1,), "groups": 1}
        shapes = (1, 1, size), (1, 1, kernel), (1, 1, count)
        x, w, y = (viewed(np.zeros(shape, np.float32)) for shape in shapes)
        return convolution("conv_fprop", at, x, w, y)

    assert of(8, 3, 8, 1, 1).post_padding == (0, 1)
    assert of(8, 3, 4, 0, 2).post_padding == (0, 1)
    assert of(9, 3, 4, 0, 2).post_padding == (0, 0)
    assert of(10, 3, 4, 0, 2).post_padding == (0, 0)  # the last position is in no window
    assert of(11, 3, 4, 0, 2) is None  # a window more would fit, which y has no place for
    assert of(8, 3, 7, -1, 1) is None
    assert of(8, 3, 8, 1, 1).x.dim == (1, 1, 1, 8)


def test_layouts_of_images_are_told_where_an_axis_has_one_element() -> None:
    at = {"stride": (1, 1), "padding": (0,) * 4, "dilation": (1, 1), "groups": 1}
    x = np.zeros((2, 6, 1, 5), np.float32)
    last = place(x, "last")
    w, y = np.zeros((4, 6, 1, 1), np.float32), np.zeros((2, 4, 1, 5), np.float32)
    made = [convolution("conv_fprop", at, viewed(each), viewed(w), viewed(y)) for each in (x, last)]
    assert [of and of.x.stride for of in made] == [(30, 5, 5, 1), (30, 1, 30, 6)]
    repeated = np.broadcast_to(x[:, :1], (2, 6, 1, 5))
    assert convolution("conv_fprop", at, viewed(repeated), viewed(w), viewed(y)) is None


def test_attention_that_cudnn_has_not_is_declined() -> None:
    def of(width: int, inputs: int = 3, dtype: str = "float16", **attributes: Any) -> Any:
        x = Described.like(np.zeros((2, 4, 2, width), dtype))
        views = tuple(viewed(np.zeros((2, 4, 2, width), dtype)) for _ in range(inputs))
        at = {"scale": None, "causal": False, **attributes}
        return described(Call("attention", at, (x,) * inputs, (x,)), views, views[0])

    found = of(64)
    assert (found.q.dim, found.q.stride) == ((2, 2, 4, 64), (512, 64, 128, 1))
    assert (found.scale, found.causal) == (0.125, False)
    assert of(64, causal=True).causal
    for declined in (of(20), of(136), of(64, dtype="float32")):
        assert declined is None
    assert of(64, causal=True, ahead=2) is None


def test_cudnn_is_asked_for_no_tensor_that_32_bits_do_not_count() -> None:
    def tensor(rows: int) -> View:
        x = Described((rows, 2), (2, 1), np.dtype("float16"))
        return View(x, x.shape, x.strides, x.dtype.name)

    x, w, y = (View(None, (1, 1, 1, 1), (1, 1, 1, 1), "float16") for _ in "xwy")
    at = {"stride": (1, 1), "padding": (0,) * 4, "dilation": (1, 1), "groups": 1}
    of = convolution("conv_fprop", at, x, w, y)
    assert of is not None
    found = executed(convolving, of, "float32", [tensor(2**30 - 1)], [tensor(2)])
    assert found is not None and isinstance(found.launches[0], Expected)  # it would be asked
    assert executed(convolving, of, "float32", [tensor(2**30)], [tensor(2)]) is None


def test_addresses_are_as_aligned_as_the_least_of_them() -> None:
    assert alignment(4096) == alignment(0) == 256
    assert alignment(4096, 48) == 16
    assert alignment(4096, 4100) == 4


def test_libraries_are_preferred_and_decline_what_is_only_described() -> None:
    x = Described.like(np.zeros((4, 4), np.float32))
    found = variants("matmul", "cuda")
    assert [each.name for each in found] == ["cublaslt", "tiled"]
    at = {"transpose_a": False, "transpose_b": False}
    assert found[0].bind(Call("matmul", at, (x, x), (x,))) is None
    names = [each.name for each in variants("with_epilogue", "cuda")]
    assert names == ["cudnn", "cublaslt", "tiled"]
    assert variants("attention", "cuda")[0].name == "cudnn"


@pytest.mark.simulator
@pytest.mark.parametrize(
    "names",
    [(*SERVED, "with_epilogue", "attention", "attention_grad"), tuple(KINDS)],
    ids=["products", "images"],
)
def test_operators_by_libraries_that_numpy_and_torch_stand_in_for(names: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *names], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["operator"] for line in lines] == list(names)
    assert [line for line in lines if line["wrong"]] == []
    assert all(line["served"].keys() & {"cublaslt", "cudnn"} for line in lines)
