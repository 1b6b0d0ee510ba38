"""The frontier of models: configurations, what they cost, points that are strategies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, GraphBuilder, Model
from soapstone.frontend.strategies.finding import graph_of, machine_of
from soapstone.frontend.strategies.preferences import find_strategy
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.search.parallel import NAMED, Options, ParallelError, Simulator, search, simulate
from soapstone.search.parallel.frontier.baselines import NO_DIM, _names, joined
from soapstone.search.parallel.frontier.costs import costs_of
from soapstone.search.parallel.frontier.meshes import configurations_of, meshes, tensor_maps
from soapstone.search.parallel.frontier.paths import Paths
from soapstone.search.parallel.frontier.points import FrontierPoint, _Points, cost_frontier
from soapstone.search.parallel.frontier.saving import Saving, Sent, ways_of
from soapstone.search.parallel.frontier.tables import INFEASIBLE
from soapstone.search.parallel.problem.prepare import Model as Prepared, prepare

SIZES = {"hidden": 24, "layers": 2, "length": 4, "vocabulary": 40}


@pytest.fixture(scope="module")
def model() -> Prepared:
    return prepare(graph_of("mlp", 32), machine_of("v100", 2))


def test_meshes_are_the_ordered_factors_and_maps_split_no_dim_twice() -> None:
    assert sorted(meshes(12)) == [
        *((2, 2, 3), (2, 3, 2), (2, 6), (3, 2, 2), (3, 4), (4, 3), (6, 2), (12,))
    ]
    assert list(meshes(1)) == [()]
    assert len(list(tensor_maps((2, 2), 3))) == 3 * 2 + 2 * 3


def test_points_of_a_configuration_are_where_its_mesh_says(model: Prepared) -> None:
    found = configurations_of(prepare(model.graph, machine_of("v100", 4)))
    for choices in found.values():
        for split, placed in zip(choices.degrees, choices.placed):
            points = int(split["points"])
            assert np.prod(split["degrees"]) == points
            assert placed[0] == 0 and len(set(placed[:points].tolist())) == points
    both = [
        (split["degrees"][:3].tolist(), placed.tolist())
        for split, placed in zip(choices.degrees, choices.placed)
        if (split["degrees"] == 2).sum() == 2
    ]
    assert len(both) == len({str(each) for each in both})


@pytest.mark.long
def test_the_frontier_is_that_of_all_combinations(model: Prepared) -> None:
    """Every strategy of the space, its sums added up one by one."""
    frontier = cost_frontier(model.graph, model.machine)
    choices, data = joined(model, configurations_of(model), "data")
    costs = costs_of(model, choices)
    maker = _Points(model, costs, ways_of(model, costs))
    sums = {
        maker.sums(dict(zip(choices, rows)))
        for rows in itertools.product(*(range(len(each)) for each in choices.values()))
    }
    best = [a for a in sums if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in sums)]
    assert [(p.memory_bytes, round(p.time_us * 1e3)) for p in frontier.points] == sorted(best)
    assert frontier.exact and frontier.error == 0.0
    assert frontier.baselines["data"].memory_bytes == maker.sums(data)[0]
    assert frontier.turning_point in frontier.points


@pytest.mark.long
def test_copies_are_among_all_combinations(model: Prepared) -> None:
    """Every strategy of the space with redundant computation, its sums added up one by one."""
    frontier = cost_frontier(model.graph, model.machine, replicate=True)
    choices, _ = joined(model, configurations_of(model, replicate=True), "data")
    costs = costs_of(model, choices)
    maker = _Points(model, costs, ways_of(model, costs))
    sums = {
        maker.sums(dict(zip(choices, rows)))
        for rows in itertools.product(*(range(len(each)) for each in choices.values()))
    }
    best = [a for a in sums if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in sums)]
    assert [(p.memory_bytes, round(p.time_us * 1e3)) for p in frontier.points] == sorted(best)
    plain = cost_frontier(model.graph, model.machine)
    assert frontier.configurations > plain.configurations
    assert {**frontier.baselines} == {**plain.baselines} and frontier.mesh == plain.mesh


@pytest.mark.long
def test_copies_make_steps_shorter() -> None:
    """Points that no strategy without redundant computation reaches, simulated too; their files
    say what is in copies."""
    graph, machine = narrow(), machine_of("v100", 4)
    plain, found = (cost_frontier(graph, machine, replicate=each) for each in (False, True))
    for point in plain.points:
        assert any(
            each.memory_bytes <= point.memory_bytes and each.time_us <= point.time_us
            for each in found.points
        )
    fastest = found.points[-1]
    assert fastest.replicated and fastest.time_us < plain.points[-1].time_us
    assert fastest.simulated_us < min(each.simulated_us for each in plain.points)
    fastest.strategy.check(graph, machine.describe())
    forms = fastest.strategy.configurations
    assert any(item.replicated for item in forms.values())
    again = simulate(graph, machine, fastest.strategy)
    assert again.step_us == fastest.simulated_us


@pytest.mark.long
def test_copies_go_with_what_saves_memory() -> None:
    """Points that also recompute, offload or keep one copy are strategies."""
    graph, machine = graph_of("lenet", 256), machine_of("v100", 4)
    found = cost_frontier(graph, machine, eps=0.01, replicate=True, saving=[*Saving], paths=True)
    some = [point for point in found.points if point.replicated]
    assert any(point.recomputed for point in some) and any(point.offloaded for point in some)
    for point in some[:: max(1, len(some) // 6)]:
        point.strategy.check(graph, machine.describe())
        assert point.simulated_us <= 1.5 * point.time_us


def narrow() -> Graph:
    """A training step of a narrow layer before a wide one: cheap to compute, dear to send."""
    with Model("narrow", seed=0) as net:
        x = net.input("x", (2048, 16))
        x = net.dense(x, 512, activation="relu", name="narrow")
        net.output(net.dense(x, 16384, name="wide"))
        net.compile(SGD(1e-2), loss="mse", cpus=1)
        return net.training_graph


def test_one_mesh_splits_names_alike(model: Prepared) -> None:
    """Its frontier is that of all combinations in which a name is split everywhere or nowhere."""
    frontier = cost_frontier(model.graph, model.machine)
    choices, data = joined(model, configurations_of(model), "data")
    costs = costs_of(model, choices)
    maker, names = _Points(model, costs, ways_of(model, costs)), _names(model)
    sums = {maker.sums(data)}
    for rows in itertools.product(*(range(len(each)) for each in choices.values())):
        split: dict[int, set[bool]] = {}
        for (op, each), row in zip(choices.items(), rows):
            for name, degree in zip(names[op], each.degrees["degrees"][row].tolist()):
                if name != NO_DIM:
                    split.setdefault(name, set()).add(degree > 1)
        if all(len(each) == 1 for each in split.values()):
            sums.add(maker.sums(dict(zip(choices, rows))))
    best = [a for a in sums if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in sums)]
    found = [(p.memory_bytes, round(p.time_us * 1e3)) for p in frontier.mesh]
    assert found == sorted(best) and len(found) > 1
    assert frontier.baselines["mesh"] == frontier.mesh[-1]


def test_dims_of_repeated_blocks_have_one_name() -> None:
    sizes = SIZES | {"heads": 4, "inner": 48, "layers": 3}
    model = prepare(graph_of("transformer", 16, sizes=sizes), machine_of("v100", 4))
    names = {model.operators[op].node.name: mine for op, mine in _names(model).items()}
    inner = [names[f"encoder{n}.inner"] for n in (1, 2, 3)]
    assert inner[0] == inner[1] == inner[2] and NO_DIM not in inner[0]
    assert inner[0][-1] == names["encoder3.outer"][-2]  # n of one, k of the other
    heads = names["encoder1.attention"][2]  # split as what the reshape before it makes of n
    assert heads == names["encoder2.attention.query"][-1] != inner[0][-1]


def test_time_on_the_network_may_be_a_third_cost(model: Prepared) -> None:
    """Every strategy of the space; and trade-offs of other costs are among these."""
    found = find_strategy(model.graph, model.machine, network=True, eps=0.0)
    frontier = found.frontiers[2]
    choices, _ = joined(model, configurations_of(model), "data")
    costs = costs_of(model, choices)
    maker = _Points(model, costs, ways_of(model, costs))

    def said(point: FrontierPoint) -> tuple[int, int, int]:
        return point.memory_bytes, round(point.time_us * 1e3), round(point.network_us * 1e3)

    sums = {
        said(maker.kept(dict(zip(choices, rows))))
        for rows in itertools.product(*(range(len(each)) for each in choices.values()))
    }
    best = [a for a in sums if not any(b != a and all(x <= y for x, y in zip(b, a)) for b in sums)]
    assert [said(point) for point in frontier.points] == sorted(best)
    pair = {said(point)[1:] for point in found.best("time_us", "network_us")}
    pairs = {each[1:] for each in sums}
    assert pair == {
        a for a in pairs if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in pairs)
    }


def test_more_devices_cost_more_money() -> None:
    graph = graph_of("rnnlm", 16, sizes=SIZES)
    found = find_strategy(graph, "v100", "profiling", devices=4)
    points = found.best("time_us", "device_us")
    assert len({(point.time_us, point.device_us) for point in points}) == len(points)
    for a, b in itertools.combinations(points, 2):
        assert (a.time_us < b.time_us) == (a.device_us > b.device_us)
    every = [point for each in found.frontiers.values() for point in each.points]
    cheapest = min(every, key=lambda each: each.device_us)
    assert cheapest.device_us == cheapest.devices * cheapest.time_us
    assert min(point.device_us for point in points) == cheapest.device_us
    with pytest.raises(ParallelError, match="cost 'joy' found, one of memory_bytes, time_us"):
        found.best("joy")


def test_what_fits_is_what_strategy_search_says() -> None:
    """Both ask the simulator, on a machine of so much memory."""
    graph = graph_of("rnnlm", 16, sizes=SIZES)
    for point in cost_frontier(graph, machine_of("v100", 2)).points:
        needed = point.simulated_bytes
        for memory in (needed, needed - 1):
            machine = machine_of("v100", 2).limited(memory)
            missing = simulate(graph, machine, point.strategy).missing_bytes
            assert (missing > 0) == (memory < needed)
        fits = machine_of("v100", 2).limited(needed)
        start = {name: each for name, each in point.strategy.configurations.items() if name != "*"}
        found = search(graph, fits, Options(proposals=200), start=start)
        assert found.simulation.missing_bytes == 0
        chosen = find_strategy(graph, "v100", devices=2, memory=needed).point
        assert chosen.fits and chosen.simulated_us <= point.simulated_us


def test_a_compiled_model_is_taken() -> None:
    with Model("two") as net:
        net.output(net.dense(net.dense(net.input("x", (64, 256)), 256), 256))
        net.compile(SGD(0.1), loss="mse", cpus=1)
        found = find_strategy(net, "v100", devices=2)
        assert found.point.devices == 2
        assert found.strategy.model_hash == net.training_graph.structural_hash
        with pytest.raises(ParallelError, match="batch size 8 found; 'two' has its own"):
            find_strategy(net, "v100", batch_size=8)


def test_a_point_is_a_strategy_that_costs_what_it_says(model: Prepared) -> None:
    frontier = cost_frontier(model.graph, model.machine)
    for point in frontier.points:
        found = simulate(model.graph, model.machine, point.strategy)
        assert found.step_us == point.simulated_us
        assert max(found.peak_bytes_per_device) == point.simulated_bytes
        assert point.time_us == pytest.approx(point.network_us + point.compute_us)
    data = Simulator(model).simulate(NAMED["data"](model))
    assert frontier.baselines["data"].simulated_us == data.step_us
    assert frontier.fastest().simulated_us <= data.step_us


def test_one_device_costs_what_a_step_of_it_alone_does() -> None:
    """Nothing moves; memory is parameters, gradients, states and what the backward pass reads."""
    build = GraphBuilder("one")
    x = build.input("x", (4, 6))
    w = build.input("w", (6, 3), role=Role.PARAMETER)
    (product,) = build.apply("matmul", x, w)
    build.output(*build.apply("relu", product))
    graph = build.build()
    frontier = cost_frontier(graph, machine_of("v100", 1))
    (point,) = frontier.points
    assert point.network_us == 0 and point.memory_bytes == 6 * 3 * 4


def test_partial_sums_that_a_view_reads_are_charged() -> None:
    """All bytes of the logits, which a reshape of the same operator reads, are summed."""
    model = prepare(graph_of("rnnlm", 16, sizes=SIZES), machine_of("v100", 2))
    costs = costs_of(model, configurations_of(model))
    (op,) = (op for op in costs.own if model.operators[op].name == "output")
    own, dims = costs.own[op], model.graph.signature(model.operators[op].node).dims
    (k,) = (i for i, dim in enumerate(dims) if dim.name == "k")
    nbytes = model.graph.tensors[model.operators[op].node.outputs[0]].nbytes
    split = costs.choices[op].degrees["degrees"][:, k] == 2
    network = (own.time - own.compute)[split]
    assert len(network) and network.min() >= 2 * nbytes * model.problem.ns_per_byte.max()


@pytest.mark.parametrize("app", ["lenet", "rnnlm", "transformer"])
def test_estimates_are_near_what_is_simulated(app: str) -> None:
    sizes = {} if app == "lenet" else dict(SIZES)
    if app == "transformer":
        sizes |= {"heads": 4, "inner": 48}
        sizes["layers"] = 1
    frontier = cost_frontier(graph_of(app, 16, sizes=sizes), machine_of("v100", 2))
    for point in frontier.points:
        assert point.simulated_us <= 1.1 * point.time_us  # sums know no overlap, nor fan-in
        assert point.memory_bytes <= 2 * point.simulated_bytes <= 4 * point.memory_bytes


@pytest.mark.long
def test_recomputation_halves_what_is_held_for_the_backward_pass() -> None:
    """Estimates hold what is simulated, and the step is as much longer as they say."""
    sizes = {"layers": 5, "hidden": 32, "heads": 4, "inner": 128, "vocabulary": 50}
    graph, machine = graph_of("transformer", 16, sizes=sizes), machine_of("v100", 1)
    (kept,) = cost_frontier(graph, machine).points
    found = cost_frontier(graph, machine, saving=["recompute"], eps=0.01)
    assert found.error <= 0.01
    fixed = 4 * sum(
        graph.tensors[name].nbytes for name in graph.inputs(Role.PARAMETER)
    )  # with gradients, and two states of Adam
    least = found.points[0]
    assert least.recomputed > 0 and least.memory_bytes - fixed < (kept.memory_bytes - fixed) / 2
    for point in found.points[:: max(1, len(found.points) // 5)]:
        assert point.simulated_bytes <= 1.15 * point.memory_bytes  # gradients on their way
        assert point.simulated_us == pytest.approx(point.time_us, rel=0.02)
        assert (point.recomputed > 0) == bool(point.strategy.tensors)


@pytest.mark.parametrize("saving", [["offload"], ["copies"], ["recompute", "offload", "copies"]])
def test_memory_is_saved_at_the_cost_that_sums_say(saving: list[str]) -> None:
    """Points that keep less are strategies that run so; what is given up is what was asked for."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "inner": 128, "vocabulary": 50}
    graph, machine = graph_of("transformer", 16, sizes=sizes), machine_of("v100", 2)
    found = cost_frontier(graph, machine, saving=saving, eps=0.02)
    least = cost_frontier(graph, machine).points[0]
    if "offload" in saving:
        assert found.points[0].memory_bytes < 0.8 * least.memory_bytes
    for point in found.points[:: max(1, len(found.points) // 4)]:
        assert point.recomputed == 0 or "recompute" in saving
        assert point.offloaded == 0 or "offload" in saving
        assert point.copied == len({*point.strategy.reshards}) or "copies" in saving
        assert point.simulated_us == pytest.approx(point.time_us, rel=0.1)
        assert point.simulated_bytes <= 1.25 * point.memory_bytes


def test_what_was_resharded_is_moved_again_or_kept_there_alone() -> None:
    """A product split by rows is read whole by every device: its copies need not stay."""
    with Model("two") as net:
        net.output(net.dense(net.dense(net.input("x", (64, 256)), 256), 256))
        net.compile(SGD(0.1), loss="mse", cpus=1)
        model = prepare(net.training_graph, machine_of("v100", 4))
    costs = costs_of(model, configurations_of(model))
    ways = ways_of(model, costs, [Saving.COPIES])
    ends = next(ends for ends, each in costs.edges.items() if each.again)
    moving, edge = costs.edges[ends], ways.problem.edges[ways.edges.index(ends)]
    assert ways.sent[ways.edges.index(ends)] == (Sent.BOTH, Sent.BEFORE, Sent.AFTER)
    both, before, after = np.moveaxis(edge.costs, 2, 0)
    moves = moving.copies > 0
    assert (before[moves, 0] < both[moves, 0]).all() and (before[moves, 1] > both[moves, 1]).all()
    assert (before[moves, 2] >= moving.copies[moves]).all()
    able = after[..., 0] < INFEASIBLE
    assert able.any() and not able[~moves].any() and (after[able, 2] == 0).all()
    assert (after[able, 0] <= both[able, 0]).all()


def test_paths_are_the_shortest_and_end_where_they_should(model: Prepared) -> None:
    wide = prepare(model.graph, machine_of("v100", 16))
    paths = Paths(wide, TensorSpec((256, 4096), "float32"))
    count = len(paths.layouts)
    assert count > 10 and len(set(map(str, paths.layouts))) > 5
    for via in range(count):
        assert (paths.ns <= paths.ns[:, via, None] + paths.ns[via]).all()
    for begin in range(0, count, 3):
        for end in range(0, count, 5):
            steps = paths.steps(begin, end)
            assert (steps[-1:] or [paths.layouts[begin]])[0] == paths.layouts[end]
            stops = [begin, *(paths.number(each) for each in steps)]
            legs = sum(int(paths.ns[leg]) for leg in itertools.pairwise(stops))
            assert legs == paths.ns[begin, end]
    assert max(len(paths.steps(a, b)) for a in range(count) for b in range(count)) > 1
    assert paths.number(Configuration({"d0": 16}, tuple(range(15, -1, -1)))) == -1


def test_values_go_along_paths_where_that_is_shorter() -> None:
    """No point is worse than without paths; those with paths are strategies that can be run."""
    graph, machine = graph_of("rnnlm", 64), machine_of("v100", 16)
    direct, found = (cost_frontier(graph, machine, paths=paths) for paths in (False, True))
    for point in direct.points:
        assert any(
            each.memory_bytes <= point.memory_bytes and each.time_us <= point.time_us
            for each in found.points
        )
    some = [each for each in found.points if each.routed]
    assert some and all(each.plain for each in direct.points)
    for point in some[:: max(1, len(some) // 4)]:
        point.strategy.check(graph, machine.describe())
        assert any(len(each.layouts) > 0 for each in point.strategy.reshards.values())
        assert point.simulated_us <= 1.1 * point.time_us
        assert point.simulated_bytes <= 1.25 * point.memory_bytes


def test_options_choose_by_memory_and_devices() -> None:
    graph = graph_of("rnnlm", 16, sizes=SIZES)
    shortest = find_strategy(graph, "v100", devices=4)
    frontier = shortest.frontiers[4]
    candidates = (*frontier.points, frontier.baselines["data"])
    assert shortest.point.simulated_us == min(each.simulated_us for each in candidates)
    needed = [
        find_strategy(graph, "v100", "profiling", devices=4).frontiers[n].least.simulated_bytes
        for n in (1, 2, 4)
    ]
    assert needed[0] > needed[1] > needed[2]
    fewest = find_strategy(graph, "v100", "mini-parallelism", memory=needed[1], devices=4)
    assert fewest.devices == 2 and fewest.point.simulated_bytes <= needed[1]
    least = find_strategy(graph, "v100", devices=2, memory=needed[1])
    assert least.point.simulated_bytes == needed[1]


@pytest.mark.parametrize("option", ["profiling", "mini-parallelism"])
def test_an_interrupt_ends_a_frontier_and_tries_no_further_devices(option: str) -> None:
    def stop(stage: str, done: int, of: int | None) -> None:
        if stage == "frontier of 2 devices":
            raise KeyboardInterrupt

    graph = graph_of("rnnlm", 16, sizes=SIZES)
    found = find_strategy(graph, "v100", option, memory=1000, devices=4, progress=stop)
    assert [*found.frontiers] == [1, 2]
    assert [each.interrupted for each in found.frontiers.values()] == [False, True]
    assert found.frontiers[2].points and not found.frontiers[2].exact
    wrong = "profiling compares" if option == "profiling" else "no strategy known at the interrupt"
    with pytest.raises(ParallelError, match=wrong):
        found.point  # noqa: B018


@pytest.mark.parametrize("option", ["mini-time", "mini-parallelism", "profiling"])
@pytest.mark.parametrize("devices", [0, -1, True, 2.5, "2", [], [0], [1.5], ["2"]], ids=str)
def test_devices_are_numbers(option: str, devices: Any) -> None:
    with pytest.raises(ParallelError, match=r"devices: .* found, .* needed"):
        find_strategy(graph_of("mlp", 32), "v100", option, devices=devices)


def test_wrong_options_say_what_is_needed() -> None:
    graph = graph_of("mlp", 32)
    assert find_strategy(graph, "v100", devices=np.int64(2), memory=np.int64(10**9)).devices == 2  # type: ignore[arg-type]
    for name in ("eps", "memory"):
        with pytest.raises(ParallelError, match=f"{name}.*: '1' found, .* needed"):
            find_strategy(graph, "v100", **{name: "1"})  # type: ignore[arg-type]
    with pytest.raises(ParallelError, match=r"saving .*'zip'.* recompute, offload, copies needed"):
        find_strategy(graph, "v100", saving=["zip"])
    with pytest.raises(ParallelError, match="offload: machine 'p100-2' has no memory larger"):
        find_strategy(graph, "p100", devices=2, saving=["offload"])
    with pytest.raises(ParallelError, match="'fast' found, one of mini-time"):
        find_strategy(graph, "v100", "fast")
    with pytest.raises(ParallelError, match="memory of 0 bytes"):
        find_strategy(graph, "v100", memory=0)
    with pytest.raises(ParallelError, match="one number needed for mini-time"):
        find_strategy(graph, "v100", devices=[1, 2])
    with pytest.raises(ParallelError, match=r"holds [\d,]+ bytes .* [\d,]+ bytes are missing"):
        find_strategy(graph, "v100", devices=2, memory=1000).strategy  # noqa: B018
    with pytest.raises(ParallelError, match="has 2 devices, 4 found"):
        find_strategy(graph, machine_of("v100", 2), devices=4)
