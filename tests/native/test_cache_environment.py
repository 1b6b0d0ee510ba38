"""What is known of the processor without LLVM, against what LLVM says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

import soapstone.kernels.cpu
import soapstone.native
from soapstone.cache import environment, objects
from soapstone.system import processor_identity


def test_features_that_are_asked_for_are_those_that_llvm_sees() -> None:
    folders = [Path(each.__file__ or "").parent for each in (objects, soapstone.native)]
    folders.append(Path(soapstone.kernels.cpu.__file__ or "").parent)
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    seen = binding.get_host_cpu_features()
    asked = {name for name in seen if f'"{name}"' in text}
    assert {"avx2", "lzcnt", "bmi", "avx512vnni", "avx512bf16", "sse4a"} <= asked or objects.arm()
    assert environment.features() & asked == {name for name in asked if seen[name]}


_NO_LLVM = """
import sys
from soapstone.cache import environment, objects
print(len(objects.levels()), objects.held(), len(environment.identity()))
print("llvmlite.binding" in sys.modules)
"""


@pytest.mark.skipif(not processor_identity(), reason="the system does not tell the processor")
def test_no_llvm_is_imported_to_know_the_processor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_LLVM],
        env={**os.environ, "SOAPSTONE_CACHE": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("False\n")
