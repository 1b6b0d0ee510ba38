"""Mappers of models: kernels that do not serve are refused, and those that do are used."""

from __future__ import annotations

import pytest

from soapstone import Model
from soapstone.mappers.stealing import WorkStealingMapper
from soapstone.runtime import Launch, Machine, MapperError, Processor


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
