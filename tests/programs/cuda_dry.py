"""Training steps and inference on GPUs that are not there, through the real Numba CUDA.

    python -m programs.cuda_executed programs.cuda_dry [CHECK ...]     # on libcuda_dry.c

Kernels are compiled to machine code, loaded, captured and launched as on a device. The driver
executes their PTX, and refuses what a driver would. What is computed has to equal what the CPU
computes. Prints the outcomes as JSON: by check, None or what is wrong.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from helpers import graph_runs, random_graphs, random_training, training_ways
from helpers.cuda_arrays import There
from helpers.training_runs import data
from numba import cuda
from numba.cuda import dispatcher
from programs import executor_apps, gpu_checks

from soapstone import InferenceSession
from soapstone.apps._shared.graphs import made_up
from soapstone.apps.graphs import gcn
from soapstone.dtypes import learn
from soapstone.frontend.app import app_module
from soapstone.frontend.training.state import TrainingState
from soapstone.ir.interpret import interpret
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.entry import Call
from soapstone.kernels.fallback import FallbackWarning
from soapstone.kernels.registry import variants
from soapstone.native.cuda.arrays import pinned_bytes
from soapstone.native.cuda.device import Device, Lane, connect
from soapstone.runtime import TaskError

OBJECTS = ("contexts", "streams", "events", "graphs", "execs", "allocations", "pinned", "libraries")
EVENTS = ("launches", "nodes", "graph_launches", "copies", "synchronous")
GIVEN_BACK = ("graphs", "execs", "allocations", "pinned", "events")
STEPS = 4  # the second replay of a trace is captured, the later ones are launched
OFF = 2e-5  # by how much what GPUs compute may be off, of the largest element of an array
SEEDS = 6  # of random trainings and graphs

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


def trained(
    name: str,
    gpus: int = 1,
    off: float = OFF,
    steps: int = STEPS,
    noise: float = 0.0,
    **options: Any,
) -> None:
    """Train an app for some steps, most of them launches of one graph: as on a CPU.

    off: how far losses and weights may be from those of the CPU. noise: if not 0, they may be as
        far as the CPU's are from its own where inputs are off by so much.
    """
    before = counted()
    mine = executor_apps.train(name, "local", None, steps, gpus=gpus, **options)
    after = counted()
    assert after["launches"] > before["launches"], "nothing was launched"
    assert after["graph_launches"] - before["graph_launches"] >= steps - 2, "no graph was launched"
    host = {key: value for key, value in options.items() if key in ("precision", "micro_batches")}
    theirs = executor_apps.train(name, "local", 1, steps, **host)
    if noise:
        other = executor_apps.train(name, "local", 1, steps, noise=noise, **host)
        off += 4 * max(executor_apps.difference(theirs, other), abs(1 - other.loss / theirs.loss))
    np.testing.assert_allclose(mine.loss, theirs.loss, rtol=off)
    near(mine.weights, theirs.weights, off)


def answered(name: str) -> None:
    """Run an app's network for several inputs and batches, in a session of a GPU: as on a CPU."""
    model = app_module(name).build(4, **executor_apps.APPS[name].options)
    x, _ = executor_apps.samples(name, 4)
    (only,) = [n for n, role in model.build().roles.items() if role == "input"][:1]
    given = x if isinstance(x, dict) else {only: x}
    with InferenceSession(model, gpus=1) as session, InferenceSession(model) as host:
        for step in range(STEPS):
            given = {key: np.roll(array, step, 0) for key, array in given.items()}
            near(session.run(given), host.run(given))
        fewer = {key: array[:3] for key, array in given.items()}
        near(session.run(fewer), host.run(fewer))


def near(found: Mapping[str, Array], wanted: Mapping[str, Array], off: float = OFF) -> None:
    """Check that arrays are near, relative to the largest element of each."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        scale = max(float(np.abs(array).max()), 1e-3)
        np.testing.assert_allclose(found[name], array, off, off * scale, err_msg=name)


def graph() -> None:
    """Train a network over a graph, and infer from it: as on a CPU."""
    own = made_up(60)
    splits = gcn.data(own)
    ended = []
    for on in ({"gpus": 1}, {"cpus": 1}):
        with gcn.build(60, own, hidden=16) as model:
            model.compile("adam", loss=gcn.OPTIONS["loss"], seed=0, **on)
            result = model.fit(
                splits.train_x,
                splits.train_y,
                batch_size=60,
                epochs=STEPS,
                shuffle=False,
                progress=False,
            )
            with InferenceSession(model, gpus=on.get("gpus", 0)) as session:
                answers = session.run(splits.train_x)
            ended.append((np.array(result.last("loss")), model.weights(), answers))
    mine, theirs = ended
    np.testing.assert_allclose(mine[0], theirs[0], rtol=OFF)
    near(mine[1], theirs[1], 10 * OFF)  # Adam divides by what may be rounding alone
    near(mine[2], theirs[2], 10 * OFF)


def narrow() -> None:
    """Infer from a graph of bfloat16, for which kernels have a type of their own."""
    network, given = gpu_checks.narrow_graph("bfloat16")
    before = counted()["launches"]
    (wanted,) = interpret(network, given).values()
    with InferenceSession(network, {"w": given["w"]}, gpus=1) as session:
        for _ in range(STEPS):
            (found,) = session.run({"x": given["x"]}).values()
            np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    assert counted()["launches"] > before, "nothing was launched"


def tiles() -> None:
    """Multiply halves by tiles that fill the shared memory that a block may have."""
    random = np.random.default_rng(0)
    x, y = (random.integers(-2, 3, shape).astype(np.float16) for shape in ((1408, 48), (48, 1536)))
    out = np.zeros((len(x), y.shape[1]), np.float16)
    left, right, made = map(There, (x, y, out))
    (tiled,) = [each for each in variants("matmul", "cuda") if each.name == "tiled"]
    operands = (left.array, right.array), (made.array,)
    entry = tiled.bind(Call("matmul", operator("matmul").normalise({}), *operands))
    assert entry.launches[0].kernel.name == "staged", entry.launches[0].kernel.name
    lane = Lane(Device(0))
    lane.enqueue(entry)
    lane.wait()
    made.back()
    np.testing.assert_array_equal(out, x.astype(np.float32) @ y.astype(np.float32))


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
    spec, random = operator("lstm"), np.random.default_rng(0)
    for kind, off in (("float32", OFF), (learn("bfloat16"), 2e-2)):
        arrays = [random.uniform(-1, 1, shape).astype(kind) for shape in shapes]
        results = spec.run(spec.normalise({}), *arrays)
        outputs = [np.zeros_like(each) for each in results]
        given, made = ([There(each) for each in side] for side in (arrays, outputs))
        operands = ([each.array for each in side] for side in (given, made))
        (lowered,) = variants("lstm", "cuda")
        entry = lowered.bind(Call("lstm", spec.normalise({}), *map(tuple, operands)))
        entry.enqueue()
        for there, output, wanted in zip(made, outputs, results):
            there.back()
            np.testing.assert_allclose(output.astype(float), wanted.astype(float), off, off)


def status() -> None:
    """Say that a label is out of range, also in launches of a graph; other steps are as ever."""
    losses = {}
    for on in ("gpus", "cpus"):
        with gpu_checks.small() as model:
            model.compile("sgd", **{on: 1})
            x, y = data(model)
            wrong, state = np.where(np.arange(len(y)) == 2, 5, y), TrainingState(model=model)
            losses[on] = []
            for step in range(2 * STEPS):
                weights = model.weights()
                try:
                    model.trainer.step({"x": x}, wrong.astype(y.dtype) if step % 2 else y, state)
                    assert step % 2 == 0, f"step {step}: a status was lost"
                    losses[on].append(state.loss)
                except TaskError as error:
                    assert step % 2 and "label" in str(error), error
                    model.set_weights(weights)
    np.testing.assert_allclose(losses["gpus"], losses["cpus"], rtol=OFF)


def trainings() -> None:
    """Train random models, by one GPU and two, in parts, and through little memory."""
    for seed in range(SEEDS):
        case = random_training.draw(seed)
        allowed = training_ways.expected(case)
        more: dict[str, Any] = {"gpus": 1 + seed % 2}
        if seed % 3 == 1 and case.parts:
            more["micro_batches"] = 2
        if seed % 3 == 2:
            more["mapper"] = "round_robin"
        if seed == 4:
            more |= training_ways.memory(case, np.random.default_rng(seed))
        ended = training_ways.stepped(case, case.compiled(**more), evaluates=seed % 3 == 0)
        wrong = allowed.misfit(ended)
        assert not wrong, f"{more}: {wrong}\n{case}"


def graphs() -> None:
    """Infer from random graphs: what sessions of GPUs return is what the graphs mean."""
    for seed in range(SEEDS):
        sample = random_graphs.draw(seed)
        allowed = graph_runs.bounds(sample)
        given = {name: sample.values[name] for name in sample.graph.inputs(Role.INPUT)}
        weights = {name: array for name, array in sample.values.items() if name not in given}
        with InferenceSession(sample.graph, weights, gpus=1) as session:
            found = [session.run(given) for _ in range(STEPS)][-1]
        for name, output in found.items():
            wrong = allowed[name].misfit(np.asarray(output))
            assert not wrong, f"{name}: {wrong}\n{sample}"


CHECKS: dict[str, Callable[[], None]] = {
    "second": second,
    "resnet step": lambda: trained("resnet", steps=1, off=2e-4),
    "resnet": lambda: trained("resnet", noise=2.0**-23),  # batch norm over 4 samples
    "resnet answers": lambda: answered("resnet"),
    "bert": lambda: trained("bert"),
    "bert answers": lambda: answered("bert"),
    "bert in halves": lambda: trained("bert", precision="mixed_float16", off=2e-2),
    "lstm": lambda: trained("nmt"),
    "lstm answers": lambda: answered("nmt"),
    "dlrm": lambda: trained("dlrm"),
    "attention": lambda: trained("transformer"),
    "graph": graph,
    "narrow": narrow,
    "recurrent": recurrent,
    "tiles": tiles,
    "peers": peers,
    "two": lambda: trained("digits", gpus=2),
    "turns": lambda: trained("digits", gpus=2, mapper="round_robin"),
    "plan": lambda: trained("lenet", fast_memory=1_000_000),
    "parts": lambda: trained("digits", micro_batches=2),
    "status": status,
    "trainings": trainings,
    "graphs": graphs,
    **gpu_checks.CHECKS,
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
