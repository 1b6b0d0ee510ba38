"""Training steps and inference on GPUs that are not there, through the real Numba CUDA.

    python -m programs.cuda_dry [CHECK ...]     # with libcuda_dry.c as the driver

Kernels are compiled to machine code, loaded, captured and launched as on a device. The driver
computes nothing and refuses what a driver would. Prints the outcomes as JSON: by check, None or
what is wrong.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.cuda_arrays import There
from numba import cuda
from numba.cuda import dispatcher
from programs import executor_apps, gpu_checks

from soapstone import InferenceSession
from soapstone.apps._shared.graphs import made_up
from soapstone.apps.graphs import gcn
from soapstone.dtypes import learn
from soapstone.frontend.app import app_module
from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call
from soapstone.kernels.fallback import FallbackWarning
from soapstone.kernels.registry import variants
from soapstone.native.cuda.arrays import pinned_bytes
from soapstone.native.cuda.device import Device, Lane, connect

OBJECTS = ("contexts", "streams", "events", "graphs", "execs", "allocations", "pinned", "libraries")
EVENTS = ("launches", "nodes", "graph_launches", "copies", "synchronous")
GIVEN_BACK = ("graphs", "execs", "allocations", "pinned", "events")
STEPS = 4  # the second replay of a trace is captured, the later ones are launched

_driver = ctypes.CDLL("libcuda.so.1")
_driver.dry_said.restype = ctypes.c_char_p
_driver.dry_counts.restype = ctypes.POINTER(ctypes.c_uint64)
_launch = dispatcher.launch


def launched(stream: Any, configuration: Any, kernel: Any, *arguments: Any) -> None:
    """Launch a kernel, whose arguments have to be as many and as large as its machine code says."""
    sizes = ctypes.POINTER(ctypes.c_int)()
    count = _driver.dry_parameters(ctypes.c_void_p(int(kernel.handle)), ctypes.byref(sizes))
    given = [ctypes.sizeof(x) if isinstance(x, ctypes._SimpleCData) else 8 for x in arguments]
    assert given == sizes[:count], f"parameters of {given} bytes found, {sizes[:count]} needed"
    _launch(stream, configuration, kernel, *arguments)


dispatcher.launch = launched


def counted() -> dict[str, int]:
    """Return how many objects of each kind there are, and how often else happened what."""
    found = _driver.dry_counts()
    there = {name: found[2 * n] - found[2 * n + 1] for n, name in enumerate(OBJECTS)}
    return there | {name: found[2 * len(OBJECTS) + n] for n, name in enumerate(EVENTS)}


def trained(name: str, gpus: int = 1, **options: Any) -> None:
    """Train an app for some steps: most of them launches of one graph."""
    _driver.dry_ones(1)
    before = counted()
    executor_apps.train(name, "local", None, STEPS, gpus=gpus, **options)
    after = counted()
    assert after["launches"] > before["launches"], "nothing was launched"
    assert after["graph_launches"] - before["graph_launches"] >= STEPS - 2, "no graph was launched"


def answered(name: str) -> None:
    """Run an app's network for several inputs, in a session of a GPU."""
    _driver.dry_ones(1)
    model = app_module(name).build(4, **executor_apps.APPS[name].options)
    x, _ = executor_apps.samples(name, 4)
    (only,) = [n for n, role in model.build().roles.items() if role == "input"][:1]
    given = x if isinstance(x, dict) else {only: x}
    with InferenceSession(model, gpus=1) as session:
        for _ in range(STEPS):
            for array in session.run(given).values():
                assert np.isfinite(array).all()


def graph() -> None:
    """Train a network over a graph, and infer from it."""
    _driver.dry_ones(1)
    own = made_up(60)
    splits = gcn.data(own)
    with gcn.build(60, own, hidden=16) as model:
        model.compile("adam", loss=gcn.OPTIONS["loss"], gpus=1)
        model.fit(splits.train_x, splits.train_y, batch_size=60, epochs=STEPS, progress=False)
        with InferenceSession(model, gpus=1) as session:
            session.run(splits.train_x)


def narrow() -> None:
    """Infer from a graph of bfloat16, for which kernels have a type of their own."""
    _driver.dry_ones(1)
    network, given = gpu_checks.narrow_graph("bfloat16")
    before = counted()["launches"]
    with InferenceSession(network, {"w": given["w"]}, gpus=1) as session:
        for _ in range(STEPS):
            session.run({"x": given["x"]})
    assert counted()["launches"] > before, "nothing was launched"


def tiles() -> None:
    """Multiply halves by tiles that fill the shared memory that a block may have."""
    x = There(np.ones((2048, 2048), np.float16)).array
    (tiled,) = [each for each in variants("matmul", "cuda") if each.name == "tiled"]
    entry = tiled.bind(Call("matmul", operator("matmul").normalise({}), (x, x), (x,)))
    assert entry.launches[0].kernel.name == "staged"
    lane = Lane(Device(0))
    lane.enqueue(entry)
    lane.wait()


def second() -> None:
    """Use one GPU, which is not the first: no other gets a context. Before all other checks."""
    lane = Lane(Device(1))
    pinned_bytes(8)
    lane.wait()
    assert counted()["contexts"] == 1


def peers() -> None:
    """Connect two GPUs that another library has connected."""
    connect(0, 1)
    connect.cache_clear()
    connect(0, 1)


def recurrent() -> None:
    """Launch a layer's steps, whose operands are parts of other arrays."""
    shapes = ((3, 2, 8), (8, 32), (8, 32), (32,), (2, 8), (2, 8))
    spec = operator("lstm")
    for kind in ("float32", learn("bfloat16")):
        arrays = [np.ones(shape, kind) for shape in shapes]
        results = spec.run(spec.normalise({}), *arrays)
        given, made = ([There(each) for each in side] for side in (arrays, results))
        operands = ([each.array for each in side] for side in (given, made))
        (lowered,) = variants("lstm", "cuda")
        entry = lowered.bind(Call("lstm", spec.normalise({}), *map(tuple, operands)))
        entry.enqueue()
    cuda.synchronize()


CHECKS: dict[str, Callable[[], None]] = {
    "second": second,
    "resnet": lambda: trained("resnet"),
    "resnet answers": lambda: answered("resnet"),
    "bert": lambda: trained("bert"),
    "bert answers": lambda: answered("bert"),
    "graph": graph,
    "narrow": narrow,
    "recurrent": recurrent,
    "tiles": tiles,
    "peers": peers,
    "two": lambda: trained("digits", gpus=2),
    "turns": lambda: trained("digits", gpus=2, mapper="round_robin"),
    "plan": lambda: trained("lenet", fast_memory=1_000_000),
    **{name: gpu_checks.CHECKS[name] for name in ("random", "folds", "errors", "memory")},
}


def cleared() -> dict[str, int]:
    """Return how many objects there are once what nobody has any longer is given back."""
    gc.collect()
    for gpu in cuda.gpus:
        if gpu.primary_context is not None:
            gpu.primary_context.deallocations.clear()
            gpu.primary_context.memory_manager.deallocations.clear()
    found = counted()
    return {name: found[name] for name in GIVEN_BACK}


def outcome(check: Callable[[], None]) -> str | None:
    """Run a check; return what it or the driver says is wrong, or what is left over."""
    _driver.dry_ones(0)
    said, before = len(_driver.dry_said()), cleared()
    try:
        check()
        after = cleared()
        left = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        if left.get("events", 0) <= len(cuda.gpus):  # each has a clock, which has one
            left.pop("events", None)
        assert not left, f"not given back: {left}"
    except Exception:
        return traceback.format_exc() + _driver.dry_said().decode()[said:]
    return _driver.dry_said().decode()[said:] or None


def main() -> None:
    """Run the checks that are named, or all, and print what became of each."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", FallbackWarning)
    print(json.dumps({name: outcome(CHECKS[name]) for name in sys.argv[1:] or CHECKS}))


if __name__ == "__main__":
    main()
