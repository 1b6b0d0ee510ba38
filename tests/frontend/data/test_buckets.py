"""Batches of like lengths: which they are, and that padding less changes nothing."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import soapstone
from soapstone import SGD, GraphError, Model
from soapstone.data import Buckets, padded
from soapstone.errors import DataError
from soapstone.frontend.data.batches import Cut

LENGTHS = np.random.default_rng(0).integers(1, 13, 37)
TEXTS = [np.random.default_rng(row).integers(1, 9, length) for row, length in enumerate(LENGTHS)]
TAGS = [text % 3 for text in TEXTS]


def tagger(**settings: Any) -> Model:
    model = Model("tagger", seed=1)
    ids = model.input("ids", (4, 12), "int32", varying=True)
    n = model.input("lengths", (4,), "int32")
    x = model.learned_positions(model.embedding(ids, 9, 8, name="e"), name="p")
    x = model.multi_head_attention(x, x, x, 2, lengths=n, name="a").reshape(4, 12, 2, 4)
    y, _ = model.gru(x.reshape(4, 12, 8), 6, lengths=n, name="g")
    model.output(model.dense(y, 3, name="tag"))
    model.compile(SGD(0.1), loss="masked_cross_entropy", metrics="accuracy", **settings)
    return model


def test_an_epoch_has_each_sample_once_and_few_shapes() -> None:
    data = Buckets(TEXTS, TAGS, buckets=3)
    cut = Cut(4, True, 7, False)
    plans = [data.plan(cut, epoch) for epoch in (0, 0, 1)]
    first, again, other = ([rows.tolist() for rows, _ in plan] for plan in plans)
    assert first == again != other
    assert sorted(row for rows in first for row in rows) == list(range(37))
    assert all((LENGTHS[rows] <= length).all() for rows, length in plans[0])
    assert len({(len(rows), length) for rows, length in plans[0]}) <= 4
    assert len(first) == -(-37 // 4)


def test_buckets_pad_least() -> None:
    def steps(bounds: tuple[int, ...]) -> int:
        return int(np.array(bounds)[np.searchsorted(bounds, LENGTHS)].sum())

    known = sorted(set(LENGTHS.tolist()))
    best = min(steps((*bounds, known[-1])) for bounds in combinations(known[:-1], 2))
    assert steps(Buckets(TEXTS, buckets=3).bounds) == best
    assert Buckets(TEXTS, buckets=100).bounds == tuple(known)


def test_less_padding_changes_no_number() -> None:
    model, data = tagger(), Buckets(TEXTS, TAGS, buckets=3)
    x, y = data.arrays(12)
    whole, short = model.evaluate(x, y), model.evaluate(data, None)
    np.testing.assert_allclose(short["loss"], whole["loss"], rtol=1e-5)
    assert short["accuracy"] == whole["accuracy"]
    together = model.gradients(data)  # all samples are one batch
    for name, value in model.gradients(x, y).items():
        np.testing.assert_allclose(together[name], value, rtol=1e-4, atol=1e-6)
    rows = np.flatnonzero(LENGTHS <= 6)[:4]
    given, labels = data.batch(rows, 6)
    padding = data.batch(rows, 12)
    found, wanted = model.gradients(given, labels), model.gradients(*padding)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        model.predict(given), model.predict(padding[0])[:, :6], rtol=1e-4, atol=1e-5
    )
    model.close()


def test_training_by_buckets(tmp_path: Any) -> None:
    model, data = tagger(), Buckets(TEXTS, TAGS, buckets=2)
    result = model.fit(data, None, epochs=12, validation_data=data, progress=False)
    assert result.last("validation_loss") < result.epochs[0]["loss"] - 0.1
    assert len(model.trainer._bounds) <= 6  # two lengths and what is left over, of two kinds
    model.save(tmp_path / "m.safetensors")
    again = soapstone.load(tmp_path / "m.safetensors")
    assert again.varying == {"ids": 12}
    model.close()


def test_mistakes() -> None:
    flat = Model("flat")
    ids = flat.input("x", (4, 12, 3), varying=True)
    flat.output(flat.dense(flat.flatten(ids), 2))
    with pytest.raises(GraphError, match="model 'flat' at length 11 of 'x': reshape"):
        flat.compile(SGD(0.1))
    model = tagger()
    with pytest.raises(DataError, match="input 'ids': 13 steps found, 1 to 12 needed"):
        model.predict({"ids": np.ones((4, 13), np.int32), "lengths": np.ones(4, np.int32)})
    with pytest.raises(DataError, match="predict: buckets found"):
        model.predict(Buckets(TEXTS))
    model.close()
    with pytest.raises(DataError, match="the last one 12 or more"):
        Buckets(TEXTS, buckets=[4, 8])
    with pytest.raises(DataError, match="'y': 1 steps found in sample 0"):
        Buckets(TEXTS, [tags[:1] for tags in TAGS])
    with pytest.raises(DataError, match=r"input 'x': .* an array, or a list of sequences, needed"):
        Buckets({"x": 3})
    with pytest.raises(DataError, match="sequence 1: 3 steps found, at most 2 needed"):
        padded([[1], [1, 2, 3]], 2)


@pytest.mark.parametrize(
    ("dtype", "value", "needed"),
    [
        ("int32", -1, "int32"),
        ("uint8", -1, "int16"),
        ("uint8", 300, "uint16"),
        ("uint64", -1, "int64"),
        ("int32", 0.5, "float32"),
        ("int16", float("nan"), "float32"),
        ("bool", -1, "int8"),
        ("bool", 0, "bool"),
        ("float64", 0, "float32"),
    ],
)
def test_what_stands_behind_the_last_step_is_what_was_said(
    dtype: str, value: float, needed: str
) -> None:
    array, lengths = padded([np.ones(1, dtype), np.ones(2, dtype)], value=value)
    assert array.dtype == needed
    np.testing.assert_array_equal(array, [[1, value], [1, 1]])
    assert lengths.tolist() == [1, 2]
