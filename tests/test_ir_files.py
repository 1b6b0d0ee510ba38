"""Strategies, memory plans and native graph files: what they mean, round trips, and bad files."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone.ir.autodiff import gradients
from soapstone.ir.errors import GraphError, ShapeError, StrategyError
from soapstone.ir.files import graph_from_json, graph_to_json, load_graph, save_graph
from soapstone.ir.graph import Graph, GraphBuilder, Initial
from soapstone.ir.interpret import interpret
from soapstone.ir.plan import Action, MemoryPlan, Step, Uses
from soapstone.ir.strategy import DEFAULT, Configuration, Keep, Reshard, Strategy
from soapstone.ir.tensor import Array, Role

MACHINE = {
    "version": 1,
    "name": "two",
    "processors": [
        {"name": "cpu0", "kind": "cpu", "threads": 1, "memory": "system", "flops": None},
        {"name": "cpu1", "kind": "cpu", "threads": 1, "memory": "system", "flops": None},
    ],
    "memories": [],
    "links": [],
}
Data = dict[str, Any]


def training() -> Graph:
    """A two-layer classifier with its gradients and updates."""
    builder = GraphBuilder("classifier")
    builder.input("x", (8, 6))
    builder.input("labels", (8,), "int64")
    uniform = Initial("uniform", 0.25)
    for name, shape in (("w1", (6, 4)), ("b1", (4,)), ("w2", (4, 3)), ("b2", (3,))):
        builder.input(name, shape, role=Role.PARAMETER, initial=uniform)
    builder.input("v", (6, 4), role=Role.STATE, initial=Initial())
    builder.input("lr", (), role=Role.SCALAR, initial=Initial("constant", 0.1))
    (hidden,) = builder.apply("linear", "x", "w1", "b1", name="fc1", activation="relu")
    (logits,) = builder.apply("linear", hidden, "w2", "b2", name="fc2")
    loss, _ = builder.apply("cross_entropy", logits, "labels", name="loss")
    weights = ["w1", "b1", "w2", "b2"]
    grads = gradients(builder, loss, weights)
    (ok,) = builder.apply("is_finite", loss, name="ok")
    for name in weights:
        momentum, state = (0.9, ["v"]) if name == "w1" else (0.0, [])
        operands = (name, grads[name], *state, "lr", ok)
        made = builder.apply("sgd", *operands, name=f"{name}.sgd", momentum=momentum)
        builder.update(name, made[0])
        if state:
            builder.update("v", made[1])
    builder.output(loss, logits)
    return builder.build()


GRAPH = training()
FORWARD = [n.name for n in GRAPH.nodes if n.origin is None and not n.spec.updates]


def values_of(graph: Graph) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {
        name: np.asarray(generator.standard_normal(graph.tensors[name].shape), np.float32)
        for role in (Role.PARAMETER, Role.STATE)
        for name in graph.inputs(role)
    }


def strategy() -> Strategy:
    """A strategy that uses every field."""
    configurations = {name: Configuration() for name in FORWARD}
    configurations["fc1"] = Configuration({"b0": 2, "n": 2}, (0, 1, 1, 0), {"b0": (0, 3, 8)})
    configurations["fc2"] = Configuration({"b0": 2}, (1, 0))
    configurations["loss"] = Configuration({"n": 2}, (1, 1))
    return Strategy(
        configurations=configurations,
        reshards={("fc1", "fc2"): Reshard(("local_slice", "all_gather"), 2)},
        tensors={"fc1": Keep.RECOMPUTE, "fc2": Keep.KEEP},
        layouts={"x": (1, 0)},
        variants={"fc1": "reference"},
        model=GRAPH.name,
        model_hash=GRAPH.structural_hash,
        machine=MACHINE,
        provenance={"search": "by hand", "seed": 3, "proposals": None},
    )


# Strategies


def test_a_strategy_round_trips_through_its_file(tmp_path: Path) -> None:
    given = strategy()
    given.check(GRAPH, MACHINE)
    path = tmp_path / "strategy.json"
    given.save(path)
    assert Strategy.load(path) == given
    first = path.read_bytes()
    Strategy.load(path).save(path)
    assert path.read_bytes() == first
    assert [item.name for item in tmp_path.iterdir()] == ["strategy.json"]


def test_an_interrupted_save_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "strategy.json"
    strategy().save(path)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        Strategy().save(path)
    assert Strategy.load(path) == strategy()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_strategy_prints_as_a_table() -> None:
    lines = str(strategy()).splitlines()
    assert lines[0] == "strategy for classifier on two"
    assert lines[1].split() == ["operator", "degrees", "devices", "cuts", "variant"]
    assert lines[2].split() == ["fc1", "b0=2", "n=2", "0-1", "1", "0", "b0:0,3,8", "reference"]
    assert "recompute fc1" in lines
    assert "layout x: (1, 0)" in lines


def test_strategies_cannot_be_changed() -> None:
    item = strategy()
    with pytest.raises(TypeError):
        item.configurations["fc1"] = Configuration()  # type: ignore[index]
    with pytest.raises(TypeError):
        item.configurations["fc1"].degrees["n"] = 3  # type: ignore[index]


def test_gradients_follow_their_origin_dim_by_dim() -> None:
    item = strategy()
    own = item.configuration(GRAPH, GRAPH.by_name["fc1"])
    assert own == item.configurations["fc1"]
    for node in GRAPH.nodes:
        if node.origin != "fc1":
            continue
        found = item.configuration(GRAPH, node)
        rename = dict(node.rename)
        signature = GRAPH.signature(node)
        signature.check(found.degrees, lowers=False)
        assert found.points == len(found.devices)
        grid, *_ = signature.points(found.degrees, found.cuts)
        split = [dim.name for dim, degree in zip(signature.dims, grid) if degree > 1]
        for point, device in enumerate(found.devices):
            index = np.unravel_index(point, tuple(found.degrees[name] for name in split))
            at = {rename.get(name, name): int(i) for name, i in zip(split, index)}
            assert device == own.devices[2 * at.get("b0", 0) + at.get("n", 0)]
    weight = next(n for n in GRAPH.nodes if n.origin == "fc1" and n.operator.endswith("_weight"))
    assert item.configuration(GRAPH, weight).degrees == {"b0": 2, "n": 2}
    assert item.configuration(GRAPH, weight).cuts == {"b0": (0, 3, 8)}


def test_an_origin_that_was_lowered_away_is_still_followed() -> None:
    item = strategy()
    gone = replace(GRAPH, nodes=tuple(node for node in GRAPH.nodes if node.name != "fc1"))
    for node in gone.nodes:
        assert item.configuration(gone, node) == item.configuration(GRAPH, node)


def test_the_default_entry_serves_what_has_no_configuration() -> None:
    item = Strategy({DEFAULT: Configuration({"b0": 3, "d0": 2}, tuple(range(6)))})
    item.check(GRAPH)
    assert item.configuration(GRAPH, GRAPH.by_name["fc2"]).degrees == {"b0": 3}
    assert item.configuration(GRAPH, GRAPH.by_name["fc2"]).devices == (0, 2, 4)
    assert item.configuration(GRAPH, GRAPH.by_name["w2.sgd"]).degrees == {"d0": 2}
    assert item.configuration(GRAPH, GRAPH.by_name["w2.sgd"]).devices == (0, 1)
    assert Strategy().configuration(GRAPH, GRAPH.by_name["fc2"]) == Configuration()


def test_a_smaller_batch_caps_degrees_and_drops_cuts() -> None:
    builder = GraphBuilder()
    builder.input("x", (1, 6))
    builder.input("w", (6, 4))
    builder.apply("linear", "x", "w", name="fc1", bias=False)
    graph = builder.build()
    found = strategy().configuration(graph, graph.by_name["fc1"])
    assert found == Configuration({"n": 2}, (0, 1))
    with pytest.raises(StrategyError, match=r"linear 'fc1': dim z does not exist|dim 'z'"):
        Strategy({"fc1": Configuration({"z": 1})}).configuration(graph, graph.by_name["fc1"])


def configured(**changes: Configuration) -> Strategy:
    return replace(strategy(), configurations={**strategy().configurations, **changes})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            configured(fc1=Configuration({"z": 2})),
            r"linear 'fc1': dim 'z' does not exist; dims are",
        ),
        (configured(fc1=Configuration({"b0": 9})), r"linear 'fc1': dim b0: degree 9 found, 1 to 8"),
        (configured(fc1=Configuration({"b0": 0})), r"linear 'fc1': dim b0: degree 0 found"),
        (configured(fc1=Configuration({"b0": 2}, (0,))), r"'fc1': 1 devices found, 2 needed"),
        (configured(fc1=Configuration({"b0": 2}, (0, 2))), r"'fc1': device 2 found, 0 to 1 needed"),
        (
            configured(fc1=Configuration({"n": 2, "b0": 2}, (0, 0, 0, 0))),
            r"degrees are listed as n, b0; b0, n needed",
        ),
        (
            configured(fc1=Configuration({"b0": 2}, (), {"b0": (0, 8)})),
            r"dim b0: 2 cuts found, 3 needed",
        ),
        (
            configured(fc1=Configuration({"b0": 2}, (), {"b0": (0, 9, 8)})),
            r"dim b0: cuts \(0, 9, 8\) found",
        ),
        (
            configured(fc1=Configuration({"b0": 2}, (), {"q": (0, 3, 8)})),
            r"dim 'q' does not exist",
        ),
        (configured(nothing=Configuration()), r"operator 'nothing' does not exist in graph"),
        (
            replace(strategy(), configurations={"fc1": Configuration()}),
            r"operators without a configuration: linear 'fc2', cross_entropy 'loss'",
        ),
        (replace(strategy(), model_hash="0" * 32), r"is for graph 'classifier' with hash 0"),
        (
            replace(strategy(), machine={**MACHINE, "name": "three"}),
            r"strategy is for machine 'three'; 'two' found",
        ),
        (
            replace(strategy(), machine={**MACHINE, "processors": MACHINE["processors"] * 2}),
            r"with 4 processors; 2 found",
        ),
        (
            replace(strategy(), reshards={("fc1", "loss"): Reshard(())}),
            r"operator 'loss' does not read 'fc1'",
        ),
        (
            replace(strategy(), reshards={("fc1", "fc2"): Reshard(("teleport",))}),
            r"'fc1': 'teleport' found, local_slice",
        ),
        (replace(strategy(), tensors={"x": Keep.RECOMPUTE}), r"recompute found for 'x', an input"),
        (replace(strategy(), tensors={"q": Keep.KEEP}), r"tensors: value 'q' does not exist"),
        (replace(strategy(), layouts={"x": (0, 0)}), r"layouts: 'x': axis order \(0, 0\) found"),
        (replace(strategy(), variants={"q": "fast"}), r"variants: operator 'q' does not exist"),
    ],
)
def test_illegal_strategies_are_refused(item: Strategy, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        item.check(GRAPH, MACHINE)


def test_uneven_cuts_around_a_split_inner_dim_are_refused() -> None:
    builder = GraphBuilder()
    builder.input("x", (3, 4))
    builder.apply("reshape", "x", name="flat", shape=(12,))
    graph = builder.build()
    legal = Configuration({"f0": 3, "f1": 2}, (), {"f1": (0, 1, 4), "f0": (0, 1, 2, 3)})
    Strategy({"flat": legal}).check(graph)
    uneven = Configuration({"f0": 3, "f1": 2}, (), {"f0": (0, 0, 1, 3)})
    with pytest.raises(StrategyError, match=r"'flat': dim f0: cuts \(0, 0, 1, 3\) found, single"):
        Strategy({"flat": uneven}).check(graph)


def edited(data: Data, edit: Callable[[Data], object]) -> Data:
    result = copy.deepcopy(data)
    edit(result)
    return result


STRATEGY_FAULTS: list[tuple[Callable[[Data], object], str]] = [
    (lambda d: d.pop("layouts"), r"field 'layouts' is missing; an object needed"),
    (lambda d: d.update(extra=1), r"unknown field 'extra'; fields are configurations"),
    (lambda d: d.update(format="other"), r"field 'format': \"other\" found, 'soapstone-strategy'"),
    (lambda d: d.update(version=2), r"field 'version': 2 found, 1 needed"),
    (lambda d: d.update(version=True), r"field 'version': true found"),
    (lambda d: d.update(model=3), r"field 'model': 3 found, a string needed"),
    (lambda d: d.update(machine=[]), r"field 'machine': \[\] found, an object needed"),
    (lambda d: d["configurations"].update(fc1=3), r"configurations.fc1: 3 found, an object"),
    (
        lambda d: d["configurations"]["fc1"].pop("devices"),
        r"configurations.fc1: field 'devices' is missing",
    ),
    (
        lambda d: d["configurations"]["fc1"]["degrees"].update(b0=1.5),
        r"configurations.fc1.degrees: field 'b0': 1.5 found, an integer from 1",
    ),
    (
        lambda d: d["configurations"]["fc1"].update(devices=[0, True]),
        r"field 'devices': \[0, true\] found, a list of integers from 0",
    ),
    (lambda d: d["configurations"]["fc1"]["cuts"].update(b0="all"), r"field 'b0': \"all\" found"),
    (lambda d: d["configurations"]["fc1"].update(color=1), r"fc1: unknown field 'color'"),
    (lambda d: d.update(reshards={}), r"field 'reshards': {} found, a list needed"),
    (
        lambda d: d["reshards"][0].update(path=["jump"]),
        r"reshards\[0\]: field 'path': \"jump\" found, one of local_slice",
    ),
    (lambda d: d["reshards"].append(d["reshards"][0]), r"reshards\[1\]: value 'fc1' to 'fc2'"),
    (lambda d: d["reshards"][0].update(copies_kept=-1), r"field 'copies_kept': -1 found"),
    (lambda d: d["tensors"].update(fc1="lose"), r"tensors: field 'fc1': \"lose\" found, one of"),
    (lambda d: d["layouts"].update(x=[0, "1"]), r"layouts: field 'x'"),
    (lambda d: d["variants"].update(fc1=None), r"field 'variants.fc1': null found, a string"),
]


@pytest.mark.parametrize(("edit", "message"), STRATEGY_FAULTS)
def test_bad_strategy_files_name_the_field(
    edit: Callable[[Data], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(edited(strategy().to_json(), edit)))
    with pytest.raises(StrategyError, match=message):
        Strategy.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"bad.json': not JSON"),
        (b"[1, 2]", r"strategy: \[1, 2\] found, an object needed"),
        (b'{"format": 1, "format": 2}', r"field 'format' appears twice"),
        (b'{"format": NaN}', r"number NaN found"),
        (b"\xff\xfe", r"UTF-8 text needed"),
        (b"[" * 100_000, r"not JSON"),
    ],
)
def test_files_that_are_no_objects_are_refused(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(StrategyError, match=message):
        Strategy.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"none.json' cannot be read: No such file"):
        Strategy.load(tmp_path / "none.json")
    with pytest.raises(GraphError, match=r"none.json' cannot be read"):
        load_graph(tmp_path / "none.json")


def test_a_strategy_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for value in (math.nan, object()):
        with pytest.raises(StrategyError, match="cannot be written as JSON"):
            Strategy(provenance={"cost": value}).save(tmp_path / "strategy.json")
    assert not list(tmp_path.iterdir())


# Memory plans


A, F, T, E, R = Action.ALLOCATE, Action.FREE, Action.FETCH, Action.EVICT, Action.RUN


def chain() -> Graph:
    builder = GraphBuilder("chain")
    builder.input("x", (4,))
    builder.apply("relu", "x", name="a")
    builder.apply("exp", "a", name="b")
    builder.apply("add", "a", "b", name="c")
    builder.output("c")
    return builder.build()


PLAN = MemoryPlan(
    48,
    (
        Step(T, "x", 16, 0),
        Step(A, "a", 16, 16),
        Step(R, "a"),
        Step(F, "x", 16, 0),
        Step(A, "b", 16, 0),
        Step(R, "b"),
        Step(E, "a", 16, 16),
        Step(T, "a", 16, 32),
        Step(A, "c", 16, 16),
        Step(R, "c"),
        Step(E, "c", 16, 16),
    ),
)


def test_a_legal_plan_replays_and_round_trips(tmp_path: Path) -> None:
    PLAN.check(chain())
    assert PLAN.peak_bytes == 48
    assert PLAN.moved_bytes == 64
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert MemoryPlan.load(path) == PLAN
    assert str(PLAN).splitlines()[2].split() == ["1", "allocate", "'a'", "[16,", "32)"]
    assert MemoryPlan(0, ()).peak_bytes == 0


def changed(number: int, *steps: Step) -> MemoryPlan:
    return replace(PLAN, steps=(*PLAN.steps[:number], *steps, *PLAN.steps[number + 1 :]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, capacity_bytes=47), r"step 7 \(fetch 'a' \[32, 48\)\): bytes up to 48"),
        (changed(1, Step(A, "a", 16, 15)), r"step 1 .*overlaps 'x' \[0, 16\), which is live"),
        (changed(1, Step(A, "a", 12, 16)), r"step 1 .*12 bytes found, 16 needed"),
        (changed(1, Step(A, "q", 16, 16)), r"step 1 .*tensor does not exist"),
        (changed(1), r"step 1 \(run 'a'\): uses 'a', which is not resident"),
        (changed(0, Step(A, "x", 16, 0)), r"step 2 \(run 'a'\): reads 'x', which has no contents"),
        (changed(0, Step(T, "b", 16, 0)), r"step 0 .*tensor is not in the backing memory"),
        (changed(3, Step(F, "x", 16, 1)), r"step 3 .*offset 1 found, 0 needed"),
        (changed(3, Step(F, "b", 16, 0)), r"step 3 .*tensor is not resident"),
        (changed(3, Step(T, "a", 16, 32)), r"step 3 .*tensor is resident already"),
        (changed(5, Step(E, "b", 16, 0)), r"step 5 .*tensor has no contents to move"),
        (changed(6, Step(F, "a", 16, 16)), r"step 7 .*tensor is not in the backing memory"),
        (changed(5, Step(R, "q")), r"step 5 \(run 'q'\): node does not exist"),
        (replace(PLAN, steps=PLAN.steps[:9]), r"add 'c' never runs"),
    ],
)
def test_illegal_plans_name_the_step(plan: MemoryPlan, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        plan.check(chain())


def test_replay_finds_every_overlap_of_random_plans() -> None:
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        sizes = {f"t{i}": generator.choice([0, 8, 16, 40]) for i in range(6)}
        live: dict[str, tuple[int, int]] = {}
        steps, legal = [], True
        for _ in range(12):
            name = generator.choice(list(sizes))
            if name in live:
                steps.append(Step(F, name, sizes[name], live.pop(name)[0]))
                continue
            low = generator.randrange(0, 80)
            high = low + sizes[name]
            legal &= high <= 100 and not any(max(low, a) < min(high, b) for a, b in live.values())
            steps.append(Step(A, name, sizes[name], low))
            live[name] = (low, high)
            if not legal:
                break
        plan = MemoryPlan(100, tuple(steps))
        if legal:
            plan.replay(sizes)
        else:
            refused += 1
            with pytest.raises(GraphError, match=f"step {len(steps) - 1} "):
                plan.replay(sizes)
    assert 50 < refused < 300


def test_replay_without_a_graph_checks_given_uses() -> None:
    plan = MemoryPlan(8, (Step(A, "t", 8, 0), Step(R, "make"), Step(E, "t", 8, 0)))
    plan.replay({"t": 8}, {"make": Uses((), ("t",))})
    with pytest.raises(GraphError, match=r"step 1 \(run 'make'\): uses 's', which is not resident"):
        plan.replay({"t": 8, "s": 8}, {"make": Uses(("s",), ("t",))})


PLAN_FAULTS: list[tuple[Callable[[Data], object], str]] = [
    (lambda d: d.pop("capacity_bytes"), r"field 'capacity_bytes' is missing"),
    (lambda d: d.update(capacity_bytes=-1), r"field 'capacity_bytes': -1 found"),
    (lambda d: d.update(note=""), r"unknown field 'note'"),
    (lambda d: d["steps"][0].update(action="lose"), r"steps\[0\]: field 'action': \"lose\" found"),
    (lambda d: d["steps"][1].update(nbytes=1.0), r"steps\[1\]: field 'nbytes': 1.0 found"),
    (lambda d: d["steps"][2].update(offset=8), r"steps\[2\]: field 'offset': 8 found, 0 for a run"),
    (lambda d: d["steps"].append(7), r"steps\[11\]: 7 found, an object needed"),
]


@pytest.mark.parametrize(("edit", "message"), PLAN_FAULTS)
def test_bad_plan_files_name_the_field(
    edit: Callable[[Data], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(PLAN.to_json(), edit)))
    with pytest.raises(GraphError, match=message):
        MemoryPlan.load(path)


# Graph files


def test_graphs_round_trip_exactly(tmp_path: Path) -> None:
    values = values_of(GRAPH)
    values["w1"] = np.asfortranarray(values["w1"])  # bytes in another order, the same value
    save_graph(GRAPH, tmp_path / "model.json", values)
    graph, loaded = load_graph(tmp_path / "model.json")
    assert graph == GRAPH
    assert list(graph.tensors) == list(GRAPH.tensors)
    assert list(graph.roles) == list(GRAPH.roles)
    assert graph.structural_hash == GRAPH.structural_hash
    assert str(graph) == str(GRAPH)
    assert any(node.origin and node.rename for node in graph.nodes)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)
    given = {
        "x": np.ones((8, 6), np.float32),
        "labels": np.arange(8) % 3,
        "lr": np.float32(0.1),
    }
    before, after = (interpret(g, {**given, **v}) for g, v in ((GRAPH, values), (graph, loaded)))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_a_graph_saved_without_values_loads_without() -> None:
    graph, beside = graph_from_json(graph_to_json(GRAPH))
    assert (graph, beside) == (GRAPH, None)


def test_every_kind_of_attribute_and_value_round_trips(tmp_path: Path) -> None:
    builder = GraphBuilder("kinds")
    builder.input("x", (2, 3))
    builder.input("flags", (), "bool", Role.STATE)
    builder.input("bytes", (0, 2), "uint8", Role.STATE)
    builder.input("step", (), "int64", Role.STATE, Initial())
    infinite = {"low": (1, 0), "high": (0, 1), "interior": (0, 0), "value": -math.inf}
    builder.apply("pad", "x", **infinite)
    steps = (("leaky_relu", (0,), (("alpha", 0.1),)), ("gelu", (1,), (("approximate", "tanh"),)))
    builder.apply("fused_elementwise", "x", program=steps, results=(2, 1))
    builder.apply("full", shape=(), value=1.0)
    builder.apply("reduce_mean", "x", axes=(0, 1), keepdims=True, count=5)
    builder.apply("linear", "x", builder.input("w", (3, 4)), bias=False)
    builder.output("pad", "step")
    graph = builder.build()
    values = {
        "flags": np.array(True),
        "bytes": np.zeros((0, 2), np.uint8),
        "step": np.array(7),
        "x": np.ones((2, 3), np.float32),
    }
    save_graph(graph, tmp_path / "kinds.json", values)
    loaded, found = load_graph(tmp_path / "kinds.json")
    assert loaded == graph
    assert loaded.by_name["pad"].attributes["value"] == -math.inf
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].shape == value.shape
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_names_stay_where_the_builder_would_choose_others() -> None:
    builder = GraphBuilder()
    builder.input("x", (2,))
    builder.apply("exp", "x", name="y")
    builder.apply("log", "x", name="y")  # becomes y_1
    builder.apply("neg", "y_1", name="z")
    builder.output("z")
    graph = builder.build().pruned()
    assert [node.name for node in graph.nodes] == ["y_1", "z"]
    renamed = replace(graph.nodes[0], name="x")  # a node may have the name of a value
    graph = replace(graph, nodes=(renamed, *graph.nodes[1:]))
    assert graph_from_json(graph_to_json(graph))[0] == graph


def fault(operator: str, edit: Callable[[Data], object]) -> Callable[[Data], object]:
    """Return an edit of the first node of an operator."""
    return lambda data: edit(next(n for n in data["nodes"] if n["operator"] == operator))


GRAPH_FAULTS: list[tuple[Callable[[Data], object], str]] = [
    (lambda d: d.pop("updates"), r"graph: field 'updates' is missing"),
    (lambda d: d.update(comment=""), r"graph: unknown field 'comment'"),
    (lambda d: d.update(format="onnx"), r"field 'format': \"onnx\" found, 'soapstone-graph'"),
    (lambda d: d.update(version="1"), r"field 'version': \"1\" found, 1 needed"),
    (lambda d: d["inputs"][0].update(role="magic"), r"inputs\[0\]: field 'role': \"magic\" found"),
    (lambda d: d["inputs"][0].update(dtype="float8"), r"inputs\[0\]: field 'dtype': \"float8\""),
    (lambda d: d["inputs"][0].update(shape=[8, -6]), r"inputs\[0\]: field 'shape': \[8, -6\]"),
    (lambda d: d["inputs"].append(d["inputs"][0]), r"inputs\[8\]: field 'name': value 'x' exists"),
    (lambda d: d["inputs"][0].pop("initial"), r"inputs\[0\]: field 'initial' is missing"),
    (
        lambda d: d["inputs"][2]["initial"].update(kind="xavier"),
        r"inputs\[2\].initial: field 'kind': \"xavier\" found, one of uniform",
    ),
    (lambda d: d["inputs"][2]["initial"].update(scale="1"), r"field 'scale': \"1\" found"),
    (lambda d: d["inputs"][0].update(shape=[8, 7]), r"linear 'fc1': dim k is 7 in input 0 but 6"),
    (fault("linear", lambda n: n.pop("rename")), r"nodes\[0\]: field 'rename' is missing"),
    (fault("linear", lambda n: n.update(operator="magic")), r"operator 'magic' is not declared"),
    (fault("linear", lambda n: n.update(origin=3)), r"field 'origin': 3 found, a string or null"),
    (
        fault("linear", lambda n: n["attributes"].update(name="x")),
        r"linear 'fc1': unknown attribute 'name'; attributes are bias, activation",
    ),
    (
        fault("linear", lambda n: n["attributes"].update(activation="magic")),
        r"linear 'fc1': attribute activation: 'magic' found, one of",
    ),
    (
        fault("linear", lambda n: n["attributes"].update(bias={"float": "inf"})),
        r"linear 'fc1': attribute bias: inf found",
    ),
    (
        fault("linear", lambda n: n["attributes"].update(bias={"real": 1})),
        r"nodes\[0\]: field 'attributes.bias': field 'float' is missing",
    ),
    (
        fault("cross_entropy", lambda n: n["attributes"].update(count={"float": "inf"})),
        r"cross_entropy 'loss': attributes?.*inf.* found",
    ),
    (
        fault("sgd", lambda n: n["attributes"].pop("momentum")),
        r"sgd 'w1.sgd': 5 inputs found, 4 needed",
    ),
    (fault("linear", lambda n: n.update(outputs=["fc1", "more"])), r"'outputs': 2 names found, 1"),
    (fault("linear", lambda n: n.update(outputs=["x"])), r"'outputs': value 'x' exists already"),
    (fault("linear", lambda n: n.update(name="fc2")), r"'fc2': field 'name': another node has it"),
    (fault("linear", lambda n: n.update(inputs=["x", "w1", "q"])), r"input 'q' is never made"),
    (
        fault("linear", lambda n: n.update(inputs=["loss.1", "w1", "b1"])),
        r"linear 'fc1': input 'loss.1' is never made, or in a cycle",
    ),
    (lambda d: d.update(outputs=["q"]), r"field 'outputs': value 'q' does not exist"),
    (lambda d: d["updates"].update(q="fc1"), r"field 'updates': value 'q' does not exist"),
    (lambda d: d["updates"].update(w1="q"), r"field 'updates': value 'q' does not exist"),
    (lambda d: d["updates"].update(w1="fc1"), r"update of 'w1': float32\[8, 4\] found"),
    (lambda d: d["updates"].update(fc1="fc1"), r"update of 'fc1': not an input"),
    (lambda d: d.update(values="../secret"), r"field 'values': \"../secret\" found, the name of"),
    (lambda d: d.update(values=1), r"field 'values': 1 found, a string or null"),
]


@pytest.mark.parametrize(("edit", "message"), GRAPH_FAULTS)
def test_bad_graph_files_name_the_field(
    edit: Callable[[Data], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(edited(graph_to_json(GRAPH), edit)))
    with pytest.raises(GraphError, match=message) as caught:
        load_graph(path)
    assert "graph.json" in str(caught.value)


def test_shape_errors_of_files_stay_shape_errors(tmp_path: Path) -> None:
    data = edited(graph_to_json(GRAPH), lambda d: d["inputs"][2].update(shape=[5, 4]))
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(ShapeError, match=r"graph.json': linear 'fc1': dim k is 6 .* but 5"):
        load_graph(tmp_path / "graph.json")


def test_mutilated_files_raise_nothing_but_graph_errors() -> None:
    generator = random.Random(1)
    odd: list[Any] = [None, True, -1, 0, 2, 10**30, 0.5, "", "x", "fc1", [], [[]], {}, [0, -1]]
    odd += [{"float": "inf"}, {"float": "nan"}, ["relu", [0], []], [["relu", [0], []]]]
    refused = 0
    builder = GraphBuilder(base=GRAPH)
    builder.apply("fused_elementwise", "x", program=(("relu", (0,), ()),), results=(1,))
    builder.input("image", (1, 2, 5, 5))
    builder.apply("max_pool2d", "image", kernel=(2, 2), stride=(1, 1))
    builder.apply("conv2d", "image", builder.input("k", (3, 2, 2, 2)), bias=False)
    builder.apply("transpose", "x", permutation=(1, 0))
    builder.apply("softmax", "x", axis=1)
    data = graph_to_json(builder.build())
    for _ in range(1500):
        broken = copy.deepcopy(data)
        place: Any = broken
        key: Any = generator.choice(list(place))
        while isinstance(place[key], dict | list) and place[key] and generator.random() < 0.85:
            place = place[key]
            key = (
                generator.choice(list(place))
                if isinstance(place, dict)
                else generator.randrange(len(place))
            )
        place[key] = copy.deepcopy(generator.choice(odd))
        try:
            graph_from_json(broken)
        except GraphError:
            refused += 1
    assert refused > 700


def stored(tmp_path: Path, values: Mapping[str, Array], graph: Graph = GRAPH) -> Path:
    """Save the graph, then put other values in the place of its own."""
    from safetensors.numpy import save_file

    path = tmp_path / "model.json"
    save_graph(GRAPH, path, values_of(GRAPH))
    meta = {"graph": graph.structural_hash}
    save_file(dict(values), tmp_path / "model.safetensors", metadata=meta)
    return path


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    values = values_of(GRAPH)
    for changes, message in (
        ({"w1": np.zeros((4, 6), np.float32)}, r"'w1': float32\[4, 6\] found, float32\[6, 4\]"),
        ({"w1": np.zeros((6, 4))}, r"'w1': float64\[6, 4\] found, float32\[6, 4\] needed"),
        ({"w9": np.zeros(3, np.float32)}, r"'w9' is no input of graph 'classifier'"),
        ({"w1": np.zeros((6, 4), np.float16)}, r"'w1': float16\[6, 4\] found"),
    ):
        with pytest.raises(GraphError, match=message):
            save_graph(GRAPH, tmp_path / "other.json", {**values, **changes})
        with pytest.raises(GraphError, match=message):
            load_graph(stored(tmp_path, {**values, **changes}))
    for name, role in (("b2", "parameter"), ("v", "state")):
        rest = {key: value for key, value in values.items() if key != name}
        with pytest.raises(GraphError, match=rf"{role} '{name}' is missing; float32"):
            save_graph(GRAPH, tmp_path / "other.json", rest)
        with pytest.raises(GraphError, match=rf"model.safetensors': {role} '{name}' is missing"):
            load_graph(stored(tmp_path, rest))
    assert not (tmp_path / "other.json").exists()
    assert not (tmp_path / "other.safetensors").exists()


def test_values_of_another_graph_or_damaged_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, values_of(GRAPH), replace(GRAPH, outputs=("fc1",)))
    with pytest.raises(GraphError, match=r"model.safetensors': values of graph '\w+' found"):
        load_graph(path)
    values = tmp_path / "model.safetensors"
    for contents in (b"", b"junk", values.read_bytes()[:-8]):
        values.write_bytes(contents)
        with pytest.raises(GraphError, match=r"model.safetensors': values cannot be read"):
            load_graph(path)
    values.unlink()
    with pytest.raises(GraphError, match=r"model.safetensors': values cannot be read"):
        load_graph(path)


def test_values_never_overwrite_the_graph(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"a suffix other than \.safetensors needed"):
        save_graph(GRAPH, tmp_path / "model.safetensors", values_of(GRAPH))
