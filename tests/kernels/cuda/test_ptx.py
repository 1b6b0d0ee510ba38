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
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.cuda.substrate.compiling import form, ptx
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
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


@pytest.mark.skipif(not compilers(), reason="NVIDIA's compilers are not installed")
@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_products_of_halves_are_steps_of_tensor_cores(dtype: str, kind: str) -> None:
    x = Described((64, 64), (128, 2), np.dtype(learn(dtype)))
    at = {"transpose_a": False, "transpose_b": False}
    (tiled,) = [each for each in variants("matmul", "cuda") if each.name == "tiled"]
    entry = tiled.bind(Call("matmul", at, (x, x), (x,)))
    text = ptx(*form(entry.launches[0]), (9, 0))
    step = rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{kind}\.{kind}\.f32 (.*);"
    steps = re.findall(step, text)
    operands = [re.sub("%[a-z]+[0-9]+", "x", step) for step in steps]
    four, two = "{x,x,x,x}", "{x,x}"
    assert [each.replace(" ", "") for each in operands] == [f"{four},{four},{two},{four}"] * 8
