"""The recurrent, transformer and recommender apps: sizes, learning, and equality with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_twins import recommend, recurrent, sequence
from torch_twins.equal import check, shapes, weights_for

from soapstone import SGD, Adam, Model
from soapstone.apps.sequences import bert, nmt
from soapstone.apps.sequences.rnntc import METAFLOW
from soapstone.apps.sequences.transformer import TENSOROPT
from soapstone.apps.tables import candle_uno, dlrm
from soapstone.frontend.app import app_module, load_app
from soapstone.frontend.data.batches import Batches
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

Twin = Callable[[], nn.Module]


@dataclass(frozen=True)
class AppCase:
    """An app at a small size: its options, those that its data share, and its twin."""

    app: str
    twin: Twin
    sizes: Mapping[str, Any]
    data: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # options of the data alone
    rate: float = 1e-2
    batch: int = 16

    @property
    def module(self) -> ModuleType:
        return app_module(self.app)

    @property
    def loss(self) -> str:
        found: str = self.module.OPTIONS["loss"]
        return found

    def build(self, batch_size: int) -> Model:
        model: Model = self.module.build(batch_size, **self.sizes)
        return model

    def splits(self, count: int) -> Splits:
        given = {name: self.sizes[name] for name in self.data}
        splits: Splits = self.module.data(count=count, **given, **self.more)
        return splits

    def samples(self, count: int) -> tuple[dict[str, Array], Array]:
        """Return inputs in the model's order, and labels."""
        splits = self.splits(2 * count)
        assert isinstance(splits.train_x, Mapping) and splits.train_y is not None
        names = self.build(1).graph.inputs(Role.INPUT)
        return {n: splits.train_x[n][:count] for n in names}, splits.train_y[:count]


TABLES = (3, 50, 700)
FEATURES = {"cells": 9, "drug": 20}
WORDS = {"vocabulary": 60, "length": 7}
BERT = {"layers": 2, "hidden": 32, "heads": 4, "length": 10, "vocabulary": 60}

CASES = {
    "dlrm": AppCase(
        "dlrm",
        lambda: recommend.Dlrm(TABLES, 8, (16, 16, 8), (32, 16, 1)),
        {"vocabularies": TABLES, "width": 8, "bottom": (16, 16, 8), "top": (32, 16, 1)},
        ("vocabularies",),
    ),
    "dlrm, features side by side": AppCase(
        "dlrm",
        lambda: recommend.Dlrm(TABLES, 8, (16, 8), (16, 1), interaction="cat"),
        {
            "vocabularies": TABLES,
            "width": 8,
            "bottom": (16, 8),
            "top": (16, 1),
            "interaction": "cat",
        },
        ("vocabularies",),
    ),
    "xdl": AppCase(
        "xdl",
        lambda: recommend.Xdl(TABLES, 3, 8, (16, 1)),
        {"vocabularies": TABLES, "bag": 3, "width": 8, "top": (16, 1)},
        ("vocabularies", "bag"),
    ),
    "candle_uno": AppCase(
        "candle_uno",
        lambda: recommend.CandleUno(FEATURES, (16, 16), (16, 1)),
        {"inputs": FEATURES, "bottom": (16, 16), "top": (16, 1)},
        ("inputs",),
    ),
    "bert": AppCase(
        "bert",
        lambda: sequence.Bert(2, 32, 4, vocabulary=60, positions=20),
        {**BERT, "positions": 20, "dropout": 0.0},
        ("length", "vocabulary"),
        rate=3e-3,
    ),
    "transformer": AppCase(
        "transformer",
        lambda: sequence.Transformer(2, 32, 4, 48, vocabulary=40, length=7),
        {
            "layers": 2,
            "hidden": 32,
            "heads": 4,
            "inner": 48,
            "length": 7,
            "vocabulary": 40,
            "dropout": 0.0,
        },
        ("length", "vocabulary"),
        rate=3e-3,
    ),
    "rnntc": AppCase(
        "rnntc",
        lambda: recurrent.Rnntc(2, 16, 60),
        {"layers": 2, "hidden": 16, **WORDS},
        ("length", "vocabulary"),
    ),
    "rnntc of simple recurrent units": AppCase(
        "rnntc",
        lambda: recurrent.Rnntc(2, 16, 60, cell="sru"),
        {"layers": 2, "hidden": 16, "cell": "sru", **WORDS},
        ("length", "vocabulary"),
    ),
    "rnnlm": AppCase(
        "rnnlm",
        lambda: recurrent.Rnnlm(2, 16, 60),
        {"layers": 2, "hidden": 16, **WORDS},
        ("length", "vocabulary"),
    ),
    "nmt": AppCase(
        "nmt",
        lambda: recurrent.Nmt(2, 16, 60),
        {"layers": 2, "hidden": 16, **WORDS},
        ("length", "vocabulary"),
    ),
    "nasrnn": AppCase(
        "nasrnn",
        lambda: recurrent.NasRnn(16, 3),
        {"hidden": 16, "length": 3},
        ("hidden", "length"),
    ),
    "nasrnn, shared weights": AppCase(
        "nasrnn",
        lambda: recurrent.NasRnn(16, 3, shared=True),
        {"hidden": 16, "length": 3, "shared": True},
        ("hidden", "length"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_output_and_all_gradients_equal_torch(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    inputs, labels = case.samples(6)
    check(case.build(6), case.twin(), inputs, labels, case.loss)


def test_bert_with_a_mask_equals_torch_and_ignores_what_is_hidden() -> None:
    case = CASES["bert"]
    torch.manual_seed(0)
    inputs, labels = case.samples(6)
    inputs["mask"] = (np.arange(10) < np.arange(3, 9)[:, None]).astype(np.float32)
    model = bert.build(6, **case.sizes, mask=True)
    check(model, case.twin(), inputs, labels, case.loss)
    with model:
        model.compile(cpus=2)
        logits = model.predict(inputs)
        changed = np.where(inputs["mask"] == 0, 59 - inputs["ids"], inputs["ids"])
        np.testing.assert_array_equal(model.predict({**inputs, "ids": changed}), logits)
        inputs["mask"][:] = 1
        assert not np.array_equal(model.predict(inputs), logits)


def test_the_transformer_sees_no_word_ahead() -> None:
    case = CASES["transformer"]
    inputs, _ = case.samples(6)
    with case.build(6) as model:
        model.compile(cpus=2)
        logits = model.predict(inputs)
        inputs["target"][:, 4] = (inputs["target"][:, 4] + 1) % 40
        changed = model.predict(inputs)
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert all(not np.array_equal(changed[:, t], logits[:, t]) for t in range(4, 7))


@pytest.mark.parametrize("name", sorted({case.app for case in CASES.values()}))
def test_the_app_builds_for_any_batch_size_and_fits_its_data(name: str) -> None:
    app = load_app(name)
    assert app.data is not None and app.summary.endswith(".")
    splits = app.data()
    assert splits.synthetic and isinstance(splits.train_x, Mapping)
    for batch_size in (1, 5):
        graph = training_graph(
            app.build(batch_size).graph, app.options["loss"], SGD(), tuple(app.options["metrics"])
        )
        (inputs, labels), *_ = Batches(splits.train_x, splits.train_y, batch_size).epoch(0)
        given = {**inputs, "labels": labels}
        assert given.keys() == set(graph.inputs(Role.INPUT))
        for key, array in given.items():
            spec = graph.tensors[key]
            assert (array.shape, array.dtype) == (spec.shape, spec.dtype), key


@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str) -> None:
    case = CASES[name]
    splits = case.splits(10 * case.batch)
    with case.build(case.batch) as model:
        model.compile(Adam(case.rate), loss=case.loss, cpus=2, seed=1)
        result = model.fit(
            splits.train_x, splits.train_y, batch_size=case.batch, epochs=4, progress=False
        )
        assert result.epochs[-1]["loss"] < 0.9 * result.epochs[0]["loss"]
        scores = model.evaluate(splits.test_x, splits.test_y)  # one full batch and one of 16
        assert np.isfinite(scores["loss"])
        predicted = model.predict(splits.test_x, batch_size=5)  # the last batch has fewer
        assert splits.test_y is not None and len(predicted) == len(splits.test_y)


# The papers' sizes


@dataclass(frozen=True)
class Size:
    """A published size: the app's options, the twin, and the parameters counted by hand."""

    app: str
    options: Mapping[str, Any]
    twin: Twin
    parameters: int
    output: tuple[int, ...]


def dense(*widths: int) -> int:
    """Return the parameters of linear layers with biases."""
    return sum((before + 1) * after for before, after in pairwise(widths))


def encoder(hidden: int, inner: int) -> int:
    """Return the parameters of a block: four projections, two dense layers, two norms."""
    return 4 * dense(hidden, hidden) + dense(hidden, inner, hidden) + 4 * hidden


def lstm(width: int, hidden: int) -> int:
    """Return the parameters of an LSTM layer with one bias."""
    return 4 * hidden * (width + hidden + 1)


def transformer(hidden: int, inner: int, vocabulary: int) -> int:
    """Return the parameters of six blocks on either side, over 64 words, and one table."""
    decoder = encoder(hidden, inner) + 4 * dense(hidden, hidden) + 2 * hidden
    return (vocabulary + 64) * hidden + 6 * (encoder(hidden, inner) + decoder)


SIZES = {
    "dlrm": Size(
        "dlrm",
        {},
        lambda: recommend.Dlrm(dlrm.VOCABULARIES),
        64 * sum(dlrm.VOCABULARIES)
        + dense(13, 512, 512, 64)
        + dense(27 * 26 // 2 + 64, 1024, 1024, 1024, 1),
        (4, 1),
    ),
    "xdl": Size(
        "xdl",
        {},
        lambda: recommend.Xdl((1_000_000,) * 4),
        64 * 4_000_000 + dense(256, 256, 256, 256, 1),
        (4, 1),
    ),
    "candle_uno": Size(
        "candle_uno",
        {},
        lambda: recommend.CandleUno(candle_uno.INPUTS),
        sum(dense(n, 1000, 1000, 1000) for n in (942, 5270, 2048))
        + dense(3000, 1000, 1000, 1000, 1),
        (4, 1),
    ),
    "bert base": Size(
        "bert",
        {},
        sequence.Bert,
        109_482_240 + dense(768, 2),  # as published, and the classes
        (4, 2),
    ),
    "bert of the papers": Size(
        "bert",
        bert.PAPERS,
        lambda: sequence.Bert(8, 1024, 16, vocabulary=None, classes=None),
        8 * encoder(1024, 4096),
        (4, 64, 1024),
    ),
    "transformer base": Size(
        "transformer", {}, sequence.Transformer, transformer(512, 2048, 37_000), (4, 64, 37_000)
    ),
    "transformer of TensorOpt": Size(
        "transformer",
        TENSOROPT,
        lambda: sequence.Transformer(6, 3840, 30, 15_360, 32_000),
        transformer(3840, 15_360, 32_000),
        (4, 64, 32_000),
    ),
    "rnntc": Size(
        "rnntc",
        {},
        recurrent.Rnntc,
        18_765 * 1024 + 4 * lstm(1024, 1024) + dense(1024, 2),
        (4, 2),
    ),
    "rnntc of MetaFlow": Size(
        "rnntc",
        METAFLOW,
        lambda: recurrent.Rnntc(1, cell="sru"),
        18_765 * 1024 + 3 * 1024**2 + 2 * 1024 + dense(1024, 2),
        (4, 2),
    ),
    "rnnlm": Size(
        "rnnlm",
        {},
        recurrent.Rnnlm,
        10_000 * 2048 + 2 * lstm(2048, 2048) + dense(2048, 10_000),
        (4, 40, 10_000),
    ),
    "nmt": Size(
        "nmt",
        {},
        recurrent.Nmt,
        2 * 32_000 * 1024 + 4 * lstm(1024, 1024) + 3 * 1024**2 + dense(1024, 32_000),
        (4, 40, 32_000),
    ),
    "nasrnn": Size("nasrnn", {}, recurrent.NasRnn, 5 * 16 * 512**2 + 512, (4, 512)),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_published_size_builds_without_weights(name: str) -> None:
    size = SIZES[name]
    model = load_app(size.app).build(4, **size.options)
    parameters = model.parameters()
    assert sum(math.prod(shape) for shape in parameters.values()) == size.parameters
    with torch.device("meta"):
        assert list(parameters.values()) == shapes(size.twin())
    assert model.graph.tensors[model.graph.outputs[0]].shape == size.output
    assert model.graph.flops() > 0


def test_dlrm_has_the_tables_of_criteo() -> None:
    tables = dlrm.VOCABULARIES
    assert (len(tables), min(tables), max(tables)) == (26, 3, 1_761_917)


def test_the_large_transformer_has_the_bytes_of_the_paper() -> None:
    model = load_app("transformer").build(1, **TENSOROPT)
    gigabytes = model.graph.nbytes(Role.PARAMETER) / 2**30
    assert round(gigabytes, 1) == 9.7


# One step of a decoder


def test_a_decoding_step_equals_torch() -> None:
    torch.manual_seed(0)
    twin = recurrent.NmtStep(2, 16, 60).eval()
    random = np.random.default_rng(0)
    states = [random.standard_normal((3, 16), dtype=np.float32) for _ in range(4)]
    memory = random.standard_normal((3, 7, 16), dtype=np.float32)
    ids = np.array([5, 0, 59], np.int32)
    with nmt.build_step(3, hidden=16, length=7, vocabulary=60) as model:
        inputs = dict(zip(model.graph.inputs(Role.INPUT), (ids, memory, *states)))
        assert list(inputs) == ["ids", "memory", "h1", "c1", "h2", "c2"]
        model.compile(cpus=2)
        model.predict(inputs)  # makes the parameters
        model.set_weights(weights_for(model, twin))
        found = model.predict(inputs)
    with torch.no_grad():
        wanted = twin(*(torch.from_numpy(value) for value in (ids, memory, *states)))
    assert [array.shape for array in found] == [(3, 60), *[(3, 16)] * 4]
    for ours, theirs in zip(found, wanted):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_encoder_and_steps_give_what_the_whole_model_gives() -> None:
    sizes = {"hidden": 16, "length": 5, "vocabulary": 30}
    splits = nmt.data(length=5, vocabulary=30, count=20)
    assert isinstance(splits.test_x, Mapping)
    source, target = splits.test_x["source"], splits.test_x["target"]
    with (
        nmt.build(4, **sizes) as whole,
        nmt.build_encoder(4, **sizes) as encoder,
        nmt.build_step(4, **sizes) as step,
    ):
        for model in (whole, encoder, step):
            model.compile(cpus=1)
            assert model.parameters().items() <= whole.parameters().items()
        logits = whole.predict(splits.test_x)  # parameters follow from their names and the seed
        memory, *states = encoder.predict(source)
        for place in range(5):
            names = ("ids", "memory", "h1", "c1", "h2", "c2")
            found, *states = step.predict(dict(zip(names, (target[:, place], memory, *states))))
            np.testing.assert_allclose(found, logits[:, place], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("app", ["rnnlm", "rnntc", "nmt"])
def test_unrolled_networks_are_the_same_networks(app: str) -> None:
    """Equal parameters give equal outputs, whether a layer is one operator or one a step."""
    module = app_module(app)
    sizes = {"hidden": 8, "length": 5, "vocabulary": 11}
    whole, steps = module.build(3, **sizes), module.build(3, unrolled=True, **sizes)
    random = np.random.default_rng(0)
    graph = whole.graph
    given = {
        name: (
            random.integers(0, 11, graph.tensors[name].shape, dtype=np.int32)
            if graph.roles[name] is Role.INPUT
            else random.standard_normal(graph.tensors[name].shape, np.float32)
        )
        for name in graph.roles
    }
    assert set(steps.graph.roles) == set(graph.roles)
    expected = interpret(graph, given)[graph.outputs[0]]
    found = interpret(steps.graph, given)[steps.graph.outputs[0]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
