"""Every CUDA kernel against its operator's reference, in Numba's simulator, and on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.operator_families import families

from soapstone.kernels.select import unserved

PROGRAM = Path(__file__).parents[2] / "programs" / "cuda_simulator.py"
SECONDS = 600
ATTENTION = {f"attention_halves{part}" for part in ("", "_queries", "_keys")}


def printed(program: str, *arguments: str) -> list[Any]:
    """Return what a program of tests/programs prints, a line each, as JSON."""
    command = [sys.executable, str(PROGRAM.with_name(program)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((), id="simulated", marks=pytest.mark.simulator),
        pytest.param(("--device",), id="device", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("names"), [pytest.param(n, id=f) for f, n in families()])
def test_kernels_equal_the_reference(names: list[str], where: tuple[str, ...]) -> None:
    lines = printed(PROGRAM.name, *where, *names)
    assert [line["operator"] for line in lines] == names
    assert [line for line in lines if line["wrong"]] == []
    without = {line["operator"] for line in lines if not line["served"]}
    assert without >= set(unserved("cuda")) & set(names)


@pytest.mark.simulator
def test_products_are_right_by_every_shape_of_tile_and_in_parts() -> None:
    found = printed("cuda_products.py")
    assert len(found) == 21
    for dtype, *_, kernel, _, _ in found:
        assert kernel.startswith("product" if dtype == "float32" else "staged"), found
    assert {kernel for *_, kernel, _, _ in found} >= {"product", "product_few", "product_large"}
    assert max(parts for *_, parts, _ in found) > 1


@pytest.mark.simulator
def test_rows_of_graphs_are_folded_in_pieces_however_long_they_are() -> None:
    found = printed("cuda_rows.py")
    assert len(found) == 84
    for name, form, off, most in found:
        assert off <= 1e-6 * max(most, 1), (name, form, off, most)


@pytest.mark.simulator
def test_rows_with_infinities_are_as_the_reference_has_them_kept_or_read_again() -> None:
    found = printed("cuda_infinite_rows.py")
    assert len(found) == 42
    assert [line for line in found if line[-1]] == []


@pytest.mark.simulator
def test_attention_of_halves_is_by_tensor_cores_on_rows_in_pieces() -> None:
    found = printed("cuda_attention.py")
    assert len(found) == 2 * (4 + 3)  # forms, of which three have gradients
    for dtype, kernels, off in found:
        assert {each for each in kernels if each != "fold"} <= ATTENTION, found
        assert max(off) < (2e-3 if dtype == "float16" else 1e-2), found


@pytest.mark.simulator
def test_what_is_outside_is_told_by_the_status() -> None:
    (found,) = printed("cuda_statuses.py")
    for name, texts in found.items():
        for text in texts:
            assert text.startswith(f"{name}: ") and "found" in text and "needed" in text, (
                name,
                text,
            )


@pytest.mark.simulator
def test_attention_that_a_file_writes_out_is_one_launch() -> None:
    ((off, variants),) = printed("gpu_decoder.py")
    assert len(off) == 3 and max(off.values()) < 1e-4, off
    assert "fused" in variants, variants
