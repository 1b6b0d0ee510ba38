"""Models trained here and in torch: the same layers, data and hyper-parameters, the same accuracy.

Each of four models is trained with several seeds by both, from the same initial weights, which are
torch's, each with its own order of samples and dropout. A difference of means is within noise where
it is at most three standard errors of it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import show, write
from torch_twins.recurrent import Lstm

from soapstone import Adam, Model
from soapstone.data import padded
from soapstone.frontend.data.sets import digits
from soapstone.frontend.data.trees import NEUTRAL, good_or_bad, sentiment

Arrays = dict[str, np.ndarray[Any, Any]]
WORDS = 4000  # of the texts, the first ones; others are one
TOKENS = 20  # of the tagged sequences


@dataclass(frozen=True)
class Task:
    """A model and how it is trained: here, and in torch.

    train, test: inputs by name, and labels by output.
    build: makes the model for a seed. net: the module of torch, called with inputs by name, which
    returns outputs by name. loss: of outputs and labels in torch; settings: of `compile`.
    measures: of outputs and labels of the test, by name.
    """

    train: tuple[Arrays, Arrays]
    test: tuple[Arrays, Arrays]
    build: Callable[[int], Model]
    net: Callable[[], nn.Module]
    loss: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor]
    settings: dict[str, Any]
    measures: Callable[[Arrays, Arrays], dict[str, float]]
    epochs: int
    rate: float
    batch: int = 32


def images() -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Return digits: their images, numbers, and how much ink there is left of the middle."""
    data = digits()

    def part(x: Any, y: Any) -> tuple[Arrays, Arrays]:
        ink = 4 * x[..., :4].mean(axis=(1, 2, 3))[:, None]
        return {"x": x}, {"kind": y, "ink": ink}

    return part(data.train_x, data.train_y), part(data.test_x, data.test_y)


def hits(out: Arrays, y: Arrays, name: str = "kind") -> float:
    """Return the part of labels, those that are not -1, that outputs are right about, in %."""
    there = y[name] >= 0
    return float(100 * (out[name].argmax(-1) == y[name])[there].mean())


def trunk(model: Model) -> Any:
    x = model.conv2d(model.input("x", (32, 1, 8, 8)), 16, 3, padding="same", activation="relu")
    x = model.dense(model.flatten(model.max_pool2d(x, 2)), 64, "relu")
    return model.dropout(x, 0.2)


class Trunk(nn.Module):
    """The same layers, and a linear one for each output."""

    def __init__(self, **outputs: int) -> None:
        super().__init__()
        self.conv, self.dense = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.2)
        self.heads = nn.ModuleDict({name: nn.Linear(64, width) for name, width in outputs.items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = max_pool2d(self.conv(x).relu(), 2).flatten(1)
        h = self.drop(self.dense(h).relu())
        return {name: head(h) for name, head in self.heads.items()}


def digit_task() -> Task:
    def build(seed: int) -> Model:
        model = Model("digits", seed=seed)
        model.output(model.dense(trunk(model), 10, name="kind"))
        return model

    (x, y), (test_x, test_y) = images()
    return Task(
        (x, {"kind": y["kind"]}),
        (test_x, {"kind": test_y["kind"]}),
        build,
        lambda: Trunk(kind=10),
        lambda out, labels: cross_entropy(out["kind"], labels["kind"]),
        {"loss": {"kind": "cross_entropy"}},
        lambda out, labels: {"digits, accuracy %": hits(out, labels)},
        epochs=6,
        rate=2e-3,
    )


def two_heads() -> Task:
    def build(seed: int) -> Model:
        model = Model("heads", seed=seed)
        x = trunk(model)
        model.output(model.dense(x, 10, name="kind"), model.dense(x, 1, name="ink"))
        return model

    train, test = images()
    return Task(
        train,
        test,
        build,
        lambda: Trunk(kind=10, ink=1),
        lambda out, labels: (
            cross_entropy(out["kind"], labels["kind"]) + 2 * mse_loss(out["ink"], labels["ink"])
        ),
        {"loss": {"kind": "cross_entropy", "ink": "mse"}, "loss_weights": {"ink": 2.0}},
        lambda out, labels: {
            "two heads, accuracy %": hits(out, labels),
            "two heads, mean error %": float(100 * np.abs(out["ink"] - labels["ink"]).mean()),
        },
        epochs=6,
        rate=2e-3,
    )


class Texts(nn.Module):
    """The mean of the embeddings of a text's words, classified."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 24)
        self.dense, self.head = nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        there = torch.arange(ids.shape[1]) < lengths[:, None]
        total = (self.words(ids) * there[..., None]).sum(1)
        return {"kind": self.head(self.dense(total / lengths[:, None]).relu())}


def texts() -> Task:
    """Sentences of films, good or bad."""
    bank = sentiment()
    numbers = {word: min(n, WORDS) for word, n in bank.numbers().items()}

    def part(trees: Any) -> tuple[Arrays, Arrays]:
        kept = good_or_bad(trees)
        sentences = [
            [numbers.get(word.lower(), WORDS) for word in leaves(tree)][:40] for tree in kept
        ]
        ids, lengths = padded(sentences, 40)
        labels = np.array([int(tree.label > NEUTRAL) for tree in kept], np.int32)
        return {"ids": ids.astype(np.int32), "lengths": lengths}, {"kind": labels}

    def leaves(tree: Any) -> Iterator[str]:
        if tree.word is not None:
            yield tree.word
        for child in tree.children:
            yield from leaves(child)

    def build(seed: int) -> Model:
        model = Model("texts", seed=seed)
        x = model.embedding(model.input("ids", (32, 40), "int32"), WORDS + 1, 24)
        x = model.mean_over_time(x, model.input("lengths", (32,), "int32"))
        model.output(model.dense(model.dense(x, 24, "relu"), 2, name="kind"))
        return model

    made = "made-up" if bank.synthetic else "SST"
    return Task(
        part(bank.train),
        part(bank.test),
        build,
        lambda: Texts(WORDS + 1),
        lambda out, labels: cross_entropy(out["kind"], labels["kind"]),
        {"loss": {"kind": "cross_entropy"}},
        lambda out, labels: {f"texts ({made}), accuracy %": hits(out, labels)},
        epochs=4,
        rate=3e-3,
    )


class Tagger(nn.Module):
    """An LSTM in both directions over packed sequences, and a linear layer for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 16)
        self.ways = nn.ModuleList([Lstm(16, 24), Lstm(16, 24)])
        self.head = nn.Linear(48, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        x, steps = self.words(ids), torch.arange(ids.shape[1])
        # Each sample in reverse: torch has both directions in one module, with biases that differ.
        turned = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
        made = []
        for way, order in zip(self.ways, (None, turned)):
            given = x if order is None else x.gather(1, order[..., None].expand_as(x))
            packed = pack_padded_sequence(given, lengths, batch_first=True, enforce_sorted=False)
            y = pad_packed_sequence(way(packed)[0], batch_first=True, total_length=ids.shape[1])[0]
            made.append(y if order is None else y.gather(1, order[..., None].expand_as(y)))
        return {"kind": self.head(torch.cat(made, 2))}


def tagged() -> Task:
    """Sequences whose steps are tagged by how they stand to the step before and the one after."""

    def part(count: int, seed: int) -> tuple[Arrays, Arrays]:
        random = np.random.default_rng(seed)
        rows = [random.integers(0, TOKENS, random.integers(4, 25)) for _ in range(count)]
        ids, lengths = padded(rows, 24)
        tags = [
            2 * (np.diff(row, prepend=row[0]) > 0) + (np.diff(row, append=row[-1]) > 0)
            for row in rows
        ]
        labels = padded(tags, 24, value=-1)[0].astype(np.int32)
        return {"ids": ids.astype(np.int32), "lengths": lengths}, {"kind": labels}

    def build(seed: int) -> Model:
        model = Model("tags", seed=seed)
        x = model.embedding(model.input("ids", (32, 24), "int32"), TOKENS, 16)
        n = model.input("lengths", (32,), "int32")
        y, _ = model.lstm(x, 24, bidirectional=True, lengths=n)
        model.output(model.dense(y, 4, name="kind"))
        return model

    def loss(out: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = out["kind"].flatten(0, 1)
        return cross_entropy(rows, labels["kind"].flatten(), ignore_index=-1)

    return Task(
        part(1500, 1),
        part(500, 2),
        build,
        Tagger,
        loss,
        {"loss": {"kind": "masked_cross_entropy"}},
        lambda out, labels: {"masked sequences, accuracy %": hits(out, labels)},
        epochs=3,
        rate=5e-3,
    )


TASKS = {"digits": digit_task, "texts": texts, "heads": two_heads, "tags": tagged}


def initial(task: Task, seed: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the twin's initial weights, in order, as they stand here."""
    torch.manual_seed(seed)
    for module in task.net().modules():
        for each in module.parameters(recurse=False):
            if each.requires_grad:
                turned = each.ndim == 2 and not isinstance(module, nn.Embedding)
                yield np.ascontiguousarray(each.detach().T if turned else each.detach())


def ours(task: Task, seed: int) -> dict[str, float]:
    """Return what a model trained here measures on the test."""
    model = task.build(seed)
    model.compile(Adam(task.rate), **task.settings)
    model.set_weights(dict(zip(model.weights(), initial(task, seed), strict=True)))
    x, y = task.train
    model.fit(x, y, epochs=task.epochs, batch_size=task.batch, progress=False)
    made = model.predict(task.test[0], batch_size=task.batch)
    outputs = dict(zip(model.output_names, made if isinstance(made, tuple) else (made,)))
    model.close()
    return task.measures(outputs, task.test[1])


def theirs(task: Task, seed: int) -> dict[str, float]:
    """Return what the twin in torch measures on the test."""
    torch.manual_seed(seed)
    net = task.net()
    adam = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=task.rate)
    (x, y), (test_x, test_y) = (
        tuple(
            {name: torch.from_numpy(np.asarray(v)) for name, v in arrays.items()} for arrays in part
        )
        for part in (task.train, task.test)
    )
    y = {name: each.long() if not each.is_floating_point() else each for name, each in y.items()}
    rows = len(next(iter(y.values())))
    for _ in range(task.epochs):
        for batch in torch.randperm(rows).split(task.batch):
            out = net(**{name: each[batch] for name, each in x.items()})
            loss = task.loss(out, {name: each[batch] for name, each in y.items()})
            adam.zero_grad()
            loss.backward()
            adam.step()
    net.eval()
    with torch.no_grad():
        made = {name: each.numpy() for name, each in net(**test_x).items()}
    return task.measures(made, {name: each.numpy() for name, each in test_y.items()})


def rows_of(task: Task, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each measure: mean and deviation over seeds of both, and their difference."""
    begin = time.perf_counter()
    pairs = [(ours(task, seed), theirs(task, seed)) for seed in range(seeds)]
    seconds = time.perf_counter() - begin
    for name in pairs[0][0]:
        one, other = ([each[side][name] for each in pairs] for side in (0, 1))
        noise = math.sqrt((statistics.variance(one) + statistics.variance(other)) / seeds)
        off = statistics.mean(one) - statistics.mean(other)
        yield {
            "model": name,
            "soapstone": f"{statistics.mean(one):.2f} ± {statistics.stdev(one):.2f}",
            "torch": f"{statistics.mean(other):.2f} ± {statistics.stdev(other):.2f}",
            "difference": f"{off:+.2f}",
            "standard error": round(noise, 2),
            "within noise": "yes" if abs(off) <= 3 * noise else "no",
            "of soapstone": one,
            "of torch": other,
            "seconds": seconds,
        }


def main() -> None:
    """Train both, print what they reach, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = []
    for name in given.tasks:
        for row in rows_of(TASKS[name](), given.seeds):
            show({key: value for key, value in row.items() if not key.startswith("of ")})
            made.append(row)
    if given.tasks == list(TASKS):
        columns = ("model", "soapstone", "torch", "difference", "standard error", "within noise")
        title = "Accuracy of twins, mean and deviation over seeds"
        command = f"python benchmarks/correctness/twins.py --seeds {given.seeds}"
        write("twins", title, command, columns, made)


if __name__ == "__main__":
    main()
