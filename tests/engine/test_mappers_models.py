"""Mappers of models: kernels that do not serve are refused, and those that do are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, Model
from soapstone.engine.mapper import GraphMapper
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.mappers import plugins
from soapstone.mappers.stealing import WorkStealingMapper
from soapstone.runtime import Launch, Link, Machine, MapperError, Memory, Processor, Runtime


class Chooses(WorkStealingMapper):
    """Asks for one kernel variant of every linear operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.chosen = name

    def variant(self, launch: Launch, point: int, processor: Processor) -> str | None:
        node = getattr(launch.tag, "node", None)
        return self.chosen if node is not None and node.operator == "linear" else None


def _variants(name: str) -> dict[str, str]:
    with Model("small") as model:
        model.output(model.dense(model.input("x", (8, 6)), 3, name="fc"))
        model.compile("sgd", machine=Machine.local(cpus=2), mapper=Chooses(name))
        return dict(model.trainer.bound("train", 8).variants)


def test_a_variant_that_a_mapper_chooses_runs() -> None:
    assert _variants("reference")["fc"] == "reference"


def test_a_variant_that_does_not_serve_names_the_task_and_the_request() -> None:
    said = r"task 'fc': variant of point \d on processor 'cpu\d' is 'quantum': .*variants are"
    with pytest.raises(MapperError, match=said):
        _variants("quantum")


def test_points_without_devices_are_spread_over_all_processors() -> None:
    with Model("small") as model:
        model.output(model.dense(model.input("x", (8, 6)), 3, name="fc"))
        model.compile("sgd", machine=Machine.local(cpus=2), mapper="work_stealing")
        operations = model.trainer.bound("train", 8).trace.operations
    assert {operation.processor for operation in operations} == {0, 1}


def test_all_processors_take_the_norm_of_a_large_gradient() -> None:
    with Model("small") as model:
        model.output(model.dense(model.input("x", (8, 400)), 300, name="fc"))
        model.compile(SGD(0.1, clip_norm=1.0), machine=Machine.local(cpus=2))
        graph, strategy = model.training_graph, model.strategy
        parts = {
            name: strategy.configuration(graph, graph.by_name[name]).parts
            for name in ("clip.fc.weight.square", "clip.fc.bias.square")
        }
    assert list(parts["clip.fc.weight.square"].values()) == [2]
    assert not parts["clip.fc.bias.square"]


def _compiled(mapper: GraphMapper | str) -> list[int]:
    """The processors that run a small model under a mapper."""
    with Model("small") as model:
        model.output(model.dense(model.input("x", (8, 6)), 3, name="fc"))
        model.compile("sgd", machine=Machine.local(cpus=2), mapper=mapper)
        operations = model.trainer.bound("train", 8).trace.operations
    return sorted({operation.processor for operation in operations})


def _raise(self: object, *asked: object) -> Any:
    raise KeyError("who")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("configure", _raise),
        ("configure", None),
        ("configure", ["fc"]),
        ("configure", {"nowhere": Configuration()}),
        ("configure", {"fc": {"n": 2}}),
        ("configure", {3: Configuration()}),
        ("strategy", _raise),
        ("strategy", "data parallel"),
        ("strategy", None),
        ("attach", _raise),
    ],
)
def test_nonsense_about_a_graph_names_mapper_and_question(question: str, answer: object) -> None:
    def answered(self: object, *asked: object) -> Any:
        return answer(self, *asked) if callable(answer) else answer

    kind = type("Odd", (GraphMapper,), {question: answered})
    with pytest.raises(MapperError, match=rf"mapper 'Odd'.*: {question} ") as caught:
        _compiled(kind())
    assert ("graph 'small" in str(caught.value)) == (question != "attach")


def test_what_a_mapper_says_of_a_graph_comes_out_as_it_is() -> None:
    class Strict(GraphMapper):
        def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
            raise StrategyError(f"no more than {len(graph.nodes)} operators")

    with pytest.raises(StrategyError, match="no more than"):
        _compiled(Strict())


def test_place_of_a_graph_mapper_is_asked() -> None:
    class Last(plugins.DataParallelMapper):
        def place(self, launch: Launch, point: int) -> int:
            super().place(launch, point)
            return 1

    assert _compiled(plugins.DataParallelMapper()) == [0, 1]
    assert _compiled(Last()) == [1]


class Needs(GraphMapper):
    """Cannot be made without an argument."""

    def __init__(self, what: str) -> None:
        super().__init__()


class Breaks(GraphMapper):
    """Cannot be made at all."""

    def __init__(self) -> None:
        raise KeyError("what")


@pytest.mark.parametrize(("kind", "said"), [(Needs, "argument: 'what'"), (Breaks, "KeyError")])
def test_a_mapper_that_cannot_be_made_is_named(kind: type, said: str) -> None:
    name = f"{__name__}:{kind.__name__}"
    with pytest.raises(StrategyError, match=f"{name}.*{said}.*make one and give it"):
        _compiled(name)
    with pytest.raises(MapperError, match=f"{name}.*{said}.*make one and give it"):
        Runtime(Machine.local(cpus=1), name)


APART = Machine(
    "apart",
    tuple(Processor(f"{side}.cpu", "cpu", 1, side) for side in ("left", "right")),
    tuple(Memory(side, 1 << 30) for side in ("left", "right")),
    (Link("left", "right", 1e-6, 1e10), Link("right", "left", 1e-6, 1e10)),
)


def _recommender() -> Model:
    """Two tables, a layer whose weights outweigh its samples, and one whose samples do."""
    model = Model("small", seed=3)
    ids = model.input("ids", (32, 2), "int32")
    rows = [
        model.apply("embedding", column, model.parameter(f"table{i}", (900 + i, 16)), name=f"at{i}")
        for i, column in enumerate(model.split(ids, (1, 1), axis=1))
    ]
    x = model.flatten(model.concat(rows, axis=1))
    x = model.dense(x, 24, activation="relu", name="narrow")
    x = model.dense(x, 640, activation="relu", name="wide")
    x = model.dense(x, 640, activation="relu", name="wider")
    model.output(model.dense(x, 5, name="head"))
    return model


def _trained(mapper: str, machine: Machine) -> tuple[Strategy, dict[str, np.ndarray], int]:
    """The strategy of two steps, the parameters after them, and the bytes that a step copies."""
    random = np.random.default_rng(0)
    ids, labels = random.integers(0, 900, (64, 2)).astype(np.int32), random.integers(0, 5, 64)
    with _recommender() as model:
        model.compile(SGD(0.1, momentum=0.9), machine=machine, mapper=mapper)
        model.fit(ids, labels, batch_size=32, epochs=1, shuffle=False, progress=False)
        operations = model.trainer.bound("train", 32).trace.operations
        copied = sum(
            operation.arrays()[0].nbytes for operation in operations if operation.kind == "copy"
        )
        trainer = model.trainer
        return trainer.strategy_for(32), trainer.session.state(), copied


def test_memories_apart_move_samples_where_parameters_outweigh_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy, found, moved = _trained("data_parallel", APART)
    configurations = strategy.configurations
    assert {configurations[name].devices for name in ("at0", "at1")} == {(0,), (1,)}
    degrees = {name: str(configurations[name]) for name in ("narrow", "wide", "wider")}
    assert degrees == {"narrow": "b0=2", "wide": "b0=2", "wider": "n=2"}
    assert str(configurations["wider.weight.update"]) == "d1=2"
    _, wanted, _ = _trained("sequential", Machine.local(cpus=1))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    monkeypatch.setattr(plugins, "configure_apart", lambda *arguments: {})
    _, _, by_samples = _trained("data_parallel", APART)
    parameters = sum(found[name].nbytes for name in ("table0", "table1", "wider.weight"))
    assert moved < by_samples - parameters  # their gradients alone, added up in halves
