"""What NVIDIA's own libraries make of what they are asked for, where there is no GPU.

cuBLASLt's descriptions are made and read back; cuDNN plans convolutions for an H100 that is only
described to it. The library of the driver has to be there, or `libcuda_described.c` in its place.
Prints a line of JSON: how many descriptions and plans were as they should be, and what was not.
"""

from __future__ import annotations

import json
import math
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from helpers import emulated_cublaslt
from nvmath import CudaDataType
from nvmath.bindings.cublas import ComputeType

from soapstone.dtypes import HALVES
from soapstone.ir.spec import operator
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.cuda.libraries import cublaslt, cudnn
from soapstone.kernels.cuda.libraries.attention import Attention, Descent, attending, descending
from soapstone.kernels.cuda.libraries.images import Kind, Tensor, convolution
from soapstone.kernels.cuda.libraries.matrices import Matrix, MatrixProduct
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.entry import TF32

H100 = {
    "deviceName": "NVIDIA H100",
    "deviceVer": 900,
    "smVersion": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "multiProcessorCount": 132,
    "totalGlobalMem": 80 << 30,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 2619000,
    "memoryBusWidth": 5120,
    "l2CacheSize": 50 << 20,
    "warpSize": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxGridSize": [2**31 - 1, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxSharedMemoryPerBlock": 48 << 10,
    "maxSharedMemoryPerBlockOptin": 227 << 10,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
}
IMAGES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("conv2d", (8, 64, 14, 14), (64, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
    ("conv2d", (8, 64, 14, 14), (128, 64, 1, 1), {"stride": (2, 2)}),
    ("conv2d", (8, 3, 56, 56), (64, 3, 7, 7), {"padding": (3,) * 4, "stride": (2, 2)}),
    ("conv2d", (8, 64, 14, 14), (64, 2, 3, 3), {"padding": (1,) * 4, "groups": 32}),
    ("conv2d", (8, 64, 14, 14), (64, 64, 3, 3), {"padding": (0, 0, 1, 1), "stride": (2, 2)}),
    ("conv1d", (8, 64, 100), (64, 64, 3), {"padding": (1, 1)}),
    ("conv3d", (2, 16, 8, 8, 8), (16, 16, 3, 3, 3), {"padding": (1,) * 6}),
)
EMULATED = (
    *("Epilogue", "ReductionScheme", "MatmulDescAttribute"),
    *("MatrixLayoutAttribute", "MatmulPreferenceAttribute"),
)
PRECISIONS = (("float32", "float32"), ("float32", TF32), ("float16", "float32"))
KINDS: tuple[Kind, ...] = ("conv_fprop", "conv_dgrad", "conv_wgrad")


def viewed(shape: tuple[int, ...], dtype: str, last: bool) -> View:
    """Return a view of an image whose channels are innermost, if `last`."""
    order = (0, *range(2, len(shape)), 1) if last else range(len(shape))
    array = np.empty([shape[axis] for axis in order], dtype).transpose(np.argsort(order))
    return View(None, shape, tuple(step // array.itemsize for step in array.strides), dtype)


def descriptions() -> list[Any]:
    """Return what is not read back from cuBLASLt as it was described."""
    lt = cublaslt.bindings()
    product = MatrixProduct(
        a=Matrix(7, 5, 9, 63, transposed=True),
        b=Matrix(7, 3, 8, 0),
        d=Matrix(5, 3, 6, 18),
        batch=4,
        places=((0, 0, 0),),
        swapped=True,
    )
    made = cublaslt.Described(product, "float16", "float32", "float32", 4096, True)
    words, layout = lt.MatmulDescAttribute, lt.MatrixLayoutAttribute
    wanted: list[tuple[Any, int, Any, Any, int]] = []
    for attribute, value in (
        (words.TRANSA, 1),
        (words.TRANSB, 0),
        (words.EPILOGUE, lt.Epilogue.RELU_BIAS),
        (words.BIAS_POINTER, 4096),
    ):
        dtype = lt.get_matmul_desc_attribute_dtype(attribute)
        wanted.append((lt.matmul_desc_get_attribute, made.product, attribute, dtype, value))
    for number, matrix in ((made.a, product.a), (made.b, product.b), (made.d, product.d)):
        for attribute, value in (
            (layout.ROWS, matrix.rows),
            (layout.COLS, matrix.columns),
            (layout.LD, matrix.ld),
            (layout.BATCH_COUNT, product.batch),
            (layout.STRIDED_BATCH_OFFSET, matrix.batch_stride),
            (layout.TYPE, 0 if matrix is product.d else 2),
            (layout.ORDER, lt.Order.COL),
        ):
            dtype = lt.get_matrix_layout_attribute_dtype(attribute)
            wanted.append((lt.matrix_layout_get_attribute, number, attribute, dtype, value))
    exact, rounded = (
        cublaslt.Described(product, "float32", "float32", each, None, False)
        for each in ("float32", TF32)
    )
    for other, kind in ((exact, "COMPUTE_32F"), (rounded, "COMPUTE_32F_FAST_TF32")):
        attribute, value = words.COMPUTE_TYPE, ComputeType[kind]
        dtype = lt.get_matmul_desc_attribute_dtype(attribute)
        wanted.append((lt.matmul_desc_get_attribute, other.product, attribute, dtype, value))
    asked, limits = cublaslt.preference([16, 8, 4]), lt.MatmulPreferenceAttribute
    for attribute, value in (
        (limits.MAX_WORKSPACE_BYTES, cublaslt.WORKSPACE_BYTES),
        (limits.REDUCTION_SCHEME_MASK, lt.ReductionScheme.COMPUTE_TYPE),
        (limits.MIN_ALIGNMENT_A_BYTES, 16),
        (limits.MIN_ALIGNMENT_B_BYTES, 8),
        (limits.MIN_ALIGNMENT_C_BYTES, 4),
        (limits.MIN_ALIGNMENT_D_BYTES, 4),
    ):
        dtype = lt.get_matmul_preference_attribute_dtype(attribute)
        wanted.append((lt.matmul_preference_get_attribute, asked, attribute, dtype, value))
    wrong = [
        [str(word), int(word), int(kind[word.name])]
        for mine, kind in (
            (emulated_cublaslt.ComputeType, ComputeType),
            (emulated_cublaslt.CudaDataType, CudaDataType),
            *((getattr(emulated_cublaslt, name), getattr(lt, name)) for name in EMULATED),
        )
        for word in mine
        if word != kind[word.name]
    ]
    for read, number, attribute, dtype, value in wanted:
        found, size = np.zeros(1, dtype), np.zeros(1, np.uint64)
        read(number, attribute, found.ctypes.data, found.nbytes, size.ctypes.data)
        if found[0] != value:
            wrong.append([str(attribute), int(found[0]), int(value)])
    return wrong


def plans() -> tuple[int, list[Any]]:
    """Return how many convolutions cuDNN plans, and those that it does not, or not as asked."""
    described = cudnn.bindings().create_device_properties(json.dumps(H100))
    count, wrong = 0, []
    for name, x, w, given in IMAGES:
        spec = operator(name)
        attributes = spec.normalise({**given, "bias": False})
        specs = TensorSpec(x, "float32"), TensorSpec(w, "float32")
        y = spec.bind(specs, attributes).output_specs[0].shape
        for kind in KINDS:
            for last in (False, True):
                made = {}
                for dtype, precision in PRECISIONS:
                    of = convolution(kind, attributes, *(viewed(s, dtype, last) for s in (x, w, y)))
                    try:
                        assert of is not None
                        graph = cudnn.convolving(of, dtype, device_property=described)
                        graph.plan(dtype, precision)
                        made[dtype, precision] = bytes(graph.graph.serialize())
                        count += 1
                    except Exception as error:
                        text = f"{type(error).__name__}: {error}"[:300]
                        wrong.append([name, w, kind, last, dtype, precision, text])
                exact, rounded = (made.get(("float32", each)) for each in ("float32", TF32))
                if last and given.get("groups", 1) == 1 and exact == rounded:
                    wrong.append([name, w, kind, "TF32 is planned as float32 is"])
    return count, wrong


def attentions() -> tuple[int, list[Any]]:
    """Return how many graphs of attention are valid, and what the library does not take of them.

    Its own plans are only for a GPU that is there; a name that it does not know fails as late.
    """
    described = cudnn.bindings().create_device_properties(json.dumps(H100))
    own = import_module("cudnn._compiled_module").backend_graph
    count, wrong = 0, []

    def packed(*dim: int) -> Tensor:
        return Tensor(dim, tuple(math.prod(dim[n + 1 :]) for n in range(len(dim))))

    q, k = packed(2, 4, 128, 64), packed(2, 4, 64, 64)
    for kind in HALVES:
        for causal in (False, True):
            for bias in (None, packed(1, 1, 128, 64), packed(2, 4, 128, 64)):
                of = Attention(q, k, k, q, 0.125, causal, bias)
                descent = Descent(of, q, (q, k, k))
                for name, make, given in (
                    ("sdpa", attending, of),
                    ("sdpa_backward", descending, descent),
                ):
                    try:
                        graph = make(given, kind, device_property=described).graph
                        graph.validate()
                        graph.build_operation_graph()
                        (node,) = graph.nodes
                        known = set(re.findall(r"(\w+): ", getattr(own, name).__doc__))
                        wrong += sorted({*node.inputs, *node.params} - known)
                        count += 1
                    except Exception as error:
                        wrong.append(f"{type(error).__name__}: {error}"[:300])
    return count, wrong


if __name__ == "__main__":
    wrong = descriptions()
    planned, unplanned = plans()
    found = {"descriptions": wrong, "planned": planned, "unplanned": unplanned}
    valid, unknown = attentions()
    print(json.dumps({**found, "attentions": valid, "unknown": unknown}))
