"""Native graph files: round trips, bad files, and values beside them."""

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
from helpers.ir_examples import GRAPH, Data, edited, values_of

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.files.graphs import graph_from_json, graph_to_json, load_graph, save_graph
from soapstone.ir.graph import Graph, Initial
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role


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
    (
        lambda d: d.update(format="soapstone-strategy", layouts={}),
        r"field 'format': \"soapstone-strategy\" found, 'soapstone-graph'",
    ),
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
        with pytest.raises(GraphError, match=r"model.safetensors': values: truncated or no"):
            load_graph(path)
    values.unlink()
    with pytest.raises(GraphError, match=r"model.safetensors': values: truncated or no"):
        load_graph(path)


def test_values_never_overwrite_the_graph(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"a suffix other than \.safetensors needed"):
        save_graph(GRAPH, tmp_path / "model.safetensors", values_of(GRAPH))
