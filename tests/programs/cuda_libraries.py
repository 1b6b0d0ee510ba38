"""Operators by NVIDIA's libraries, of which NumPy and PyTorch do the work; in Numba's simulator.

    python tests/programs/cuda_libraries.py OPERATOR ...

What is printed is what `cuda_simulator.py` prints.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs import cuda_simulator  # isort: skip  # sets the simulator, so before Numba
from helpers import emulated_cublaslt, emulated_cudnn
from helpers.operator_checks import subject
from numba import cuda
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from soapstone.ir.spec import Case, operator
from soapstone.kernels.cuda.libraries import device

# Of two queries all keys are hidden, of one by the mask alone.
_ROWS = (-math.inf, -math.inf, -1.0, 0.5), (-math.inf,) * 4, (-math.inf, -9e4, 0.0, 1.0), (0.0,) * 4
HIDING = Case((*("1 4 2 8",) * 3, "4 4"), {"causal": True}, contents={3: _ROWS})
_GRADS = (*("2 4 2 8",) * 5, "2 2 4")
# Calls that libraries serve and no case of the operators has: (operator, case, element type).
MORE = (
    ("matmul", Case(("2 3 5", "2 5 4")), "float64"),
    ("linear", Case(("4 5", "5 3", "3"), {"bias": True, "activation": "relu"}), "float64"),
    ("matmul", Case(("2 3 8", "2 8 4")), "bfloat16"),
    ("conv2d", Case(("2 4 6 6", "4 4 3 3", "4")), "bfloat16"),
    ("attention", Case(("2 9 2 8", "2 5 2 8", "2 5 2 16")), "bfloat16"),
    ("attention", Case(("2 9 2 8", "2 5 2 8", "2 5 2 16")), "float16"),
    ("attention", Case(("1 5 2 8", "1 5 2 8", "1 5 2 8"), {"causal": True}), "float16"),
    ("attention", Case(("2 9 2 8", "2 5 2 8", "2 5 2 16", "2 1 1 5")), "float16"),
    ("attention", HIDING, "bfloat16"),
    ("attention_grad", Case(_GRADS), "float16"),
    ("attention_grad", Case((*_GRADS, "2 1 4 4"), {"causal": True}), "bfloat16"),
)

emulated_cublaslt.install()
emulated_cudnn.install()
device.SIMULATED = False
FakeCUDAArray.__cuda_array_interface__ = property(lambda self: self._ary.__array_interface__)
type(cuda.get_current_device()).id = 0

_of_cases = cuda_simulator.forms


def forms(name: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the calls of the simulator's program, and those of `MORE`."""
    yield from _of_cases(name)
    for own, case, dtype in MORE:
        if own == name:
            item = subject(operator(name), case, dtype)
            yield f"{case.inputs} {dtype} plain", item.attributes, item.arrays, item.run()


cuda_simulator.forms = forms

if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(cuda_simulator.served(name)), flush=True)
