"""What a strategy says of values, carried out: the same numbers, in less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import legate_environment
from helpers.graph_runs import degrees_of
from helpers.processes import PROGRAMS, TESTS, mpiexec, ranks
from programs.carried_training import (
    WAYS,
    all_recomputed,
    compiled,
    data,
    forward_values,
    kept,
    network,
    routed,
    same,
    trace_of,
    trained,
)
from typer.testing import CliRunner

from soapstone import SGD, Model
from soapstone.cli.main import app
from soapstone.engine.carry import carry_out
from soapstone.engine.carry.traffic import traffic_bytes
from soapstone.engine.lower import lower, views
from soapstone.engine.lower.passes import verifier
from soapstone.engine.lower.verify import check_aliases, check_graph, check_views
from soapstone.engine.prepare import prepare
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import (
    DEFAULT,
    Configuration,
    Copies,
    Keep,
    Reshard,
    Step,
    Strategy,
)
from soapstone.ir.strategy.recomputation import recomputable
from soapstone.ir.tensor import Role
from soapstone.ir.training.backward import backward
from soapstone.optimizers import Adagrad
from soapstone.runtime import Link, Machine, Memory, Runtime
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel.simulation.simulate import simulate

LEGATE = ("all", "routed, after", "routed and recomputed")
WHOLE = Strategy({DEFAULT: Configuration()})


def graph() -> Graph:
    """The step of the network."""
    with compiled(kept) as model:
        return model.training_graph


def test_the_backward_pass_is_what_parameters_need_and_outputs_do_not() -> None:
    step = graph()
    back = backward(step)
    for node in step.nodes:
        if node.name in ("conv1", "norm1", "head", "finite") or "running" in node.name:
            assert node.name not in back, node
        if ".grad." in node.name or node.operator == "adam":
            assert node.name in back, node
    assert not backward(graph_of("lenet", 4, training=False))


STEPS: dict[str, dict[str, Any]] = {
    "states by operators of their own": {"optimizer": Adagrad(1e-2)},
    "a scale of the loss": {"precision": "mixed_float16"},
    "a batch in parts": {"micro_batches": 2},
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS)
def test_steps_of_all_kinds_recompute_and_offload(settings: dict[str, Any]) -> None:
    """What else outlives a step is of the backward pass too, and keeps no value of the other."""
    machine = Machine.local(cpus=1).bounded(1 << 24)

    def ended(keep: Keep) -> tuple[dict[str, np.ndarray], int]:
        strategy = WHOLE
        if keep is not Keep.KEEP:
            with network() as model:
                model.compile(**settings)
                values = recomputable(model.trainer.original_graph(4))
                assert "relu2" in values
            strategy = replace(WHOLE, tensors=dict.fromkeys(values, keep))
        model = network()
        model.compile(**settings, machine=machine, strategy=strategy)
        images, labels = data()
        with model:
            model.fit(images, labels, epochs=1, progress=False)
            graphs = [bound.prepared for bound in model.trainer._bounds.values()]
            ends = {".recomputed": Keep.RECOMPUTE, ".offloaded": Keep.OFFLOAD}
            for end, which in ends.items():
                for graph in graphs:
                    assert any(end in node.name for node in graph.nodes) == (keep is which)
            return model.trainer.state(), len(graphs)

    wanted, graphs = ended(Keep.KEEP)
    assert graphs == settings.get("micro_batches", 1)
    for keep in (Keep.RECOMPUTE, Keep.OFFLOAD):
        same(ended(keep)[0], wanted)


@pytest.fixture(scope="module")
def wanted() -> dict[int, dict[str, np.ndarray]]:
    """What training gives where everything is kept, by how many memories two workers have."""
    return {
        count: trained(compiled(kept, machine=Machine.local(cpus=2, memories=count)))
        for count in (1, 2)
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memories", [1, 2])
def test_values_carried_otherwise_give_the_same_bits(
    way: str, memories: int, wanted: dict[int, dict[str, np.ndarray]]
) -> None:
    machine = Machine.local(cpus=2, memories=memories)
    same(trained(compiled(WAYS[way], machine=machine)), wanted[memories])


@pytest.mark.parametrize("plan", ["lru", "stream"])
@pytest.mark.parametrize("memories", [1, 2])
@pytest.mark.parametrize("way", ["all", "every other", "routed and recomputed"])
def test_memory_plans_of_steps_that_recompute_give_the_same_bits(
    way: str, memories: int, plan: str, wanted: dict[int, dict[str, np.ndarray]]
) -> None:
    machine, capacity = Machine.local(cpus=2, memories=memories), 90_000 // memories + 10_000
    model = compiled(WAYS[way], machine=machine, fast_memory=capacity, plan=plan)
    made = compiled(WAYS[way], machine=machine)
    assert model.strategy == made.strategy  # of the machine without a bound
    made.close()
    bound = model.trainer.bound("train", model.batch_size)
    assert any(".recomputed" in node.name for node in bound.prepared.nodes)
    assert model.trainer.session.used_bytes[memories:] == (capacity,) * memories
    planned, copied = bound.moved_bytes or (0, 0)
    assert planned > 0 < copied and (memories > 1 or planned == copied)
    same(trained(model), wanted[memories])


def test_one_worker_recomputes_to_the_same_bits() -> None:
    same(trained(compiled(all_recomputed)), trained(compiled(kept)))


@pytest.mark.parametrize("way", [way for way in WAYS if "routed" in way])
def test_paths_move_the_bytes_that_were_foreseen(way: str) -> None:
    machine = Machine.local(cpus=2, memories=2)
    with compiled(WAYS[way], machine=machine) as model:
        step, strategy = model.training_graph, model.strategy
        planned, moved = Counter[str](), Counter[str]()
        for (value, _), nbytes in traffic_bytes(step, strategy, machine).items():
            planned[value] += nbytes
        for operation in trace_of(model).operations:
            if operation.kind == "copy":
                (partition, _) = operation.launch.partitions
                nbytes = int(partition.tiling.volume[0]) * partition.region.dtype.itemsize
                moved[partition.region.name] += nbytes
    carried, _ = carry_out(step, strategy)
    copies = [name for name in carried.tensors if ".to." in name or name.endswith(".back")]
    assert len(copies) >= 8 and sum(planned[name] for name in copies) > 0
    values = [*copies, "conv1.relu", "dropout", "inner"]
    assert {name: moved[name] for name in values} == {name: planned[name] for name in values}


def test_copies_that_do_not_stay_are_made_anew() -> None:
    """What the backward pass of `conv2` and of `norm1` reads, by which copies stay."""
    for kept_copies, own, makers in (
        (Copies.BEFORE, "norm1.0", "norm1.0.to.conv2.recomputed"),
        (Copies.AFTER, "norm1.0.to.conv2", "norm1.0.to.conv2"),
        (Copies.BOTH, "norm1.0", "norm1.0.to.conv2"),
    ):
        with compiled(routed(kept_copies), machine=Machine.local(cpus=2)) as model:
            carried, plain = carry_out(model.training_graph, model.strategy)
        assert not plain.reshards
        gradient = carried.by_name["conv2.grad.conv2d_grad_weight"]
        assert makers in gradient.inputs
        late = [n.name for n in carried.nodes if n.late and n.name.startswith("norm1.0.")]
        assert bool(late) == (kept_copies is Copies.BEFORE)
        assert carried.by_name["conv2"].inputs[0] == "norm1.0.to.conv2"
        assert plain.configuration(carried, carried.by_name["norm1.0.to.conv2"]).degrees["d1"] == 2
        assert own in carried.tensors


def test_after_a_path_the_way_back_remakes_what_its_maker_needs() -> None:
    builder = GraphBuilder("back")
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4), role=Role.PARAMETER)
    made = builder.apply("tanh", builder.apply("matmul", x, w, name="product")[0], name="made")[0]
    builder.output(builder.apply("exp", made, name="out")[0])
    slope = builder.apply("tanh_grad", made, made, name="slope", origin="made")[0]
    builder.update("w", builder.apply("mul", slope, "w", name="next")[0])
    step = builder.build()
    path = (Step("permute", Configuration({"d0": 2}, (1, 0))), Step("permute"))
    strategy = Strategy(
        {"*": Configuration(), "made": Configuration({"d1": 2}, (0, 1))},
        reshards={("made", "out"): Reshard(path, Copies.AFTER)},
    )
    strategy.check(step)
    carried, plain = carry_out(step, strategy)
    assert carried.by_name["slope"].inputs == ("made.back", "made.back")
    assert carried.by_name["made.back"].inputs == ("made.to.out",)
    assert plain.configurations["made.back"] == Configuration({"d1": 2}, (0, 1))


def test_a_path_to_what_comes_after_the_backward_pass_begins_before_it() -> None:
    """A running statistic is stored behind the updates, which read its flag as well."""
    step = graph()
    edge = "finite", "norm1.mean.next"
    path = (Step("permute", Configuration()), Step("permute"))
    for kept_copies in Copies:
        strategy = replace(WHOLE, reshards={edge: Reshard(path, kept_copies)})
        strategy.check(step)
        carried, _ = carry_out(step, strategy)
        check_graph(carried)
        assert carried.by_name["norm1.mean.next"].inputs[-1] == "finite.to.norm1.mean.next"


def test_what_an_update_writes_over_it_reads_itself() -> None:
    step = graph()
    weights = dict.fromkeys(step.inputs(Role.PARAMETER), Keep.OFFLOAD)
    carried, _ = carry_out(step, replace(WHOLE, tensors=weights))
    for node in step.nodes:
        if node.spec.updates:
            old = set(node.overwrites.values())
            kept_inputs = zip(node.inputs, carried.by_name[node.name].inputs)
            assert all(name == now for name, now in kept_inputs if name in old)
    update = next(node for node in step.nodes if node.operator == "adam")
    path = {(update.inputs[0], update.name): Reshard(("permute",))}
    with pytest.raises(StrategyError, match="a value that it writes over; no path needed"):
        replace(WHOLE, reshards=path).check(step)


def deep_model(layers: int) -> Model:
    """A chain of dense layers of 32, each with its tanh, on 256 samples."""
    model = Model("deep", seed=0)
    x = model.input("x", (256, 32))
    for layer in range(layers):
        x = model.tanh(model.dense(x, 32, name=f"fc{layer}"), name=f"tanh{layer}")
    model.output(model.dense(x, 3, name="last"))
    return model


def test_offloaded_values_leave_a_memory_that_is_too_small_for_them() -> None:
    """Six layers whose activations do not fit beside each other, but do one after the other."""

    def deep(change: dict[str, Keep], machine: Machine) -> tuple[dict[str, np.ndarray], int, int]:
        with deep_model(6) as model:
            model.compile(SGD(0.1), machine=machine)
            strategy = model.strategy
        with deep_model(6) as model:
            model.compile(SGD(0.1), machine=machine, strategy=replace(strategy, tensors=change))
            memories = trace_of(model).describe()["memories"]
            x = np.random.default_rng(0).standard_normal((256, 32), np.float32)
            model.fit(x, np.zeros(256, np.int64), epochs=2, progress=False)
            near, far = (memories[name]["peak_bytes"] for name in ("system.bounded", "system"))
            return model.trainer.state(), near, far

    large = Machine.local(cpus=2).bounded(1 << 26)
    wanted, most, _ = deep({}, large)
    away = {f"tanh{layer}": Keep.OFFLOAD for layer in range(6)}
    found, least, far = deep(away, large)
    same(found, wanted)
    activation = 256 * 32 * 4
    assert least <= most - 2 * activation and far >= 5 * activation
    with pytest.raises(StrategyError, match=r"'tanh0.offloaded': machine 'local' has no mem"):
        deep(away, Machine.local(cpus=2))


@pytest.mark.long
def test_the_simulator_sees_what_is_carried_out() -> None:
    machine = load_machine("p100", 2)
    step = chain(samples=4096)
    names = [f"{kind}{at}" for kind in ("fc", "tanh") for at in ("00", "01", "10", "11")]
    names.remove("tanh01")
    split = {
        node.name: Configuration({"b0": 2}, (0, 1))
        for node in step.nodes
        if node.operator == "linear"
    }
    strategy = Strategy({"*": Configuration(), **split})
    before = simulate(step, machine, strategy)
    after = simulate(step, machine, replace(strategy, tensors=dict.fromkeys(names, Keep.RECOMPUTE)))
    assert after.compute_us > before.compute_us and after.tasks > before.tasks
    assert max(after.peak_bytes_per_device) < max(before.peak_bytes_per_device)
    path = (Step("permute", Configuration({"d0": 2}, (1, 0))), Step("permute"))
    routes = {("tanh00", "fc01"): Reshard(path, Copies.BOTH)}
    found = simulate(step, machine, replace(strategy, reshards=routes))
    assert found.bytes_moved >= before.bytes_moved + 2 * step.tensors["tanh00"].nbytes
    assert found.step_us > before.step_us
    away = replace(strategy, tensors=dict.fromkeys(["tanh00", "tanh01"], Keep.OFFLOAD))
    with pytest.raises(StrategyError, match="has no memory larger than"):
        simulate(step, machine, away)
    behind = simulate(step, backed(machine), away)
    assert max(behind.peak_bytes_per_device) < max(before.peak_bytes_per_device)
    assert behind.step_us > before.step_us


def backed(machine: Machine) -> Machine:
    """A machine with a memory behind each of its devices'."""
    near = list(dict.fromkeys(processor.memory for processor in machine.processors))
    memories = [Memory(f"{name}.host", 1 << 40) for name in near]
    links = [
        Link(*ends, 1e-6, 1e9)
        for name in near
        for ends in ((name, f"{name}.host"), (f"{name}.host", name))
    ]
    return replace(machine, memories=(*machine.memories, *memories), links=(*machine.links, *links))


@pytest.mark.parametrize("memories", [1, 2])
def test_so_do_steps_that_are_not_traced(memories: int) -> None:
    found = []
    machine = Machine.local(cpus=2, memories=memories)
    for change in (kept, all_recomputed):
        with compiled(change, machine=machine) as model:
            bound, runtime = model.trainer.bound("train", 8), model.trainer.session.runtime
            assert isinstance(runtime, Runtime)
            images, labels = data()
            given = {"image": images[:8], "labels": labels[:8], "step": 1, "learning_rate": 0.01}
            for name, array in given.items():
                bound.feeds[name][...] = array
            bound.program.constants = {}
            bound.program.launch(runtime)
            runtime.wait()
            found.append(model.trainer.state())
    same(found[1], found[0])


def test_random_configurations_and_passes_are_sound() -> None:
    step = graph()
    for seed in range(6):
        random = np.random.default_rng(seed)
        split = {n.name: Configuration(degrees_of(step.signature(n), random)) for n in step.nodes}
        names = [name for name in forward_values(step) if random.random() < 0.6]
        strategy = Strategy(split, tensors=dict.fromkeys(names, Keep.RECOMPUTE))
        carried, plain = carry_out(step, strategy)
        check_graph(carried, step)
        assert not plain.tensors
        lowered = lower(carried, plain, watch=verifier(carried))
        check_aliases(lowered)
        check_views(lowered, plain, views(lowered, plain))
        for node in carried.nodes:
            if node.late:
                first = carried.by_name[node.name.removesuffix(".recomputed")]
                assert (node.operator, node.items) == (first.operator, first.items)
                mine = plain.configuration(carried, node)
                assert mine == strategy.configuration(step, step.by_name[first.name])


def test_what_is_kept_changes_nothing() -> None:
    step = graph()
    strategy = replace(WHOLE, tensors={"conv2": Keep.KEEP, "of another graph": Keep.KEEP})
    assert carry_out(step, strategy) == (step, strategy)
    absent = replace(WHOLE, tensors={"of another graph": Keep.RECOMPUTE})
    assert carry_out(step, absent)[0].nodes == step.nodes


def chain(samples: int = 8) -> Graph:
    """Two blocks of a chain, and gradients."""
    model = Model("chain", seed=0)
    x = model.input("x", (samples, 16))
    for block in range(2):
        for layer in range(2):
            x = model.tanh(model.dense(x, 16, name=f"fc{block}{layer}"), name=f"tanh{block}{layer}")
    model.output(model.dense(x, 3, name="last"))
    model.compile(SGD(0.1), cpus=1)
    return model.training_graph


def test_clones_are_before_their_first_reader_and_read_what_is_kept() -> None:
    step = chain()
    names = [
        f"{kind}{block}{layer}" for kind in ("fc", "tanh") for block in (0, 1) for layer in (0, 1)
    ]
    names.remove("tanh01")
    carried, _ = carry_out(step, replace(WHOLE, tensors=dict.fromkeys(names, Keep.RECOMPUTE)))
    order = [node.name for node in carried.nodes]
    back = backward(step)
    clones = [node for node in carried.nodes if node.late]
    names.remove("fc01")  # the backward pass reads what is made of it, which is kept
    assert {node.name for node in clones} == {f"{name}.recomputed" for name in names}
    # A dense layer's result has one reader in the forward pass: it goes where that goes.
    assert carried.by_name["fc10.recomputed"].inputs[0] == "tanh01"
    assert carried.by_name["tanh10.recomputed"].inputs == ("fc10.recomputed",)
    for node in clones:
        readers = [order.index(r.name) for r in carried.consumers[node.outputs[0]]]
        later = order[order.index(node.name) + 1 : min(readers)]
        assert all(carried.by_name[name].late for name in later)
    for node in carried.nodes:
        if node.name not in back and not node.late:
            assert not any(name.endswith(".recomputed") for name in node.inputs)


def test_a_value_that_only_a_clone_would_need_is_recomputed_with_it() -> None:
    builder = GraphBuilder("alone")
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4), role=Role.PARAMETER)
    product = builder.apply("matmul", x, w, name="product")[0]
    made = builder.apply("relu", product, name="made")[0]
    builder.output(builder.apply("exp", made, name="out")[0])
    builder.update("w", builder.apply("mul", made, "w", name="next")[0])
    step = builder.build()
    for tensors, clones in (
        ({"made": Keep.RECOMPUTE}, ["product", "made"]),
        ({"made": Keep.RECOMPUTE, "product": Keep.KEEP}, ["made"]),
    ):
        carried, _ = carry_out(step, replace(WHOLE, tensors=tensors))
        assert [n.name for n in carried.nodes if n.late] == [f"{c}.recomputed" for c in clones]


@pytest.mark.parametrize("cpus", [1, 2])
def test_the_peak_of_memory_falls(cpus: int) -> None:
    """Ten layers in two blocks: what is inside a block is not kept."""

    def deep(recompute: bool) -> tuple[int, dict[str, np.ndarray]]:
        with deep_model(10) as model:
            model.compile(SGD(0.1), cpus=cpus)
            strategy = model.strategy
        names = [f"{kind}{i}" for kind in ("fc", "tanh") for i in range(10)]
        names.remove("tanh4")
        tensors = dict.fromkeys(names, Keep.RECOMPUTE) if recompute else {}
        with deep_model(10) as model:
            model.compile(SGD(0.1), cpus=cpus, strategy=replace(strategy, tensors=tensors))
            trace = trace_of(model)
            memory = trace.describe()["memories"]["system"]
            assert memory["bound_bytes"] <= memory["peak_bytes"]
            x = np.random.default_rng(0).standard_normal((256, 32), np.float32)
            model.fit(x, np.zeros(256, np.int64), epochs=2, progress=False)
            return memory["peak_bytes"], model.trainer.state()

    (most, wanted), (less, found) = deep(False), deep(True)
    same(found, wanted)
    activation = 256 * 32 * 4
    assert most >= 10 * activation and less <= most - 3 * activation


def test_late_launches_wait_for_the_backward_pass() -> None:
    strategy = replace(WHOLE, tensors={"tanh00": Keep.RECOMPUTE, "fc00": Keep.KEEP})
    prepared = prepare(chain(), strategy)
    late = [item for item in prepared.launches if item.node.late]
    assert [item.node.name for item in late] == ["tanh00.recomputed"]
    *_, trigger = late[0].arguments
    assert ".grad." in trigger.region and str(trigger.privilege) == "Read"
    assert (trigger.hi - trigger.lo == 1).all()
    assert all(operand.argument < len(late[0].arguments) - 1 for operand in late[0].inputs)


def test_show_names_the_step(tmp_path: Path) -> None:
    step = graph_of("lenet", 4)
    file = tmp_path / "strategy.json"
    replace(WHOLE, tensors={"conv1": Keep.RECOMPUTE}).save(file)
    assert "conv1" in step.by_name
    shown = ["show", "lenet", "--batch-size", "4", "--strategy", str(file)]
    result = CliRunner().invoke(app, [*shown, "--after", "carry_out_strategy"])
    assert result.exit_code == 0 and "conv1.recomputed = conv2d(" in result.output, result.output


def test_checked_mode_trains_to_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "programs.carried_training", "local", "routed and recomputed"],
        env={**os.environ, "SOAPSTONE_CHECKED": "1"},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 ways equal\n"


@pytest.mark.long
def test_two_ranks_train_to_the_same_bits() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    if mpiexec() is None:
        pytest.skip("there is no mpiexec")
    done = ranks(2, PROGRAMS / "carried_training.py", "mpi", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{len(WAYS)} ways equal"] * 2


def test_legate_trains_to_the_same_bits(tmp_path: Path) -> None:
    output = legate_environment.printed(tmp_path, "carried_training", "legate", *LEGATE)
    assert f"{len(LEGATE)} ways equal" in output


def test_the_network_has_what_is_hard() -> None:
    """What the tests above mean to cover is in it."""
    with network() as model:
        model.compile("sgd", cpus=1)
        operators = {node.operator for node in model.training_graph.nodes}
    assert {"batch_norm", "dropout", "split", "concat", "store", "accumulate"} <= operators
