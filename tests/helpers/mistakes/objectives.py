"""Losses and metrics.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

from helpers.mistakes.models import X, Y, ends, net, of, two

from soapstone.losses import CTC, CrossEntropy, Huber
from soapstone.metrics import OfArrays, TopK

OBJECTIVES: list[tuple[Any, ...]] = [
    (lambda: net(loss="crossentropy"), "loss 'crossentropy'", "did you mean 'cross_entropy'?"),
    (
        lambda: net(loss="sparse_categorical_crossentropy"),
        "loss 'sparse_categorical_crossentropy'",
        "did you mean 'cross_entropy'?",
    ),
    (lambda: net(loss=Huber), "loss class Huber in place of an instance, Huber(…), found, one of"),
    (lambda: net(loss=None), "loss None found, one of cross_entropy, masked_cross_entropy,"),
    (lambda: net(loss={"p": "mse"}), "loss: output 'p' found, one of 'o' needed"),
    (lambda: net(loss_weights={"p": 1}), "loss_weights: output 'p' found, one of 'o' needed"),
    (lambda: net(metrics="acuracy"), "metric 'acuracy'", "did you mean 'accuracy'?"),
    (lambda: net(metrics=[3]), "metric 3 found, one of accuracy, micro_f1, binary_accuracy,"),
    (
        lambda: net(metrics=["accuracy", "accuracy"]),
        "metric 'accuracy': found twice, another name needed",
    ),
    (
        lambda: net(loss=lambda m, o, y: o - y),
        "loss '<lambda>': float32[8, 4] returned; one float32 number needed,",
    ),
    (
        lambda: net(loss=lambda m, o, y: m.reduce_mean(o, axis=9)),
        "reduce_mean: unknown argument 'axis'",
        "did you mean 'axes'?",
    ),
    (
        lambda: net(metrics=[TopK(9)]),
        "metric 'top_9_accuracy': output float32[8, 4], labels int32[8]; 4",
    ),
    (
        lambda: two(loss="mse"),
        "loss does not depend on 'b.weight'; output 'b' has no loss; loss={…} gives each its own",
    ),
    (
        lambda: two(loss=["cross_entropy", "mse"]),
        "loss: list found, a dict by output needed: {'a': …, 'b': …}",
    ),
    (lambda: two(metrics=["accuracy"]), "metrics: accuracy found for 2 outputs; a dict by output"),
    (
        lambda: ends(lambda m, t: m.softmax(t)),
        "loss 'cross_entropy' takes logits; output 'softmax' is made by softmax, which the loss",
    ),
    (
        lambda: ends(lambda m, t: m.sigmoid(t), loss="bce_with_logits"),
        "loss 'bce_with_logits' takes logits; output 'sigmoid' is made by sigmoid, which the loss",
    ),
    (
        lambda: ends(lambda m, t: m.dense(t, 1, "sigmoid"), loss="bce_with_logits"),
        "loss 'bce_with_logits' takes logits; output 'dense' is made by sigmoid, which the loss",
    ),
    (
        lambda: ends(lambda m, t: t, loss="bce"),
        "loss 'bce' takes probabilities; output 'o' is made by linear: sigmoid is missing,",
    ),
    (
        lambda: net(1, metrics=()),
        "loss 'cross_entropy': output 'o' has 1 class, 2 or more needed;",
        "'bce_with_logits'",
    ),
    (lambda: net(metrics="auc"), "metric 'auc': output float32[8, 4]", "two classes needed"),
    (
        lambda: net(metrics=[lambda o, y: 1.0]),
        "metric '<lambda>': a function of (model, output, la",
    ),
    (lambda: OfArrays(3), "OfArrays: 3 found, a function of arrays needed"),
    (
        lambda: net(metrics=[OfArrays(lambda o, y: None, "q")]).fit(X, Y, progress=False),
        "metric 'q': None found, a number needed",
    ),
    (
        lambda: CrossEntropy(class_weights=3),
        "CrossEntropy: class_weights 3 found, a weight of each",
    ),
    (lambda: net(loss=CrossEntropy(class_weights=[1] * 9)), "9 class weights found, at most 4"),
    (lambda: net(loss=CTC(), metrics=()), "ctc 'loss.each': input 0 has rank 2"),
    (lambda: net(metrics=["mape"]), "metric 'mape': output float32[8, 4], labels int32[8]; labels"),
    (
        lambda: of(
            lambda m: (
                m.output(m.dense(m.input("x", (8, 5, 3)), 4)),
                m.compile(loss="ctc", metrics="accuracy"),
            )
        ),
        "metric 'accuracy' needs class numbers as labels",
        "of loss ctc there is 'error_rate'",
    ),
    (lambda: TopK(0), "TopK: k: 0 found, an integer of 1 or more needed"),
    (
        lambda: CrossEntropy(label_smoothing=2),
        "CrossEntropy: label_smoothing 2 found, 0 to 1 needed",
    ),
    (lambda: Huber(0), "Huber: delta 0 found, a number above 0 needed"),
]
