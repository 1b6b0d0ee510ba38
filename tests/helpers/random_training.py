"""Random models, and how each is trained: layers, data and settings that follow from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone import SGD, Adam, AdamW, Model
from soapstone.frontend.recording import Tensor
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.losses import CrossEntropy, Huber, Quantile, SmoothL1
from soapstone.optimizers import Adagrad, Adamax, Lion, NAdam, RMSprop
from soapstone.schedules import ExponentialDecay, LinearWarmup, StepDecay, cosine

EXTENTS = (1, 2, 3, 4, 5, 6, 7, 9, 16, 17)
WIDTHS = (1, 2, 3, 4, 5, 8, 12, 16, 17)
SMOOTH = ("tanh", "sigmoid", "gelu", "silu", "softplus", "softsign", "elu", "mish")
BENT = ("relu", "leaky_relu", "abs", "relu6", "hard_swish")
ACTIVATIONS = (None, "relu", "leaky_relu", "gelu", "sigmoid", "tanh")
ROWS = 11  # of embeddings

Batch = tuple[dict[str, Array], Any, Any]  # inputs, labels, and weights of samples or None


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    build: the model, not compiled. settings: of `compile`. batches: one a step, of sizes that may
    differ; the first has the model's. parts: whether batches may be computed in parts (dropout
    draws otherwise there, and batch norm sees parts).
    """

    seed: int
    build: Callable[[], Model]
    settings: Mapping[str, Any]
    batches: tuple[Batch, ...]
    parts: bool
    notes: tuple[str, ...]

    def compiled(self, **more: Any) -> Model:
        """Return the model, compiled by the settings and by others."""
        model = self.build()
        model.compile(**{**self.settings, **more})
        return model

    def __str__(self) -> str:
        sizes = [len(next(iter(inputs.values()))) for inputs, _, _ in self.batches]
        layers = "\n".join(self.notes)
        return f"seed {self.seed}, batches {sizes}, {dict(self.settings)}\n{layers}"


class _Drawing:
    """A model that is being drawn; the same seed draws the same at any time."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([seed, 11])
        self.batch = int(self.random.choice([1, 2, 3, 4, 5, 6, 8, 12]))
        self.model = Model("random", seed=seed)
        self.notes: list[str] = []
        self.integers: dict[str, tuple[int, int]] = {}  # what inputs of integers may hold
        self.parts = True
        self.biased = False

    def one(self, *of: Any) -> Any:
        return of[int(self.random.integers(len(of)))]

    def chance(self, of: float) -> bool:
        return bool(self.random.random() < of)

    def input(self, *shape: int, dtype: str = "float32") -> Tensor:
        name = f"given{len([n for n in self.notes if n.startswith('input')])}"
        self.notes.append(f"input {name} {dtype} {(self.batch, *shape)}")
        return self.model.input(name, (self.batch, *shape), dtype)

    def start(self) -> Tensor:
        """Return a first tensor of two to five axes."""
        kind = self.one("rows", "rows", "sequence", "sequence", "image", "image", "ids", "line")
        if kind == "rows":
            return self.input(self.one(*WIDTHS))
        if kind == "sequence":
            return self.input(self.one(*EXTENTS[:7]), self.one(*WIDTHS))
        if kind == "line":
            return self.input(self.one(1, 2, 3, 4, 8), self.one(3, 5, 8, 9))
        if kind == "image":
            return self.input(
                self.one(1, 2, 3, 4, 6), self.one(*EXTENTS[2:8]), self.one(*EXTENTS[2:8])
            )
        ids = self.input(self.one(*EXTENTS[:7]), dtype="int32")
        self.integers[ids.name] = (0, ROWS)
        return self.model.embedding(ids, ROWS, self.one(*WIDTHS))

    def layer(self, x: Tensor) -> Tensor:
        """Return what some layer makes of x."""
        m, rank = self.model, len(x.shape)
        ways: list[Callable[[Tensor], Tensor]] = [
            self.activated,
            self.activated,
            self.scaled,
            self.residual,
            self.halves,
            self.dropped,
            lambda x: m.layer_norm(x),
            lambda x: m.rms_norm(x),
            lambda x: m.softmax(x),
            self.cut,
            self.dense,
        ]
        if rank >= 2:
            ways.append(self.normed)
        if rank == 2:
            ways += [self.dense] * 3
        if rank == 3:
            ways += [self.recurrent, self.recurrent, self.attention, self.attention]
            ways += [self.convolved, self.turned, self.positioned, self.over_time]
        if rank == 4:
            ways += [self.convolved] * 4 + [self.pooled] * 2 + [self.grouped, self.resized]
        return self.one(*ways)(x)

    def activated(self, x: Tensor) -> Tensor:
        return getattr(self.model, self.one(*SMOOTH, *BENT))(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.one(0.5, -1.0, 2.0) + self.one(0.0, 0.25)

    def residual(self, x: Tensor) -> Tensor:
        y = self.activated(x) if self.chance(0.5) else self.dense(x, x.shape[-1])
        return self.one(
            lambda: x + y, lambda: x * y, lambda: self.model.maximum(x, y), lambda: x - y
        )()

    def halves(self, x: Tensor) -> Tensor:
        axis = int(self.random.integers(1, len(x.shape)))
        if x.shape[axis] < 2:
            return self.model.concat([x, self.activated(x)], axis=axis)
        at = int(self.random.integers(1, x.shape[axis]))
        left, right = self.model.split(x, (at, x.shape[axis] - at), axis=axis)
        return self.model.concat([self.activated(right), left], axis=axis)

    def dropped(self, x: Tensor) -> Tensor:
        self.parts = False
        return self.model.dropout(x, self.one(0.1, 0.5))

    def normed(self, x: Tensor) -> Tensor:
        self.parts = False
        return self.model.batch_norm(x, momentum=self.one(0.1, 0.5))

    def cut(self, x: Tensor) -> Tensor:
        axis = int(self.random.integers(1, len(x.shape)))
        if x.shape[axis] < 3:
            return x
        return self.model.slice(x, axis, self.one(0, 1), x.shape[axis], self.one(1, 2))

    def dense(self, x: Tensor, width: int | None = None) -> Tensor:
        return self.model.dense(
            x, width or self.one(*WIDTHS), self.one(*ACTIVATIONS), bias=self.chance(0.7)
        )

    def recurrent(self, x: Tensor) -> Tensor:
        kind = self.one("lstm", "gru", "rnn", "sru")
        more: dict[str, Any] = {"layers": self.one(1, 1, 2)}
        way = self.one("", "bidirectional", "reverse")
        if way:
            more[way] = True
        if kind == "gru":
            more["linear_before_reset"] = self.chance(0.5)
        if self.chance(0.3) and kind != "sru":
            lengths = self.input(dtype="int32")
            self.integers[lengths.name] = (1, x.shape[1] + 1)
            more["lengths"] = lengths
        if more["layers"] > 1 and self.chance(0.2):
            more["dropout"] = 0.3
            self.parts = False
        y, states = getattr(self.model, kind)(x, self.one(1, 2, 3, 4, 8), **more)
        alone = more["layers"] == 1 and not way
        return states[0] if alone and self.chance(0.2) and len(states[0].shape) == 2 else y

    def attention(self, x: Tensor) -> Tensor:
        heads = self.one(*(h for h in (1, 2, 3, 4) if x.shape[2] % h == 0))
        more: dict[str, Any] = {"causal": self.chance(0.4), "bias": self.chance(0.6)}
        if self.chance(0.3):
            lengths = self.input(dtype="int32")
            self.integers[lengths.name] = (1, x.shape[1] + 1)
            more["lengths"] = lengths
            more["causal"] = False
        y = self.model.multi_head_attention(x, x, x, heads, **more)
        return x + y if self.chance(0.5) else y

    def convolved(self, x: Tensor) -> Tensor:
        m, rank, c = self.model, len(x.shape) - 2, x.shape[1]
        least = min(x.shape[2:])
        kernel = self.one(*(k for k in (1, 2, 3, 5) if k <= least))
        if self.chance(0.15):
            return m.conv_transpose(x, self.one(1, 2, 4), kernel, stride=self.one(1, 2))
        if rank == 2 and self.chance(0.2):
            return m.depthwise_conv2d(x, kernel, padding="same", activation=self.one(*ACTIVATIONS))
        groups = self.one(*(g for g in (1, 1, 1, 2, 3, 4) if c % g == 0))
        layer = m.conv1d if rank == 1 else m.conv2d
        return layer(
            x,
            groups * self.one(1, 2, 3, 4),
            kernel,
            stride=self.one(1, 1, 2),
            padding=self.one(0, "same"),
            groups=groups,
            activation=self.one(*ACTIVATIONS),
            bias=self.chance(0.7),
        )

    def pooled(self, x: Tensor) -> Tensor:
        kernel = self.one(*(k for k in (1, 2, 3) if k <= min(x.shape[2:])))
        pool = self.one(self.model.max_pool, self.model.avg_pool)
        padding = kernel // 2 if self.chance(0.3) else 0
        return pool(
            x, kernel, stride=self.one(1, 2, None), padding=padding, ceil_mode=self.chance(0.3)
        )

    def grouped(self, x: Tensor) -> Tensor:
        if self.chance(0.3):
            return self.model.instance_norm(x)
        groups = self.one(*(g for g in (1, 2, 3, 4) if x.shape[1] % g == 0))
        return self.model.group_norm(x, groups)

    def resized(self, x: Tensor) -> Tensor:
        if x.shape[1] % 4 == 0 and self.chance(0.5):
            return self.model.depth_to_space(x, 2)
        return (
            self.model.global_avg_pool(x)
            if self.chance(0.5)
            else self.model.pad(x, (0, 0, 1, 0), (0, 0, 0, 1))
        )

    def turned(self, x: Tensor) -> Tensor:
        return self.model.transpose(x, (0, 2, 1))

    def positioned(self, x: Tensor) -> Tensor:
        return self.model.learned_positions(x)

    def over_time(self, x: Tensor) -> Tensor:
        lengths = self.input(dtype="int32")
        self.integers[lengths.name] = (1, x.shape[1] + 1)
        return self.one(self.model.mean_over_time, self.model.max_over_time)(x, lengths)

    def body(self) -> Tensor:
        x = self.start()
        for _ in range(int(self.random.integers(1, 6))):
            try:
                y = self.layer(x)
            except GraphError as error:
                self.notes.append(f"refused: {error}")
                continue
            if all(y.shape) and np.prod(y.shape[1:]) <= 2000:
                x = y
            self.notes.append(f"{x.name} {x.shape}")
        return x


def _head(of: _Drawing, x: Tensor, name: str) -> tuple[Tensor, Any, Callable[[int], Array]]:
    """Return an output, its loss, and what makes labels of a batch."""
    m, random = of.model, np.random.default_rng(int(of.random.integers(1 << 30)))
    flat = len(x.shape) == 2 or of.chance(0.6)
    x = m.flatten(x) if flat and len(x.shape) > 2 else x
    if len(x.shape) > 3:
        x = m.flatten(x)
    kind = of.one("classes", "classes", "masked", "numbers", "numbers", "binary", "dense")
    width = of.one(1, 2, 3, 5) if kind in ("numbers", "binary") else of.one(2, 3, 5)
    y = m.dense(x, width, name=name)
    rest = y.shape[1:]
    if kind == "classes" and len(rest) == 1:
        weights = None if of.chance(0.7) else [1.0] * (width - 1) + [3.0]
        loss: Any = CrossEntropy(label_smoothing=of.one(0.0, 0.1), class_weights=weights)
        return y, loss, lambda n: random.integers(0, width, n).astype("int32")
    if kind == "classes":  # of every position
        return (
            y,
            "cross_entropy",
            lambda n: random.integers(0, width, (n, *rest[:-1])).astype("int32"),
        )
    if kind == "masked":

        def some(n: int) -> Array:
            labels = random.integers(-1, width, (n, *rest[:-1])).astype("int32")
            labels[0] = 0  # a batch of none has a loss of 0, whatever its penalties
            return labels

        return y, "masked_cross_entropy", some
    if kind == "binary":
        return y, "bce_with_logits", lambda n: random.integers(0, 2, (n, *rest)).astype("float32")
    if kind == "dense":
        return (
            y,
            "cross_entropy_dense",
            lambda n: random.dirichlet(np.ones(width), (n, *rest[:-1])).astype("float32"),
        )
    loss = of.one("mse", "mae", Huber(delta=0.5), "log_cosh", SmoothL1(0.5), Quantile(0.3))
    return y, loss, lambda n: random.standard_normal((n, *rest)).astype("float32")


def _optimizer(of: _Drawing) -> Any:
    rate = of.one(
        0.05,
        0.01,
        cosine(0.05, 10, warmup=2),
        StepDecay(0.1, 2),
        ExponentialDecay(0.05, 2),
        LinearWarmup(0.1, 3),
    )
    more: dict[str, Any] = of.one({}, {}, {"clip_norm": 0.5}, {"clip_value": 0.05})
    if of.chance(0.2):
        more = {**more, "rates": {"*.bias": 2.0}} if of.biased else more
    return of.one(
        lambda: SGD(rate, **more),
        lambda: SGD(
            rate, momentum=0.9, nesterov=of.chance(0.5), weight_decay=of.one(0.0, 0.01), **more
        ),
        lambda: Adam(rate, weight_decay=of.one(0.0, 0.01), **more),
        lambda: AdamW(rate, weight_decay=0.1, **more),
        lambda: of.one(RMSprop, Adagrad, Adamax, NAdam, Lion)(rate, **more),
    )()


def draw(seed: int) -> Training:
    """Return the training of a seed."""

    def drawn() -> tuple[_Drawing, list[Tensor], dict[str, Any], dict[str, Callable[[int], Array]]]:
        of = _Drawing(seed)
        x = of.body()
        heads = [_head(of, x, "head")]
        if of.chance(0.2):
            heads.append(_head(of, x, "other"))
        of.model.output(*(y for y, _, _ in heads))
        names = ("head", "other")[: len(heads)]
        losses = dict(zip(names, (loss for _, loss, _ in heads)))
        return (
            of,
            [y for y, _, _ in heads],
            losses,
            dict(zip(names, (make for _, _, make in heads))),
        )

    of, _, losses, makes = drawn()
    names = [n for n in of.model.weights() if not n.endswith((".mean", ".variance"))]
    of.biased = any(n.endswith(".bias") for n in names)
    settings: dict[str, Any] = {"optimizer": _optimizer(of)}
    settings["loss"] = losses if len(losses) > 1 else losses["head"]
    if len(losses) > 1 and of.chance(0.5):
        settings["loss_weights"] = {"other": 0.3}
    weighted = of.chance(0.2) and "masked_cross_entropy" not in losses.values()
    if weighted:
        settings["weighted"] = True
    freeze = [str(n) for n in of.random.permutation(np.array(names, object))[: len(names) // 3]]
    freeze = freeze if of.chance(0.3) else []
    penalty = of.one({}, {}, {}, {"l2": 0.01}, {"l1": 0.01, "l2": 0.01})

    def build() -> Model:
        model = drawn()[0].model
        if freeze:
            model.freeze(*freeze)
        if penalty:
            model.regularize("*", **penalty)
        return model

    sizes = [of.batch, of.batch, int(of.random.integers(1, of.one(1, 1, 2) * of.batch + 1))]
    specs = {
        n: of.model.build().tensors[n] for n in of.model.build().roles if n.startswith("given")
    }
    batches = []
    for size in sizes:
        inputs = {}
        for name, spec in specs.items():
            shape = (size, *spec.shape[1:])
            low, high = of.integers.get(name, (0, 2))
            inputs[name] = (
                of.random.integers(low, high, shape).astype(spec.dtype)
                if spec.dtype.startswith("int")
                else of.random.standard_normal(shape).astype(spec.dtype)
            )
        labels: Any = {name: make(size) for name, make in makes.items()}
        labels = labels if len(labels) > 1 else labels["head"]
        weights = of.random.integers(0, 3, size).astype("float32") + 0.5 if weighted else None
        batches.append((inputs, labels, weights))
    of.notes += [f"frozen {freeze}", f"penalty {penalty}"]
    return Training(seed, build, settings, tuple(batches), of.parts, tuple(of.notes))
