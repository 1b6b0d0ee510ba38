"""What integers an input may hold where they are indices, and what follows from that."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import Graph, GraphBuilder, Model
from soapstone.engine.measuring import drawn
from soapstone.errors import DataError
from soapstone.ir.analysis.indices import index_range
from soapstone.ir.interpret import interpret
from soapstone.ir.spec import Case, OpSpec, operators

DECLARED = [spec for spec in operators() if spec.indices is not None]


@pytest.mark.parametrize("spec", DECLARED, ids=lambda spec: spec.name)
def test_the_ends_of_each_range_are_taken_and_no_more(spec: OpSpec) -> None:
    """For all cases of the operator, by its reference, which refuses what is outside."""
    tried = 0
    for case in spec.cases:
        graph = one_node(spec, case)
        for name in graph.roles:
            known = index_range(graph, name)
            if known is None or not graph.tensors[name].size or not len(known[0]):
                continue
            values = {each: drawn(graph, each) for each in graph.roles}
            for number in (known[0].start, known[0].stop - 1):
                values[name] = np.full_like(values[name], number)
                interpret(graph, values)
            for number in (known[0].start - 1, known[0].stop):
                values[name] = np.full_like(values[name], number)
                with pytest.raises(Exception, match=f"{number} found"):
                    interpret(graph, values)
            tried += 1
    assert tried


def one_node(spec: OpSpec, case: Case) -> Graph:
    builder = GraphBuilder("case")
    names = []
    for place, text in enumerate(case.inputs):
        words = [word for word in text.split() if word[0] not in "<>"]
        dtype = words.pop(0) if words and not words[0].isdigit() else "float32"
        names.append(builder.input(f"x{place}", tuple(map(int, words)), dtype))
    builder.output(*builder.apply(spec.name, *names, **dict(case.attributes)))
    return builder.build()


def columns(least: int) -> Model:
    """Return a model of ids of which each column has a table of its own."""
    model = Model("columns", seed=1)
    ids = model.input("ids", (4, 2), "int32")
    one = model.embedding(ids[:, 0], least, 3, name="one")
    other = model.embedding(ids[:, 1], 50, 3, name="other")
    model.output(model.dense(model.concat([one, other], axis=1), 2, name="o"))
    return model


def test_a_part_of_an_input_says_nothing_of_the_rest() -> None:
    with columns(1) as model:
        assert index_range(model.graph, "ids") is None
        known = index_range(model.graph, "ids", parts=True)
        assert known is not None and known[0] == range(1)
        assert not drawn(model.graph, "ids").any()
        model.compile("sgd", cpus=1)
        ids = np.stack([np.zeros(8, int), np.arange(42, 50)], 1)
        model.fit(ids, np.arange(8) % 2, epochs=1, progress=False)


def test_ids_of_several_readers_fit_all() -> None:
    model = Model("several", seed=1)
    ids = model.input("ids", (4, 3), "int32")
    turned = model.embedding(model.transpose(ids, (0, 1)), 8, 5)
    picked = model.gather_elements(model.input("x", (4, 5)), ids, axis=1)
    model.output(model.dense(turned.sum(axis=2) + picked, 2, name="o"))
    with model:
        known = index_range(model.graph, "ids")
        assert known is not None and known[0] == range(5)
        model.compile("sgd", cpus=1)
        x = np.zeros((4, 5), np.float32)
        with pytest.raises(DataError, match=r"ids: 5 at row 2; layer 'gather_elements' has 5"):
            model.fit({"ids": np.full((4, 3), [[0], [1], [5], [9]]), "x": x}, np.zeros(4, int))


def test_a_step_with_a_table_of_one_row_is_optimised_and_checked() -> None:
    model = Model("row", seed=1)
    ids = model.input("ids", (4, 3), "int32")
    h = model.embedding(ids, 9, 6) + model.embedding(model.input("types", (4, 3), "int32"), 1, 6)
    h = model.reduce_mean(h, axes=(1,), keepdims=False)
    model.output(model.dense(model.dense(h, 5) * model.dense(h, 5), 2, name="o"))
    with model:
        model.compile("sgd", cpus=1, optimize=True)
        ids_ = {"ids": np.zeros((8, 3), int), "types": np.zeros((8, 3), int)}
        model.fit(ids_, np.arange(8) % 2, epochs=1, progress=False)
