"""CUDA kernels on this computer's GPU: what they take, what they reach, and what was estimated.

    python benchmarks/kernels/gpu_kernels.py [OPERATOR ...] [--machine h100] [--no-write]

Calls of usual sizes, in single precision and in both halves, by every variant that serves them:
NVIDIA's libraries where the extra `cuda-libs` is installed, and kernels of soapstone's own. Times
are those of `GpuCost`: by events, many runs in one CUDA graph. "estimated us" is what `--machine`
prices the same launches at. Each row is kept in --rows as soon as it is there, and is not measured
again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

from cuda_ptx import USUAL, described
from harness import show, write

from soapstone.dtypes import learn
from soapstone.ir.spec import Case, operator
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.cuda.composites import LOWERED
from soapstone.kernels.cuda.entry import Expected, Launch
from soapstone.kernels.cuda.libraries.device import expecting
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native.cuda.arrays import launchable, uploaded
from soapstone.native.cuda.device import Device, Lane, simulated
from soapstone.native.cuda.timing import Repeated, identity
from soapstone.search.cost.database import ROUNDS, interleaved
from soapstone.search.cost.gpus import launched
from soapstone.search.cost.machine import Device as Description

SIZES: dict[str, tuple[Case, ...]] = {
    **{name: (case,) for name, case in USUAL.items()},
    "reduce_sum": (USUAL["reduce_sum"], Case(("8192 4096",), {"axes": (1,)})),
    "reduce_max": (
        Case(("8192 4096",), {"axes": (1,)}),
        Case(("262144 128",), {"axes": (1,)}),
        Case(("64 3136 64",), {"axes": (1,)}),
    ),
    "reduce_mean": (Case(("64 2048 7 7",), {"axes": (2, 3)}), Case(("33554432",), {"axes": (0,)})),
    "softmax": (USUAL["softmax"], Case(("98304 512",)), Case(("4096 50257",))),
    "log_softmax": (Case(("4096 8192",)), Case(("4096 32000",))),
    "cross_entropy": (USUAL["cross_entropy"], Case(("4096 50257", "int64 4096"))),
    "cross_entropy_grad": (Case(("", "4096 50257", "int64 4096", "4096")),),
    "rms_norm_grad": (Case(("8192 4096", "8192 4096", "4096", "8192")),),
    "group_norm": (Case(("32 256 64 64", "256", "256"), {"num_groups": 32}),),
    "group_norm_grad": (
        Case(("32 256 64 64", "32 256 64 64", "256", "32 32", "32 32"), {"num_groups": 32}),
    ),
    "instance_norm": (Case(("32 64 128 128", "64", "64")),),
    "argmax": (Case(("4096 50257",), {"axis": 1}), Case(("8192 4096",), {"axis": 1})),
    "dropout": (Case(("8192 4096", "int64"), {"rate": 0.1, "seed": 7}),),
    "tanh": (Case(("8192 4096",)),),
    "silu": (Case(("8192 4096",)),),
    "erf": (Case(("8192 4096",)),),
    "exp": (Case(("8192 4096",)),),
    "gelu_grad": (Case(("8192 4096",) * 2),),
    "where": (Case(("bool 8192 4096", "8192 4096", "8192 4096")),),
    "cast": (Case(("8192 4096",), {"to": "float16"}),),
    "transpose": (
        Case(("8192 4096",), {"permutation": (1, 0)}),
        Case(("8 512 12 64",), {"permutation": (0, 2, 1, 3)}),
    ),
    "matmul": (
        *(Case((f"{n} {n}", f"{n} {n}")) for n in (512, 2048, 4096, 8192)),
        Case(("16 4096", "4096 4096")),
        Case(("64 65536", "65536 64")),
        Case(("4096 4096", "4096 4096"), {"transpose_b": True}),
        Case(("96 512 64", "96 64 512")),
    ),
    "conv2d": (
        USUAL["conv2d"],
        Case(("64 256 14 14", "256 256 3 3", "256"), {"padding": (1, 1, 1, 1)}),
        Case(("64 256 56 56", "64 256 1 1", "64")),
    ),
    "attention": (
        Case(("8 512 12 64",) * 3),
        Case(("2 4096 16 64",) * 3, {"causal": True}),
        Case((*("8 512 12 64",) * 3, "8 1 1 512")),
    ),
    "attention_grad": (
        Case((*("8 512 12 64",) * 5, "8 12 512")),
        Case((*("2 4096 16 64",) * 5, "2 16 4096"), {"causal": True}),
    ),
}
TYPES = ("float32", "float16", "bfloat16")
COLUMNS = ("operator", "operands", "type", "variant", "us", "estimated us", "GB/s", "TFLOP/s")


def specs(name: str, case: Case, reals: str) -> tuple[Any, ...] | None:
    """Return attributes, and the specs of inputs and outputs; None where a type is not taken."""
    spec = operator(name)
    inputs = tuple(map(described, case.inputs))
    if reals != "float32":
        made = [TensorSpec(x.shape, learn(reals)) if x.dtype == "float32" else x for x in inputs]
        inputs = tuple(made)
    attributes = spec.normalise(case.attributes)
    try:
        bound = spec.bind(inputs, attributes)
    except ValueError:
        return None
    return attributes, inputs, bound.output_specs, spec.flops(bound, inputs, attributes)


def filled(spec: TensorSpec, bound: str) -> np.ndarray[Any, Any]:
    """Return numbers of a spec, integers below what a case's text says."""
    rng, dtype = np.random.default_rng(3), np.dtype(learn(spec.dtype))
    if spec.is_float:
        return rng.random(spec.shape, np.float32).astype(dtype)
    below = next((int(word[1:]) for word in bound.split() if word[0] == "<"), 2)
    return rng.integers(0, max(below, 1), spec.shape).astype(dtype)


def rows(name: str, case: Case, reals: str, lane: Lane, machine: Description) -> Iterator[Any]:
    """Yield a row for each variant that serves a call."""
    found = specs(name, case, reals)
    if found is None:
        return
    attributes, ins, outs, flops = found
    with lane.device:
        given = tuple(launchable(uploaded(filled(x, t))) for x, t in zip(ins, case.inputs))
        made = tuple(launchable(uploaded(np.zeros(x.shape, learn(x.dtype)))) for x in outs)
    nbytes = sum(x.nbytes for x in (*ins, *outs))
    served = 0
    for each in variants(name, "cuda"):
        if each.name == LOWERED and served:
            continue  # its primitives are kernels of their own
        row = {"operator": name, "operands": ", ".join(case.inputs), "type": reals}
        row |= {"variant": each.name, "attributes": str(dict(case.attributes))}
        try:
            with lane.device:
                entry = each.bind(Call(name, attributes, given, made))
            if entry is None:
                continue
            served += 1
            work = Repeated(lane, [entry])
            us = interleaved([work.us], 1 if simulated() else ROUNDS)[0].us
            row |= {"us": us, "GB/s": nbytes / us / 1e3, "TFLOP/s": flops / us / 1e6}
            row |= {"launches": len(entry.launches)}
        except Exception as error:  # the next ones are told all the same
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        estimated = estimate(each, Call(name, attributes, given, made), flops, nbytes, machine)
        if estimated is not None:
            row["estimated us"] = estimated
        yield row


def estimate(
    variant: Any, call: Call, flops: float, nbytes: float, machine: Description
) -> float | None:
    """Return what a variant's launches are priced at, or None where it declines what is described.

    call: on a GPU's arrays, of which shapes, strides and types are taken.
    """
    inputs, outputs = (
        tuple(Described(x.shape, x.strides, x.dtype) for x in side)
        for side in (call.inputs, call.outputs)
    )
    assert machine.gpu is not None
    with expecting(variant.name in ("cublaslt", "cudnn")):
        entry = variant.bind(Call(call.operator, call.attributes, inputs, outputs))
    if entry is None:
        return None
    works = [each for each in entry.launches if isinstance(each, Launch | Expected)]
    about = machine.gpu, machine.rate, machine.memory_rate, call, variant.name
    priced = launched(*about, works, flops, nbytes)
    return sum(machine.launch_us + each.busy_us for each in priced)


def main() -> None:
    """Measure what is not yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", help="by default all that have usual sizes")
    parser.add_argument("--machine", default="h100", help="whose prices stand beside")
    parser.add_argument("--rows", type=Path, help="where rows are kept, a line each")
    parser.add_argument("--no-write", action="store_true", help="leave results and tables alone")
    taken = parser.parse_args()
    lane, machine = Lane(Device(0)), Description.load(taken.machine)
    about = identity(lane.device)
    file = taken.rows or Path(tempfile.gettempdir()) / "soapstone" / "gpu_kernels.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [row for row in map(json.loads, lines) if row["gpu"] == about]
    known = {row["call"] for row in kept}
    for name in taken.operators or SIZES:
        for case in SIZES[name]:
            for reals in TYPES:
                call = f"{name} {case.inputs} {dict(case.attributes)} {reals}"
                if call in known:
                    continue
                new = [
                    {**row, "call": call, "gpu": about}
                    for row in rows(name, case, reals, lane, machine)
                ]
                with file.open("a") as out:  # those of a call together
                    out.write("".join(json.dumps(row) + "\n" for row in new))
                for row in new:
                    show({key: row[key] for key in (*COLUMNS, "error") if key in row})
                kept += new
    failed = [row for row in kept if "error" in row]
    print(f"{len(kept)} rows, {len(failed)} of them failed")
    if not taken.no_write and kept:
        title = "CUDA kernels on a GPU, and their prices"
        good = [row for row in kept if math.isfinite(row.get("us", math.inf))]
        command = f"python benchmarks/kernels/gpu_kernels.py --machine {taken.machine}"
        write("gpu_kernels", title, f"{command}, on {about}", COLUMNS, good)


if __name__ == "__main__":
    main()
