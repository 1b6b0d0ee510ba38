"""Graphs priced for described GPUs: the launches that would run there, and what bounds each."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import python
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.frontend.memory_plans import Launches
from soapstone.frontend.strategies.finding import graph_of, machine_of, simulated
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.files.graphs import save_graph
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Role
from soapstone.kernels import registry
from soapstone.runtime.machines.machine import COPIER, CUDA, Link, Machine, Memory, Processor
from soapstone.search.cost import machine as machines
from soapstone.search.cost.gpu_resources import FUSED, resources
from soapstone.search.cost.gpus import BUSY_THREADS, HOST
from soapstone.search.cost.machine import Device, DeviceError, RooflineCost
from soapstone.search.placement.find import TIME, memory_plan

pytest.importorskip("numba.cuda", reason="pip install soapstone[cuda]")
GPUS = ("a100", "h100", "h200")
H100 = Device.load("h100")
LOADED = resources("pointwise").loaded

# Operators by name: attributes and operands; n is a batch, and w a weight's operand.
CALLS = {
    "relu": ({}, ["n 3000"]),
    "add": ({}, ["n 40 7", "n 40 7"]),
    "softmax": ({}, ["n 300"]),
    "layer_norm": ({}, ["n 77", "w 77", "w 77"]),
    "reduce_sum": ({"axes": (0,)}, ["n 65"]),
    "reduce_max": ({"axes": (1,)}, ["n 5000"]),
    "matmul": ({}, ["n 130", "w 130 70"]),
    "linear": ({}, ["n 130", "w 130 70", "w 70"]),
    "conv2d": ({"padding": (1, 1, 1, 1)}, ["n 8 14 14", "w 24 8 3 3", "w 24"]),
    "max_pool2d": ({"kernel": (2, 2), "stride": (2, 2)}, ["n 8 14 14"]),
    "transpose": ({"permutation": (0, 2, 1)}, ["n 30 40"]),
    "cumsum": ({"axis": 1}, ["n 40"]),  # which has no kernel here
}


@pytest.fixture(autouse=True)
def unserved(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.variants("cumsum", "cuda")  # which loads all
    monkeypatch.setitem(registry._VARIANTS, ("cumsum", "cuda"), [])


@pytest.fixture(autouse=True, params=[False])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Say whether NVIDIA's libraries are installed; nothing depends on whether they are."""
    found = bool(request.param)
    monkeypatch.setattr(machines, "libraries_installed", lambda: found)
    return found


either = pytest.mark.parametrize("libraries", [False, True], indirect=True)


def apply(builder: GraphBuilder, name: str, batch: int, first: str | None = None) -> str:
    """Return the result of an operator of `CALLS`; first: its first operand, else a new input."""
    attributes, operands = CALLS[name]
    given = []
    for number, text in enumerate(operands):
        of, *extents = text.split()
        shape = (*((batch,) if of == "n" else ()), *map(int, extents))
        role = Role.INPUT if of == "n" else Role.PARAMETER
        if number == 0 and first is not None:
            given.append(first)
        else:
            given.append(builder.input(builder.unique("x"), shape, role=role))
    return builder.apply(name, *given, **attributes)[0]


def alone(name: str, batch: int) -> Graph:
    builder = GraphBuilder(name)
    builder.output(apply(builder, name, batch))
    return builder.build()


@either
@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("name", CALLS)
def test_twice_the_batch_costs_at_most_twice_and_a_launch(name: str, device: str) -> None:
    model = RooflineCost(device)
    for batch in (1, 3, 50, 64, 131, 132, 700, 5000):
        one, two = (model.cost(alone(name, n), {}).time_us for n in (batch, 2 * batch))
        assert two <= 2 * one + model.device.launch_us, (batch, one, two)
        assert one <= 1.5 * two, (batch, one, two)  # more threads share what weights take


@either
@pytest.mark.parametrize("batch", [1, 64, 1000, 20_000])
@pytest.mark.parametrize("producer", ["relu", "add", "linear", "conv2d"])
def test_what_is_fused_is_not_slower(producer: str, batch: int, libraries: bool) -> None:
    model = RooflineCost(H100)
    builder = GraphBuilder("fused")
    made = apply(builder, producer, batch)
    shape = builder.spec(made).shape
    builder.output(builder.apply("tanh", *builder.apply("sigmoid", made))[0])
    fused = model.cost(builder.build(), {})
    apart = model.cost(alone(producer, batch), {})
    for name in ("sigmoid", "tanh"):
        builder = GraphBuilder(name)
        builder.output(*builder.apply(name, builder.input("x", shape)))
        apart += model.cost(builder.build(), {})
    by_library = libraries and producer in ("linear", "conv2d")  # what follows is a pass
    biased = by_library and producer == "conv2d"  # cuDNN's: its bias is a pass, too
    assert (fused.launches, apart.launches) == (1 + by_library, 3 + biased)
    assert fused.bytes < apart.bytes
    assert fused.time_us <= apart.time_us


@either
@pytest.mark.parametrize("device", GPUS)
def test_few_elements_take_a_launch_and_many_reach_the_rates(device: str) -> None:
    model = RooflineCost(device)
    launch = model.device.launch_us
    for name in ("relu", "softmax", "matmul", "max_pool2d"):
        assert launch < model.cost(alone(name, 1), {}).time_us < 3 * launch
    large = model.cost(alone("relu", 1 << 17), {})
    floor = launch + 1e6 * large.bytes / model.device.memory_rate
    assert floor <= large.time_us < 1.01 * floor
    builder = GraphBuilder("product")
    x, y = (builder.input(name, (8192, 8192)) for name in "xy")
    builder.output(*builder.apply("matmul", x, y))
    product = model.cost(builder.build(), {})
    floor = launch + 1e6 * product.flops / model.device.product_rate("float32")
    assert floor <= product.time_us < 1.06 * floor


def test_blocks_that_are_few_or_too_many_for_a_round_leave_multiprocessors_idle() -> None:
    gpu = H100.gpu
    assert gpu is not None

    def arithmetic(blocks: int, threads: int = BUSY_THREADS) -> float:
        return gpu.shares(blocks, threads, 8, H100.memory_rate, LOADED)[0]

    count = gpu.multiprocessors
    assert arithmetic(1) == pytest.approx(1 / count)
    assert arithmetic(count) == arithmetic(2 * count) == 1
    assert arithmetic(count + 1) == pytest.approx((count + 1) / (2 * count))
    assert arithmetic(count, BUSY_THREADS // 4) == pytest.approx(1 / 4)
    assert arithmetic(2 * count, BUSY_THREADS // 4) == pytest.approx(1 / 2)

    def traffic(blocks: int, resident: int) -> float:
        return gpu.shares(blocks, 256, resident, H100.memory_rate, LOADED)[1]

    needed = H100.memory_rate * gpu.latency_us * 1e-6  # bytes under way, by Little's law
    assert traffic(10, 8) == pytest.approx(10 * 256 * LOADED / needed)
    assert traffic(10_000, 1) == pytest.approx(count * 256 * LOADED / needed)
    assert traffic(10_000, 8) == 1


def test_what_a_multiprocessor_holds_is_bound_by_its_least_resource() -> None:
    gpu = H100.gpu
    assert gpu is not None
    assert gpu.resident(32, 16, 0) == gpu.blocks == 32
    assert gpu.resident(256, 32, 0) == 2048 // 256
    assert gpu.resident(256, 128, 0) == 65536 // (128 * 256)
    assert gpu.resident(64, 32, 100_000) == 2
    assert gpu.resident(1024, 255, 0) == 1


def test_an_operator_without_a_kernel_costs_copies_the_host_and_the_graph_of_the_step() -> None:
    model, gpu = RooflineCost(H100), H100.gpu
    assert gpu is not None
    builder = GraphBuilder("mixed")
    x = builder.input("x", (1000, 1000))
    first = builder.apply("relu", x)[0]
    builder.output(*builder.apply("cumsum", *builder.apply("softmax", first), axis=1))
    graph = builder.build()
    found = model.launches(graph, {})
    hosted = [(us, each) for _, us, each in found if each.kernel == HOST]
    assert [each.operator for _, each in hosted] == ["cumsum"]
    copies = 2 * (gpu.host.latency_us + 1e6 * 4e6 / gpu.host.bytes_per_s)
    assert hosted[0][0] > copies + 1e6 * 8e6 / gpu.host.memory_bytes_per_s
    assert all(us >= gpu.untraced_us for _, us, _ in found)
    assert model.cost(graph, {}).time_us == pytest.approx(sum(us for _, us, _ in found))


def test_launches_of_a_composite_have_the_operations_of_what_it_is_lowered_to() -> None:
    builder = GraphBuilder("attention")
    q, k, v = (builder.input(name, (2, 8, 4, 32)) for name in "qkv")  # few queries: primitives
    builder.output(*builder.apply("attention", q, k, v))
    found = RooflineCost(H100).launches(builder.build(), {})
    products = [each for _, _, each in found if each.kernel == "product"]
    assert [each.flops for each in products] == [2 * 2 * 4 * 8 * 8 * 32] * 2
    assert all(each.nbytes > 0 for _, _, each in found)
    assert all(each.bound in ("arithmetic", "memory") for _, _, each in found)


def product_of(dtype: str, *after: str, extent: int = 8192) -> Graph:
    """Return a product of square matrices of a type, and functions of it."""
    builder = GraphBuilder(dtype)
    made = builder.apply("matmul", *(builder.input(name, (extent,) * 2, dtype) for name in "xy"))
    for name in after:
        made = builder.apply(name, made[0])
    builder.output(made[0])
    return builder.build()


@either
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_halves_are_by_tensor_cores_of_the_kernel_that_would_run(
    dtype: str, libraries: bool
) -> None:
    model = RooflineCost(H100)
    half, single, double = (
        model.cost(product_of(each), {}) for each in (dtype, "float32", "float64")
    )
    assert half.launches == single.launches == 1
    assert half.bytes == single.bytes / 2
    assert half.time_us < single.time_us <= double.time_us
    ((_, us, launch),) = model.launches(product_of(dtype), {})
    peaks, share = H100.flops_per_s, H100.compute_share
    if libraries:
        assert (launch.kernel, launch.grid) == ("cublaslt", ())
        rate = peaks["float16"] * share
    else:  # as many operations as its loop has to an instruction
        issued = resources(launch.kernel).issued
        assert issued is not None and launch.grid
        rate = min(peaks["float16"], peaks["float32"] * issued / FUSED) * share
    assert 1e6 * launch.flops / rate <= us < 1.06e6 * launch.flops / rate + H100.launch_us
    assert model.device.product_rate(dtype) == rate


def test_prices_are_those_of_the_libraries_that_are_said_to_be_there() -> None:
    graph = product_of("float16", "gelu")
    own, asked = (RooflineCost(H100, libraries=each).launches(graph, {}) for each in (False, True))
    assert [each.kernel for _, _, each in own] == ["staged"]
    assert [each.kernel for _, _, each in asked] == ["cublaslt", "pointwise"]
    assert sum(us for _, us, _ in asked) < sum(us for _, us, _ in own)
    assert sum(each.flops for _, _, each in asked) == sum(each.flops for _, _, each in own)


def test_what_a_library_declines_is_priced_as_the_kernel_that_serves_it() -> None:
    """Attention of few queries is products of its primitives, of others one kernel."""

    def kernels(dtype: str, width: int, queries: int = 64) -> list[str]:
        builder = GraphBuilder("attention")
        q, k, v = (
            builder.input(name, (2, t, 4, width), dtype)
            for name, t in (("q", queries), ("k", 64), ("v", 64))
        )
        builder.output(*builder.apply("attention", q, k, v))
        launches = RooflineCost(H100, libraries=True).launches(builder.build(), {})
        return [each.kernel for _, _, each in launches if each.kernel != "pointwise"]

    assert kernels("float16", 32) == ["cudnn"]
    assert kernels("float16", 20) == ["attention"]  # rows begin anywhere
    assert kernels("float32", 32) == ["attention"]
    for dtype, width in (("float32", 32), ("float16", 20)):
        found = kernels(dtype, width, queries=4)
        assert found.count("cublaslt") >= 2 and "cudnn" not in found


def attention_graph(dtype: str, length: int, causal: bool, gradients: bool = False) -> Graph:
    """Return attention of two samples and four heads of 64 elements."""
    builder = GraphBuilder("attention")
    q, k, v = (builder.input(name, (2, length, 4, 64), dtype) for name in "qkv")
    made = builder.apply("attention", q, k, v, causal=causal)
    if gradients:
        dy = builder.input("dy", (2, length, 4, 64), dtype)
        made = builder.apply("attention_grad", dy, q, k, v, *made, causal=causal)
    builder.output(*made)
    return builder.build()


@pytest.mark.parametrize(
    ("dtype", "kernel"), [("float32", "attention"), ("bfloat16", "attention_halves")]
)
def test_attention_is_one_launch_and_its_gradients_three_without_scores_in_memory(
    dtype: str, kernel: str
) -> None:
    model = RooflineCost(H100, libraries=False)
    found = model.launches(attention_graph(dtype, 512, False, gradients=True), {})
    assert [each.kernel for _, _, each in found] == [
        *(kernel, "fold", f"{kernel}_queries", f"{kernel}_keys"),
    ]
    operand = 2 * 512 * 4 * 64 * (4 if dtype == "float32" else 2)
    assert all(each.nbytes < 8 * operand for _, _, each in found)
    products = [2, 0, 3, 4]  # of each launch, over all scores
    scores = 2 * 4 * 512 * 512
    for (_, _, each), count in zip(found, products):
        if count:
            assert each.flops == scores * (2 * 64 * count + 10)


def test_causal_attention_computes_the_tiles_that_are_seen() -> None:
    model = RooflineCost(H100, libraries=False)
    found = [
        [each.flops for _, _, each in model.launches(attention_graph("float32", 640, c, True), {})]
        for c in (False, True)
    ]
    tiles = 640 // 64
    share = (tiles + 1) / (2 * tiles)
    for whole, seen in zip(*found, strict=True):
        assert seen == pytest.approx(whole * share) or whole < 1e7  # but of the fold


def test_operations_of_a_librarys_call_are_not_those_of_a_pass_before_it() -> None:
    model = RooflineCost(H100, libraries=True)
    found = model.launches(attention_graph("float16", 512, False, gradients=True), {})
    flops = {each.kernel: each.flops for _, _, each in found if each.operator == "attention_grad"}
    assert flops["cudnn"] > 0 and flops["pointwise"] == 0


@pytest.mark.parametrize(("rows", "depth"), [(64, 64), (64, 200_000), (128, 4096)])
def test_a_librarys_product_of_few_tiles_is_cut_into_parts_of_its_sums(
    rows: int, depth: int
) -> None:
    builder = GraphBuilder("sums")
    a, b = builder.input("a", (rows, depth), "float16"), builder.input("b", (depth, 64), "float16")
    builder.output(*builder.apply("matmul", a, b))
    model = RooflineCost(H100, libraries=True)
    ((_, us, launch),) = model.launches(builder.build(), {})
    one = 1e6 * launch.flops / (model.device.rate("float16") / 132)  # by one multiprocessor
    fewest = 1e6 * launch.nbytes / H100.memory_rate
    assert fewest < us
    if depth > 1000:
        assert us < one / 2


def test_a_description_of_a_gpu_is_read_back_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    for change, message in (
        ({}, ""),
        ({"multiprocessors": 0}, "gpu: field 'multiprocessors': 0 found, an integer from 1"),
        ({"latency_us": 0.0}, "'gpu.latency_us': 0.0 found, a number above 0"),
        ({"host": {**H100.to_json()["gpu"]["host"], "bytes_per_s": -1}}, "'gpu.host.bytes_per_s'"),
        ({"tensor_cores": 528}, "unknown field 'tensor_cores'"),
    ):
        data = H100.to_json()
        data["gpu"] |= change
        path.write_text(json.dumps(data))
        if message:
            with pytest.raises(DeviceError, match=message):
                Device.load(path)
        else:
            assert Device.load(path) == H100
    plain = dataclasses.replace(H100, gpu=None)
    assert "gpu" not in plain.to_json()
    assert Device.from_json(plain.to_json()) == plain


@pytest.mark.simulator
@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="no numba-cuda here")
@pytest.mark.parametrize("network", ["mlp", "cnn", "attention", "recurrent"])
def test_what_is_priced_is_what_is_launched(network: str) -> None:
    """Inference and a training step: kernels, grids, blocks and the host's runs, in order."""
    done = python(["-m", "programs.gpu_prices", network])
    assert done.returncode == 0, done.stderr
    for kind, (priced, launched) in json.loads(done.stdout)[network].items():
        assert priced == launched, kind
        assert len(priced) > 3
        assert np.all([HOST in row for row in priced if not row[1]])


@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="no numba-cuda here")
@pytest.mark.parametrize(
    "simulated",
    [pytest.param(True, marks=pytest.mark.simulator), pytest.param(False, marks=pytest.mark.gpu)],
)
def test_what_is_measured_is_kept_and_read_back(
    simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches, the host's run of one, enqueuing, rates, links and variants of a call.

    In the simulator times mean nothing.
    """
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path / "cache"))
    done = python(["-m", "programs.gpu_measured", str(tmp_path)], simulated)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("traced", "hosted"):
        about = found[kind]
        assert about["equal"] and not about["estimated"] and about["enough"]
        assert about["measured"][1] == 0
    assert found["traced"]["measured"][0] == found["traced"]["launches"] == 3
    assert found["hosted"]["measured"][0] == 2  # the host's, and enqueuing: the rest was known
    better = found["optimized"]
    assert better["launches"][1] <= better["launches"][0] == 2
    assert min(better["us"]) > 0 and not better["estimated"]
    tuned = found["tuned"]
    assert tuned["equal"] and min(tuned["times"]) > 0
    assert tuned["chosen"][1] == 1 and tuned["launches"] > 1
    if simulated:  # by what is expected, not by the record
        assert tuned["chosen"][0] == 0
    assert tuned["mark"] is None
    memories = found["machine"]["memories"]
    assert len(memories) > 1 and memories[0] == "system"
    wanted = sorted([a, b] for a in memories for b in memories if a != b)
    assert sorted(found["machine"]["links"]) == wanted
    assert found["machine"]["finite"] and not found["machine"]["assumed"]


def test_the_command_line_says_what_a_launch_takes_and_why(tmp_path: Path) -> None:
    file = str(tmp_path / "linear.json")
    save_graph(alone("linear", 64), file)

    def told(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["show", file, *arguments])
        assert result.exit_code in (0, 1)
        return result.output

    lines = told("--machine", "h100").splitlines()
    assert lines[0].startswith("H100: ") and "1 launches" in lines[0]
    assert "tiled product, 2 blocks of 256" in lines[1] and "memory" in lines[1]
    found = json.loads(told("--machine", "h100", "--json"))
    assert found["time_us"] == pytest.approx(sum(each["us"] for each in found["launches"]))
    assert "blocks" not in told("--machine", "v100")  # whose kernels are not said
    assert "--machine found beside" in told("--machine", "h100", "--diff")
    assert "'h10'" in told("--machine", "h10")


@pytest.mark.parametrize(
    "name", ["h100", *(pytest.param(n, marks=pytest.mark.long) for n in ("a100", "h200")), "file"]
)
def test_strategies_for_gpus_are_finite_and_gain_from_more_of_them(
    name: str, tmp_path: Path
) -> None:
    """Of described clusters, and of a machine file as `machine measure --gpus 2` writes it."""
    if name == "file":
        gpus = [Processor(f"gpu{n}", CUDA, memory=f"m{n}", flops=2e13) for n in range(2)]
        copiers = [Processor(f"gpu{n}.{way}", COPIER, memory=f"m{n}") for n in "01" for way in "io"]
        memories = [Memory("system", 1 << 34), *(Memory(f"m{n}", 1 << 34, 2e12) for n in range(2))]
        ends = itertools.permutations([memory.name for memory in memories], 2)
        links = [Link(a, b, 1e-5, 2e10) for a, b in ends]
        name = str(tmp_path / "here.json")
        Machine("here", (*gpus, *copiers), tuple(memories), tuple(links)).save(name)
    graph = graph_of("alexnet", 512)
    both = machine_of(name, 2)
    assert [each.kind for each in both.processors].count(COPIER) == 0
    whole = Strategy({DEFAULT: Configuration()})
    one, two = (simulated(graph, both, strategy).step_us for strategy in (whole, "data"))
    assert 0 < two < one < math.inf


def test_a_large_operator_costs_the_optimiser_what_it_costs_a_strategy() -> None:
    builder = GraphBuilder("large")
    x, y = (builder.input(name, (8192, 8192)) for name in "xy")
    product = builder.apply("matmul", x, y)[0]
    builder.output(*builder.apply("softmax", product))
    graph = builder.build()
    step = simulated(graph, machine_of("h100", 1), Strategy({DEFAULT: Configuration()}))
    assert step.step_us == pytest.approx(RooflineCost(H100).cost(graph, {}).time_us, rel=0.05)


def test_a_memory_plan_for_a_gpu_takes_its_launches_and_copies_beside_them() -> None:
    graph = graph_of("lenet", 64)
    footprint, times = Launches(graph, timed=True, machine="h100")(())
    assert times is not None and times.overlapped
    computed = sum(times.node_us.values())
    price = RooflineCost(H100, training=True)
    assert computed == pytest.approx(price.cost(graph, {}).time_us)
    small = memory_plan(footprint, 4_000_000, "lru", times=times, minimize=TIME)
    copies = sum(times.copied_us(step.copied) for step in small.plan.steps)
    assert small.step_us is not None and computed < small.step_us < computed + 2 * copies
    assert Launches(graph, machine="h100")(())[1] is None
    with pytest.raises(DeviceError, match="'V100': no field 'gpu' found"):
        Launches(graph, timed=True, machine="v100")


def test_a_gpu_that_is_not_there_is_one_clear_error() -> None:
    program = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n"
        "import soapstone; from soapstone.errors import DataError\n"
        "from soapstone.frontend.strategies.finding import forward_of\n"
        "try: soapstone.optimize(*forward_of('lenet', 1), machine='gpu')\n"
        "except DataError as error: print(error)"
    )
    done = python(["-c", program], simulated=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("machine 'gpu': no NVIDIA GPU found"), done.stdout
