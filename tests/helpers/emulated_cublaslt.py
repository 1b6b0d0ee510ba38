"""cuBLASLt as NVIDIA documents it, in NumPy: what a product described in its words computes.

It has the functions of `nvmath.bindings.cublasLt` that soapstone calls, takes addresses of the
host's memory, and checks what the library would take on trust: alignments, workspaces, layouts.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np

from soapstone.dtypes import learn

ComputeType = IntEnum(
    "ComputeType", {"COMPUTE_32F": 68, "COMPUTE_64F": 70, "COMPUTE_32F_FAST_TF32": 77}
)
CudaDataType = IntEnum(
    "CudaDataType", {"CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_R_16BF": 14}
)
Epilogue = IntEnum("Epilogue", {"DEFAULT": 1, "RELU": 2, "BIAS": 4, "RELU_BIAS": 6})
MatmulDescAttribute = IntEnum(
    "MatmulDescAttribute", {"TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8}
)
MatrixLayoutAttribute = IntEnum(
    "MatrixLayoutAttribute", {"BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 6}
)
MatmulPreferenceAttribute = IntEnum(
    "MatmulPreferenceAttribute",
    {"MAX_WORKSPACE_BYTES": 1, "REDUCTION_SCHEME_MASK": 3}
    | {f"MIN_ALIGNMENT_{x}_BYTES": 5 + n for n, x in enumerate("ABCD")},
)
ReductionScheme = IntEnum("ReductionScheme", {"INPLACE": 1, "COMPUTE_TYPE": 2, "OUTPUT_TYPE": 4})
TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: np.dtype(learn("bfloat16")).type}
WORKSPACE_BYTES = 48  # that every algorithm here wants
_KINDS = {
    "BIAS_POINTER": np.int64,
    "STRIDED_BATCH_OFFSET": np.int64,
    "MAX_WORKSPACE_BYTES": np.uint64,
}
_objects: dict[int, dict[Any, Any]] = {}
_numbers = itertools.count(1)


class cuBLASLtError(Exception):
    """What the library raises for what it does not support."""


class MatmulHeuristicResult:
    """An algorithm: which product it is for, by the objects that describe it."""

    def __init__(self) -> None:
        self.ptr = new()
        self.state, self.workspace_size = 0, WORKSPACE_BYTES


def get_version() -> int:
    """Return a number."""
    return 130000


def new(**given: Any) -> int:
    """Return the number of a new object."""
    number = next(_numbers)
    _objects[number] = given
    return number


create = new
matmul_preference_create = new


def matmul_desc_create(compute: int, scale: int) -> int:
    """Return a description, of no transposes."""
    return new(compute=ComputeType(compute), scale=CudaDataType(scale))


def matrix_layout_create(kind: int, rows: int, columns: int, ld: int) -> int:
    """Return the layout of one matrix."""
    if ld < rows or rows < 1 or columns < 1:
        raise cuBLASLtError(f"{rows} rows, {columns} columns, leading dimension {ld}")
    return new(kind=TYPES[int(kind)], rows=rows, columns=columns, ld=ld)


def destroy(number: int) -> None:
    """Forget an object."""
    del _objects[number]


matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = destroy


def _dtype(attribute: Any) -> Any:
    return _KINDS.get(attribute.name, np.int32)


get_matmul_desc_attribute_dtype = _dtype
get_matrix_layout_attribute_dtype = _dtype
get_matmul_preference_attribute_dtype = _dtype


def _set(number: int, attribute: Any, address: int, nbytes: int) -> None:
    assert nbytes == np.dtype(_dtype(attribute)).itemsize
    (_objects[number][attribute],) = _memory(address, nbytes).view(_dtype(attribute)).tolist()


matmul_desc_set_attribute = matrix_layout_set_attribute = matmul_preference_set_attribute = _set


def _memory(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def matmul_algo_get_heuristic(
    handle: int,
    product: int,
    a: int,
    b: int,
    c: int,
    d: int,
    preference: int,
    wanted: int,
    results: int,
    count: int,
) -> None:
    """Write one algorithm; none for double precision with an epilogue, which must do without."""
    assert handle in _objects and wanted == 1 and c == d
    words = MatmulPreferenceAttribute
    asked = _objects[preference]
    assert asked[words.MAX_WORKSPACE_BYTES] >= WORKSPACE_BYTES
    assert asked[words.REDUCTION_SCHEME_MASK] == ReductionScheme.COMPUTE_TYPE
    least = {key: asked[words[f"MIN_ALIGNMENT_{key}_BYTES"]] for key in "ABCD"}
    _objects[results] |= {"product": product, "layouts": (a, b, d), "aligned": least}
    odd = _objects[product]["compute"] == ComputeType.COMPUTE_64F
    found = 0 if odd and MatmulDescAttribute.EPILOGUE in _objects[product] else 1
    _memory(count, 4).view(np.int32)[0] = found


def _elements(number: int, address: int, batches: int) -> np.ndarray[Any, Any]:
    """Return the matrices of a layout at an address: (batches, rows, columns), writable."""
    layout = _objects[number]
    words = MatrixLayoutAttribute
    assert layout.get(words.BATCH_COUNT, 1) == batches
    size = np.dtype(layout["kind"]).itemsize
    step = layout.get(words.STRIDED_BATCH_OFFSET, 0)
    last = (batches - 1) * step + layout["rows"] - 1 + (layout["columns"] - 1) * layout["ld"]
    flat = _memory(address, (last + 1) * size).view(layout["kind"])
    shape = (batches, layout["rows"], layout["columns"])
    strides = (step * size, size, layout["ld"] * size)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def matmul(
    handle: int,
    product: int,
    alpha: int,
    a: int,
    a_layout: int,
    b: int,
    b_layout: int,
    beta: int,
    c: int,
    c_layout: int,
    d: int,
    d_layout: int,
    algorithm: int,
    workspace: int,
    workspace_bytes: int,
    stream: int,
) -> None:
    """Compute d = epilogue(alpha op(a) op(b) + beta c)."""
    described, chosen = _objects[product], _objects[algorithm]
    words = MatmulDescAttribute
    assert handle in _objects and c == d and c_layout == d_layout and isinstance(stream, int)
    assert (chosen["product"], chosen["layouts"]) == (product, (a_layout, b_layout, d_layout))
    for key, address in zip("ABCD", (a, b, c, d)):
        assert address % chosen["aligned"][key] == 0, f"{key} at {address:#x}"
    assert workspace_bytes >= WORKSPACE_BYTES
    _memory(workspace, WORKSPACE_BYTES)[...] = 255
    scale = TYPES[described["scale"]]
    factors = [_memory(at, np.dtype(scale).itemsize).view(scale)[0] for at in (alpha, beta)]
    assert factors == [1, 0]
    double = described["compute"] == ComputeType.COMPUTE_64F
    batches = _objects[d_layout].get(MatrixLayoutAttribute.BATCH_COUNT, 1)
    first, second = (
        _elements(layout, address, batches).astype(np.float64 if double else np.float32)
        for layout, address in ((a_layout, a), (b_layout, b))
    )
    if described["compute"] == ComputeType.COMPUTE_32F_FAST_TF32:
        first, second = map(rounded, (first, second))
    first = first.swapaxes(1, 2) if described.get(words.TRANSA) else first
    second = second.swapaxes(1, 2) if described.get(words.TRANSB) else second
    result = np.matmul(first, second)
    epilogue = Epilogue(described.get(words.EPILOGUE, Epilogue.DEFAULT))
    out = _elements(d_layout, d, batches)
    if epilogue & 4:
        rows = out.shape[1]
        at = described[words.BIAS_POINTER]
        bias = _memory(at, rows * out.itemsize).view(out.dtype)
        result = result + bias[:, None].astype(result.dtype)
    if epilogue & 2:
        result = np.maximum(result, 0)
    out[...] = result


def rounded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return float32 numbers with 10 bits after the point, as TF32 has."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def install() -> None:
    """Stand in for the package `nvmath`."""
    names = ("nvmath", "nvmath.bindings", "nvmath.bindings.cublas")
    nvmath, bindings, cublas = made = [ModuleType(name) for name in names]
    vars(nvmath).update(bindings=bindings, CudaDataType=CudaDataType)
    vars(bindings).update(cublas=cublas, cublasLt=sys.modules[__name__])
    vars(cublas).update(ComputeType=ComputeType)
    sys.modules |= {**dict(zip(names, made)), "nvmath.bindings.cublasLt": bindings.cublasLt}
