"""Compiled functions on disk follow their sources, wherever these are written."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

import soapstone.cache
import soapstone.system
from soapstone.cache.compiled import linked
from soapstone.cache.linked import object_code
from soapstone.cache.sources import closure, stamp
from soapstone.native.entries import helper, routine

# A small package with the caches of the real one: `main` inlines `middle`, and with it `helper`.
_FILES = {
    "__init__.py": "",
    "helper.py": """
from soapstone.cache.compiled import linked
FACTOR = 10
@linked(forceinline=True)
def scaled(x):
    return FACTOR * x
""",
    "middle.py": """
from .helper import (
    scaled,  # what `main` inlines
)
from soapstone.cache.compiled import njit
@njit(nogil=True)
def shifted(x):
    return scaled(x) + 1
""",
    "main.py": """
import ctypes
from soapstone import middle
from soapstone.cache.compiled import njit
from soapstone.cache import objects
made = []
compiled = objects._linked.object_code
class Counting:
    def object_code(*of):
        made.append(of)
        return compiled(*of)
objects._linked = Counting
middle_shifted = middle.shifted
@njit()
def run(x):
    return middle_shifted(x)
def call(x):
    return middle_shifted(x)
found = objects.address(call, "int64(int64)")
called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(found)
print(run(4), called(4), sum(run.stats.cache_hits.values()), 1 - len(made))
""",
    "packer.py": """
from soapstone.main import call, objects
folder = objects.packaged("x86-64")
folder.mkdir(parents=True)
objects.package(call, "int64(int64)", folder)
""",
    "factory.py": """
from numba import types
from numba.extending import intrinsic
from soapstone.cache.compiled import njit
def made(*helpers):
    helper, twice = helpers[0], helpers[-1]
    @njit()
    def run(x):
        return helper(twice(x))
    return run
def doubled(kind):
    @intrinsic
    def double(context, x):
        def code(context, builder, signature, given):
            return builder.add(given[0], given[0])
        return kind(kind), code
    return double
""",
    "user.py": """
from numba import types
from soapstone.factory import doubled, made
from soapstone.helper import scaled
for run in (made(scaled), made(scaled, doubled(types.int64))):
    print(run(4), sum(run.stats.cache_hits.values()))
""",
    "beside.py": """
import os, time
from numba.core import caching
from soapstone.cache.compiled import njit
write = caching.IndexDataCacheFile._save_index
def slowly(self, index):
    time.sleep(1.0)  # meanwhile others read the index
    write(self, index)
caching.IndexDataCacheFile._save_index = slowly
@njit()
def add(x, y):
    return x + y
for kind in os.environ["KINDS"].split():
    print(int(add(eval(kind)(30), eval(kind)(12))))
print(sum(add.stats.cache_hits.values()))
""",
    "alike.py": """
from soapstone.cache.compiled import linked, njit
def made(inner):
    @njit()
    def run(x):
        return inner(x)
    return run
less, more = linked()(lambda x: x + 1), linked()(lambda x: x + 2)
for inner in less, more:
    run = made(inner)
    print(run(4), sum(run.stats.cache_hits.values()))
""",
    "full.py": """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as on a disk that is full
import soapstone.main
""",
}


def test_a_part_of_compiled_functions_has_no_machine_code_of_its_own() -> None:
    @linked()
    def part(x: int) -> int:
        return x + 1

    @numba.njit  # type: ignore[misc, unused-ignore]
    def whole(x: int) -> int:
        return part(x) * part(2 * x)

    assert whole(3) == 28
    for of, there in ((part, False), (whole, True)):
        (made,) = of.overloads.values()
        assert (made.library.get_pointer_to_function(made.fndesc.llvm_func_name) != 0) == there


def test_a_routine_is_not_inlined_by_force_where_a_helper_calls_it_first() -> None:
    @routine
    def total(n: int) -> int:
        found = 0
        for i in range(n):
            found += i * i
        return found

    @helper
    def doubled(n: int) -> int:
        return 2 * total(n)

    def twice(n: int) -> int:
        return doubled(n) + doubled(n + 1)

    object_code(twice, "int64(int64)", "twice")
    forced = []
    for each in (total, doubled):
        (made,) = each.made[0].overloads.values()  # type: ignore[attr-defined]
        forced.append("alwaysinline" in made.library.get_llvm_str())
    assert forced == [False, True]


def test_a_part_of_compiled_functions_may_define_functions() -> None:
    @linked()
    def part(x: int) -> int:
        def more(y: int) -> int:  # which needs passes of Numba's that kernels do not
            return x + y

        return more(2 * x)

    @numba.njit  # type: ignore[misc, unused-ignore]
    def whole(x: int) -> int:
        return part(x) - 1

    assert whole(3) == 8


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "soapstone"
    folder.mkdir(parents=True)
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    shutil.copytree(Path(soapstone.cache.__file__).parent, folder / "cache")
    shutil.copy(soapstone.system.__file__, folder)
    return folder


def _run(package: Path, module: str = "main", **more: str) -> tuple[list[int], str]:
    environment = {name: value for name, value in os.environ.items() if "NUMBA" not in name}
    environment |= {
        "PYTHONPATH": str(package.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SOAPSTONE_CACHE": str(package.parent.parent / "caches"),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import soapstone.{module}"],
        env=environment,
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()], done.stderr


def test_compiled_code_is_kept_and_follows_what_it_inlines(package: Path) -> None:
    assert _run(package)[0] == [41, 41, 0, 0]
    assert _run(package)[0] == [41, 41, 1, 1]  # from disk
    helper = package / "helper.py"
    first = helper.read_text()
    helper.write_text(first.replace("FACTOR * x", "FACTOR * x * 2"))  # inlined twice over
    assert _run(package)[0] == [81, 81, 0, 0]
    helper.write_text(first.replace("FACTOR = 10", "FACTOR = 30"))  # a constant of another file
    assert _run(package)[0] == [121, 121, 0, 0]
    helper.write_text(first)
    assert _run(package)[0] == [41, 41, 1, 1]
    assert not list(package.rglob("*.nbi"))  # nothing is written beside the sources


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="levels are of x86-64"
)
def test_machine_code_of_a_package_is_of_its_sources_or_is_not_used(package: Path) -> None:
    assert _run(package, "packer")[0] == [41, 41, 0, 0]
    empty = {"SOAPSTONE_CACHE": str(package.parent.parent / "empty")}
    assert _run(package, **empty)[0] == [41, 41, 0, 1]  # found, with no cache
    assert _run(package, **empty, NUMBA_LOOP_VECTORIZE="0")[0] == [41, 41, 0, 0]
    helper = package / "helper.py"
    helper.write_text(helper.read_text().replace("FACTOR = 10", "FACTOR = 30"))
    assert _run(package, **empty)[0] == [121, 121, 0, 0]


def test_compiled_code_follows_what_a_factory_is_given(package: Path) -> None:
    """The factory's own module does not import the helper that it compiles in."""
    assert _run(package, "user")[0] == [400, 0, 80, 0]
    assert _run(package, "user")[0] == [400, 1, 80, 1]  # under the names of another process
    helper = package / "helper.py"
    helper.write_text(helper.read_text().replace("FACTOR = 10", "FACTOR = 30"))
    assert _run(package, "user")[0] == [3600, 0, 240, 0]


def test_compiled_code_of_a_program_follows_the_helpers_it_imports(package: Path) -> None:
    program = package.parent / "program.py"
    program.write_text("from soapstone.factory import made\nfrom soapstone.helper import scaled\n")
    shutil.copy(package / "helper.py", package.parent / "mine.py")
    with program.open("a") as text:
        text.write("from mine import scaled as mine\nfrom soapstone.cache.compiled import njit\n")
        text.write("@njit()\ndef run(x):\n    return scaled(x) + mine(x)\nprint(run(4))\n")
    path = {"PYTHONPATH": str(package.parent)}
    assert _run(package, "factory; import program", **path)[0] == [80]
    for file, found in ((package / "helper.py", 160), (package.parent / "mine.py", 240)):
        file.write_text(file.read_text().replace("FACTOR = 10", "FACTOR = 30"))
        assert _run(package, "factory; import program", **path)[0] == [found]


def test_processes_that_compile_at_once_keep_what_each_made(package: Path) -> None:
    """Numba by itself gives both signatures one file: of two numbers one would be nonsense."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(_run, package, "beside", KINDS=kind) for kind in ("int", "float")]
    assert [run.result()[0] for run in runs] == [[42, 0], [42, 0]]
    assert _run(package, "beside", KINDS="int float")[0] == [42, 42, 2]


def test_closures_of_functions_of_one_name_are_told_apart(package: Path) -> None:
    assert _run(package, "alike")[0] == [5, 0, 6, 0]
    assert _run(package, "alike")[0] == [5, 1, 6, 1]


def test_what_is_edited_while_a_process_runs_is_not_kept(package: Path) -> None:
    """What it has imported is not what it would read now."""
    helper = package / "helper.py"
    text = helper.read_text().replace("FACTOR = 10", "FACTOR = 30")
    (package / "editor.py").write_text(
        "import time\nimport soapstone.helper\nfrom soapstone.cache import sources\n"
        f"time.sleep(0.05)\nopen({str(helper)!r}, 'w').write({text!r})\nimport soapstone.main\n"
    )
    assert _run(package, "editor")[0] == [41, 41, 0, 0]
    assert _run(package)[0] == [121, 121, 0, 0]
    assert _run(package)[0] == [121, 121, 1, 1]


def test_settings_of_the_compiler_are_part_of_the_stamp(package: Path) -> None:
    assert _run(package)[0] == [41, 41, 0, 0]
    assert _run(package, NUMBA_LOOP_VECTORIZE="0")[0] == [41, 41, 0, 0]
    assert _run(package, NUMBA_LOOP_VECTORIZE="0")[0] == [41, 41, 1, 1]
    assert _run(package, SOAPSTONE_CHECKED="1")[0] == [41, 41, 1, 1]  # which those who call look at


def test_where_nothing_can_be_written_functions_are_compiled_and_it_is_said(package: Path) -> None:
    (package.parent / "file").write_text("")
    nowhere = str(package.parent / "file" / "caches")
    for _ in range(2):
        numbers, told = _run(package, SOAPSTONE_CACHE=nowhere)
        assert numbers == [41, 41, 0, 0]
        assert told.count("CacheWarning") == 1 and "not kept" in told


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of files")
def test_on_a_full_disk_functions_are_compiled_and_it_is_said(package: Path) -> None:
    for _ in range(2):
        numbers, told = _run(package, "full")
        assert numbers == [41, 41, 0, 0]
        assert told.count("CacheWarning") == 1 and "not kept" in told


@pytest.mark.parametrize("suffix", ["nbi", "nbc", "o"])
def test_code_that_is_cut_short_is_compiled_anew(package: Path, suffix: str) -> None:
    _run(package)
    files = list((package.parent.parent / "caches").rglob(f"*.{suffix}"))
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    numbers, told = _run(package)
    assert files and numbers[:2] == [41, 41] and 0 in numbers[2:]
    assert told.count("CacheWarning") == 1 and "compiled anew" in told
    assert _run(package) == ([41, 41, 1, 1], "")


def test_a_numba_that_keeps_code_elsewhere_is_noticed(package: Path) -> None:
    numbers, told = _run(package, NUMBA_CACHE_LOCATOR_CLASSES="InTreeCacheLocator")
    if "CacheWarning" in told:  # a Numba that knows this variable
        assert "does not keep compiled code where it is told to" in told
    assert numbers == [41, 41, 0, 0]


def test_folders_of_older_sources_are_removed(package: Path) -> None:
    family = package.parent.parent / "caches" / "compiled" / "soapstone.main"
    for number in range(12):
        (family / f"stamp {number}").mkdir(parents=True)
        os.utime(family / f"stamp {number}", (number, number))
    assert _run(package)[0] == [41, 41, 0, 0]
    left = {path.name for path in family.iterdir() if path.is_dir()}
    assert len(left) == 8 and {f"stamp {number}" for number in range(5, 12)} < left
    assert _run(package)[0] == [41, 41, 1, 1]


# ------------------------------------------------------------------ the package's own sources
def test_closures_are_what_modules_import() -> None:
    program = closure(["soapstone.runtime.tracing.program"])
    assert {"soapstone.native.intrinsics", "soapstone.cache.deferred"} <= program
    assert "soapstone.kernels.select" not in program
    winograd = closure(["soapstone.kernels.cpu.winograd.variants"], compiled=True)
    assert {"soapstone.native.entries", "soapstone.native.vectors"} <= winograd  # one named there
    assert "soapstone.ir.graph" not in winograd
    assert stamp("soapstone.runtime.tracing.program") != stamp("soapstone.native.intrinsics")


def test_there_is_one_way_to_keep_compiled_code() -> None:
    """No module asks Numba itself to cache: its stamp is of one file."""
    root = Path(soapstone.cache.__file__).parents[2]
    own = root / "soapstone" / "cache" / "compiled.py"
    for file in root.rglob("*.py"):
        if file != own and not {"tests", "build", "site-packages"}.intersection(file.parts):
            assert not re.search(r"cache=True|enable_caching", file.read_text()), file
