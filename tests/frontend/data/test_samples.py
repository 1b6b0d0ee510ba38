"""Data that threads read, and files of images, tables and texts."""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from soapstone import SGD, DataError, Model
from soapstone.callbacks import Callback, TrainingState
from soapstone.data import (
    ImageFolder,
    Samples,
    in_turn,
    random_crop,
    random_flip,
    read_table,
    token_ids,
)
from soapstone.frontend.data.batches import Batches
from soapstone.ir.tensor import Array

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((21, 1, 6, 6)).astype(np.float32)
Y = np.arange(21) % 3


class Numbered:
    """A data set as PyTorch has them."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        return X[index], int(Y[index])


def drawn(samples: Any, epoch: int = 1, start: int = 0, **more: Any) -> list[tuple[Any, Any]]:
    batches = Batches(samples, batch_size=4, seed=5, **more)
    return [(inputs["x"], labels) for inputs, labels in batches.epoch(epoch, start)]


def same(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> None:
    assert len(one) == len(other)
    for (x, y), (u, v) in zip(one, other):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


def test_what_is_drawn_follows_from_seed_and_epoch_alone() -> None:
    augment = in_turn(random_flip, random_crop(2))
    given = [
        drawn(Samples(Numbered(), augment=augment, workers=workers, ahead=ahead))
        for workers, ahead in ((0, 1), (1, 1), (3, 5))
    ]
    same(given[0], given[1])
    same(given[0], given[2])
    same(given[0][3:], drawn(Samples((X, Y), augment=augment), start=3))
    assert [len(x) for x, _ in given[0]] == [4, 4, 4, 4, 4, 1]
    assert not np.array_equal(given[0][0][0], drawn(Samples((X, Y), augment=augment), 2)[0][0])
    same(drawn(Samples((X, Y))), drawn(Samples(Numbered())))


class Watched(Numbered):
    """A data set that knows how many samples were read."""

    def __init__(self) -> None:
        self.read, self.news = 0, threading.Condition()

    def __getitem__(self, index: int) -> tuple[Array, int]:
        with self.news:
            self.read += 1
            self.news.notify_all()
        return super().__getitem__(index)


def readers() -> list[str]:
    return [each.name for each in threading.enumerate() if "soapstone-samples" in each.name]


def test_the_next_epoch_is_read_while_one_ends() -> None:
    watched = Watched()
    batches = Batches(Samples(watched, workers=1, ahead=2), batch_size=4, seed=5, epochs=2)
    first = [(inputs["x"], labels) for inputs, labels in batches.epoch(0)]
    with watched.news:
        assert watched.news.wait_for(lambda: watched.read == 21 + 2 * 4, timeout=60)
    second = [(inputs["x"], labels) for inputs, labels in batches.epoch(1)]
    assert watched.read == 2 * 21 and not readers()
    same(first, drawn(Samples(Numbered()), 0))
    same(second, drawn(Samples(Numbered()), 1))
    one, other = batches.epoch(0), batches.epoch(1, 2)
    np.testing.assert_array_equal(next(one)[0]["x"], first[0][0])
    np.testing.assert_array_equal(next(other)[0]["x"], second[2][0])
    np.testing.assert_array_equal(next(one)[0]["x"], first[1][0])
    del one, other
    assert not readers()


def test_a_fit_that_ends_early_leaves_no_thread() -> None:
    class Ends(Callback):
        def on_step_end(self, state: TrainingState) -> None:
            state.stop = state.step == 2

    class Fails(Callback):
        def on_epoch_end(self, state: TrainingState) -> None:
            raise KeyError("mine")

    model = Model("net", seed=0)
    model.output(model.dense(model.flatten(model.input("x", (4, 1, 6, 6))), 3))
    model.compile(SGD(0.1))
    model.fit(Samples(Numbered()), epochs=3, callbacks=[Ends()], progress=False)
    assert not readers()
    with pytest.raises(KeyError, match="mine"):
        model.fit(Samples(Numbered()), epochs=3, callbacks=[Fails()], progress=False)
    assert not readers()
    model.close()


def test_mapped_files_are_read_by_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    same(drawn(Samples((mapped, Y)), shuffle=False), drawn(Samples((X, Y)), shuffle=False))
    batches: Any = Batches(mapped, Y, 4)
    batches.convert(lambda batch: batch)
    assert np.shares_memory(batches._source.inputs["x"], mapped)


def test_balanced_classes_are_drawn_equally_often() -> None:
    rare = np.array([0] * 17 + [1] * 3 + [2])
    samples = Samples((np.arange(21.0), rare), balance=rare)
    labels = np.concatenate([y for _, y in drawn(samples)])
    assert np.bincount(labels).tolist() == [7, 7, 7]
    numbers = np.concatenate([x for x, _ in drawn(samples)])
    assert len(np.unique(numbers[labels == 0])) == 7  # none twice while others wait


def test_a_model_is_trained_on_samples() -> None:
    def net() -> Model:
        model = Model("net", seed=0)
        model.output(model.dense(model.flatten(model.input("image", (4, 1, 6, 6))), 3))
        model.compile(SGD(0.1), metrics="accuracy")
        return model

    model, other = net(), net()
    found = model.fit(Samples(Numbered()), epochs=2, progress=False)
    expected = other.fit(X, Y, epochs=2, progress=False)
    assert found.history == expected.history
    assert model.evaluate(Samples((X, Y))) == other.evaluate(X, Y)
    assert len(np.asarray(model.predict(Samples((X,))))) == 21
    with pytest.raises(DataError, match=r"fit: input 'image': samples of shape \(6, 6\) found"):
        model.fit(Samples((X[:, 0], Y)))
    with pytest.raises(DataError, match="y: labels come with the samples of x"):
        model.fit(Samples((X, Y)), Y)


def test_a_step_takes_all_samples_of_a_source(tmp_path: Path) -> None:
    model = Model("net", seed=0)
    model.output(model.dense(model.flatten(model.input("x", (4, 1, 6, 6))), 3))
    model.compile(SGD(0.1))
    for part in range(3):
        rows = slice(7 * part, 7 * part + 7)
        np.savez(tmp_path / f"{part}.npz", x=X[rows], y=Y[rows])
    wanted, weights = model.gradients(X, Y), model.weights()
    loss = model.train_on_batch(X, Y)
    for given in (Samples(Numbered()), tmp_path, [(X, Y)], iter([(X, Y)])):
        model.set_weights(weights)
        if not isinstance(given, Iterator):
            for name, found in model.gradients(given).items():
                np.testing.assert_array_equal(found, wanted[name])
        assert model.train_on_batch(given) == loss
    model.close()


def test_an_error_of_a_data_set_says_which_sample() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> tuple[Array, int]:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        drawn(Samples(Broken()), shuffle=False)
    assert raised.value.__notes__ == ["while sample 0 was read"]
    assert not readers()


def test_loaders_and_data_sets_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model = Model("net", seed=0)
    model.output(model.dense(model.flatten(model.input("x", (4, 1, 6, 6))), 3))
    model.compile(SGD(0.1))
    weights = model.weights()
    histories = []
    for given in ((X, Y), (loader,), (Samples(data),)):
        model.set_weights(weights)
        held_out = given if len(given) == 2 else given[0]
        result = model.fit(
            *given, epochs=2, shuffle=False, validation_data=held_out, progress=False
        )
        histories.append(result.history)
    assert histories[0] == histories[1] == histories[2]
    np.testing.assert_array_equal(model.predict(loader), model.predict(X))
    model.close()


def test_images_of_folders(tmp_path: Path) -> None:
    for number, (kind, shade) in enumerate((("cat", 0), ("dog", 255), ("dog", 51))):
        (tmp_path / kind).mkdir(exist_ok=True)
        Image.new("RGB", (8, 4), (shade, 0, 0)).save(tmp_path / kind / f"{number}.png")
    images = ImageFolder(tmp_path)
    assert images.classes == ("cat", "dog") and images.labels.tolist() == [0, 1, 1]
    image, label = images[2]
    assert image.shape == (3, 4, 8) and label == 1
    np.testing.assert_allclose(image[:, 0, 0], [0.2, 0, 0], atol=1e-6)
    assert ImageFolder(tmp_path, (2, 5), grey=True)[0][0].shape == (1, 2, 5)
    assert [x.shape for x, _ in drawn(Samples(images))] == [(3, 3, 4, 8)]
    Image.new("RGB", (3, 3)).save(tmp_path / "cat" / "9.png")
    with pytest.raises(DataError, match=r"sample 1: shape \(3, 3, 3\) found, \(3, 4, 8\) needed"):
        drawn(Samples(ImageFolder(tmp_path)), shuffle=False)
    (tmp_path / "cat" / "9.png").write_text("none")
    with pytest.raises(DataError, match=r"image .*9\.png': cannot identify"):
        ImageFolder(tmp_path)[1]


def test_tables_of_both_kinds(tmp_path: Path) -> None:
    text = "size,colour,weight,kind\n1,red,2.5,b\n2,blue,,a\n3,red,1e1,b\n"
    (tmp_path / "t.csv").write_text(text)
    columns = {"size": [1, 2, 3], "colour": ["red", "blue", "red"]}
    columns |= {"weight": [2.5, None, 10.0], "kind": ["b", "a", "b"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    for path in (tmp_path / "t.csv", tmp_path / "t.parquet"):
        table = read_table(path, "kind", missing=0.0)
        assert table.columns == ("size", "weight") and table.x.dtype == np.float32
        assert table.x.tolist() == [[1, 2.5], [2, 0], [3, 10]]
        assert table.ids["colour"].tolist() == [1, 0, 1] and table.y is not None
        assert table.y.tolist() == [1, 0, 1] and table.texts["kind"] == ("a", "b")
        assert read_table(path, "size", columns=["colour"]).x.shape == (3, 0)
    (tmp_path / "u.csv").write_text("colour\ngreen\n")
    with pytest.raises(DataError, match="'green' at row 0 is unknown; one of blue, red needed"):
        read_table(tmp_path / "u.csv", columns=["colour"], like=table)


def test_a_table_like_another_has_its_columns_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,colour,y\n1,2,red,0\n3,4,blue,1\n")
    (tmp_path / "u.csv").write_text("extra,y,colour,b,a\n9,1,red,20,10\n")
    table = read_table(tmp_path / "t.csv", "y")
    other = read_table(tmp_path / "u.csv", "y", like=table)
    assert other.columns == ("a", "b") and other.x.tolist() == [[10, 20]]
    assert other.ids["colour"].tolist() == [1] and other.y is not None and other.y.tolist() == [1]
    assert read_table(tmp_path / "u.csv", like=table).x.tolist() == [[10, 20]]
    (tmp_path / "v.csv").write_text("a,b,colour\n1,none,red\n")
    with pytest.raises(DataError, match="column 'b': texts found, such as 'none'; numbers needed"):
        read_table(tmp_path / "v.csv", like=table)


def test_what_is_no_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("code,n\n1_0,1\n10,nan\n")
    table = read_table(tmp_path / "t.csv", missing=-1)
    assert table.texts["code"] == ("10", "1_0") and table.x.tolist() == [[1], [-1]]
    columns = {"n": [1.0, float("nan"), None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet", missing=0).x.tolist() == [[1], [0], [0]]


def test_pixels_of_sixteen_bits_are_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    wide = np.random.default_rng(0).integers(0, 65536, (6, 5)).astype(np.uint16)
    Image.fromarray(wide).save(tmp_path / "a" / "0.png")
    for grey, channels in ((True, 1), (False, 3)):
        image, _ = ImageFolder(tmp_path, grey=grey)[0]
        assert image.shape == (channels, 6, 5) and image.dtype == np.float32
        np.testing.assert_allclose(image, np.stack([wide] * channels) / 65535, rtol=1e-6)
    small, _ = ImageFolder(tmp_path, (3, 3))[0]
    assert small.shape == (3, 3, 3) and 0 <= small.min() < small.max() <= 1
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "a" / "0.tiff")
    (tmp_path / "a" / "0.png").unlink()
    with pytest.raises(DataError, match=r"0\.tiff': pixels of 32 bits found; 8 or 16 needed"):
        ImageFolder(tmp_path)[0]


@pytest.mark.parametrize("suffix", ["ppm", "png"])
def test_every_damaged_image_is_named(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path, random = tmp_path / "a" / f"0.{suffix}", np.random.default_rng(1)
    Image.fromarray(random.integers(0, 256, (9, 9, 3), np.uint8)).save(path)
    whole, refused = path.read_bytes(), 0
    for number in range(100):
        data = bytearray(whole[: random.integers(1, len(whole))] if number % 2 else whole)
        for _ in range(3):
            data[random.integers(min(len(data), 60))] = random.integers(256)
        path.write_bytes(bytes(data))
        try:
            ImageFolder(tmp_path)[0]
        except DataError as error:
            assert path.name in str(error)
            refused += 1
    assert refused


def test_arrays_may_be_lists_and_items_too() -> None:
    x, y = X[:6].reshape(6, -1), Y[:6]
    needed = drawn(Samples((x, y)), shuffle=False)

    class Listed:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return [x[index], y[index]]

    for given in (Samples(({"x": x.tolist()}, y.tolist())), Samples(Listed())):
        for (one, kind), (other, wanted) in zip(drawn(given, shuffle=False), needed, strict=True):
            values = one["x"] if isinstance(one, dict) else one
            others = other["x"] if isinstance(other, dict) else other
            np.testing.assert_allclose(values, others, rtol=1e-6)
            assert np.array_equal(kind, wanted)


def test_texts_become_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for given in (
        tokenizer,
        tmp_path / "tokenizer.json",
        lambda text: ["?ab".find(t) for t in text],
    ):
        ids, lengths = token_ids(
            ["a b a", "b"] if callable(given) is False else ["aba", "b"], given, 2
        )
        assert ids.tolist() == [[1, 2], [2, 0]] and lengths.tolist() == [2, 1]
    tokenizer.enable_padding(length=5)  # as files of many models say
    ids, lengths = token_ids(["a b a", "b", ""], tokenizer, 4)
    assert ids.tolist() == [[1, 2, 1, 0], [2, 0, 0, 0], [0] * 4] and lengths.tolist() == [3, 1, 0]


def read(item: Any) -> None:
    """Train on two samples, the second of which is what is given."""
    model = Model("net")
    model.output(model.dense(model.flatten(model.input("x", (2, 1, 6, 6))), 3, name="o"))
    model.compile(SGD(0.1))
    model.fit(Samples([(X[0], 0), item]), shuffle=False, progress=False)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda path: ImageFolder(path / "none"), "no such folder"),
        (lambda path: ImageFolder(path), "none found in 0 folders of classes"),
        (lambda path: read_table(path / "none.csv"), "no such file"),
        (lambda path: read_table(path / "t.csv", "knd"), "did you mean 'kind'?"),
        (lambda path: read_table(path / "t.csv"), "column 'n': no number at row 1"),
        (lambda path: read_table(path / "short.csv"), "row 0: 1 fields found, 2 needed"),
        (lambda path: read_table(path / "twice.csv"), "column 'n' is there twice; once needed"),
        (lambda path: read_table(path / "latin.csv"), "UTF-8 text needed"),
        (lambda path: read_table(path / "long.csv"), "larger than field limit"),
        (lambda path: read_table(path / "when.parquet"), "'when': date at row 0; a number or a"),
        (
            lambda path: read(([1, [2, 3]], 0)),
            "sample 1: a list of unlike parts found; an array, or",
        ),
        (lambda path: read_table(path / "t.txt"), "suffix '.txt' found"),
        (lambda path: read_table(path / "bad.parquet"), "bad.parquet"),
        (lambda path: token_ids(["a"], path / "none.json", 3), "tokenizer"),
        (lambda path: token_ids(["a"], 3, 3), "a tokenizer or a function needed"),
        (lambda path: Samples((X[:0], Y[:0])), "0 found, 1 or more needed"),
        (lambda path: Samples((X, Y), balance=Y[:3]), r"balance of shape (3,) found, (21,) needed"),
        (lambda path: Samples((X, Y), workers=-1), "workers: -1 found"),
        (lambda path: Samples(iter([1])), "samples: list_iterator found; an object with a length"),
        (lambda path: Samples({"x": X}), "samples: dict found; an object with a length"),
        (lambda path: Samples("photos"), "samples: 'photos' found; an object with a length"),
        (lambda path: Samples(ImageFolder), "samples: class ImageFolder in place of an instance"),
        (lambda path: Samples((X, Y), augment=3), "samples: augment: 3 found, a function needed"),
        (lambda path: read(None), "sample 1: x alone found, x and y needed as of sample 0"),
        (lambda path: read((1, 2, 3, 4)), "sample 1: 4 parts found, x and y needed as of sample 0"),
        (lambda path: read(({"x": 1}, 2)), "sample 1: a dict of 'x' found, an array needed"),
        (lambda path: read((X[0], 7)), "batch 0: labels: 7 at row 1; layer 'o' has 3 classes"),
        (lambda path: random_crop(0), "padding: 0 found"),
    ],
)
def test_files_and_settings_that_do_not_serve(
    call: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("kind,n\na,1\nb,\n")
    (tmp_path / "short.csv").write_text("kind,n\na\n")
    (tmp_path / "twice.csv").write_text("n,n\n1,2\n")
    (tmp_path / "latin.csv").write_bytes("größe\n1\n".encode("latin-1"))
    (tmp_path / "long.csv").write_text(f"a\n{'x' * 200_000}\n")
    when = pyarrow.table({"when": [datetime.date(2020, 1, 1)]})
    pyarrow.parquet.write_table(when, tmp_path / "when.parquet")
    for name in ("t.txt", "bad.parquet"):
        (tmp_path / name).write_text("kind")
    with pytest.raises(DataError) as raised:
        call(tmp_path)
    assert said in str(raised.value)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"need tokenizers: pip install 'soapstone\[text\]'"):
        token_ids(["a"], "tokenizer.json", 3)
