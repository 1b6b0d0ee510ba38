"""The app treelstm and its data."""

from pathlib import Path

import pytest

from soapstone import DataError
from soapstone.frontend.app import AppError, load_app, train_app
from soapstone.frontend.data.trees import Tree, read_trees, sentiment


def test_it_learns_made_up_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOAPSTONE_DATA", raising=False)
    said: list[str] = []
    result = train_app("treelstm", epochs=3, cpus=1, progress=False, say=said.append)
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.9  # the commoner label is half of them
    assert said[0] == "800, 100 and 200 made-up trees"
    assert "compose" in said[1]


def test_the_same_steps_with_and_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOAPSTONE_DATA", raising=False)
    monkeypatch.setattr("soapstone.frontend.data.trees._SIZES", {"train": 40, "dev": 1, "test": 10})
    losses = []
    for reuse in ("all", "patterns", "batch", "off"):
        app = load_app("treelstm")
        result = train_app(app, reuse=reuse, epochs=2, cpus=1, progress=False)
        losses.append(result.loss)
    # Dropout is drawn by run, so the losses are near, not equal; without it see test_dynamic.
    assert losses == pytest.approx([losses[0]] * 4, rel=0.1)


def test_trees_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("(3 (2 It) (4 (2 's) (4 8\u00a01\\/2)))\n\n(0 bad)\n", "utf-8")
    first, second = read_trees(path)
    assert first == Tree(
        3, None, (Tree(2, "It"), Tree(4, None, (Tree(2, "'s"), Tree(4, "8\u00a01\\/2"))))
    )
    assert second == Tree(0, "bad")
    assert [tree.label for tree in first.phrases()].count(4) == 2
    path.write_text("(2 " * 5000 + "(2 x)" + " (2 z))" * 5000, "utf-8")
    (deep,) = read_trees(path)
    assert sum(1 for _ in deep.phrases()) == 10_001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(5 x)", "label '5' found"),
        ("(2 x", "one tree in parentheses needed"),
        ("(2 x))", "found without"),
        ("(2 (2 x))", "1 parts found"),
        ("(2)", "0 parts found"),
        ("()", "label '' found"),
        ("x", "one tree in parentheses needed"),
        ("(2 (2 x) y)", "2 parts found"),
    ],
)
def test_lines_that_are_no_trees_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.txt"
    path.write_text(f"(2 fine)\n{text}\n", "utf-8")
    with pytest.raises(DataError, match="line 2") as caught:
        list(read_trees(path))
    assert message in str(caught.value)


def test_a_folder_without_all_files_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sst").mkdir()
    (tmp_path / "sst" / "train.txt").write_text("(2 x)", "utf-8")
    monkeypatch.setenv("SOAPSTONE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"dev\.txt'?: no such file"):
        sentiment()


def test_what_programs_do_not_have_is_refused() -> None:
    with pytest.raises(AppError, match="executor 'mpi' found; its graph changes"):
        train_app("treelstm", executor="mpi", progress=False)
    with pytest.raises(AppError, match="its graph changes from sample to sample"):
        load_app("treelstm").build(4)
    with pytest.raises(AppError, match="reuse 'all' found with a graph that does not change"):
        train_app("mlp", reuse="all", progress=False)
