"""What several devices compute: tiles of copies, the same numbers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import legate_environment
from helpers.parallel_problems import product
from helpers.processes import PROGRAMS, mpiexec, ranks
from programs.carried_training import compiled, kept, trained
from programs.replicated_training import WAYS, at_random, close

from soapstone.engine.carry.traffic import traffic_bytes
from soapstone.engine.prepare import prepare
from soapstone.frontend.strategies.finding import imported
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Reshard, Step, Strategy
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine, Read
from soapstone.runtime.machines.cluster import load_machine

ALL = Configuration({"m": 2}, (0, 1), replicated=("m",))


def given(first: Configuration, second: Configuration | None = None) -> Strategy:
    """A strategy of two products."""
    second = second or Configuration({"n": 2}, (1, 0))
    return Strategy({DEFAULT: Configuration(), "first": first, "second": second})


def test_each_point_writes_its_copy_and_reads_that_of_its_device() -> None:
    step, strategy = product(8, 12, 4), given(ALL)
    strategy.check(step)
    prepared = prepare(step, strategy)
    first, second = prepared.launches
    assert prepared.region("first").shape == (16, 12)
    (written,) = [a for a in first.arguments if a.privilege is not Read]
    assert written.lo.tolist() == [[0, 0], [8, 0]] and written.hi.tolist() == [[8, 12], [16, 12]]
    (read,) = [a for a in second.arguments if a.region == "first"]
    assert read.lo.tolist() == [[8, 0], [0, 0]] and read.hi.tolist() == [[16, 12], [8, 12]]
    machine = Machine.local(cpus=2, memories=2)
    assert traffic_bytes(step, strategy, machine).get(("first", "second"), 0) == 0
    split = given(replace(ALL, replicated=()))
    assert traffic_bytes(step, split, machine)["first", "second"] == 8 * 12 * 4


def test_copies_of_parts_lie_one_behind_the_other() -> None:
    """Rows are split, columns are not: two copies of two parts each."""
    form = Configuration({"m": 2, "n": 2}, (0, 1, 2, 3), replicated=("n",))
    assert (form.copies, dict(form.parts)) == (2, {"m": 2}) and str(form) == "m=2 n=2*"
    step = product(8, 12, 4)
    readers = Configuration({"m": 4}, (3, 0, 1, 2))
    prepared = prepare(step, given(form, readers))
    first, second = prepared.launches
    (written,) = [a for a in first.arguments if a.privilege is not Read]
    assert written.lo[:, 0].tolist() == [0, 8, 4, 12] and not written.lo[:, 1].any()
    assert (written.hi - written.lo).tolist() == [[4, 12]] * 4
    (read,) = [a for a in second.arguments if a.region == "first"]
    assert read.lo[:, 0].tolist() == [8, 2, 12, 6]  # devices 3 and 1 have the second copy


def test_sums_that_are_not_split_are_not_folded() -> None:
    """All of a reduced dim at each point is the whole result, not a part of it."""
    prepared = prepare(product(8, 12, 4), given(Configuration({"k": 2}, (0, 1), {}, ("k",))))
    assert {str(a.privilege) for a in prepared.launches[0].arguments} == {"Read", "Write"}


@pytest.fixture(scope="module")
def wanted() -> dict[str, np.ndarray]:
    """What training on one processor gives."""
    return trained(compiled(kept))


@pytest.mark.parametrize("memories", [1, 2])
@pytest.mark.parametrize("way", [*WAYS, at_random(0), at_random(1), at_random(2)])
def test_copies_train_to_the_same_numbers(
    way: object, memories: int, wanted: dict[str, np.ndarray]
) -> None:
    machine = Machine.local(cpus=2, memories=memories)
    model = compiled(way, machine=machine)
    forms = model.strategy.configurations.values()
    assert any(item.copies > 1 for item in forms)
    close(trained(model), wanted)


def test_four_workers_train_to_the_same_numbers(wanted: dict[str, np.ndarray]) -> None:
    model = compiled(at_random(3, 4), machine=Machine.local(cpus=4, memories=4))
    assert {1, 2, 4} <= {item.copies for item in model.strategy.configurations.values()}
    close(trained(model), wanted)


@pytest.mark.long
def test_two_ranks_train_to_the_same_numbers() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    if mpiexec() is None:
        pytest.skip("there is no mpiexec")
    done = ranks(2, PROGRAMS / "replicated_training.py", "mpi", 3, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["9 strategies equal"] * 2


@pytest.mark.long
def test_legate_trains_to_the_same_numbers(tmp_path: Path) -> None:
    output = legate_environment.printed(tmp_path, "replicated_training", "legate", "1")
    assert "7 strategies equal" in output


def test_files_say_what_is_in_copies_and_older_ones_do_not(tmp_path: Path) -> None:
    strategy = given(ALL)
    strategy.save(tmp_path / "some.json")
    assert Strategy.load(tmp_path / "some.json") == strategy
    data = json.loads((tmp_path / "some.json").read_text())
    assert data["configurations"]["first"]["replicated"] == ["m"]
    assert set(data["configurations"]["second"]) == {"degrees", "devices", "cuts"}


def test_searches_begin_without_copies(tmp_path: Path) -> None:
    step, machine = product(8, 12, 4), load_machine("p100", 2)
    given(ALL).save(tmp_path / "some.json")
    found = imported(step, machine, tmp_path / "some.json")
    assert found["first"] == replace(ALL, replicated=())
    assert "m=2*" in str(given(ALL))


def guarded() -> Graph:
    """A product whose sum is left of a run, and an update."""
    builder = GraphBuilder("guarded")
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4), role=Role.PARAMETER)
    made = builder.apply("tanh", builder.apply("matmul", x, w, name="product")[0], name="made")[0]
    slope = builder.apply("tanh_grad", made, made, name="slope", origin="made")[0]
    builder.output(builder.apply("reduce_sum", made, axes=(0, 1), keepdims=False, name="total")[0])
    builder.update("w", builder.apply("mul", slope, "w", name="next")[0])
    return builder.build()


@pytest.mark.parametrize(
    ("name", "item", "found"),
    [
        ("product", Configuration({"m": 2}, (), {}, ("m",)), "replicated m found, devices of the"),
        ("product", Configuration({"m": 2}, (0, 1), {}, ("n",)), "dim n split, and once, needed"),
        ("product", Configuration({"m": 2}, (0, 1), {}, ("m", "m")), "dim m split, and once"),
        (
            "product",
            Configuration({"m": 2, "k": 2}, (0, 1, 2, 3), {}, ("m",)),
            r"product.*replicated m found where k=2 leaves parts of results",
        ),
        ("slope", Configuration({"d0": 2}, (0, 1), {}, ("d0",)), "because it follows 'made'"),
        ("total", Configuration({"d0": 2}, (0, 1), {}, ("d0",)), "because 'total' is left of a"),
        ("*", Configuration({"m": 2}, (0, 1), {}, ("m",)), "of one operator needed"),
    ],
)
def test_copies_that_cannot_be_are_refused(name: str, item: Configuration, found: str) -> None:
    strategy = Strategy({DEFAULT: Configuration(), name: item})
    with pytest.raises(StrategyError, match=found):
        strategy.check(guarded())


def test_a_path_has_each_element_once() -> None:
    form = Configuration({"d0": 2}, (0, 1), {}, ("d0",))
    path = {("first", "second"): Reshard((Step("all_gather", form), Step("permute")))}
    with pytest.raises(StrategyError, match=r"'first' to 'second'.*replicated d0 found"):
        replace(given(Configuration()), reshards=path).check(product(8, 12, 4))
