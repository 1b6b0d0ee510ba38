"""Strategies: what they mean, round trips, and bad files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.ir_examples import FORWARD, GRAPH, MACHINE, Data, edited

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.files.graphs import load_graph
from soapstone.ir.strategy import (
    DEFAULT,
    Configuration,
    Copies,
    Keep,
    Reshard,
    Step,
    Strategy,
)

# To another cut of the samples, then to whatever the consumer reads.
PATH = (
    Step("all_to_all", Configuration({"d0": 2}, (1, 0), {"d0": (0, 5, 8)})),
    Step("permute"),
)


def strategy() -> Strategy:
    """A strategy that uses every field."""
    configurations = {name: Configuration() for name in FORWARD}
    configurations["fc1"] = Configuration({"b0": 2, "n": 2}, (0, 1, 1, 0), {"b0": (0, 3, 8)})
    configurations["fc2"] = Configuration({"b0": 2}, (1, 0))
    configurations["loss"] = Configuration({"n": 2}, (1, 1))
    return Strategy(
        configurations=configurations,
        reshards={("fc1", "fc2"): Reshard(PATH, Copies.BOTH)},
        tensors={"fc1": Keep.RECOMPUTE, "fc2": Keep.KEEP},
        layouts={"x": (1, 0)},
        variants={"fc1": "reference"},
        model=GRAPH.name,
        model_hash=GRAPH.structural_hash,
        machine=MACHINE,
        provenance={"search": "by hand", "seed": 3, "proposals": None},
    )


def to_fc2(layout: Configuration) -> Strategy:
    """The strategy, whose path to `fc2` is one step that ends in a layout."""
    return replace(strategy(), reshards={("fc1", "fc2"): Reshard((Step("permute", layout),))})


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


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_file_has_the_permissions_that_the_process_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is the whole process's: other threads make files meanwhile, so it stays as it is."""
    before = os.umask(0o027)
    try:
        monkeypatch.delattr(os, "umask")
        strategy().save(tmp_path / "strategy.json")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "strategy.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["strategy.json"]


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
    assert "reshard fc1 -> fc2: all_to_all (d0=2 on 1,0), permute; both kept" in lines
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
        (replace(strategy(), model_hash="0" * 32), r"with hash 0.*: batch size, layers"),
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
            r"'fc1' to 'fc2': step 1 of 1, 'teleport' found; local_slice",
        ),
        (
            replace(strategy(), reshards={("fc1", "fc2"): Reshard(("permute", "permute"))}),
            r"step 1 of 2, 'permute': no layout found; one needed for every step but the last",
        ),
        (
            to_fc2(Configuration({"d7": 2})),
            r"step 1 of 1, 'permute': layout: dim 'd7' does not exist",
        ),
        (
            to_fc2(Configuration({"d0": 2}, (1,))),
            r"'permute': layout: 1 devices found, 2 needed, one a point",
        ),
        (
            to_fc2(Configuration({"d0": 2}, (0, 1))),
            r"the path ends in permute \(d0=2 on 0,1\), where device 1 has \d+ bytes less than the",
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
    (lambda d: d["reshards"][0].update(kept="all"), r"field 'kept': \"all\" found, one of before"),
    (
        lambda d: d["reshards"][0]["path"][0]["layout"].update(devices="all"),
        r"reshards\[0\].path\[0\].layout: field 'devices': \"all\" found",
    ),
    (lambda d: d["tensors"].update(fc1="lose"), r"tensors: field 'fc1': \"lose\" found, one of"),
    (lambda d: d["layouts"].update(x=[0, "1"]), r"layouts: field 'x'"),
    (lambda d: d["variants"].update(fc1=None), r"field 'variants.fc1': null found, a string"),
]


def test_files_of_before_say_how_many_copies_are_kept_and_name_steps_alone() -> None:
    for copies, kept in ((1, Copies.BEFORE), (2, Copies.BOTH)):
        data = strategy().to_json()
        old = {"value": "fc1", "consumer": "fc2", "path": ["local_slice"], "copies_kept": copies}
        data["reshards"] = [old]
        found = Strategy.from_json(data).reshards["fc1", "fc2"]
        assert found == Reshard((Step("local_slice"),), kept)


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
        (b"", r"bad.json': nothing found, JSON needed"),
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
    with pytest.raises(StrategyError, match=r"none.json': no such file"):
        Strategy.load(tmp_path / "none.json")
    with pytest.raises(GraphError, match=r"none.json': no such file"):
        load_graph(tmp_path / "none.json")


def test_a_strategy_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    for value in (math.nan, object()):
        with pytest.raises(StrategyError, match="cannot be written as JSON"):
            Strategy(provenance={"cost": value}).save(tmp_path / "strategy.json")
    assert not list(tmp_path.iterdir())
