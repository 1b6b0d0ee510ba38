"""CUDA kernels compiled without a GPU, where NVIDIA's compiler is installed (extra `cuda`)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.cuda_compilers import compilers

from soapstone.dtypes import learn
from soapstone.ir.spec import operator
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.choices import Choices
from soapstone.kernels.cuda.entry import Launch
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.cuda.substrate.compiling import assembled, assembler, form, ptx
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.kernels.select import select_device
from soapstone.search.cost.gpu_resources import resources

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "kernels" / "cuda_ptx.py"
# One of each family: chains, folds by warp and block, rows, tiles of products, windows, graphs,
# what is put by index, lines, tables.
SOME = (
    *("gelu", "reduce_sum", "softmax", "matmul", "quantized_linear", "max_pool2d_grad", "spmm"),
    *("embedding_grad", "scatter_elements", "top_k", "cumsum", "resize_grad"),
)


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize("reals", ["float32", "float16", "bfloat16"])
def test_kernels_compile_without_spills_or_double_precision(reals: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *SOME, "--reals", reals],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [ast.literal_eval(line) for line in done.stdout.splitlines() if line[0] == "{"]
    within = [
        row["registers"] <= resources(row["kernel"]).registers
        and row["shared"] <= resources(row["kernel"]).shared
        for row in rows
        if "registers" in row  # where ptxas is
    ]
    assert sum(within) >= 0.8 * len(within), rows


def entry_of(dtype: str, extent: int, row: int, **attributes: bool) -> Launch:
    """Return the launch of a product of square matrices, whose rows are `row` elements apart."""
    x = Described((extent, extent), (2 * row, 2), np.dtype(learn(dtype)))
    at = operator("matmul").normalise(attributes)
    (tiled,) = [each for each in variants("matmul", "cuda") if each.name == "tiled"]
    launch: Launch = tiled.bind(Call("matmul", at, (x, x), (x,))).launches[0]
    return launch


def steps(text: str, kind: str) -> list[str]:
    """Return the operands of all steps of tensor cores, of registers that are called x."""
    step = rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{kind}\.{kind}\.f32 (.*);"
    found = [re.sub("%[a-z]+[0-9]+", "x", each) for each in re.findall(step, text)]
    return [each.replace(" ", "") for each in found]


OPERANDS = ",".join(["{x,x,x,x}", "{x,x,x,x}", "{x,x}", "{x,x,x,x}"])


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_products_of_halves_are_steps_of_tensor_cores(dtype: str, kind: str) -> None:
    launch = entry_of(dtype, 62, 63)  # rows that begin anywhere
    assert launch.kernel.name == "fragments"
    assert steps(ptx(*form(launch), (9, 0)), kind) == [OPERANDS] * 8


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_multiplies_in_registers_without_spills(dtype: str) -> None:
    """Scores of halves are made by tensor cores from copied rows, and are their next operand."""
    x, lse = (Described.like(np.empty(shape, dtype)) for shape in ((2, 128, 4, 64), (2, 4, 128)))
    at = operator("attention").normalise({"causal": True})
    (fused,) = [each for each in variants("attention", "cuda") if each.name == "fused"]
    (launch,) = fused.bind(Call("attention", at, (x, x, x), (x, lse))).launches
    text = ptx(*form(launch), (9, 0))
    halves = dtype == "float16"
    assert launch.kernel.name == ("attention_halves" if halves else "attention")
    if halves:
        assert set(steps(text, "f16")) == {OPERANDS}
        assert len(re.findall(r"cvt\.rn\.f16x2\.f32", text)) == 4 * 4  # of sixteen keys each
        assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared" in text
        assert "cp.async.cg.shared.global" in text
    ptxas = assembler()
    if ptxas is not None:
        made, needed = assembled(text, (9, 0), ptxas), resources(launch.kernel.name)
        assert made.spilled == 0 and made.shared <= needed.shared


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize("crossed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("extent", [64, 4096])
def test_tiles_of_halves_are_copied_while_others_are_multiplied(
    crossed: tuple[bool, bool], extent: int
) -> None:
    at = dict(zip(("transpose_a", "transpose_b"), crossed))
    launch = entry_of("float16", extent, extent, **at)
    many = (4, 2) if extent == 4096 else (2, 1)
    assert launch.kernel.name == ("staged" if extent == 4096 else "staged_small")
    text = ptx(*form(launch), (8, 0))
    found = steps(text, "f16")
    times, rest = divmod(len(found), 2 * many[0] * 2 * many[1])  # that the loop is unrolled
    assert times > 0 and rest == 0 and set(found) == {OPERANDS}
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", text)) >= 3 * 2
    assert "cp.async.wait_group 1" in text and "cp.async.commit_group" in text
    load = r"ldmatrix\.sync\.aligned\.m8n8\.x4%s\.shared"
    loads = [len(re.findall(load % way, text)) for way in ("", r"\.trans")]
    of_a, of_b = 2 * many[0] * times, 2 * many[1] * times
    assert loads == [
        of_a * (not crossed[0]) + of_b * crossed[1],
        of_a * crossed[0] + of_b * (not crossed[1]),
    ]
    ptxas = assembler()
    if ptxas is not None:
        made, needed = assembled(text, (8, 0), ptxas), resources(launch.kernel.name)
        assert made.spilled == 0
        assert (made.registers, made.shared) <= (needed.registers, needed.shared)


def text_of(name: str, dtype: str, *shapes: tuple[int, ...]) -> str:
    """Return the PTX of the first launch of a call that makes what has the first shape."""
    inputs = tuple(Described.like(np.empty(shape, learn(dtype))) for shape in shapes)
    spec = operator(name)
    made = spec.bind(tuple(TensorSpec(each.shape, dtype) for each in inputs), spec.normalise({}))
    outputs = tuple(Described.like(np.empty(s.shape, learn(s.dtype))) for s in made.output_specs)
    with Choices(tune=False).current():  # nothing can be measured
        _, entry = select_device(Call(name, spec.normalise({}), inputs, outputs))
    return ptx(*form(entry.launches[0]), (9, 0))


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "shapes", "at_once"),
    [
        ("gelu", ((4096, 1024),), True),
        ("add", ((64, 30, 8, 8), (30, 1, 1)), True),  # rows of one element of the second operand
        ("gelu", ((1023,),), True),  # and a rest
        ("add", ((64, 30, 7, 7), (30, 1, 1)), False),  # rows begin anywhere
    ],
)
def test_neighbours_are_loaded_and_stored_sixteen_bytes_at_a_time(
    dtype: str, name: str, shapes: tuple[tuple[int, ...], ...], at_once: bool
) -> None:
    text = text_of(name, dtype, *shapes)
    for way in ("ld", "st"):
        assert bool(re.search(rf"{way}\.global\.v4\.[fbu]32", text)) == at_once, text


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize(
    ("name", "dtype", "shapes", "pieces"),
    [  # of a thread, 16 elements at most of each operand
        ("softmax", "float32", ((64, 8192),), 4),
        ("softmax", "float16", ((64, 8192),), 2),
        ("softmax_grad", "float32", ((64, 8192), (64, 8192)), 8),
        ("rms_norm", "bfloat16", ((64, 4096), (4096,)), 4),
    ],
)
def test_rows_that_fit_are_read_once_and_written_once(
    name: str, dtype: str, shapes: tuple[tuple[int, ...], ...], pieces: int
) -> None:
    text = text_of(name, dtype, *shapes)
    wide = r"\.global\.v4\.[fbu]32"
    assert len(re.findall(f"ld{wide}", text)) == pieces
    assert len(re.findall(f"st{wide}", text)) == pieces // len(shapes)
    assert not re.findall(r"ld\.global\.[fbus]\d", text)
