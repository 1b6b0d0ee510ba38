"""What holds of a graph after each pass, and that the verifier says so of one that was broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.graph_runs import degrees_of
from helpers.random_graphs import draw
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.engine.lower import (
    channels_last,
    fold_weights,
    lower,
    passes,
    split_constants,
    views,
)
from soapstone.engine.lower.passes import NAMES, PASSES, Pass, verifier
from soapstone.engine.lower.verify import check_aliases, check_graph, check_sources, check_views
from soapstone.frontend.app import app_names, load_app
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.files.graphs import save_graph
from soapstone.ir.graph import Graph, signature_of
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.mappers import load
from soapstone.runtime import Machine

WHOLE = Strategy({DEFAULT: Configuration()})
MACHINES = (Machine.local(cpus=1), Machine.local(cpus=2), Machine.local(cpus=3, memories=3))


def verified(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph lowered, which was verified after each pass and at the end."""
    lowered = lower(graph, strategy, watch=verifier(graph))
    check_aliases(lowered)
    check_views(lowered, strategy, views(lowered, strategy))
    return lowered


def verified_inference(graph: Graph, constants: dict[str, Array]) -> Graph:
    """Return a graph with constants, lowered and verified alike."""
    graph = replace(graph, updates={}).pruned()
    known = fold_weights(graph, constants, watch=verifier(graph, whole=False))
    first, rest = split_constants(known, constants.keys())
    for part in (first, rest):
        check_graph(part)
        check_sources(part, graph, whole=False)
    return verified(rest, replace(WHOLE, layouts=channels_last(rest)))


@pytest.mark.parametrize("name", ["lenet", "squeezenet", "rnnlm", "dlrm", "bert"])
def test_apps_are_sound_after_every_pass(name: str) -> None:
    graph = graph_of(name, 4)
    for machine in MACHINES:
        verified(graph, load("data_parallel").strategy(graph, machine))
    forward = load_app(name).build(1).build(1)
    constants = {
        value: np.broadcast_to(np.ones((), spec.dtype), spec.shape)
        for value, spec in forward.tensors.items()
        if forward.roles.get(value, Role.INPUT) is not Role.INPUT
    }
    lowered = verified_inference(forward, constants)
    assert {name for node in lowered.nodes for name in node.work_of} <= forward.by_name.keys()


@pytest.mark.long
def test_lowered_graphs_do_not_depend_on_the_order_of_sets() -> None:
    """All apps, in two processes whose strings have other hashes."""
    program = Path(__file__).parents[1] / "programs" / "lowered_apps.py"
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].splitlines() for process in running)
    graphs = [name for name in app_names() if load_app(name).program is None]
    assert first == second and [line.split()[0] for line in first] == graphs


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_random_graphs_are_sound_after_every_pass(first: int) -> None:
    for seed in range(first, first + 40):
        sample = draw(seed)
        graph, random = sample.graph, np.random.default_rng(seed)
        split = {n.name: Configuration(degrees_of(graph.signature(n), random)) for n in graph.nodes}
        verified(graph, Strategy(split))
        verified(graph, replace(WHOLE, layouts=channels_last(graph)))
        fixed = [name for name, role in graph.roles.items() if role is not Role.INPUT]
        verified_inference(graph, {name: sample.values[name] for name in fixed})


def small() -> Graph:
    """A product, its bias and activation, and an update of a state."""
    builder = GraphBuilder("small")
    x, w = builder.input("x", (4, 3)), builder.input("w", (3, 2), role=Role.PARAMETER)
    bias = builder.input("b", (2,), role=Role.PARAMETER)
    builder.input("s", (4, 2), role=Role.STATE)
    y = builder.apply("add", builder.apply("matmul", x, w)[0], bias)[0]
    builder.update("s", builder.apply("relu", y)[0])
    builder.output(builder.apply("exp", "s")[0])
    return builder.build()


def test_a_fused_launch_names_its_operators_and_the_store_what_it_stores() -> None:
    nodes = {node.name: node for node in verified(small(), WHOLE).nodes}
    assert nodes["matmul"].operator == "with_epilogue"
    assert nodes["matmul"].work_of == ("matmul", "add", "relu")
    assert nodes["s.next"].work_of == ("relu",) and nodes["exp"].work_of == ("exp",)
    split = {"matmul": Configuration({"k": 3}), DEFAULT: Configuration()}
    assert verified(small(), Strategy(split)).by_name["matmul"].work_of == ("matmul",)


def _at(number: int, **changes: object) -> Callable[[Graph], Graph]:
    """Return what changes a node of a graph."""

    def change(graph: Graph) -> Graph:
        nodes = list(graph.nodes)
        nodes[number] = replace(nodes[number], **changes)  # type: ignore[arg-type]
        return replace(graph, nodes=tuple(nodes))

    return change


def _typed(name: str, spec: TensorSpec | None) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        kept = {value: known for value, known in graph.tensors.items() if value != name}
        return replace(graph, tensors=kept if spec is None else {**kept, name: spec})

    return change


def _without(graph: Graph) -> Graph:
    return graph.with_nodes(node for node in graph.nodes if node.name != "exp")


FAULTS: dict[str, Callable[[Graph], Graph]] = {
    "read before it is made": lambda g: replace(g, nodes=g.nodes[::-1]),
    "another node has its name": _at(1, name="matmul"),
    "exists already": _at(1, outputs=("matmul",)),
    "outputs .* found, .* needed": _typed("add", TensorSpec((2, 4))),
    "a type and no maker": _typed("nothing", TensorSpec((1,))),
    "not in their frozen form": _at(0, items=()),
    "unknown attribute": _at(2, items=(("colour", 1),)),
    "update of 's'": lambda g: replace(g, updates={"s": "w"}),
    "output 'exp' is never made": _without,
    "updates .* as before": lambda g: replace(g, updates={}),
    "outputs .* as before": lambda g: replace(g, outputs=("add", "exp")),
    "inputs .* as before": lambda g: replace(g, roles={**g.roles, "x": Role.SCALAR}),
    "'who', no node": _at(1, sources=("who",)),
    "relu 'relu' is done by none": _at(2, sources=("add",)),
}


@pytest.mark.parametrize("error", FAULTS)
def test_a_broken_graph_is_refused(error: str) -> None:
    graph = small()
    verifier(graph)("no pass", graph, graph)
    with pytest.raises(GraphError, match=f"pass 'wrong': .*{error}"):
        verifier(graph)("wrong", graph, FAULTS[error](graph))


def test_old_contents_are_not_read_after_the_update() -> None:
    lowered = lower(small(), WHOLE)
    order = sorted(lowered.nodes, key=lambda node: node.operator == "exp")
    with pytest.raises(GraphError, match="exp 'exp': reads 's' after store"):
        check_aliases(replace(lowered, nodes=tuple(order)))


def test_views_that_overlap_or_have_no_memory_are_refused() -> None:
    builder = GraphBuilder("parts")
    x = builder.input("x", (4, 6))
    parts = [builder.apply("relu", builder.apply("exp", x)[0])[0], builder.apply("neg", x)[0]]
    builder.output(builder.apply("exp", builder.apply("concat", *parts, axis=1)[0])[0])
    lowered = lower(builder.build(), WHOLE)
    seen = views(lowered, WHOLE)
    check_views(lowered, WHOLE, seen)
    (one, first), (other, second) = seen.items()
    for wrong, error in (
        ({one: first, other: replace(second, box=first.box)}, "overlap"),
        ({one: first, other: replace(second, root=one)}, "no memory of its own"),
        ({one: first, other: second.then("transpose", (1, 0))}, r"shape \(6, 4\) found"),
    ):
        with pytest.raises(GraphError, match=error):
            check_views(lowered, WHOLE, wrong)


def test_passes_have_names_of_their_own_and_run_in_the_order_of_the_list() -> None:
    ran: list[str] = []
    lower(small(), WHOLE, watch=lambda name, before, after: ran.append(name))
    assert ran == [each.name for each in PASSES] == list(NAMES[-len(PASSES) :])
    assert len(set(NAMES)) == len(NAMES)
    ran.clear()
    lower(small(), WHOLE, fuse=False, watch=lambda name, before, after: ran.append(name))
    assert ran == [each.name for each in PASSES if not each.fuses]


def told(*arguments: str) -> str:
    """Return what `soapstone show` prints, or the one line of its error."""
    result = CliRunner().invoke(app, ["show", *arguments])
    assert result.exit_code in (0, 1) and (result.exit_code == 0 or not result.stdout)
    return result.output


def test_a_pass_that_changes_nothing_rebuilds_nothing() -> None:
    """A pass whose operators are there, and whose rule serves none of them, returns its graph."""
    builder = GraphBuilder("net")
    x = builder.input("x", (2, 3, 4, 4))
    w = builder.input("w", (3, 3, 1, 1), role=Role.PARAMETER)
    scale, shift = (builder.input(name, (3, 1, 1), role=Role.PARAMETER) for name in ("a", "b"))
    scaled = builder.apply("add", *builder.apply("mul", x, scale), shift)  # before the product
    (y,) = builder.apply("conv2d", *scaled, w, bias=False)
    builder.output(*builder.apply("relu", *builder.apply("reshape", y, shape=(2, 48))))
    graph, changed = builder.build(), []
    constants = {name: np.ones(graph.tensors[name].shape, np.float32) for name in ("w", "a", "b")}

    def watch(name: str, before: Graph, after: Graph) -> None:
        changed.extend([name] if after is not before else [])

    fold_weights(graph, constants, watch)
    assert changed == []
    before = replace(graph, outputs=("conv2d",)).pruned()
    after = GraphBuilder(base=replace(before, outputs=()))
    after.output(*after.apply("mul", "conv2d", "a"))
    fold_weights(after.build(), constants, watch)
    assert changed == ["fold_scales", "drop_unread"]


def test_show_prints_graphs_differences_and_launches(tmp_path: Path) -> None:
    file = str(tmp_path / "small.json")
    save_graph(
        small(),
        file,
        {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
        | {"s": np.ones((4, 2), np.float32)},
    )
    table = told(file, "--cpus", "1")
    assert "fuse_epilogues        3 operators\n" in table and "3 launches" in table
    assert "matmul: matmul + add + relu; whole; Read x[4, 3], Read w[3, 2], Read b[2]" in table
    after = told(file, "--after", "fuse_epilogues")
    assert "relu = with_epilogue(x, w, b" in after and "of matmul, add, relu" in after
    assert told(file, "--after", "model") == f"{small()}\n"
    changes = told(file, "--after", "fuse_epilogues", "--diff").splitlines()
    assert changes[:2] == ["--- merge_parts", "+++ fuse_epilogues"]
    assert [line[:7] for line in changes[2:] if line[0] in "+-"] == [
        "-  matm",
        "-  add ",
        "-  relu",
        "+  relu",
    ]
    assert "fold_products" in told("lenet", "--inference", "--diff")


def test_show_as_json() -> None:
    whole = json.loads(told("lenet", "--inference", "--json"))
    assert whole["passes"]["split_constants"] == 8 and len(whole["launches"]) == 8
    assert whole["launches"][0]["tiles"][-1] == {
        "region": "conv1",
        "privilege": "Write",
        "shape": [1, 6, 28, 28],
    }
    nodes = json.loads(told("lenet", "--after", "model", "--json"))["nodes"]
    assert nodes[0]["operator"] == "conv2d" and nodes[0]["work_of"] == ["conv1"]
    assert json.loads(told("lenet", "--diff", "--json"))["diff"]["fuse_epilogues"] == []


def test_show_says_in_one_line_what_was_wrong() -> None:
    assert told("lenet", "--after", "who").startswith(
        "error: pass 'who' found; one of model, carry_out_strategy, "
    )
    assert "which is not for this graph" in told("lenet", "--after", "fold_scales")
    assert "an ONNX file, with symbolic dims, needed" in told("lenet", "--dim", "n=2")
    assert "inference runs on one processor" in told("lenet", "--inference", "--cpus", "2")


def test_checked_mode_names_the_pass_that_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Pass[Strategy]("lose_updates", lambda graph, _: replace(graph, updates={}))
    monkeypatch.setattr(passes, "PASSES", (*PASSES, wrong))
    monkeypatch.setattr(passes, "CHECKED", False)
    lower(small(), WHOLE)
    monkeypatch.setattr(passes, "CHECKED", True)
    with pytest.raises(GraphError, match=r"pass 'lose_updates': updates \[\] found, \['s'\] need"):
        lower(small(), WHOLE)


def test_a_chain_takes_the_signatures_that_its_steps_had_as_nodes() -> None:
    signature_of.cache_clear()
    builder = GraphBuilder("chain")
    x, scale = builder.input("x", (2, 7, 5, 3)), builder.input("scale", (7, 1, 1))
    builder.output(*builder.apply("relu", builder.apply("mul", x, scale)[0]))
    (chain,) = (lowered := lower(builder.build(), WHOLE)).nodes
    assert lowered.signature(chain).outputs[0].shape == (2, 7, 5, 3)
    found = signature_of.cache_info()
    assert found.misses == 3 and found.hits >= len(chain.attributes["program"]) == 2
