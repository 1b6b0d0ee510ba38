"""Dynamic sessions: equal to PyTorch node by node, however calls are batched."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dynamic_programs import differences

from soapstone import SGD, Adam, DataError, DynamicSession, GraphError, NonFiniteLoss
from soapstone.frontend.dynamic.rows import pieces
from soapstone.frontend.dynamic.session import REUSE
from soapstone.ir.graph import Initial
from soapstone.kernels import measure
from soapstone.kernels.entry import Entry
from soapstone.native.rows import ADD, work
from soapstone.runtime.errors import TaskError

WORDS, WIDTH, HIDDEN = 12, 5, 6
Tree = Any  # a word's number, or a pair of trees


@pytest.fixture
def session() -> Iterator[DynamicSession]:
    with DynamicSession("tests", SGD(0.1), cpus=2) as made:
        yield made


def drawn(random: np.random.Generator, depth: int) -> Tree:
    if depth == 0 or random.random() < 0.3:
        return int(random.integers(WORDS))
    return drawn(random, depth - 1), drawn(random, depth - 1)


def tree_model(session: DynamicSession, cells: bool = True) -> Callable[[Tree, int], Any]:
    """A binary Tree-LSTM with a loss at the root; what it is made of is in `twin` too.

    cells: whether its functions are cells, or Python functions of the layers of the session.
    """
    table = session.table("words", WORDS, WIDTH)
    inside = [""] if cells else ["leaf.", "compose."]

    def leaf(m: Any, x: Any) -> Any:
        gates = m.dense(x, 3 * HIDDEN, name=f"{inside[0]}gates")
        i, o, u = m.split(gates, [HIDDEN] * 3, axis=1)
        c = m.sigmoid(i) * m.tanh(u)
        return m.sigmoid(o) * m.tanh(c), c

    def compose(m: Any, lh: Any, lc: Any, rh: Any, rc: Any) -> Any:
        gates = m.dense(m.concat([lh, rh], axis=1), 5 * HIDDEN, name=f"{inside[-1]}gates")
        i, fl, fr, o, u = m.split(gates, [HIDDEN] * 5, axis=1)
        c = m.sigmoid(i) * m.tanh(u) + m.sigmoid(fl) * lc + m.sigmoid(fr) * rc
        return m.sigmoid(o) * m.tanh(c), c

    functions = [leaf, compose]
    leaf_, compose_ = [session.cell(f) if cells else partial(f, session) for f in functions]

    def of(tree: Tree) -> Any:
        if isinstance(tree, int):
            return leaf_(table[tree])
        return compose_(*of(tree[0]), *of(tree[1]))

    def loss(tree: Tree, label: int) -> Any:
        return session.cross_entropy(session.dense(of(tree)[0], 2, name="classes"), label)

    return loss


def twin(weights: dict[str, torch.Tensor], tree: Tree, label: int) -> torch.Tensor:
    """The loss of `tree_model` in PyTorch."""

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def of(tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tree, int):
            i, o, u = dense(weights["words"][tree][None], "leaf.gates").split(HIDDEN, 1)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (lh, lc), (rh, rc) = map(of, tree)
        gates = dense(torch.cat([lh, rh], 1), "compose.gates")
        i, fl, fr, o, u = gates.split(HIDDEN, 1)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * lc + fr.sigmoid() * rc
        return o.sigmoid() * c.tanh(), c

    logits = dense(of(tree)[0], "classes")
    return torch.nn.functional.cross_entropy(logits, torch.tensor([label]))


@pytest.mark.parametrize(("reuse", "cells"), [*((r, True) for r in REUSE), ("all", False)])
@pytest.mark.parametrize(
    ("seed", "clip"),
    [(0, {}), (1, {}), (2, {}), (0, {"clip_norm": 0.1}), (0, {"clip_value": 0.01})],
    ids=str,
)
def test_steps_are_those_of_torch_node_by_node(
    reuse: str, cells: bool, seed: int, clip: dict[str, float]
) -> None:
    """Clipping counts the rows of tables that a step used among all gradients."""
    random = np.random.default_rng(seed)
    batches = [[(drawn(random, 5), int(random.integers(2))) for _ in range(7)] for _ in range(3)]
    optimizer = SGD(0.5, **clip)
    with DynamicSession("trees", optimizer, cpus=2, reuse=reuse, collect_steps=1) as session:
        loss = tree_model(session, cells)
        session.values([loss(*each) for each in batches[0]])  # makes the parameters
        weights = {
            name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
            for name, value in session.state().items()
        }
        session.forget()
        for batch in batches:
            mean = session.step([loss(*each) for each in batch])
            expected = torch.stack([twin(weights, *each) for each in batch]).mean()
            assert mean == pytest.approx(expected.item(), rel=1e-5)
            for weight in weights.values():
                weight.grad = None
            expected.backward()
            if "clip_norm" in clip:
                torch.nn.utils.clip_grad_norm_(weights.values(), clip["clip_norm"])
            if "clip_value" in clip:
                torch.nn.utils.clip_grad_value_(weights.values(), clip["clip_value"])
            with torch.no_grad():
                for weight in weights.values():
                    assert weight.grad is not None
                    weight -= 0.5 * weight.grad
        for name, value in session.state().items():
            np.testing.assert_allclose(value, weights[name].detach(), atol=1e-5, err_msg=name)


def test_layers_that_occur_together_become_the_cells_that_they_would_be() -> None:
    random = np.random.default_rng(0)
    trees = [drawn(random, 6) for _ in range(20)]
    runs = {}
    for cells in (True, False):
        with DynamicSession("trees", SGD(0.1), cpus=1, collect_steps=1) as session:
            loss = tree_model(session, cells)
            for _ in range(3):
                session.step([loss(tree, 0) for tree in trees])
            report = session.report()
            runs[cells] = {cell.name: (cell.operators, cell.calls) for cell in report.cells}
    found = [each for name, each in runs[False].items() if name.startswith("pattern")]
    operators, calls = runs[True]["compose"]
    # Two steps with patterns, three with cells; roots, whose c nobody takes, are another pattern,
    # and may have what classifies them too.
    whole = [n for size, n in found if operators <= size <= operators + 3]
    assert sum(whole) >= 0.9 * calls * 2 / 3


def test_what_a_pattern_makes_inside_is_there_when_it_is_asked_for() -> None:
    with DynamicSession(
        "inside", SGD(0.1), cpus=1, collect_steps=1, pattern_frequency=1
    ) as session:
        for step in range(3):
            x = session.value(np.full(2, 0.5, np.float32))
            inner = session.sigmoid(x)
            outer = session.tanh(inner) * 2.0
            expected = 1 / (1 + np.exp(-0.5))
            np.testing.assert_allclose(outer.numpy(), 2 * np.tanh([[expected] * 2]), rtol=1e-6)
            np.testing.assert_allclose(inner.numpy(), [[expected] * 2], rtol=1e-6)
            weight = session.parameter("w", (2, 1), Initial("constant", 1.0))
            session.step([(inner + outer) @ weight])
            del step
        names = [cell.name for cell in session.report().cells]
    assert any(name.startswith("pattern") for name in names)


def test_rows_of_a_table_that_no_step_used_stay_what_they_are() -> None:
    with DynamicSession("rows", Adam(0.1), cpus=1) as session:
        table = session.table("words", WORDS, WIDTH)
        before = session.state()["words"]
        for _ in range(2):
            x = table[3]
            session.step([session.reduce_sum(x * x, axes=(1,))])
        after = session.state()["words"]
        expected = torch.tensor(before[3], requires_grad=True)
        adam = torch.optim.Adam([expected], 0.1)
        for _ in range(2):
            adam.zero_grad()
            (expected * expected).sum().backward()
            adam.step()
        np.testing.assert_allclose(after[3], expected.detach(), atol=1e-6)
        np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


def test_calls_with_equal_operands_are_one_and_the_rest_run_together(
    session: DynamicSession,
) -> None:
    @session.cell
    def add(m: Any, x: Any, y: Any) -> Any:
        return x + y

    ones = [session.value(np.full(3, i, np.float32)) for i in range(100)]
    sums = [add(x, y) for x, y in pairwise(ones)]
    assert add(ones[0], ones[1]) is sums[0]
    np.testing.assert_array_equal(session.values(sums)[:, 0], np.arange(99) * 2 + 1)
    (cell,) = session.report().cells
    assert (cell.calls, cell.runs) == (99, 1)


def test_arguments_that_are_no_values_are_part_of_what_is_recorded(
    session: DynamicSession,
) -> None:
    @session.cell
    def scaled(m: Any, x: Any, by: Any = 1.0) -> Any:
        return x * (10.0 if by is True else float(by))

    x = session.value(np.ones(2, np.float32))
    calls = [scaled(x), scaled(x, by=3.0), scaled(x, 2), scaled(x, 1), scaled(x, True), scaled(x)]
    assert session.values(calls)[:, 0].tolist() == [1, 3, 2, 1, 10, 1]


def test_a_cell_that_is_recorded_for_each_of_many_numbers_is_told_once(
    session: DynamicSession,
) -> None:
    @session.cell
    def scaled(m: Any, x: Any, by: Any, times: int = 2) -> Any:
        return x * by * times

    x = session.value(np.ones(2, np.float32))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(99):
            scaled(x, n / 8, times=n % 3)
        assert not told
        for n in range(99, 140):
            scaled(x, n / 8)
        assert [str(each.message) for each in told] == [
            "cell 'scaled': 100 recordings found, for 100 numbers as its argument 'by'; each is"
            " recorded and compiled anew, and an array is not: session.value([by]) needed"
        ]
        assert told[0].filename == __file__
        told.clear()
        for n in range(200):
            scaled(x, session.value([n / 8]))
            (x + session.value(np.ones(n + 1, np.float32)[:1])) * session.value([n / 8])
        assert not told
        for n in range(200):
            x * (n / 8)
        assert ["argument 'scale'" in str(each.message) for each in told] == [True]


def test_roots_of_trees_of_all_heights_run_at_once(session: DynamicSession) -> None:
    loss = tree_model(session)
    trees: list[Tree] = [0]
    for _ in range(9):
        trees.append((trees[-1], 1))
    session.step([loss(tree, 0) for tree in trees])
    runs = {cell.name: (cell.calls, cell.runs) for cell in session.report().cells}
    assert runs["leaf"] == (2, 1)
    assert runs["compose"] == (9, 9)  # each is a part of the next
    assert runs["linear"][0] == 10
    assert runs["linear"][1] <= 2


def test_values_are_computed_when_they_are_looked_at(session: DynamicSession) -> None:
    x = session.value(np.array([1.0, -2.0], np.float32))
    y = session.relu(x) * 3.0
    while float(session.reduce_sum(y, axes=(1,))) < 20:
        y = y * 2.0
    np.testing.assert_array_equal(y.numpy(), [[24, 0]])
    assert session.report().updates == 0


def test_dropout_is_drawn_for_each_call_and_only_in_training(session: DynamicSession) -> None:
    x = session.value(np.ones(64, np.float32))
    one, other = session.dropout(x, 0.5, name="d"), session.dropout(x, 0.5, name="d")
    assert not np.array_equal(one.numpy(), other.numpy())
    assert set(np.unique(one.numpy())) == {0, 2}
    session.forget()
    weight = session.parameter("w", (64, 1))
    x = session.value(np.ones(64, np.float32))
    dropped = session.dropout(x, 0.5, name="d")
    kept = dropped.numpy()[0]
    session.step([dropped @ weight])  # whose gradient is what was left
    np.testing.assert_allclose(session.state()["w"][:, 0], -0.1 * kept, rtol=1e-6)
    with session.inference():
        x = session.value(np.ones(64, np.float32))
        np.testing.assert_array_equal(session.dropout(x, 0.5, name="d").numpy(), x.numpy())


def test_dropout_is_the_same_however_calls_are_run() -> None:
    """Of cells, layers and patterns that are found; looking at values changes it neither."""

    def trained(reuse: str, look: bool) -> tuple[list[float], dict[str, Any]]:
        with DynamicSession(
            *("drawn", SGD(0.3)),
            cpus=2,
            reuse=reuse,
            collect_steps=1,
            pattern_frequency=3,
        ) as session:
            table = session.table("words", WORDS, WIDTH)

            @session.cell
            def merge(m: Any, left: Any, right: Any) -> Any:
                both = m.dropout(m.concat([left, right], axis=1), 0.4)
                return m.dropout(m.dense(both, WIDTH, activation="tanh", name="d"), 0.2)

            def of(tree: Tree) -> Any:
                if isinstance(tree, int):
                    word = session.dense(table[tree], WIDTH, name="leaf")
                    return session.tanh(session.dropout(word, 0.5, name="word"))
                made = merge(of(tree[0]), of(tree[1]))
                if look and made.numpy()[0, 0] > 2:
                    raise AssertionError
                return made

            def loss(tree: Tree, label: int) -> Any:
                return session.cross_entropy(session.dense(of(tree), 3, name="end"), label)

            random, losses = np.random.default_rng(5), []
            for _ in range(3):
                trees = [drawn(random, depth) for depth in (4, 1, 3, 5)]
                losses.append(session.step([loss(tree, at % 3) for at, tree in enumerate(trees)]))
            names = {cell.name for cell in session.report().cells}
            if reuse in ("patterns", "all"):
                assert any(name.startswith("pattern") for name in names)
            return losses, session.state()

    losses, state = trained("off", look=False)
    for reuse in REUSE:
        for look in (False, True):
            found, after = trained(reuse, look)
            np.testing.assert_allclose(found, losses, rtol=1e-5)
            for name, value in state.items():
                np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_parameter_of_a_session_is_an_operand_of_layers_and_of_cells(
    session: DynamicSession,
) -> None:
    weight = session.parameter("w", (2, 1))
    x = session.value(np.array([1.0, 2.0], np.float32))
    target = session.value(np.array([3.0], np.float32))
    error = x @ weight - target
    assert session.step([error * error]) == pytest.approx(9)
    np.testing.assert_allclose(session.state()["w"][:, 0], [0.6, 1.2], rtol=1e-6)


def test_trees_deeper_than_pythons_limit_of_recursion(session: DynamicSession) -> None:
    limit = 3000
    grow = session.cell(lambda m, x: m.tanh(x))

    def of(depth: int) -> Any:
        return session.value(np.ones(2, np.float32)) if depth == 0 else grow(of(depth - 1))

    value = of(limit).numpy()
    expected = np.ones(2, np.float32)
    for _ in range(limit):
        expected = np.tanh(expected)
    np.testing.assert_allclose(value[0], expected, rtol=1e-3)
    assert sys.getrecursionlimit() > limit


def test_a_state_is_saved_and_loaded() -> None:
    random = np.random.default_rng(1)
    tree = drawn(random, 4)
    with DynamicSession("one", Adam(0.01), cpus=1) as session:
        loss = tree_model(session)
        session.step([loss(tree, 1)])
        state = session.state()
        expected = [session.step([loss(tree, 1)]) for _ in range(2)]
    with DynamicSession("one", Adam(0.01), cpus=1, seed=5) as session:
        loss = tree_model(session)
        session.load_state(state)
        session.updates = 1
        assert [session.step([loss(tree, 1)]) for _ in range(2)] == expected


def test_what_does_not_fit_is_refused(session: DynamicSession) -> None:
    x = session.value(np.ones(4, np.float32))
    with pytest.raises(GraphError, match="name needed"):
        session.dense(x, 3)
    with pytest.raises(GraphError, match="mixes rows"):
        session.cell(lambda m, a: m.reduce_sum(a, axes=(0,)))(x)
    with pytest.raises(GraphError, match="returned, tensors"):
        session.cell(_returns_nothing)(x)
    with pytest.raises(DataError, match="row 12 found"):
        session.table("words", WORDS, WIDTH)[12]
    with pytest.raises(DataError, match="one floating-point number"):
        session.step([x])
    session.forget()
    with pytest.raises(GraphError, match="of another step"):
        session.relu(x)
    with pytest.raises(GraphError, match="reuse 'some' found"):
        DynamicSession(reuse="some")
    with pytest.raises(AttributeError, match="no layer or attribute 'relulu'"):
        session.relulu(x)
    with pytest.raises(DataError, match="label 2 found"):
        session.cross_entropy(session.value(np.ones(2, np.float32)), 2)


def _returns_nothing(m: Any, x: Any) -> None:
    m.relu(x)


def test_a_loss_that_is_not_finite_changes_nothing(session: DynamicSession) -> None:
    weight = session.parameter("w", (1, 1))
    x = session.value(np.ones(1, np.float32))
    session.step([(x @ weight) + 1.0])
    before = session.state()["w"]
    with pytest.raises(NonFiniteLoss, match="step 1"):
        session.step([session.value(np.array([np.inf], np.float32)) @ weight])
    np.testing.assert_array_equal(session.state()["w"], before)
    session.step([(session.value(np.ones(1, np.float32)) @ weight) + 1.0])  # it goes on


@pytest.mark.long
@pytest.mark.parametrize("seed", [10, 11])
def test_random_programs_give_the_same_however_they_are_run(seed: int) -> None:
    assert differences(seed, programs=8) == []


@pytest.mark.parametrize("flops", [1, 4e5, 1e8])
def test_pieces_are_all_rows_and_more_of_them_where_rows_cost_more(flops: float) -> None:
    for rows in range(1, 1000):
        made = pieces(rows, flops)
        assert sum(count for count, _ in made) == rows
        assert all(count <= size for count, size in made)
        assert len(made) <= len(pieces(rows, 4 * flops))
        assert sum(size for _, size in made) >= sum(size for _, size in pieces(rows, 4 * flops))
    assert pieces(99, 1) == ((99, 128),)
    assert pieces(99, 1e8) == ((64, 64), (32, 32), (2, 2), (1, 1))


def test_rows_are_gathered_and_added_where_places_are_the_same() -> None:
    random = np.random.default_rng(0)
    for count in (1, 5, 200):
        places = random.integers(0, 20, count)
        values = random.integers(0, 9, (count, 3)).astype(np.float32)
        target = np.zeros((20, 3), np.float32)
        back = np.full((count + 2, 3), 7, np.float32)
        add = (values.ctypes.data, target.ctypes.data, 12, count, places.ctypes.data, ADD)
        gather = (target.ctypes.data, back.ctypes.data, 12, count, places.ctypes.data, count + 2)
        assert work([add, gather]) == -1
        expected = np.zeros((20, 3), np.float32)
        np.add.at(expected, places, values)
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(back[:count], expected[places])
        assert not back[count:].any()


@pytest.mark.parametrize("reuse", ["off", "batch"])
def test_rows_move_to_more_room_while_runs_of_them_are_still_to_be_done(reuse: str) -> None:
    start = np.linspace(-1, 1, 4, dtype=np.float32)
    with DynamicSession("chain", SGD(0.5), cpus=1, reuse=reuse) as session:
        weight = session.parameter("w", (1, 4), Initial("constant", 0.25))
        x = session.value(start)
        for _ in range(700):  # arrays begin with room for 256
            x = session.tanh(x + weight)
        session.step([session.reduce_sum(x, axes=1)])
        found = session.state()["w"]
    at, wide = np.full(4, 0.25), start.astype(np.float64)
    slopes = []
    for _ in range(700):
        wide = np.tanh(wide + at)
        slopes.append(1 - wide**2)
    grad, total = np.ones(4), np.zeros(4)
    for slope in reversed(slopes):
        grad = grad * slope
        total += grad
    np.testing.assert_allclose(found, (at - 0.5 * total)[np.newaxis], rtol=1e-4)


def test_a_layer_that_fails_among_others_is_named_and_the_session_goes_on() -> None:
    with DynamicSession("lookups", SGD(0.1), cpus=1, reuse="off") as session:
        for index in (3, 9, 3):
            found = session.embedding(session.value(index, "int32"), 5, 4, name="words")
            for _ in range(3):
                found = session.tanh(found)
            if index < 5:
                assert np.isfinite(found.numpy()).all()
            else:
                with pytest.raises(TaskError, match=r"embedding.*9.*0 to 4"):
                    found.numpy()


@pytest.mark.usefixtures("own_measurements")
def test_kernels_are_measured_in_the_thread_that_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere they would leave an OpenMP team that keeps this thread's from spinning."""
    where: set[int] = set()
    best_us = measure.best_us

    def noted(entries: Mapping[str, Entry]) -> dict[str, float]:
        where.add(threading.get_ident())
        return best_us(entries)

    monkeypatch.setattr(measure, "best_us", noted)
    with DynamicSession("measured", cpus=2) as session:
        x = session.value(np.ones(300, np.float32))
        assert session.dense(x, 450, name="layer").numpy().shape == (1, 450)
    assert where == {threading.get_ident()}
