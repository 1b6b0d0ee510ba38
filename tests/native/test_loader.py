"""Object files placed in memory without LLVM: the same functions, and what is left to LLVM."""

from __future__ import annotations

import ctypes
import math
import platform
import sys

import pytest

from soapstone.cache import objects
from soapstone.cache.linked import object_code
from soapstone.cache.loader import load
from soapstone.cache.places import root
from soapstone.native.entries import noop

HERE = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(not HERE, reason="object files of other systems are LLVM's")


def _logarithm(x: float, n: int) -> float:
    total = 0.0
    for k in range(n):
        total += math.log(x + k) * (3.25, 0.5, 7.0, -2.0, 1.5)[k % 5]
    return total


def _code() -> bytes:
    return object_code(_logarithm, "float64(float64, int64)", "logarithm")


def _called(address: int) -> float:
    kind = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_int64)
    return float(kind(address)(2.5, 11))


def test_a_function_with_constants_and_calls_is_as_llvm_loads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = _code()
    placed = load(code, "logarithm")
    assert placed is not None and b"log" in code
    assert _called(placed) == pytest.approx(_logarithm(2.5, 11), rel=1e-15)
    monkeypatch.setattr(objects, "load", lambda code, name: None)
    assert _called(objects._load(code, "logarithm")) == _called(placed)


def test_what_is_no_such_file_is_left_to_llvm() -> None:
    code = _code()
    assert load(code, "cosine") is None and load(b"", "logarithm") is None
    for at, byte in ((4, 1), (16, 3), (18, 183)):  # 32 bits; no relocatable file; an ARM processor
        other = bytearray(code)
        other[at] = byte
        assert load(bytes(other), "logarithm") is None
    for cut in range(0, len(code), 97):
        assert load(code[:cut], "logarithm") is None


def test_what_is_compiled_of_kernels_needs_no_llvm() -> None:
    assert noop().address  # at least this one is kept
    for path in sorted(root().rglob(f"*{objects.SUFFIX}"))[:300]:
        assert load(path.read_bytes()[32:], path.stem), path.name
