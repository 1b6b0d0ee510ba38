"""What a process imports before its first answer of a file, and what of that is kept."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from soapstone.frontend.onnx.file.schema import ship

_LOADS = sys.platform == "linux" and platform.machine() == "x86_64"  # kernels without LLVM
_UNNEEDED = (
    *("onnx", "ml_dtypes", "google.protobuf", "numba", *(("llvmlite.binding",) if _LOADS else ())),
    *("sqlite3", "concurrent.futures", "importlib.metadata", "subprocess", "numpy.ma", "socket"),
    *("soapstone.kernels.cpu.onednn.quantized", "soapstone.runtime.tracing.automatic"),
    *("soapstone.search", "soapstone.frontend.layers", "soapstone.kernels.cpu.attention.heads"),
    *("soapstone.ir.ops.recurrent", "soapstone.ir.ops.graphs", "soapstone.ir.ops.windows.pooling"),
    *("soapstone.frontend.onnx.rules.learned", "soapstone.frontend.onnx.rules.training"),
)
_ANSWER = """
import dataclasses, sys
import numpy as np
made = []
dataclasses.exec = lambda *given: (made.append(1), exec(*given))  # compiles a method of a class
from soapstone import InferenceSession
with InferenceSession("m.onnx", threads=1) as session:
    print(session.run(np.full((2, 3), 2, np.float32))["y"].tolist())
print([name for name in UNNEEDED if name in sys.modules])
modules = [sys.modules[name] for name in sys.modules if name.startswith("soapstone.")]
print(len(made), sum(not hasattr(module, "__path__") for module in modules))  # without folders
"""


def _told(folder: Path) -> list[str]:
    """Return what a process tells that binds the model, with no session that was kept."""
    shutil.rmtree(folder / "cache" / "sessions", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", _ANSWER.replace("UNNEEDED", str(_UNNEEDED))],
        cwd=folder,
        env={**os.environ, "SOAPSTONE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _answer(folder: Path) -> list[str]:
    """Return what a process answers that binds the model, and what it imports for that."""
    answer, imported, counts = _told(folder)
    methods, modules = map(int, counts.split())
    assert methods < 80 and modules < (303 if imported == "[]" else 411)
    return [answer, imported]


def test_a_process_after_the_first_imports_no_onnx(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in "xy"
    }
    scale = numpy_helper.from_array(np.array([3], np.float32), "scale")
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["s"]),
        helper.make_node("LeakyRelu", ["s"], ["y"], alpha=0.5),
    ]
    graph = helper.make_graph(nodes, "g", [value["x"]], [value["y"]], [scale])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    answer = str([[6.0] * 3] * 2)
    _told(tmp_path)  # which imports more where it compiles a kernel
    shutil.rmtree(tmp_path / "cache")
    assert _answer(tmp_path)[0] == answer
    assert _answer(tmp_path) == [answer, "[]"]
    files = {
        path: json.loads(path.read_text().partition("\n")[2])  # behind its hash
        for path in tmp_path.glob("cache/onnx/*.json")
    }
    tables = sorted(files.values(), key=len)
    assert tables[0].keys() == {"newest opset"} and {":Mul:18", ":LeakyRelu:18"} <= tables[1].keys()
    kept = max(files, key=lambda path: len(files[path]))
    # What is kept for another ONNX, or cut short, is not used.
    kept.rename(kept.with_name("0" * 32 + ".json"))
    assert _answer(tmp_path)[1] != "[]"
    assert _answer(tmp_path)[1] == "[]"
    kept.write_bytes(kept.read_bytes()[:-5])
    told = _answer(tmp_path)
    assert told[0] == answer and "onnx" in told[1]
    assert _answer(tmp_path)[1] == "[]"


_SHIPPED = """
import sys
from pathlib import Path
from soapstone.cache import answers
answers.PACKAGED = Path("package")
from soapstone.frontend.onnx.file.schema import newest_opset, remember, schema
print(newest_opset(), schema("", "Conv", 17), schema("", "Gelu", 17))
remember()
print("onnx" in sys.modules, Path("cache", "onnx").exists())
"""


def test_what_onnx_declares_may_come_with_the_package(tmp_path: Path) -> None:
    ship(tmp_path / "package")
    done = subprocess.run(
        [sys.executable, "-c", _SHIPPED],
        cwd=tmp_path,
        env={**os.environ, "SOAPSTONE_CACHE": "cache"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers, imported = done.stdout.splitlines()
    assert answers.startswith(f"{onnx.defs.onnx_opset_version()} Declaration(")
    assert imported == "False False"
    assert "max_input=3" in answers and answers.endswith(" None")  # which came with opset 20
