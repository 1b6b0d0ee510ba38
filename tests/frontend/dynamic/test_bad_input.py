"""What users get wrong in dynamic sessions, and what is unusual and works."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from soapstone import Adam, DataError, DynamicSession, GraphError
from soapstone.frontend.app import app_module
from soapstone.frontend.data.structured import Lattice, Question
from soapstone.frontend.data.trees import Tree

DEPTH = 10_000


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOAPSTONE_DATA", raising=False)


@pytest.fixture
def session() -> Iterator[DynamicSession]:
    with DynamicSession("tests", Adam(0.01), cpus=1) as made:
        yield made


def ones(session: DynamicSession, width: int = 1) -> Any:
    return session.value(np.ones(width, np.float32))


@pytest.mark.long
def test_values_cannot_be_changed(session: DynamicSession) -> None:
    given = np.ones(2, np.float32)
    x = session.value(given)
    given[...] = 5
    y = session.relu(x)
    y.numpy()[...] = 7
    z = y
    z += 1.0
    np.testing.assert_array_equal(y.numpy(), [[1, 1]])
    np.testing.assert_array_equal(z.numpy(), [[2, 2]])
    with pytest.raises(TypeError, match="item assignment"):
        y[0] = 1
    with pytest.raises(GraphError, match=r"numpy\.add: a tensor found"):
        np.add(given, y, out=given)


@pytest.mark.long
def test_zeros_of_both_signs_are_told_apart(session: DynamicSession) -> None:
    x = session.value(-np.zeros(1, np.float32))
    assert [np.signbit((x + by).numpy()).item() for by in (0.0, -0.0)] == [False, True]


@pytest.mark.parametrize("call", [lambda x, a: x * a, lambda x, a: a * x])
def test_arrays_are_made_values_first(session: DynamicSession, call: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match=r"ndarray of shape \(1,\) found .*session\.value"):
        call(ones(session), np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: m.relu(x) if x else x, r"Tensor\(x0.*\) has no contents"),
        (lambda m, x: x * float(x), r"Tensor\(x0.*\) has no contents"),
        (lambda m, x: x * np.asarray(x), r"Tensor\(x0.*\) has no contents"),
        (lambda m, x: x * float(np.random.default_rng().random()), "records something else"),
    ],
)
def test_cells_have_no_contents_and_are_pure(
    session: DynamicSession, function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        session.cell(function)(ones(session))


def test_arguments_that_do_not_fit_are_named(session: DynamicSession) -> None:
    x = ones(session)
    inner = session.cell(lambda m, x: m.relu(x))
    for wrong in (lambda m, y: session.relu(y), lambda m, y: inner(y)):
        wrong.__name__ = f"wrong{id(wrong)}"
        with pytest.raises(GraphError, match=r"Tensor\(x0.* inside of a cell, layers of its first"):
            session.cell(wrong)(x)
    with pytest.raises(GraphError, match="dict found among arguments"):
        inner(x, {"a": 1})
    with pytest.raises(DataError, match=r"label 1\.5 found, 0 to 2 needed"):
        session.cross_entropy(ones(session, 3), 1.5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="row 'a' found"):
        session.table("words", 3, 2)["a"]  # type: ignore[index]
    with pytest.raises(DataError, match=r"^value: .*inhomogeneous"):
        session.value([[1, 2], [3]])


def test_an_error_in_a_cell_leaves_nothing(session: DynamicSession) -> None:
    calls = []

    @session.cell
    def sometimes(m: Any, x: Any) -> Any:
        calls.append(x)
        if len(calls) == 1:
            raise RuntimeError("of the user")
        return m.relu(x)

    x = ones(session)
    with pytest.raises(RuntimeError, match="of the user"):
        sometimes(x)
    assert sometimes(x).numpy() == 1


def test_an_error_in_a_session_closes_it() -> None:
    before = sys.getrecursionlimit(), gc.isenabled()
    with (
        pytest.raises(KeyError),
        DynamicSession("tests", cpus=1) as session,
    ):
        y = session.relu(ones(session))
        raise KeyError("of the user")
    assert (sys.getrecursionlimit(), gc.isenabled()) == before
    with pytest.raises(DataError, match="values of this step needed"):
        y.numpy()
    with pytest.raises(GraphError, match="cell 'tanh': a value found of another step"):
        session.tanh(y)


@pytest.mark.parametrize(
    "app", [pytest.param("treelstm", marks=pytest.mark.long), "rntn", "lattice", "dynrnn"]
)
def test_values_inside_of_patterns_are_looked_at(app: str) -> None:
    losses = []
    for every in (0, 7):
        with DynamicSession(
            app, Adam(0.01), cpus=1, collect_steps=1, pattern_frequency=2
        ) as session:
            # Dropout is drawn by run, and looking makes other runs.
            more = {"dropout": 0.0} if app in ("treelstm", "dynrnn") else {}
            program = app_module(app).program(session, 6, cells=False, **more)
            tanh, seen = session.tanh, [0]

            def looking(x: Any, tanh: Any = tanh, seen: Any = seen, every: int = every) -> Any:
                made = tanh(x)
                seen[0] += 1
                if every and seen[0] % every == 0:
                    assert np.abs(made.numpy()).max() <= 1
                return made

            session.tanh = looking  # type: ignore[method-assign]
            found = []
            for first in (0, 4, 8):
                with_labels = [
                    each
                    for sample in program.train[first : first + 4]
                    for each in program.outputs(sample)
                ]
                found.append(session.step([session.cross_entropy(*each) for each in with_labels]))
            losses.append(found)
            assert any(cell.name.startswith("pattern") for cell in session.report().cells)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def deep(app: str) -> Any:
    """Return a sample of an app that is 10,000 deep."""
    if app == "lattice":
        words = tuple((last - 2, last, last % 60) for last in range(2, DEPTH, 3))
        return Lattice(tuple(place % 40 for place in range(DEPTH)), words, ((DEPTH - 1, 1),))
    if app == "modules":
        layout: Any = ("find", "red")
        for _ in range(DEPTH // 2):
            layout = ("and", ("find", "circle"), ("relate", "left", layout))
        return Question(("count", layout), np.ones((9, 6), np.float32), 3)
    tree = Tree(3, "good1")
    for _ in range(DEPTH):
        tree = Tree(3, None, (tree, Tree(1, "bad1")))
    return tree


@pytest.mark.parametrize("app", ["rntn", "lattice", "modules", "dynrnn"])
def test_samples_that_are_10_000_deep(app: str, session: DynamicSession) -> None:
    program = app_module(app).program(session, 4)
    sample = deep(app)
    first, second = (
        session.step([session.cross_entropy(*each) for each in program.outputs(sample)])
        for _ in range(2)
    )
    assert second < first
