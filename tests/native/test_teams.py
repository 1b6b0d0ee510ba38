"""Teams of threads: every part of a region once, whoever is late, and what OpenMP says of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from soapstone.native.threads import openmp, teams
from soapstone.native.threads.linking import replace
from soapstone.system import usable_cores

pytestmark = pytest.mark.skipif(not teams.supported(), reason="OpenMP is the system's here")
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "GOMP_parallel": (BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),
    "GOMP_parallel_start": (BODY, ctypes.c_void_p, ctypes.c_uint),
    "GOMP_loop_static_start": (*[ctypes.c_long] * 4, *[ctypes.POINTER(ctypes.c_long)] * 2),
    "GOMP_loop_static_next": (*[ctypes.POINTER(ctypes.c_long)] * 2,),
}


def call(name: str, *arguments: object) -> int:
    """Call one of OpenMP's functions as a library does."""
    found = openmp.functions()
    assert found is not None
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS.get(name, ()))
    return int(kind(found[name])(*arguments))


def region(parts: int, body: Callable[[], object]) -> None:
    """Run a region; what a part raises is raised."""
    errors: list[BaseException] = []

    def guarded(_: object) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    call("GOMP_parallel", BODY(guarded), None, parts, 0)
    if errors:
        raise errors[0]


def system_threads() -> int:
    """Return how many threads this process has, those of C included."""
    return len(list(Path("/proc/self/task").iterdir()))


def place() -> tuple[int, int]:
    return call("omp_get_thread_num"), call("omp_get_num_threads")


@pytest.mark.parametrize("parts", [1, 2, 3, 9, 40])
def test_every_part_is_run_once(parts: int) -> None:
    for _ in range(20):
        seen: list[tuple[int, int]] = []
        region(parts, lambda seen=seen: seen.append(place()))
        assert sorted(seen) == [(part, parts) for part in range(parts)]
    assert place() == (0, 1) and not call("omp_in_parallel")


def test_the_older_calls_run_the_first_part_outside() -> None:
    seen: list[tuple[int, int]] = []
    body = BODY(lambda _: seen.append(place()))
    call("GOMP_parallel_start", body, None, 3)
    body(None)
    call("GOMP_parallel_end")
    assert sorted(seen) == [(0, 3), (1, 3), (2, 3)]


def test_a_region_within_a_part_is_one_part() -> None:
    seen: list[object] = []

    def outer() -> None:
        before = place()
        region(4, lambda: seen.append((place(), call("omp_in_parallel"))))
        assert place() == before

    region(3, outer)
    assert seen == [((0, 1), 1)] * 3


def test_late_members_leave_their_parts_to_others() -> None:
    """Parts of a moment, many more than cores: they do not wait for a thread each."""
    most = 0
    for _ in range(50):
        ran: Counter[int] = Counter()
        region(16, lambda ran=ran: ran.update([threading.get_native_id()]))
        assert ran.total() == 16
        most = max(most, *ran.values())
    assert most > 1


@pytest.mark.parametrize("parts", [2, 5])
def test_a_barrier_holds_all_parts(parts: int) -> None:
    for _ in range(20):
        arrived: list[int] = []

        def body(arrived: list[int] = arrived) -> None:
            for round_ in range(1, 4):
                arrived.append(round_)
                call("GOMP_barrier")
                assert arrived.count(round_) == parts
                call("GOMP_barrier")

        region(parts, body)


@pytest.mark.parametrize(
    ("first", "last", "step"), [(0, 10, 1), (3, 50, 4), (10, -7, -3), (0, 1, 1), (5, 5, 1)]
)
@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_static_loops_are_cut_as_openmp_says(
    first: int, last: int, step: int, chunk: int, parts: int
) -> None:
    """Blocks as even as can be, or chunks in turn. Source: OpenMP 5.2, table 11.1"""
    ran: dict[int, list[int]] = {}

    def body() -> None:
        begin, end = ctypes.c_long(), ctypes.c_long()
        mine: list[int] = []
        bounds = ctypes.byref(begin), ctypes.byref(end)
        more = call("GOMP_loop_static_start", first, last, step, chunk, *bounds)
        while more & 0xFF:
            mine += range(begin.value, end.value, step)
            more = call("GOMP_loop_static_next", *bounds)
        call("GOMP_loop_end_nowait")
        ran[call("omp_get_thread_num")] = mine

    region(parts, body)
    whole = list(range(first, last, step))
    if chunk:
        chunks = [whole[at : at + chunk] for at in range(0, len(whole), chunk)]
        assert ran == {part: list(chain(*chunks[part::parts])) for part in range(parts)}
    else:
        assert list(chain(*(ran[part] for part in range(parts)))) == whole
        sizes = [len(ran[part]) for part in range(parts)]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_threads_are_set_for_the_calling_thread_alone() -> None:
    before = openmp.set_threads(3)
    try:
        assert call("omp_get_max_threads") == 3
        seen: list[int] = []
        region(0, lambda: seen.append(call("omp_get_num_threads")))
        assert seen == [3, 3, 3]
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(call("omp_get_max_threads")))
        thread.start()
        thread.join()
        assert other != [3]
    finally:
        assert openmp.set_threads(before) == 3


@pytest.mark.skipif(usable_cores() < 2, reason="there is one core")
def test_members_keep_off_the_core_of_their_leader() -> None:
    cores = os.sched_getaffinity(0)
    found: list[set[int]] = []
    leader = threading.get_native_id()

    def body() -> None:
        if threading.get_native_id() != leader:
            found.append(os.sched_getaffinity(0))
        call("GOMP_barrier")  # so that the leader does not run both

    for _ in range(5):
        region(2, body)
    assert found and all(mask < cores for mask in found)
    assert os.sched_getaffinity(0) == cores


@pytest.mark.skipif(usable_cores() < 2, reason="there is one core")
def test_a_member_that_does_not_run_goes_on_where_its_leader_waits() -> None:
    found: list[set[int]] = []
    leader = threading.get_native_id()

    def body() -> None:
        before = os.sched_getaffinity(0)
        call("GOMP_barrier")
        if threading.get_native_id() != leader:
            time.sleep(0.1)  # as if another process had its core
            found.extend([before, os.sched_getaffinity(0)])

    for _ in range(20):  # the leader may meanwhile have gone to the member's core
        region(2, body)
        before, displaced = found[-2:]
        if not displaced & before:
            break
    assert len(displaced) == 1 and not displaced & before
    region(2, body)
    assert len(found[-2]) == len(before)  # the leader may have moved, and its members off its core


@pytest.mark.skipif(usable_cores() < 2, reason="there is one core")
def test_a_leader_that_sleeps_looks_for_members_that_stop_later() -> None:
    found: list[set[int]] = []
    leader = threading.get_native_id()

    def body() -> None:
        before = os.sched_getaffinity(0)
        call("GOMP_barrier")
        if threading.get_native_id() != leader:
            until = time.monotonic() + 0.03
            while time.monotonic() < until:
                pass
            time.sleep(0.2)
            found.append(os.sched_getaffinity(0) - before)

    for _ in range(20):  # the leader may meanwhile have gone to the member's core
        region(2, body)
        if found[-1]:
            break
    assert len(found[-1]) == 1


def test_a_process_without_threads_says_so() -> None:
    """Parts that wait for each other would wait for ever."""
    code = """
        import resource
        from pathlib import Path
        from test_teams import call, region

        region(2, lambda: call("GOMP_barrier"))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (2 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        region(40, lambda: call("GOMP_barrier"))
    """
    done = python(code, PYTHONPATH=str(Path(__file__).parent))
    assert done.returncode == -signal.SIGABRT
    assert "OMP_NUM_THREADS" in done.stderr


def test_many_leaders_have_teams_which_end_with_them() -> None:
    began = system_threads()
    counts: list[int] = []

    def lead() -> None:
        ran: list[int] = []
        for _ in range(100):
            region(3, lambda: ran.append(0))
        counts.append(len(ran))

    leaders = [threading.Thread(target=lead) for _ in range(6)]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    assert counts == [300] * 6
    deadline = time.monotonic() + 30
    while system_threads() > began and time.monotonic() < deadline:
        time.sleep(0.01)
    assert system_threads() <= began


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that compute without end."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def test_beside_other_processes_every_part_is_run_once() -> None:
    """Members lose their core in the midst of parts, and go on elsewhere."""
    with busy(2 * min(usable_cores(), 4)):
        until = time.monotonic() + 2
        while time.monotonic() < until:
            seen: list[int] = []

            def body(seen: list[int] = seen) -> None:
                time.sleep(0)  # others may have the interpreter
                seen.append(call("omp_get_thread_num"))

            region(2, body)
            assert sorted(seen) == [0, 1]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_forked_process_makes_teams_of_its_own() -> None:
    code = """
        import os
        from test_teams import call, region

        def both():
            met = []
            region(2, lambda: (call("GOMP_barrier"), met.append(1)))
            return len(met)

        assert both() == 2
        child = os.fork()
        if child == 0:
            os._exit(both())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), both())
    """
    assert run(code, PYTHONPATH=str(Path(__file__).parent)) == "2 2"


def test_users_say_how_threads_wait() -> None:
    code = """
        from soapstone.native.threads import openmp

        openmp.functions()
        print(openmp.described())
    """
    said = {policy: run(code, OMP_WAIT_POLICY=policy) for policy in ("passive", "ACTIVE", "")}
    assert list(said.values()) == [f"teams awake {ns} ns" for ns in (0, 10_000_000, 80_000)]


@pytest.mark.onednn
def test_a_library_calls_teams_or_is_left_as_it_was() -> None:
    from soapstone.kernels.cpu.onednn import library

    assert openmp.adopt(library.library())
    few = {"GOMP_barrier": 1}
    assert not replace(library.library(), few, ("GOMP_", "omp_"))
    assert not replace(library.library(), {}, ())
    assert openmp.adopt(library.library())


def test_threads_that_ask_at_once_prepare_teams_once() -> None:
    """Of two keys of threads' words, functions might each know one of their own."""
    code = """
        import ctypes, os, threading
        from soapstone.native.threads import openmp, teams

        keys = []
        made = teams._made
        teams._made = lambda *of: (keys.append(1), made(*of))
        ready = threading.Barrier(8)
        ask = lambda: (ready.wait(), openmp.functions())
        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        print(len(keys))
    """
    assert run(code) == "1"


def test_functions_may_be_loaded_before_teams_are_prepared() -> None:
    """As those who compile all kernels ahead do."""
    code = """
        import ctypes
        from soapstone.native.threads import openmp

        loaded = {name: function.address for name, function in openmp.FUNCTIONS.items()}
        assert openmp.functions() == loaded
        print(ctypes.CFUNCTYPE(ctypes.c_int)(loaded["omp_get_max_threads"])())
    """
    assert run(code, OMP_NUM_THREADS="3") == "3"


def test_a_process_ends_while_a_thread_of_it_runs_regions() -> None:
    """The interpreter frees what it has while the thread, and its members, run on."""
    code = """
        import ctypes, threading, types
        from soapstone.native import entries, memory
        from soapstone.native.threads import parallel
        from soapstone.system import address

        body = types.SimpleNamespace(address=address(ctypes.CDLL(None).sched_yield))
        entry = parallel.parallel_for(body, memory.pack(), 4, 4)
        assert memory.run(entry) == 0
        for _ in range(2):
            entry = entries.sequence([entry] * 3000)
        threading.Thread(target=memory.run, args=(entry,), daemon=True).start()
    """
    run(code)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler of C")
@pytest.mark.parametrize("region", ["GOMP_barrier", "__kmpc_barrier"])
def test_a_library_that_calls_others_regions_is_left_as_it_was(region: str, tmp_path: Path) -> None:
    """Of LLVM's OpenMP, whose questions have GNU's names: its threads would all be the first."""
    (tmp_path / f"{region}.c").write_text(
        f"int omp_get_thread_num(void) {{ return 7; }} void {region}(void) {{}}"
    )
    (tmp_path / "asks.c").write_text(
        f"int omp_get_thread_num(void); void {region}(void);"
        f"int ask(void) {{ {region}(); return omp_get_thread_num(); }}"
    )
    against = ("-L.", f"-l{region}", f"-Wl,-rpath,{tmp_path}")
    for name, options in {region: (), "asks": against}.items():
        made = ["gcc", "-shared", "-fPIC", "-o", f"lib{name}.so", f"{name}.c", *options]
        subprocess.run(made, check=True, cwd=tmp_path)
    own = getattr(os, "RTLD_DEEPBIND", 0)  # other libraries of the process may have such names
    library = ctypes.CDLL(str(tmp_path / "libasks.so"), mode=os.RTLD_LOCAL | own)
    ours = region.startswith("GOMP_")
    assert openmp.adopt(library) is ours
    assert library.ask() == (0 if ours else 7)
