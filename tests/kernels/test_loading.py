"""Kernels that are imported by operator are those that are registered when all are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = """
import json, sys
from soapstone.ir.spec import operators
from soapstone.kernels import registry
from soapstone.kernels.registry import Variant, variant, variants

@variant("relu", "before")
def before(call):
    return None

names = [spec.name for spec in operators()] + ["with_epilogue"]
if ORDER == "directly":
    import soapstone.kernels.cpu.recurrent.layers
if ORDER == "both":  # as who compiles all kernels does
    import soapstone.kernels.cpu.openblas.convolution
if ORDER == "all":
    registry.registered()
for name in sorted(names, reverse=ORDER == "reversed"):
    variants(name)
if ORDER == "one":
    print(json.dumps({"modules": [name for name in sys.modules if ".kernels.cpu." in name]}))
else:
    print(json.dumps({name: [each.name for each in variants(name)] for name in names}))
"""


def _told(order: str, cache: Path, **settings: str) -> Any:
    script = _SCRIPT.replace("ORDER", repr(order))
    if order == "one":
        script = script.replace(
            '[spec.name for spec in operators()] + ["with_epilogue"]', '["max_pool2d"]'
        )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SOAPSTONE_CACHE": str(cache), **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_variants_and_their_order_do_not_depend_on_what_is_imported_first(tmp_path: Path) -> None:
    first = _told("all", tmp_path)
    assert len(first["with_epilogue"]) > 1 and first["relu"][0] == "before"
    assert _told("sorted", tmp_path) == first  # by what the first process has kept
    assert _told("reversed", tmp_path) == first
    assert _told("all", tmp_path) == first
    assert _told("reversed", tmp_path / "empty") == first
    assert _told("directly", tmp_path / "none") == first


def test_what_is_kept_is_of_one_library(tmp_path: Path) -> None:
    first = _told("sorted", tmp_path)
    off = _told("sorted", tmp_path, SOAPSTONE_ONEDNN="off")
    assert any("onednn" in names for names in first.values()) or first == off
    assert not any("onednn" in names for names in off.values())
    assert _told("sorted", tmp_path) == first
    _told("both", tmp_path / "both")
    assert _told("sorted", tmp_path / "both") == first


def test_an_operators_kernels_alone_are_imported(tmp_path: Path) -> None:
    whole = _told("one", tmp_path)["modules"]
    some = _told("one", tmp_path)["modules"]
    assert len(some) < len(whole) / 2
    assert "soapstone.kernels.cpu.pooling.variants" in some
    assert "soapstone.kernels.cpu.attention.variants" not in some


_DECLARED = """
from soapstone.ir.ops.elementwise.pointwise import declare
declare("thrice", lambda x: x * 3.0, forms=(), laws=(), doc="3 x")
from soapstone.kernels.registry import variants
variants("max_pool2d")
print([each.name for each in variants("thrice")])
"""


def test_an_operator_that_a_program_declares_has_its_kernels(tmp_path: Path) -> None:
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _DECLARED],
            env={**os.environ, "SOAPSTONE_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.strip())
    assert told == ["['numba']"] * 2
