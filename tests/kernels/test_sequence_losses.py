"""Cross-entropies over the places of a sequence, in training and evaluation, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from soapstone import DataError, Model


def test_a_cross_entropy_over_places_equals_torch_and_accuracy_counts_labels() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 5, 8), dtype=np.float32)
    labels = random.integers(0, 4, (6, 5)).astype(np.int32)
    with Model("places", seed=1) as model:
        model.output(model.dense(model.input("x", (6, 5, 8)), 4))
        model.compile(loss="cross_entropy", metrics=["accuracy"], cpus=2)
        graph = model.training_graph
        assert sum(node.operator == "reshape" for node in graph.nodes) <= 3
        logits = torch.from_numpy(np.array(model.predict(x)))
        wanted = nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels).flatten().long()
        )
        right = (logits.argmax(-1).numpy() == labels).mean()
        for scores in (
            model.evaluate(x, labels),
            model.evaluate(x, labels, batch_size=4),
            model.fit(x, labels, progress=False).epochs[-1],
        ):
            assert scores["loss"] == pytest.approx(float(wanted), rel=1e-5)
            assert scores["accuracy"] == pytest.approx(right)
        with pytest.raises(DataError, match=r"samples of shape \(\) found, \(5,\) needed"):
            model.fit(x, labels[:, 0], progress=False)


def test_a_dense_cross_entropy_over_places_equals_torch() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 5, 4), dtype=np.float32)
    labels = random.dirichlet(np.ones(4), (3, 5)).astype(np.float32)
    with Model("places", seed=1) as model:
        model.output(model.dense(model.input("x", (3, 5, 4)), 4))
        model.compile(loss="cross_entropy_dense", cpus=1)
        logits = torch.from_numpy(np.array(model.predict(x)))
        wanted = nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels).flatten(0, 1)
        )
        assert model.evaluate(x, labels)["loss"] == pytest.approx(float(wanted), rel=1e-5)
