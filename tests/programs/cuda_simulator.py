# ruff: noqa: E402
"""CUDA kernels against the references, in Numba's simulator; run in a process of its own.

    python tests/programs/cuda_simulator.py [--every] [OPERATOR ...]
    python tests/programs/cuda_simulator.py --device [--few] [OPERATOR ...]     # on a GPU

Cases are run in turn as they are and as images channels-last in tiles of larger arrays, the first
in both ways and both half precisions; some operators on sizes whose launches have several blocks.
Cases of many points, which take the simulator seconds, and those beyond the fifth are run with
--every, and on a GPU but with --few, which leaves the first. What is printed is one line of JSON an
operator: how many calls each variant serves of how many, and what is wrong. Every index into a span
is checked, and that nothing outside of outputs is written.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DEVICE = "--device" in sys.argv
if not DEVICE:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.setswitchinterval(1e-4)  # the simulator polls its threads
warnings.simplefilter("ignore")

import numpy as np
from helpers.cuda_arrays import There
from helpers.kernel_calls import FILL, around, place
from helpers.operator_checks import Subject, subject

from soapstone.dtypes import kind_of, learn
from soapstone.ir.ops.graphs.spmm import example
from soapstone.ir.spec import Case, operator, operators
from soapstone.ir.tensor import Array
from soapstone.kernels.cuda.composites import LOWERED
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

EVERY, FEW = "--every", "--few"
# At most so many cases, of so many points.
ALL, SOME = (None, math.inf), (1 if DEVICE else 5, 5000)
CASES, POINTS = ALL if EVERY in sys.argv or (DEVICE and FEW not in sys.argv) else SOME
HALVES = ("float16", learn("bfloat16"))
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-9}
# Whose halves have tensor cores, or are loaded in other numbers.
HALVED = ("matmul", "linear", "embedding_grad", "spmm", "sddmm")
# A matrix of four rows and nine columns, of which one row has no entry and one most.
OFFSETS, COLUMNS = (0, 3, 3, 35, 40), [5 * n % 9 for n in range(40)]
_ROWS, _ORDER = np.repeat([0, 2, 3], [3, 32, 5]), np.argsort(COLUMNS, kind="stable")
_BACK = np.searchsorted(np.sort(COLUMNS), range(10))
MATRIX = (OFFSETS, COLUMNS), (_BACK, _ROWS[_ORDER])
_ALL = ("p", "i", "pt", "it")
# Sizes of several blocks, and of rows that a block has to itself.
LARGER = {
    "add": [Case(("3 70 31", "70 1")), Case(("900", "900"))],
    "mul": [Case(("70 90", "90"))],
    "gelu": [Case(("2000",))],
    "transpose": [
        Case(("3 40 70",), {"permutation": (0, 2, 1)}),
        Case(("136 72",), {"permutation": (1, 0)}),
        Case(("70 2 80",), {"permutation": (2, 1, 0)}),
        Case(("bool 90 72",), {"permutation": (1, 0)}),
    ],
    "dropout": [Case(("40 30", "int64 <100"), {"rate": 0.5, "seed": 7})],
    "reduce_sum": [
        Case(("700 5",), {"axes": (0,)}),
        Case(("5 700",), {"axes": (1,)}),
        Case(("2000",), {"axes": (0,)}),
        Case(("4 6 200",), {"axes": (0, 2)}),
        Case(("700 8",), {"axes": (0,)}),
        Case(("300 5 24",), {"axes": (0, 1)}),
        Case(("3 701",), {"axes": (1,)}),
        Case(("900 20",), {"axes": (1,)}),
    ],
    "reduce_max": [Case(("9 300",), {"axes": (1,)}), Case(("300 40",), {"axes": (0,)})],
    "argmax": [Case(("3 300",), {"axis": 1})],
    "softmax": [
        *(Case((text,)) for text in ("3 300", "40 10", "2 700", "3 512", "3 17001")),
    ],
    "softmax_grad": [Case(("3 301", "3 301"))],
    "group_norm": [Case(("2 6 70", "6", "6"), {"num_groups": 2})],
    "layer_norm": [Case(("3 300", "300", "300"))],
    "layer_norm_grad": [Case(("70 40", "70 40", "40", "70", "70"), {}, (), positive=True)],
    "batch_norm": [Case(("4 3 10 10", "3", "3", "3", "3")), Case(("400 8", *["8"] * 4))],
    "mse": [Case(("1500", "1500"))],
    "cross_entropy": [
        Case(("40 100", "int64 40 <100")),
        Case(("3 701", "int64 3 <701")),
        Case(("2 16600", "int64 2 <16600")),
    ],
    "spmm": [
        example(("9 16", *_ALL, "40", "40"), MATRIX),
        example(("9 6", *_ALL), MATRIX, reduction="mean"),
    ],
    "spmm_max": [example(("9 8", *_ALL), MATRIX)],
    "sddmm": [example((f"4 {n}", f"9 {n}", "p", "i"), MATRIX) for n in (128, 602)],
    "segment_softmax": [example(("40 8", "p"), MATRIX)],
    "segment_softmax_grad": [example(("40 8", "40 8", "p"), MATRIX)],
    "cumsum": [
        Case(("9000 1",)),
        Case(("2 9000",), {"axis": 1, "exclusive": True, "reverse": True}),
        Case(("300 40",)),
        Case(("3 300",), {"axis": 1, "reverse": True}),
    ],
    "top_k": [
        Case(("2 300",), {"k": 7, "axis": 1, "sorted": False}),
        Case(("150 2",), {"k": 70, "axis": 0, "largest": False}),
        Case(("2100 2",), {"k": 3, "axis": 0}),
        Case(("2 2100",), {"k": 70, "axis": 1, "largest": False}),
        Case(("int64 2100 >=0 <9",), {"k": 40, "sorted": False}),
        Case(("int64 9 >=0 <3",), {"k": 6}),
        Case(("uint8 70 >=0 <256",), {"k": 21, "sorted": False}),
        Case(
            ("9",),
            {"k": 9},
            contents={0: (-0.0, math.nan, 0.0, math.inf, -1.5, 2.0, -math.inf, -math.nan, 2.0)},
        ),
    ],
    "gather_grad": [
        Case(("300 40", "int64 300 <70"), {"extent": 70}),
        Case(("6 40", "int64 40 <3"), {"axis": 1, "extent": 3}),
    ],
    "embedding_grad": [
        Case(("2100 8", "int64 2100 <300"), {"vocabulary": 300}),
        Case(("30 100 3", "int32 30 100 <2"), {"vocabulary": 2}),
    ],
    "embedding_bag_grad": [Case(("40 16", "int64 40 9 <50"), {"vocabulary": 50})],
    "scatter_nd": [
        Case(("3 9 8", "int64 70 2 <3", "70 8"), {"reduction": reduction})
        for reduction in ("none", "add", "mul", "max")
    ],
    "scatter_elements": [
        Case(("40 3", "int64 300 3 <40", "300 3"), {"reduction": "add"}),
        Case(("900", "int64 70 <900", "70")),
    ],
    "matmul_nbits": [
        Case(("2 90", "uint8 3 6 8 >=0 <256", "3 6", "3 6"), {"zeros": True}),
        Case(("2 9 30", "uint8 11 2 8 >=0 <256", "11 2")),
    ],
    "matmul": [
        Case(("20 40", "40 30")),
        Case(("2 40 48", "2 48 24")),
        Case(("48 20", "16 48"), {"transpose_a": True, "transpose_b": True}),
        Case(("40 19", "40 24"), {"transpose_a": True}),
    ],
    "linear": [Case(("2 11 40", "40 24", "24"), {"bias": True, "activation": "gelu"})],
    "lstm": [Case(("3 3 2", "2 12", "3 12", "12", "3 3", "3 3", "int32 3 >=1 <4"))],
    "gru": [
        Case(
            ("3 3 2", "2 9", "3 9", "9", "9", "3 3", "int32 3 >=1 <4"),
            {"reverse": True, "linear_before_reset": False},
        )
    ],
    "rnn": [Case(("3 3 2", "2 4", "4 4", "4", "3 4", "int32 3 >=1 <4"), {"reverse": True})],
    "lstm_grad": [
        Case(
            ("3 2 3", "2 3", "2 3", "3 2 12", "3 2 3", "3 12", "2 3", "int32 2 <4"),
            {"reverse": True},
        )
    ],
    "adam": [Case(("900",) * 4 + ("", "int64 <9", "bool"), {}, (), positive=True)],
}


def forms(name: str) -> Iterator[tuple[str, Mapping[str, Any], Sequence[Array], Sequence[Array]]]:
    """Yield calls: a description, attributes, operands, and what the reference makes of them."""
    spec = operator(name)
    given = [(case, subject(spec, case, "float32")) for case in spec.cases]
    few = [(case, item) for case, item in given if _points(item) <= POINTS][:CASES]
    larger = [(case, subject(spec, case, "float32")) for case in LARGER.get(name, ())]
    for number, (case, item) in enumerate((*few, *larger)):
        expected = item.run()
        what = f"{case.inputs} {dict(case.attributes)}"
        if number % 2 == 0 or case not in spec.cases:
            yield f"{what} plain", item.attributes, item.arrays, expected
        if number == 0 or number % 2:
            arrays = [place(array, "last tile") for array in item.arrays]
            yield f"{what} tile", item.attributes, arrays, expected
        if number and not (name in HALVED and case in LARGER[name]):
            continue  # halves are computed as float32 is
        for kind in HALVES:
            halves = [x.astype(kind) if x.dtype == np.float32 else x for x in item.arrays]
            if any(x.dtype == kind for x in halves):
                try:
                    expected = spec.run(item.attributes, *halves)
                except Exception:  # not an operator of halves
                    continue
                yield f"{case.inputs} {kind}", item.attributes, halves, expected


def _points(item: Subject) -> int:
    """Return how many points an operator has, reduced dims included."""
    return math.prod(dim.extent for dim in item.signature.dims)


def served(name: str) -> dict[str, Any]:
    """Run every variant of an operator; one that is lowered only where no other serves, but for the
    first call."""
    calls, names, wrong = 0, {}, []
    for what, attributes, arrays, expected in forms(name):
        calls += 1
        layout = "last tile" if what.endswith("tile") else "plain"
        found = False
        for each in variants(name, "cuda"):
            if each.name == LOWERED and calls > 1 and found:
                continue
            outputs = [place(np.full(x.shape, FILL, x.dtype), layout) for x in expected]
            inputs, made = ([There(x) for x in side] for side in (arrays, outputs))
            given = ((x.array for x in side) for side in (inputs, made))
            call = Call(name, attributes, *map(tuple, given))
            try:
                entry = each.bind(call)
                if entry is None:
                    continue
                found = True
                names[each.name] = names.get(each.name, 0) + 1
                entry.enqueue()
                code = 0 if entry.status is None else int(entry.status.copy_to_host()[0])
                assert code == 0, entry.explain(code)
                for output_there in made:
                    output_there.back()
                for output, value in zip(outputs, expected, strict=True):
                    near(
                        output,
                        value,
                        max(TOLERANCES.get(x.dtype.name, 0) for x in arrays or [value]),
                        each.name == LOWERED,
                    )
                    assert around(output), "wrote outside a tile"
            except Exception as error:
                text = " ".join(str(error).split())[:500]
                wrong.append(f"{each.name} {what}: {type(error).__name__}: {text}")
    return {"operator": name, "calls": calls, "served": names, "wrong": wrong}


def near(found: Array, wanted: Array, tolerance: float, lowered: bool) -> None:
    """Check that values are near, integers equal, and the types the same.

    What is lowered keeps halves in single precision where the reference rounds them.
    """
    assert found.dtype == wanted.dtype, f"{wanted.dtype} needed"
    if kind_of(wanted.dtype) != "f":
        np.testing.assert_array_equal(found, wanted)
        return
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    relative = tolerance > (1e-3 if lowered else 1e-2)
    most = np.abs(wanted[np.isfinite(wanted)]).max(initial=1) if relative else 1
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * most)


if __name__ == "__main__":
    named = [name for name in sys.argv[1:] if not name.startswith("--")]
    for name in named or [spec.name for spec in operators()]:
        print(json.dumps(served(name)), flush=True)
