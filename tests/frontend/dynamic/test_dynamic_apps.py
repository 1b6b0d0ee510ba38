"""The apps whose graph changes: they learn, and their steps are the same however they are run."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import Adam, DataError, DynamicSession, GraphError
from soapstone.frontend.app import app_module, train_app
from soapstone.frontend.data.structured import ANSWERS, KINDS, lattices, questions
from soapstone.frontend.dynamic.program import Program, fit
from soapstone.frontend.dynamic.session import REUSE
from soapstone.frontend.training.callbacks import Checkpoint, History
from soapstone.frontend.training.checkpoint import CheckpointError, load, save
from soapstone.frontend.training.state import Callback, TrainingState

SMALL: dict[str, dict[str, Any]] = {
    "treelstm": {"width": 6, "hidden": 5, "dropout": 0.0},
    "rntn": {"width": 5},
    "lattice": {"width": 6, "hidden": 5, "train": 30, "test": 5},
    "modules": {"hidden": 6, "train": 30, "test": 5},
    "dynrnn": {"width": 6, "hidden": 5, "dropout": 0.0},
}


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOAPSTONE_DATA", raising=False)


def small(app: str, session: DynamicSession, **more: Any) -> Program:
    program: Program = app_module(app).program(session, **SMALL[app], **more)
    return program


@pytest.mark.parametrize(
    ("app", "epochs", "least", "chance"),
    [
        ("rntn", 5, 0.65, 0.4),
        ("dynrnn", 6, 0.7, 0.6),
        ("lattice", 3, 0.9, 0.5),
        ("modules", 14, 0.8, 0.4),
    ],
)
def test_they_learn(app: str, epochs: int, least: float, chance: float) -> None:
    with DynamicSession(app, "adam", cpus=1) as session:
        program: Program = app_module(app).program(session)
        labels = [program.outputs(sample)[0][1] for sample in program.test]
    assert np.bincount(labels).max() < chance * len(labels)  # what always the same answer is worth
    history = History()
    result = train_app(app, epochs=epochs, cpus=1, progress=False, callbacks=[history])
    losses = history.values["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert result.test_accuracy is not None
    assert result.test_accuracy > least


def test_a_step_of_the_tensor_network_changes_phrases_little() -> None:
    """Its tensor has 3,600 entries for each number of a phrase, all of which Adam moves as far."""
    app = app_module("rntn")
    with DynamicSession("rntn", app.OPTIONS["optimizer"], cpus=1) as session:
        program: Program = app.program(session)
        trees = program.train[:40]
        session.tables["words"].data *= 8  # as long as they become

        def logits() -> Any:
            with session.inference():
                made = [logits for tree in trees for logits, _ in program.outputs(tree)]
                return session.values(made)

        before = logits()
        session.step([session.cross_entropy(*each) for t in trees for each in program.outputs(t)])
        assert 0.01 < np.abs(logits() - before).max() < 0.4


@pytest.mark.parametrize("app", SMALL)
def test_steps_are_the_same_however_they_are_run(app: str) -> None:
    # Without cells, parameters have other names and begin as others.
    ways = [(reuse, True) for reuse in REUSE] + [("off", False), ("all", False)]
    losses: dict[tuple[str, bool], list[float]] = {}
    for reuse, cells in ways if app != "modules" else ways[:4]:
        with DynamicSession(app, Adam(0.01), cpus=1, reuse=reuse, collect_steps=1) as session:
            program = small(app, session, **({} if cells else {"cells": False}))
            batches = [program.train[first : first + 4] for first in (0, 4, 8)]
            losses[reuse, cells] = [
                session.step(
                    [
                        session.cross_entropy(*each)
                        for sample in batch
                        for each in program.outputs(sample)
                    ]
                )
                for batch in batches
            ]
    for (reuse, cells), found in losses.items():
        assert found == pytest.approx(losses["off", cells], abs=1e-4), (reuse, cells)


class Stop(Callback):
    """Ends training after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: TrainingState) -> None:
        state.stop = state.step == self.step


@pytest.mark.parametrize("app", ["treelstm", "lattice"])
@pytest.mark.parametrize("at", [9, 5])  # the end of an epoch, and the middle of one
def test_training_goes_on_where_a_checkpoint_was(app: str, at: int, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    sizes = {**SMALL[app], **({"dropout": 0.5} if app == "treelstm" else {})}
    found = []
    for callbacks, resume in (
        ([], None),
        ([Checkpoint(path, every_steps=at), Stop(at)], None),
        ([], path),
    ):
        with DynamicSession(app, Adam(0.01), cpus=1) as session:
            made: Program = app_module(app).program(session, **sizes)
            program = Program(made.outputs, made.train[:27], made.test, each=made.each)
            result = fit(
                *(session, program),
                epochs=3,
                batch_size=3,
                callbacks=callbacks,
                resume=resume,
                progress=False,
            )
            found.append((result.epochs, session.state()))
    (epochs, state), _, (rest, after) = found
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    assert rest[-1] == pytest.approx(epochs[-1], rel=1e-6)
    assert state.keys() == after.keys()
    for name, value in state.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_apps_are_saved_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soapstone.frontend.data.trees._SIZES", {"train": 40, "dev": 1, "test": 10})
    path = tmp_path / "c.npz"
    whole = train_app("rntn", epochs=2, cpus=1, progress=False)
    train_app("rntn", epochs=1, cpus=1, progress=False, checkpoint=path)
    rest = train_app("rntn", epochs=2, cpus=1, progress=False, resume=path)
    assert rest.loss == pytest.approx(whole.loss, rel=1e-6)
    assert rest.epochs == 2
    with pytest.raises(CheckpointError, match=r"model 'rntn' found, 'dynrnn' needed"):
        train_app("dynrnn", resume=path, cpus=1, progress=False)
    with pytest.raises(CheckpointError, match=r"seed 0 found, 1 needed"):
        train_app("rntn", resume=path, seed=1, cpus=1, progress=False)
    with pytest.raises(CheckpointError, match="no such file"):
        train_app("rntn", resume=tmp_path / "none.npz", cpus=1, progress=False)
    arrays, metadata = load(path)
    arrays["words"][0, 0] = np.nan
    save(path, arrays, metadata)
    with pytest.raises(CheckpointError, match=r"'words': values that are not finite"):
        train_app("rntn", resume=path, cpus=1, progress=False)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    for width in (4, 5):
        with DynamicSession("one", "sgd", cpus=1) as session:
            table = session.table("words", 3, width)
            if width == 5:
                with pytest.raises(DataError, match=r"shape \(3, 4\) found, \(3, 5\) needed"):
                    session.load_checkpoint(path)
            else:
                session.step([session.reduce_sum(table[1], axes=(1,))])
                session.save_checkpoint(path)


def test_a_table_is_updated_by_optimizers_whose_states_are_by_row() -> None:
    for optimizer, refused in (("rmsprop", False), ("nadam", True)):
        with DynamicSession("one", optimizer, cpus=1) as session:
            table = session.table("words", 3, 2)
            before = table.data.copy()
            loss = session.reduce_sum(session.dense(table[1], 2, name="o"), axes=(1,))
            if refused:
                with pytest.raises(GraphError, match="table 'words': NAdam has states that are n"):
                    session.step([loss])
                continue
            session.step([loss])
            assert (table.data[1] != before[1]).all() and (table.data[::2] == before[::2]).all()


def test_nothing_is_loaded_of_tables_of_another_shape(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"

    def opened(width: int) -> Any:
        session = DynamicSession("one", Adam(0.1), cpus=1)
        tables = [session.table("first", 2, 3), session.table("second", 2, width)]

        def step() -> None:
            values = [session.dense(table[1], 2, name=f"of {table.name}") for table in tables]
            session.step([session.reduce_sum(value, axes=(1,)) for value in values])

        return session, step

    session, step = opened(4)
    with session:
        step()
        session.save_checkpoint(path)
        state = session.state()
    for called in (False, True):
        session, step = opened(5)
        with session:
            if called:
                step()
            before = session.state()
            for load in (session.load_state, lambda _, s=session: s.load_checkpoint(path)):
                with pytest.raises((DataError, CheckpointError), match=r"\(.* 4\) found|\(4, 2\)"):
                    load(state)
                after = session.state()
                assert before.keys() == after.keys()
                assert all((after[name] == value).all() for name, value in before.items())


def test_cells_and_tables_that_a_checkpoint_does_not_have_are_named(tmp_path: Path) -> None:
    path, again = tmp_path / "c.npz", tmp_path / "d.npz"

    def opened(name: str = "merge", table: str = "words", early: bool = True) -> Any:
        session = DynamicSession("one", "sgd", cpus=1)
        session.table(table, 2, 3)

        def merge(m: Any, x: Any, layers: int) -> Any:
            for number in range(layers):
                x = m.dense(x, 3, name=f"d{number}")
            return x

        def rare(m: Any, x: Any) -> Any:
            return m.dense(x, 3, name="r")

        merge.__name__ = name
        decorated: list[Any] = []

        def decorate() -> None:
            decorated.extend(map(session.cell, (merge, rare)))

        def step(layers: int = 2, seldom: bool = False, end: str = "end") -> float:
            value = decorated[0](session.tables[table][0], layers)
            value = decorated[1](value) if seldom else value
            return session.step([session.cross_entropy(session.dense(value, 2, name=end), 1)])

        if early:
            decorate()
        return session, step, decorate

    session, step, _ = opened()
    with session:
        step()
        session.save_checkpoint(path)
    for settings, found in (
        (
            {"name": "join"},
            "cell 'join' is missing; cell 'merge' found, none needed .*strict=False",
        ),
        ({"table": "rows"}, "table 'rows' is missing; table 'words' found, none needed"),
    ):
        session, step, _ = opened(**settings)
        with session:
            before = session.state()
            with pytest.raises(CheckpointError, match=found):
                session.load_checkpoint(path)
            assert all((session.state()[name] == value).all() for name, value in before.items())
            session.load_checkpoint(path, strict=False)
            step()
    session, step, _ = opened()
    with session:
        session.load_checkpoint(path)
        step(layers=1)
        step(seldom=True)  # had not been called, so that it is in no checkpoint
        more = r"of \(float32\[3\], 3\): parameter 'merge.d2.*is missing.*strict=False"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=more):
                step(layers=3)
        with pytest.raises(CheckpointError, match=r"'other' of .*parameter 'other.* is missing"):
            step(end="other")
        session.save_checkpoint(again)
    session, step, _ = opened()
    with session:
        step(layers=3)
        with pytest.raises(CheckpointError, match=r"parameter 'merge.d2.*is missing"):
            session.load_checkpoint(again)
        session.load_checkpoint(again, strict=False)
        step(layers=3, end="other")
    session, step, decorate = opened("join", early=False)
    with session:
        with pytest.raises(CheckpointError, match="cell 'merge' found, none needed"):
            session.load_checkpoint(again)
        session.load_checkpoint(again, strict=False)
        decorate()
        step(seldom=True)
    session, step, _ = opened()
    with session:
        session.load_checkpoint(path)
        with pytest.raises(CheckpointError, match="cell '_new' is missing"):
            session.cell(_new)


def test_what_is_loaded_and_not_called_is_saved_again(tmp_path: Path) -> None:
    path, again = tmp_path / "a.npz", tmp_path / "b.npz"

    def opened(*names: str) -> tuple[DynamicSession, dict[str, Callable[[int], Any]]]:
        session = DynamicSession("two", "adam", cpus=1)
        table, calls = session.table("words", 2, 3), {}

        def dense(m: Any, x: Any) -> Any:
            return m.reduce_sum(m.dense(x, 3, name="d"), axes=(1,))

        for name in names:
            dense.__name__ = name
            cell = session.cell(dense)
            calls[name] = lambda row, cell=cell: cell(table[row])
        calls["layer"] = lambda row: session.reduce_sum(session.tanh(table[row]), axes=(1,))
        return session, calls

    session, calls = opened("often", "rare")
    with session:
        session.step([calls["often"](0), calls["rare"](1)])
        session.save_checkpoint(path)
        wanted = session.state()
    session, calls = opened("often", "rare")
    with session:
        session.load_checkpoint(path)
        session.step([calls["often"](0)])
        session.save_checkpoint(again)
    session, calls = opened("often", "rare")
    with session:
        session.load_checkpoint(again)
        with session.inference():
            calls["rare"](1).numpy()
        found = session.state()
    of_rare = [name for name in wanted if name.startswith("rare.")]
    assert len(of_rare) == 6 and found.keys() == wanted.keys()
    for name in of_rare:
        np.testing.assert_array_equal(found[name], wanted[name])
    session, calls = opened("often")
    with session:
        session.load_checkpoint(path, strict=False)
        session.step([calls["layer"](0)])
        assert session.state().keys() == wanted.keys() - set(of_rare)


def _new(m: Any, x: Any) -> Any:
    return m.relu(x)


@pytest.mark.parametrize("reuse", ["all", "off"])
def test_a_checkpoint_of_other_layers_is_refused(reuse: str, tmp_path: Path) -> None:
    path, again = tmp_path / "c.npz", tmp_path / "d.safetensors"
    x = np.ones(3, np.float32)

    def opened(of: str = "tanh", end: str | None = None, factor: float = 2.0) -> Any:
        session = DynamicSession("one", "sgd", cpus=1, reuse=reuse)

        @session.cell
        def merge(m: Any, value: Any, scale: float) -> Any:
            return getattr(m, of)(m.dense(m.dropout(value), 4, name="d")) * (scale * factor)

        def step(scale: float = 0.5, rate: float = 0.5) -> float:
            value = session.dropout(session.value(x), rate, name="before")
            made = session.dense(merge(value, scale), 2, activation=end, name="end")
            return session.step([session.cross_entropy(made, 1)])

        return session, step

    session, step = opened()
    with session:
        step()
        session.save_checkpoint(path)
    cell = r"c.npz': cell 'merge' of \(float32\[3\], 0.5\): layer 'merge."
    for settings, found in (
        ({"of": "relu"}, cell + r"relu' is missing; .* layer 'merge.tanh' found, none needed"),
        ({"factor": 3.0}, cell + "affine.: scale 1.0 found, 1.5 needed"),
        ({"end": "relu"}, r"c.npz.: .end. of .*: activation None found, .relu. needed"),
    ):
        session, step = opened(**settings)
        with session:
            session.load_checkpoint(path)
            before = session.state()
            for _ in range(2):  # it does not get used to it
                with pytest.raises(CheckpointError, match=found):
                    step()
            assert all((session.state()[name] == value).all() for name, value in before.items())
        session, step = opened(**settings)
        with session:
            step()  # its layers are known before
            with pytest.raises(CheckpointError, match=found):
                session.load_checkpoint(path)
    session, step = opened()
    with session:
        session.load_checkpoint(path)
        session.save_checkpoint(again)  # in which nothing is known by a call
        step()
        step(scale=0.25, rate=0.25)  # what the checkpoint does not know is taken
    session, step = opened(of="relu")
    with session:
        session.load_checkpoint(again)
        with pytest.raises(CheckpointError, match=r"d\.safetensors': cell 'merge'"):
            step()


def test_kinds_and_answers_are_what_they_are_said_to_be() -> None:
    kinds = {kind for lattice in lattices(50, 3) for _, kind in lattice.kinds}
    assert kinds == set(range(KINDS))
    for lattice in lattices(20):
        ends = {last for _, last, _ in lattice.words}
        assert ends.issuperset(place for place, _ in lattice.kinds)
        assert all(0 <= first < last for first, last, _ in lattice.words)
    made = list(islice(questions(400), 400))
    assert {question.answer for question in made} == set(range(len(ANSWERS)))
    one = next(q for q in made if q.layout == ("exists", ("find", "red")))
    assert one.answer == one.scene[:, 0].any()
    counted = next(q for q in made if q.layout == ("count", ("find", "circle")))
    assert ANSWERS[counted.answer][0] == str(min(4, int(counted.scene[:, 3].sum())))
