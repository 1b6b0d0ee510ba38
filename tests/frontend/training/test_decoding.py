"""Decoding of CTC against sums over all paths and torch's loss; edit distances by recursion."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product

import numpy as np
import pytest
import torch

from soapstone import GraphError, Model
from soapstone.decoding import ctc_beam_search, ctc_greedy, edit_distance
from soapstone.errors import DataError
from soapstone.ir.tensor import Array
from soapstone.losses import CTC
from soapstone.metrics import ErrorRate

RANDOM = np.random.default_rng(0)


def labellings(logits: Array, blank: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each row of labels, summed over all paths."""
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    found: dict[tuple[int, ...], float] = {}
    for path in product(range(logits.shape[1]), repeat=len(logits)):
        labels = tuple(label for label, _ in groupby(path) if label != blank)
        found[labels] = found.get(labels, 0.0) + float(np.prod(p[range(len(path)), path]))
    return found


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("classes", [1, 2, 3, 4])
def test_a_wide_search_finds_all_labellings(steps: int, classes: int) -> None:
    x, blank = 2 * RANDOM.standard_normal((1, steps, classes)), classes - 1
    wanted = labellings(x[0], blank)
    (found,) = ctc_beam_search(x, blank=blank, width=2000, best=2000)
    assert {each.labels for each in found} == wanted.keys()
    for each in found:
        assert np.exp(each.log_probability) == pytest.approx(wanted[each.labels])
    assert sorted(found, key=lambda each: -each.log_probability) == found
    ((narrow,),) = ctc_beam_search(x, blank=blank, width=2)
    assert np.exp(narrow.log_probability) <= wanted[narrow.labels] * (1 + 1e-9)
    path = x[0].argmax(1)
    assert ctc_greedy(x, blank=blank)[0] == [k for k, _ in groupby(path) if k != blank]


def test_probabilities_are_those_of_torchs_loss() -> None:
    x = 3 * RANDOM.standard_normal((4, 30, 12)).astype(np.float32)
    lengths = np.array([30, 8, 1, 0])
    logs = torch.log_softmax(torch.tensor(x), -1).transpose(0, 1)
    for sample, found in enumerate(ctc_beam_search(x, lengths, width=64, best=3)):
        for each in found:
            loss = torch.nn.functional.ctc_loss(
                logs[:, sample],
                torch.tensor([each.labels], dtype=torch.int64),
                torch.tensor([lengths[sample]]),
                torch.tensor([len(each.labels)]),
                reduction="sum",
            )
            assert each.log_probability <= -loss.item() + 1e-4
    best = ctc_beam_search(x[1:2], lengths[1:2], width=512)[0][0]
    labels = torch.tensor([best.labels])
    sizes = torch.tensor([8]), torch.tensor([len(best.labels)])
    loss = torch.nn.functional.ctc_loss(logs[:, 1], labels, *sizes, reduction="sum")
    assert best.log_probability == pytest.approx(-loss.item(), abs=1e-2)


def test_edit_distances() -> None:
    for _ in range(200):
        one, two = ("".join(RANDOM.choice([*"abc"], RANDOM.integers(0, 8))) for _ in range(2))

        @cache
        def edits(i: int, j: int, one: str = one, two: str = two) -> int:
            if not i or not j:
                return i + j
            replaced = edits(i - 1, j - 1) + (one[i - 1] != two[j - 1])
            return min(edits(i - 1, j) + 1, edits(i, j - 1) + 1, replaced)

        assert edit_distance(one, two) == edits(len(one), len(two))
    assert edit_distance(["a", "cat"], ["cat"]) == 1


@pytest.mark.parametrize("lengths", [None, "lengths"])
def test_the_metric_counts_edits_of_the_epoch(lengths: str | None) -> None:
    x = RANDOM.standard_normal((11, 9, 5)).astype(np.float32)
    n = RANDOM.integers(3, 10, 11)
    labels = np.full((11, 3), -1)
    for row, size in enumerate(RANDOM.integers(0, 3, 11)):
        labels[row, :size] = RANDOM.integers(0, 4, size)
    model = Model("m")
    h = model.dense(model.input("x", (4, 9, 5)), 5, name="y")
    model.input("lengths", (4,), "int32")
    model.output(h)
    loss = CTC(blank=4, lengths=lengths, zero_infinity=True)
    model.compile("sgd", loss=loss, metrics=["error_rate", ErrorRate(separator=0)])
    given = {"x": x, "lengths": n}
    found = ctc_greedy(model.predict(given), None if lengths is None else n, blank=4)
    wanted = [[int(label) for label in row if label >= 0] for row in labels]

    def words(row: list[int]) -> list[str]:
        return "".join(map(str, row)).replace("0", " ").split()

    scores = model.evaluate(given, labels)
    for name, cut in (("error_rate", list), ("word_error_rate", words)):
        edits = sum(edit_distance(cut(a), cut(b)) for a, b in zip(found, wanted))
        assert scores[name] == pytest.approx(edits / sum(len(cut(b)) for b in wanted))
    model.close()


def test_what_does_not_fit() -> None:
    x = np.zeros((2, 3, 4), np.float32)
    for mistake, said in (
        (lambda: ctc_greedy(x[0]), r"float32 of shape \(3, 4\) found, logits of shape \(samples"),
        (lambda: ctc_greedy(x.astype(int)), "int64 of shape"),
        (lambda: ctc_greedy(x, [1]), r"lengths: int64 of shape \(1,\) found, integers \(2,\) need"),
        (lambda: ctc_greedy(x, blank=4), "blank 4 found, one of 4 classes needed"),
        (lambda: ctc_beam_search(x * np.nan), "nan at sample 0"),
        (lambda: ctc_beam_search(x, width=0), "width: 0 found, an integer of 1 or more needed"),
        (lambda: ctc_beam_search(x, width=2, best=3), "best: 3 found, at most width, 2, needed"),
    ):
        with pytest.raises(DataError, match=said):
            mistake()
    model = Model("m")
    model.output(model.dense(model.input("x", (4, 5)), 5, name="y"))
    with pytest.raises(GraphError, match=r"metric 'error_rate': output .* the loss CTC needed"):
        model.compile("sgd", metrics="error_rate")
