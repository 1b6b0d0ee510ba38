"""CUDA kernels compiled without a GPU: registers, shared memory and spills of each, by operator.

    python benchmarks/kernels/cuda_ptx.py [OPERATOR ...] [--every] [--reals float16] [--save]
    python benchmarks/kernels/cuda_ptx.py matmul --loops     # needs nvidia-cuda-nvdisasm

Calls are bound to arrays that are only described, so that what is compiled is what a GPU would be
given. Each operator's first case is taken (all with --every), and for some a call of usual size,
whose launches differ; with --reals, those that take reals, in a half precision. With --loops, the
instructions of each loop of the machine code are shown, from which `search/cost/gpu_resources.py`
has what products issue. The exit code is 1 where a kernel cannot be compiled, spills registers, or
computes in double precision although no operand does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from soapstone.dtypes import learn
from soapstone.ir.errors import GraphError
from soapstone.ir.spec import Case, OpSpec, operator, operators
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.choices import Choices
from soapstone.kernels.cuda.entry import Launch
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.cuda.substrate.compiling import assembled, assembler, form, loops, ptx
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device

CAPABILITIES = ((8, 0), (9, 0))
USUAL = {
    "add": Case(("64 256 56 56", "256 1 1")),
    "gelu": Case(("8192 4096",)),
    "softmax": Case(("4096 8192",)),
    "layer_norm": Case(("8192 4096", "4096", "4096")),
    "layer_norm_grad": Case(("8192 4096", "8192 4096", "4096", "8192", "8192")),
    "rms_norm": Case(("8192 1024", "1024")),
    "softmax_grad": Case(("4096 8192",) * 2),
    "batch_norm": Case(("64 256 56 56", *["256"] * 4)),
    "batch_norm_grad": Case(("64 256 56 56", "64 256 56 56", "256", "256", "256")),
    "reduce_sum": Case(("8192 4096",), {"axes": (0,)}),
    "cross_entropy": Case(("4096 50000", "int64 4096")),
    "matmul": Case(("4096 4096", "4096 4096")),
    "attention": Case(("8 384 12 64",) * 3),
    "attention_grad": Case((*("8 384 12 64",) * 5, "8 12 384")),
    "conv2d": Case(("64 64 56 56", "64 64 3 3", "64"), {"padding": (1, 1, 1, 1)}),
    "spmm": Case(("100000 128", "int64 100001", "int32 1000000", "int64 100001", "int32 1000000")),
    "sddmm": Case(("100000 128", "50000 128", "int64 100001", "int32 1000000")),
    "top_k": Case(("64 4096",), {"k": 100, "axis": 1, "sorted": False}),
    "lstm": Case(("2 16 1024", "1024 4096", "1024 4096", "4096", "16 1024", "16 1024")),
    "lstm_grad": Case(
        (*("2 16 1024", "16 1024", "16 1024", "2 16 4096"), "2 16 1024", "1024 4096", "16 1024")
    ),
    "gru": Case(("2 16 1024", "1024 3072", "1024 3072", "3072", "3072", "16 1024")),
    "nas_cell": Case(("16 512", "16 512", "16 512", "512 4096", "512 4096", "4096")),
    "adam": Case(("4096 4096",) * 4 + ("", "int64", "bool")),
    "cumsum": Case(("4096 512",)),
    "embedding_grad": Case(("32768 128", "int64 32768"), {"vocabulary": 100000}),
}


def described(text: str) -> TensorSpec:
    """Return the spec of a case's operand, such as "int64 4 <3"."""
    words = text.split()
    dtype = words.pop(0) if words and words[0][0].isalpha() else "float32"
    return TensorSpec(tuple(int(word) for word in words if word.isdigit()), dtype)


def launches(spec: OpSpec, case: Case, reals: str = "float32") -> Iterator[Launch]:
    """Yield the launches of a call, on described arrays; none where no kernel serves it.

    reals: their type; none of halves where the operator has none, or takes none.
    """
    inputs = tuple(map(described, case.inputs))
    halves = reals != "float32"
    if halves:
        inputs = tuple(
            TensorSpec(one.shape, learn(reals)) if one.dtype == "float32" else one for one in inputs
        )
        if not any(one.dtype == reals for one in inputs):
            return
    attributes = spec.normalise(case.attributes)
    try:
        made = spec.bind(inputs, attributes).output_specs
    except GraphError:
        if halves:
            return
        raise

    def array(of: TensorSpec) -> Any:
        step, strides = np.dtype(of.dtype).itemsize, []
        for extent in of.shape[::-1]:
            strides.insert(0, step)
            step *= max(extent, 1)
        return Described(of.shape, tuple(strides), np.dtype(of.dtype))

    call = Call(spec.name, attributes, tuple(map(array, inputs)), tuple(map(array, made)))
    try:
        with Choices(tune=False).current():  # nothing can be measured
            _, entry = select_device(call)
    except ValueError:
        return
    yield from entry.launches


def save(rows: list[dict[str, Any]], chosen: list[str]) -> None:
    """Write a row for each kind of kernel and each capability: the most that one of them takes."""
    from harness import write

    made = []
    for kind, sm in sorted({(row["kernel"], row["sm"]) for row in rows}):
        own = [row for row in rows if (row["kernel"], row["sm"]) == (kind, sm)]

        def most(key: str, own: list[dict[str, Any]] = own) -> int:
            return max(row.get(key, 0) for row in own)

        made.append(
            {
                "kernel": kind,
                "sm": sm,
                "compiled": len(own),
                "of operators": len({row["operator"] for row in own}),
                "most registers": most("registers"),
                "most shared bytes": most("shared"),
                "most spilled bytes": most("spilled"),
                "failed": sum("error" in row for row in own),
            }
        )
    title = "CUDA kernels compiled without a GPU: one case an operator, by kind of kernel"
    command = " ".join(["python benchmarks/kernels/cuda_ptx.py", *chosen, "--save"])
    write("cuda_ptx", title, command, list(made[0]), made)


def main() -> int:
    """Compile, print a line a kernel, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--reals", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--loops", action="store_true", help="Show the instructions of loops.")
    parser.add_argument("--save", action="store_true", help="Write the table in RESULTS.md.")
    taken = parser.parse_args()
    ptxas, known, wrong, rows = assembler(), set(), 0, []
    if ptxas is None:
        print("ptxas not found (pip install nvidia-cuda-nvcc): PTX alone is compiled")
    for name in taken.operators or [spec.name for spec in operators()]:
        spec = operator(name)
        cases = [*spec.cases[: None if taken.every else 1]]
        cases += [USUAL[name]] if name in USUAL else []
        for case in cases:
            for launch in launches(spec, case, taken.reals):
                kernel, types = form(launch)
                if (kernel, types) in known:
                    continue
                known.add((kernel, types))
                wide = any("float64" in str(one) for one in types)
                for capability in CAPABILITIES:
                    row = {"operator": name, "kernel": kernel.name, "sm": capability[0] * 10}
                    try:
                        text = ptx(kernel, types, capability)
                        row["double"] = not wide and bool(re.search(r"\.f64\s+%", text))
                        if ptxas is not None:
                            row |= vars(assembled(text, capability, ptxas))
                        if ptxas is not None and taken.loops:
                            row["loops"] = loops(text, capability, ptxas)
                    except Exception as error:
                        row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
                    bad = row.get("error") or row.get("spilled") or row.get("double")
                    wrong += bool(bad)
                    rows.append(row)
                    print("WRONG " if bad else "", row, sep="", flush=True)
    if taken.save:
        save(rows, taken.operators)
    print(f"{len(rows)} compiled, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
