"""Data sets and batches: every sample once an epoch, also after a resume; clear errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soapstone.errors import DataError
from soapstone.frontend.data.batches import Batches
from soapstone.frontend.data.sets import (
    Splits,
    data_folder,
    digits,
    images,
    read_splits,
    synthetic_images,
)
from soapstone.ir.tensor import Array

ROWS = 23


def arrays(rows: int = ROWS) -> tuple[Array, Array]:
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return x, np.arange(rows, dtype=np.int32)


def write_folder(folder: Path, sizes: tuple[int, ...] = (7, 0, 5, 11)) -> tuple[Array, Array]:
    folder.mkdir(exist_ok=True)
    x, y = arrays(sum(sizes))
    start = 0
    for number, size in enumerate(sizes):
        rows = slice(start, start + size)
        np.savez(folder / f"part{number}.npz", x=x[rows], y=y[rows])
        start += size
    return x, y


def drawn(batches: Batches, epoch: int = 0, start: int = 0) -> list[tuple[Array, Array]]:
    return [(inputs["x"].copy(), labels) for inputs, labels in batches.epoch(epoch, start)]


def check_epoch(batches: Batches, size: int, rows: int = ROWS, epoch: int = 0) -> Array:
    """Check that an epoch has every row once, with its label, in full batches but the last."""
    found = drawn(batches, epoch)
    assert [len(y) for _, y in found] == [size] * (rows // size) + [rows % size] * (rows % size > 0)
    assert len(batches) == batches.steps == len(found)
    x, y = (np.concatenate(part) for part in zip(*found))
    assert sorted(y) == list(range(rows))
    np.testing.assert_array_equal(x[:, 0], 2 * y)
    return y


@pytest.mark.parametrize("size", [1, 4, 23, 50])
@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_every_row_comes_once_in_a_new_order_each_epoch(
    kind: str, size: int, tmp_path: Path
) -> None:
    given = arrays() if kind == "arrays" else (tmp_path, None)
    write_folder(tmp_path)
    in_order = check_epoch(Batches(*given, size, shuffle=False), size)
    np.testing.assert_array_equal(in_order, np.arange(ROWS))
    batches = Batches(*given, size, seed=5)
    orders = [check_epoch(batches, size, epoch=epoch) for epoch in (0, 1)]
    assert (orders[0] != orders[1]).any() and (orders[0] != in_order).any()
    np.testing.assert_array_equal(check_epoch(Batches(*given, size, seed=5), size), orders[0])
    assert (check_epoch(Batches(*given, size, seed=6), size) != orders[0]).any()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["arrays", "folder", "list"])
def test_a_resumed_epoch_has_the_batches_that_were_left(
    kind: str, shuffle: bool, tmp_path: Path
) -> None:
    x, y = write_folder(tmp_path)
    given: tuple[Any, Any] = (x, y) if kind == "arrays" else (tmp_path, None)
    if kind == "list":
        given = ([(x[i : i + 4], y[i : i + 4]) for i in range(0, ROWS, 4)], None)
    batches = Batches(*given, 4, shuffle=shuffle, seed=1)
    whole = drawn(batches, 3)
    for start in range(len(whole) + 2):
        rest = drawn(batches, 3, start)
        assert len(rest) == max(len(whole) - start, 0)
        for (x1, y1), (x2, y2) in zip(rest, whole[start:]):
            np.testing.assert_array_equal(x1, x2)
            np.testing.assert_array_equal(y1, y2)


@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_drop_last_leaves_out_the_partial_batch(kind: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    given = arrays() if kind == "arrays" else (tmp_path, None)
    batches = Batches(*given, 5, drop_last=True)
    assert [len(y) for _, y in drawn(batches)] == [5] * 4 and len(batches) == 4
    assert (
        len(Batches(*given, 50, drop_last=True))
        == len(drawn(Batches(*given, 50, drop_last=True)))
        == 0
    )


def test_batches_in_order_are_views_of_the_array() -> None:
    x, y = arrays()
    for inputs, labels in Batches(x, y, 4, shuffle=False).epoch(0):
        assert np.shares_memory(inputs["x"], x) and np.shares_memory(labels, y)


def test_inputs_by_name_and_data_without_labels() -> None:
    x, y = arrays()
    for inputs, labels in Batches({"a": x, "b": y}, y, 4).epoch(2):
        np.testing.assert_array_equal(inputs["a"][:, 0], 2 * labels)
        np.testing.assert_array_equal(inputs["b"], labels)
    assert all(labels is None for _, labels in Batches(x, None, 4).epoch(0))


def test_named_inputs_in_files(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez(tmp_path / "only.npz", left=x, right=y, y=y)
    for path in (tmp_path, tmp_path / "only.npz", str(tmp_path)):
        (inputs, labels), *_ = Batches(path, None, ROWS, shuffle=False).epoch(0)
        assert sorted(inputs) == ["left", "right"]
        np.testing.assert_array_equal(labels, y)


def test_generators_and_functions_that_make_them() -> None:
    x, y = arrays()

    def stream() -> Iterator[tuple[Array, Array]]:
        yield x[:10], y[:10]
        yield x[10:13], y[10:13]

    again = Batches(stream)
    assert again.steps is None
    with pytest.raises(TypeError, match="no length"):
        len(again)
    assert [len(labels) for _, labels in drawn(again, 0)] == [10, 3]
    assert [len(labels) for _, labels in drawn(again, 1)] == [10, 3]
    once = Batches(stream())
    assert len(drawn(once)) == 2
    with pytest.raises(DataError, match="epoch 1: x is an iterator that an earlier epoch used up"):
        drawn(once, 1)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), np.zeros(4), "y: 4 rows found, 3 needed as in input 'x'"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, None, "b: 2 rows found, 3 needed as in input 'a'"),
        ({}, None, "an empty dict found"),
        (np.float32(3), None, "x: a single number found"),
        (np.array(["a"]), None, "x: element type <U1 found, numbers needed"),
        (np.array([None]), None, "x: element type object found"),
        ([[1, 2], [3]], None, "x: "),
        ("nowhere", None, "'nowhere': no such file or folder"),
        ("nowhere", np.zeros(3), "y: labels of 'nowhere' are read from its files"),
        (lambda: iter(()), np.zeros(3), "y: labels come with the batches"),
    ],
)
def test_bad_data_names_the_field(x: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Batches(x, y)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "4"])
def test_bad_batch_sizes(size: Any) -> None:
    with pytest.raises(DataError, match=r"batch_size: .* found, an integer of 1 or more needed"):
        Batches(*arrays(), size)


def test_batches_of_a_data_loader_are_lists() -> None:
    x, y = arrays(6)
    given = [[x[:3], y[:3]], [x[3:], y[3:], np.ones(3)], (x[:3], y[:3])]
    batches = [*Batches(given, None, batch_size=3).epoch(0)]
    assert [labels is not None for _, labels in batches] == [True] * 3
    ((inputs, labels),) = Batches(iter([x[:3].tolist()]), None, batch_size=3).epoch(0)
    np.testing.assert_array_equal(inputs["x"], x[:3])
    assert labels is None
    tensor = torch.tensor(x, requires_grad=True)
    np.testing.assert_array_equal(Batches(tensor, y, batch_size=6).specs()[0]["x"][0], (2,))


def test_a_bad_batch_of_a_stream_names_its_number() -> None:
    x, y = arrays()
    with pytest.raises(DataError, match="batch 1: y: 3 rows found, 2 needed"):
        drawn(Batches([(x, y), (x[:2], y[:3])]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": np.zeros((4, 2), np.float32)}, "field 'y' is missing; needed as in 'a.npz'"),
        (
            {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4)},
            "field 'x': samples of float32[3] found",
        ),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, "float64[2] found, float32[2] needed"),
        (
            {"x": np.zeros((4, 2), np.float32), "y": np.zeros(3)},
            "field 'y': 3 rows found, 4 needed",
        ),
        ({"x": np.array([None] * 4), "y": np.zeros(4)}, "field 'x': element type object found"),
        ({"x": np.float32(1), "y": np.zeros(4)}, "field 'x': a single number found"),
        ({"y": np.zeros(4)}, "an input such as 'x' needed"),
    ],
)
def test_a_bad_file_of_a_folder_names_file_and_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4))
    np.savez(tmp_path / "b.npz", **fields)
    with pytest.raises(DataError) as caught:
        Batches(tmp_path)
    assert "b.npz" in str(caught.value) and message in str(caught.value)


def test_truncated_foreign_and_corrupt_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no npz file found"):
        Batches(tmp_path)
    file = tmp_path / "a.npz"
    np.savez(file, x=np.arange(4000.0), y=np.arange(4000))
    whole = file.read_bytes()
    for contents in (whole[: len(whole) // 2], b"not a zip file", b""):
        file.write_bytes(contents)
        with pytest.raises(DataError, match=r"a\.npz"):
            Batches(tmp_path)
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:])
    with pytest.raises(DataError, match=r"a\.npz.*CRC"):
        drawn(Batches(tmp_path))


def test_digits_are_the_whole_set_split_by_class() -> None:
    splits = digits()
    assert isinstance(splits.train_x, np.ndarray) and isinstance(splits.test_x, np.ndarray)
    assert splits.train_y is not None and splits.test_y is not None
    assert len(splits.train_x) + len(splits.test_x) == 1797
    assert splits.train_x.shape[1:] == splits.test_x.shape[1:] == (1, 8, 8)
    assert splits.train_x.dtype == np.float32 and splits.train_y.dtype == np.int32
    assert splits.train_x.min() == 0 and splits.train_x.max() == 1
    for number in range(10):
        held, kept = (splits.test_y == number).sum(), (splits.train_y == number).sum()
        assert held == round((held + kept) / 5)
    both = {image.tobytes() for image in splits.train_x} & {i.tobytes() for i in splits.test_x}
    assert not both
    again = digits()
    np.testing.assert_array_equal(again.test_y, splits.test_y)
    assert not splits.synthetic and "digits" in str(splits)


def test_digits_of_another_folder_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"digits\.npz"):
        digits(tmp_path)
    np.savez(tmp_path / "digits.npz", images=np.zeros((20, 8, 7)), labels=np.zeros(20))
    with pytest.raises(DataError, match="field 'images': samples of shape \\(8, 7\\) found"):
        digits(tmp_path)
    np.savez(tmp_path / "digits.npz", images=np.zeros((20, 8, 8)), labels=np.full(20, 10))
    with pytest.raises(DataError, match=r"field 'labels': values outside 0\.\.9"):
        digits(tmp_path)


@pytest.mark.parametrize("shape", [(784,), (1, 28, 28), (3, 10, 9)])
def test_synthetic_images_repeat_and_can_be_told_apart(shape: tuple[int, ...]) -> None:
    splits = synthetic_images(500, shape, 10, seed=2)
    assert splits.synthetic and "synthetic" in str(splits)
    x, y, test_x, test_y = splits.train_x, splits.train_y, splits.test_x, splits.test_y
    assert isinstance(x, np.ndarray) and isinstance(test_x, np.ndarray)
    assert y is not None and test_y is not None
    assert x.shape == (400, *shape) and x.dtype == np.float32 and y.dtype == np.int32
    again = synthetic_images(500, shape, 10, seed=2).train_x
    np.testing.assert_array_equal(np.asarray(again), x)
    assert (np.asarray(synthetic_images(500, shape, 10, seed=3).train_x) != x).any()
    means = np.stack([x[y == c].mean(0).ravel() for c in range(10)])
    distance = ((test_x.reshape(100, 1, -1) - means) ** 2).sum(2)
    assert (distance.argmin(1) == test_y).mean() > 0.95


def test_bad_arguments_of_synthetic_images() -> None:
    with pytest.raises(DataError, match="count: 0 found"):
        synthetic_images(0, (2,), 2)
    with pytest.raises(DataError, match="noise: -1"):
        synthetic_images(1, (2,), 2, noise=-1)


def test_splits_check_their_rows() -> None:
    x, y = arrays()
    with pytest.raises(DataError, match="data set 'd', test: y: 3 rows found, 23 needed"):
        Splits(x, y, x, y[:3], "d")
    with pytest.raises(
        DataError, match=r"test: field 'x': samples of shape \(1,\) found, \(2,\) n"
    ):
        Splits(x, y, x[:, :1], y, "d")
    with pytest.raises(DataError, match=r"test: field 'b': samples of shape \(2,\) found, None"):
        Splits({"a": x}, y, {"a": x, "b": x}, y, "d")


def test_the_data_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOAPSTONE_DATA", raising=False)
    assert data_folder() is None
    monkeypatch.setenv("SOAPSTONE_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"SOAPSTONE_DATA: .*absent"):
        data_folder()
    monkeypatch.setenv("SOAPSTONE_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert images("set", (2,), 3, count=10).synthetic
    folder = tmp_path / "set"
    write_folder(folder)
    with pytest.raises(DataError, match=r"neither train\.npz nor a folder 'train' found"):
        images("set", (2,), 3, count=10)
    x, y = arrays()
    np.savez(folder / "train.npz", x=x, y=y)
    write_folder(folder / "test")
    found = images("set", (2,), 3, count=10)
    assert not found.synthetic and found.name == "set"
    assert check_epoch(Batches(found.train_x, found.train_y, 4), 4).any()
    assert check_epoch(Batches(found.test_x, found.test_y, 4), 4).any()
    np.savez(folder / "train.npz", x=x)
    with pytest.raises(DataError, match="field 'y' is missing"):
        read_splits(folder)
