"""CUDA kernels compiled without a GPU, where NVIDIA's compiler is installed (extra `cuda`)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cuda_compilers import compilers

from soapstone.kernels.cuda.substrate.resources import resources

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
        row["registers"] <= resources(row["kernel"])[0]
        and row["shared"] <= resources(row["kernel"])[1]
        for row in rows
        if "registers" in row  # where ptxas is
    ]
    assert sum(within) >= 0.8 * len(within), rows
