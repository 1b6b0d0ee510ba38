"""cuBLASLt through NVIDIA's bindings (nvmath-python): a product is described once, then enqueued.

Which algorithm runs is cuBLASLt's own expectation; its memory to work in is allocated when it is
bound. None of this has run on a device yet: what is described is tested without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from soapstone.dtypes import HALVES
from soapstone.kernels.cuda.entry import DeviceEntry, Expected
from soapstone.kernels.cuda.libraries.device import (
    address,
    alignment,
    attempted,
    current,
    imported,
    is_described,
    number,
    workspace,
)
from soapstone.kernels.cuda.libraries.matrices import Matrix, MatrixProduct, column_major
from soapstone.kernels.cuda.products.matmul import Problem
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.entry import TF32
from soapstone.native import memory
from soapstone.native.memory import Array

WORKSPACE_BYTES = 32 << 20  # at most; what NVIDIA advises from its generation Hopper on
_INSTEAD = "kernels of soapstone's own compute products"
_TYPES = {
    "float16": "CUDA_R_16F",
    "bfloat16": "CUDA_R_16BF",
    "float32": "CUDA_R_32F",
    "float64": "CUDA_R_64F",
}


@cache
def bindings() -> Any:
    """Return `nvmath.bindings.cublasLt`, or None: it is not installed, or cannot be used."""
    return imported("nvmath.bindings.cublasLt", "get_version", "cuBLASLt", _INSTEAD)


@cache
def _handle(device: int) -> Any:
    """Return what calls are made with on the GPU that is current, whose number is given."""
    return attempted(bindings().create, f"cuBLASLt on GPU {device}", _INSTEAD)


class Described:
    """A product in cuBLASLt's own words: a description of it, and of each matrix.

    Args:
        kind: the element type of a and b. stored: of d.
        precision: TF32 where float32 may be rounded to that.
        bias: the address of a vector of d's type, one element a row of d, or None.
        relu: whether negative results become 0, after the bias.

    Attributes:
        product, a, b, d: the library's objects, which are given back with this one.
    """

    def __init__(
        self,
        of: MatrixProduct,
        kind: str,
        stored: str,
        precision: str,
        bias: int | None,
        relu: bool,
    ) -> None:
        from nvmath import CudaDataType
        from nvmath.bindings.cublas import ComputeType

        lt = bindings()
        words = lt.MatmulDescAttribute
        double = kind == "float64"
        compute = ComputeType.COMPUTE_64F if double else ComputeType.COMPUTE_32F
        if precision == TF32 and kind == "float32":
            compute = ComputeType.COMPUTE_32F_FAST_TF32
        scale = CudaDataType[_TYPES["float64" if double else "float32"]]
        self.product = self._own(lt.matmul_desc_create(compute, scale), lt.matmul_desc_destroy)

        def put(attribute: int, value: int) -> None:
            kind = lt.get_matmul_desc_attribute_dtype(attribute)
            _set(lt.matmul_desc_set_attribute, self.product, attribute, value, kind)

        put(words.TRANSA, int(of.a.transposed))
        put(words.TRANSB, int(of.b.transposed))
        if bias is not None or relu:
            name = "RELU_BIAS" if relu and bias is not None else "RELU" if relu else "BIAS"
            put(words.EPILOGUE, lt.Epilogue[name])
        if bias is not None:
            put(words.BIAS_POINTER, bias)
        self.a, self.b, self.d = (
            self._matrix(CudaDataType[_TYPES[dtype]], matrix, of.batch)
            for matrix, dtype in ((of.a, kind), (of.b, kind), (of.d, stored))
        )

    def _matrix(self, kind: int, matrix: Matrix, batch: int) -> int:
        lt = bindings()
        made = lt.matrix_layout_create(kind, matrix.rows, matrix.columns, matrix.ld)
        self._own(made, lt.matrix_layout_destroy)
        words = lt.MatrixLayoutAttribute
        given = ((words.BATCH_COUNT, batch), (words.STRIDED_BATCH_OFFSET, matrix.batch_stride))
        for attribute, value in given if batch > 1 else ():
            of_type = lt.get_matrix_layout_attribute_dtype(attribute)
            _set(lt.matrix_layout_set_attribute, made, attribute, value, of_type)
        return int(made)

    def _own(self, made: int, destroy: Callable[[int], None]) -> int:
        weakref.finalize(self, destroy, made).atexit = False
        return made


def _set(setter: Callable[..., None], of: int, attribute: int, value: int, kind: Any) -> None:
    held = np.array([value], kind)
    setter(of, attribute, int(memory.address(held)), held.nbytes)


@dataclass(frozen=True)
class Multiplied:
    """One product at its addresses. `keep`: what has to live as long."""

    handle: int
    described: Described
    a: int
    b: int
    d: int
    factors: Array  # 1 and 0: what a b, and d's old contents, are multiplied by
    algorithm: Any
    workspace: int
    workspace_bytes: int
    keep: tuple[Any, ...]

    def enqueue(self, stream: Any = 0) -> None:
        """Put the product on a stream, and return."""
        one, of, first = self.factors.itemsize, self.described, int(memory.address(self.factors))
        bindings().matmul(
            self.handle,
            of.product,
            first,
            self.a,
            of.a,
            self.b,
            of.b,
            first + one,
            self.d,
            of.d,
            self.d,
            of.d,
            self.algorithm.ptr,
            self.workspace,
            self.workspace_bytes,
            number(stream),
        )


def product(
    problem: Problem, precision: str, bias: View | None = None, relu: bool = False
) -> DeviceEntry | None:
    """Return the entry of a product, or None where cuBLASLt does not serve it.

    Args:
        bias: (n) a value a column of the result, or None. relu: see `Described`.
    """
    a, b, c = (operand.view for operand in problem[:3])
    kind, stored = a.dtype, c.dtype
    allowed = stored == kind or (kind in HALVES and stored == "float32")
    if kind not in _TYPES or b.dtype != kind or not allowed:
        return None
    if bias is not None and (bias.dtype != stored or not bias.contiguous):
        return None
    of = column_major(problem, by_columns=bias is not None)
    if of is None:
        return None
    if is_described(c):
        extents = of.batch, of.d.rows, of.d.columns, of.a.rows if of.a.transposed else of.a.columns
        one = Expected("cublaslt", extents, kind, (a.span, b.span, c.span))
        return DeviceEntry((one,) * len(of.places))
    begin = [address(view) for view in ((b, a, c) if of.swapped else (a, b, c))]
    at = None if bias is None else address(bias)
    sizes = [np.dtype(kind).itemsize] * 2 + [np.dtype(stored).itemsize]
    calls = [
        (
            begin[0] + first * sizes[0],
            begin[1] + second * sizes[1],
            begin[2] + d * sizes[2],
        )
        for first, second, d in of.places
    ]
    handle = _handle(current())
    if handle is None:
        return None
    described = Described(of, kind, stored, precision, at, relu)
    aligned = [alignment(*column) for column in zip(*calls)]
    if at is not None:
        aligned[2] = min(aligned[2], alignment(at))
    algorithm = _algorithm(handle, described, aligned)
    if algorithm is None:
        return None
    nbytes = int(algorithm.workspace_size)
    room, held = workspace(nbytes, c)
    factors = np.array([1, 0], "float64" if kind == "float64" else "float32")
    keep = (a.span, b.span, c.span, held, bias and bias.span)
    given = factors, algorithm, room, nbytes, keep
    return DeviceEntry(
        tuple(Multiplied(handle, described, first, second, d, *given) for first, second, d in calls)
    )


def preference(aligned: Sequence[int]) -> int:
    """Return the library's object of what an algorithm may be; whoever asks gives it back.

    aligned: bytes that addresses of a, b and d are multiples of.
    """
    lt = bindings()
    words = lt.MatmulPreferenceAttribute
    wanted = {
        words.MAX_WORKSPACE_BYTES: WORKSPACE_BYTES,
        # Parts of a sum are never rounded to halves before they are added.
        words.REDUCTION_SCHEME_MASK: lt.ReductionScheme.COMPUTE_TYPE,
    }
    for name, least in zip("ABDC", [*aligned, aligned[2]]):
        wanted[words[f"MIN_ALIGNMENT_{name}_BYTES"]] = least
    made = int(lt.matmul_preference_create())
    for attribute, value in wanted.items():
        kind = lt.get_matmul_preference_attribute_dtype(attribute)
        _set(lt.matmul_preference_set_attribute, made, attribute, value, kind)
    return made


def _algorithm(handle: int, of: Described, aligned: Sequence[int]) -> Any:
    """Return the algorithm that cuBLASLt expects to be the fastest, or None: it has none.

    aligned: see `preference`.
    """
    lt = bindings()
    found, count = lt.MatmulHeuristicResult(), np.zeros(1, np.int32)
    asked = preference(aligned)
    objects = of.product, of.a, of.b, of.d, of.d
    try:
        lt.matmul_algo_get_heuristic(
            handle, *objects, asked, 1, found.ptr, int(memory.address(count))
        )
    except lt.cuBLASLtError:  # such a product is not supported
        return None
    finally:
        lt.matmul_preference_destroy(asked)
    return found if count[0] and int(found.state) == 0 else None
