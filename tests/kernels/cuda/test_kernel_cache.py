"""CUDA kernels on disk: a second process compiles none; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.cuda_compilers import compilers

pytestmark = pytest.mark.skipif(
    not compilers("nvJitLink"), reason="NVIDIA's compilers are not installed"
)

PROGRAM = Path(__file__).parents[2] / "programs" / "cuda_kept.py"


def compiled(folder: Path, names: Sequence[str] = ("gelu", "softmax", "cumsum")) -> dict[str, Any]:
    """Return what a process of its own did for the kernels of operators, with a cache folder."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *names],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "SOAPSTONE_CACHE": str(folder), "NUMBA_CACHE_DIR": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_second_process_finds_all_kernels_and_compiles_none(tmp_path: Path) -> None:
    first, second = compiled(tmp_path), compiled(tmp_path)
    assert (first["compiled"], first.get("cache", 0), first["told"]) == (3, 0, [])
    assert (second.get("compiled", 0), second["cache"], second["told"]) == (0, 3, [])
    assert first["hash"] == second["hash"]


def test_a_damaged_file_is_said_and_compiled_anew(tmp_path: Path) -> None:
    first = compiled(tmp_path, ["gelu"])
    (path,) = tmp_path.rglob("*.cubin")
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        path.write_bytes(damaged)
        again = compiled(tmp_path, ["gelu"])
        assert (again["compiled"], again.get("cache", 0)) == (1, 0)
        assert again["hash"] == first["hash"]
        assert len(again["told"]) == 1 and f"{path.name}: cut short" in again["told"][0]
        assert path.read_bytes() == whole


def test_what_tells_kernels_apart_names_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import cuda, types

    from soapstone.kernels.cuda.substrate.compiling import pretended
    from soapstone.kernels.cuda.substrate.folds import folds
    from soapstone.native.cuda.kernel_cache import kept

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def path(
        source: str = "text",
        values: dict[str, Any] | None = None,
        capability: tuple[int, int] = (9, 0),
        arguments: tuple[Any, ...] = (types.int64,),
        **options: Any,
    ) -> str:
        made = kept(cuda.jit(lambda n: None, **options), source, values or {})
        with pretended(capability):
            return made._cache._path(arguments).name

    same = [path(), path()]
    others = [
        path("another"),
        path(capability=(8, 0)),
        path(arguments=(types.float32,)),
        path(fastmath=True),
        path(values={"SCRATCH": 32}),
        path(values={"SCRATCH": 64}),
        path(values={"fold": folds(True)["fold_sum"]}),
        path(values={"fold": folds(True)["fold_max"]}),
        path(values={"fold": folds(False)["fold_sum"]}),
    ]
    assert len({*same, *others}) == 1 + len(others)
    monkeypatch.setattr("soapstone.native.cuda.kernel_cache.installed", lambda package: "another")
    assert path() not in {*same, *others}


def test_a_device_of_another_capability_has_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import types
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import devices

    from soapstone.kernels.cuda.substrate.compiling import pretended
    from soapstone.native.cuda.kernels import copy

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    array = types.Array(types.int8, 4, "A")

    def loaded(made: Any, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Return the code and the name that a device would be given."""
        device = SimpleNamespace(compute_capability=capability, id=capability[0])
        context = SimpleNamespace(device=device)

        def load(image: Any, *setup: Any) -> Any:
            return SimpleNamespace(get_function=lambda name: (bytes(image.code), name))

        context.create_module_image = load
        with pretended(capability):
            monkeypatch.setattr(devices, "get_context", lambda *number: context)
            monkeypatch.setattr(dispatcher, "get_current_device", lambda: device)
            return made._codelibrary.get_cufunc()

    with pretended((9, 0)):
        fresh = dispatcher._Kernel(copy.py_func, (array, array), **copy.targetoptions)
        copy._cache.save_overload((array, array), fresh)
        again = copy._cache.load_overload((array, array), None)
    assert again.argument_types == (array, array) and again.entry_name == fresh.entry_name
    assert loaded(again, (9, 0)) == (
        bytes(fresh._codelibrary.get_cubin((9, 0, "a")).code),
        again.entry_name,
    )
    code, _ = loaded(again, (8, 0))
    assert code != loaded(again, (9, 0))[0]
