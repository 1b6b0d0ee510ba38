"""What beginners do wrong: each mistake is one clear sentence, before the first step if it can be.

A row is what was written and what the error says of it. No message speaks of Python's own insides.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

import soapstone as sp
from soapstone import SGD, Adam, Model
from soapstone.callbacks import Callback, Checkpoint, CSVLogger, EarlyStopping, TensorBoard
from soapstone.data import Buckets, Samples, token_ids
from soapstone.losses import CTC, CrossEntropy, Huber
from soapstone.metrics import OfArrays, TopK
from soapstone.optimizers import Composed
from soapstone.schedules import OneCycle, cosine

X = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
Y = np.arange(20) % 4


def net(out: int = 4, *, compiled: bool = True, **settings: Any) -> Model:
    model = Model("net")
    x = model.input("x", (8, 6))
    model.output(model.dense(model.dense(x, 5, name="h"), out, name="o"))
    if compiled:
        model.compile(**{"optimizer": SGD(0.1), "metrics": "accuracy", **settings})
    return model


def still() -> Model:
    model = net(compiled=False)
    model.freeze("*")
    model.compile(SGD(0.1))
    return model


@cache
def ids() -> Model:
    model = Model("ids")
    i = model.input("ids", (8, 3), "int32")
    model.output(model.dense(model.flatten(model.embedding(i, 10, 4, name="e")), 4, name="o"))
    model.compile()
    return model


def two(**settings: Any) -> Model:
    model = Model("two")
    x = model.input("x", (8, 6))
    model.output(model.dense(x, 4, name="a"), model.dense(x, 1, name="b"))
    model.compile(**{"loss": {"a": "cross_entropy", "b": "mse"}, **settings})
    return model


def pair() -> Model:
    model = Model("pair")
    model.output(model.dense(model.concat([model.input("a", (8, 2)), model.input("b", (8, 2))]), 4))
    model.compile()
    return model


def image(m: Model) -> Any:
    return m.input("x", (8, 3, 8, 8))


def ends(last: Any, **settings: Any) -> Model:
    """Return a model that ends with what `last` makes of three logits."""
    model = Model("n")
    model.output(last(model, model.dense(model.input("x", (8, 6)), 3, name="o")))
    model.compile(**settings)
    return model


class Short(Callback):
    def on_epoch_end(self) -> None:  # type: ignore[override]
        pass


class Misspelt(Callback):
    def on_epoch_ended(self, state: Any) -> None:
        pass


class Forgetful(Composed):
    def next(self, of: Any) -> Any:
        of.w - of.g


class Loud(Callback):
    def on_step_end(self, state: Any) -> None:
        state.learning_rate = "high"


def of(make: Any) -> Any:
    """Return what is made with an empty model."""
    return make(Model("n"))


FITTING: list[tuple[Any, ...]] = [
    (
        lambda: still().fit(X, Y),
        "fit: model 'net' has nothing to train: all its parameters are frozen; unfreeze some,",
    ),
    (
        lambda: still().train_on_batch(X, Y),
        "train_on_batch: model 'net' has nothing to train: all its parameters are frozen",
    ),
    (lambda: net().fit(X), "fit: labels are missing; y, or files with y, needed"),
    (lambda: net().fit(X, Y[:5]), "fit: y: 5 rows found, 20 needed as in input 'x'"),
    (lambda: net().fit(X[:, :5], Y), "fit: input 'x': samples of shape (5,) found, (6,) needed"),
    (lambda: net().fit(X[0], Y), "fit: y: 20 rows found, 6 needed as in input 'x'"),
    (lambda: net().fit(X, Y + 1), "fit: labels: 4 at row 3; layer 'o' has 4 classes (0-3)"),
    (lambda: net().fit(X, Y - 1), "fit: labels: -1 at row 0; layer 'o' has 4 classes (0-3)"),
    (lambda: net().fit(X, Y.astype("f")), "fit: labels: float32 found, int32 needed"),
    (
        lambda: net().fit(X, np.eye(4)[Y]),
        "fit: labels: samples of shape (4,) found, () needed; class numbers,",
    ),
    (
        lambda: net().fit(X, Y + 2**32),
        "fit: labels: 4294967296 at row 0; layer 'o' has 4 classes (0-3)",
    ),
    (
        lambda: net().fit(X, Y[:, None]),
        "fit: labels: samples of shape (1,) found, () needed; class numbers",
    ),
    (lambda: net().fit(X.astype(str), Y), "fit: x: element type <U32 found, numbers needed"),
    (lambda: net().fit(X, Y.astype(str)), "fit: y: element type <U21 found, numbers needed"),
    (
        lambda: net().fit(np.array([[1], [1, 2]], dtype=object), Y[:2]),
        "fit: x: element type object found, numbers needed",
    ),
    (
        lambda: net().fit([[1.0, 2.0], [1.0]], Y[:2]),
        "fit: x: rows of different lengths found, equal ones needed; pad them,",
    ),
    (
        lambda: net().fit((X, Y)),
        "fit: x: a tuple found, an array needed; x and y are two arguments,",
    ),
    (lambda: net().fit(None, Y), "fit: x: None found, an array with one row a sample needed"),
    (
        lambda: net().fit(3, Y),
        "fit: x: a single number found, an array with one row a sample needed",
    ),
    (lambda: net().fit(X[:0], Y[:0]), "fit: 0 samples found, 1 or more needed"),
    (
        lambda: net().fit(X * np.nan, Y, progress=False),
        "step 0: loss is nan; the first value that is not finite is made by",
    ),
    (lambda: net().fit(X, Y, epochs=2.5), "fit: epochs: float 2.5 found, an integer needed"),
    (lambda: net().fit(X, Y, epochs=-1), "epochs: -1 found, an integer of 0 or more needed"),
    (lambda: net().fit(X, Y, epochs="3"), "fit: epochs: str '3' found, an integer needed"),
    (lambda: net().fit(X, Y, batch_size=0), "batch_size: 0 found, an integer of 1 or more needed"),
    (
        lambda: net().fit(X, Y, batch_size=8.5),
        "fit: batch_size: float 8.5 found, an integer needed",
    ),
    (
        lambda: net().fit(X, Y, batch_size=-8),
        "batch_size: -8 found, an integer of 1 or more needed",
    ),
    (
        lambda: net().fit({"image": X}, Y),
        "input 'image' is unknown, 'x' is missing; model 'net' takes 'x'",
    ),
    (lambda: net().fit({"x": X, "z": X}, Y), "input 'z' is unknown; model 'net' takes 'x'"),
    (lambda: net().fit(X, Y, epoch=3), "fit: unknown argument 'epoch'", "did you mean 'epochs'?"),
    (
        lambda: net().fit(X, Y, sample_weight=np.ones(20)),
        "fit: unknown argument 'sample_weight'",
        "did you mean 'sample_weights'?",
    ),
    (
        lambda: net().fit(X, Y, verbose=1),
        "fit: unknown argument 'verbose'",
        "did you mean 'progress'?",
    ),
    (
        lambda: net().fit(X, Y, validation_data="nofolder"),
        "validation_data: 'nofolder': no such file or folder; npz files needed",
    ),
    (
        lambda: net().fit(X, Y, validation_data=X),
        "validation_data: ndarray found, a pair (x, y) or the path of npz files",
    ),
    (
        lambda: net().fit(X, Y, validation_data=iter([(X, Y)])),
        "validation_data: list_iterator found, which one epoch uses up; a list of batches,",
    ),
    (
        lambda: net().fit(X, Y, validation_data=(X[:, :3], Y)),
        "validation_data: input 'x': samples of shape (3,) found, (6,) needed",
    ),
    (
        lambda: net().fit(X, Y, validation_data=(X, Y + 9)),
        "validation_data: labels: 9 at row 0; layer 'o' has 4 classes (0-3)",
    ),
    (
        lambda: net().fit(X, Y, validation_split=20),
        "validation_split: 20 found, a number between 0 and 1 needed",
    ),
    (
        lambda: net().fit(X, Y, validation_split=0.001),
        "validation_split: 0.001 of 20 samples leaves one part empty",
    ),
    (
        lambda: net().fit(X, Y, validation_split=0.2, validation_data=(X, Y)),
        "validation_split: found beside validation_data; one needed",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[EarlyStopping("val_loss")]),
        "EarlyStopping: monitor 'val_loss' found, one of loss, accuracy needed;",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[EarlyStopping("validation_loss")]),
        "EarlyStopping: monitor 'validation_loss' found, one of loss, accuracy",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[EarlyStopping]),
        "fit: callbacks: class EarlyStopping in place of an instance,",
    ),
    (
        lambda: net().fit(X, Y, callbacks=None),
        "fit: callbacks: None found, a list of callbacks needed",
    ),
    (
        lambda: net(compiled=False).fit(X, Y),
        "model 'net' is not compiled; call model.compile(…) first",
    ),
    (
        lambda: net().fit(X, Y, sample_weights=np.ones(20)),
        "sample_weights found; model 'net' takes none: compile(weighted=True)",
    ),
    (
        lambda: net(weighted=True).fit(X, Y, sample_weights=np.ones(3)),
        "fit: sample_weights: 3 rows found, 20 needed as in input 'x'",
    ),
    (
        lambda: net(weighted=True).fit(X, Y, sample_weights=-np.ones(20)),
        "fit: sample_weights: a number below 0, or none, found; 0 or more needed",
    ),
    (lambda: net(weighted=True).fit(X, Y), "sample_weights of output 'o' are missing"),
    (
        lambda: net().fit(X, Y, resume="none.safetensors"),
        "checkpoint 'none.safetensors': no such file",
    ),
    (lambda: net().fit("no folder"), "fit: 'no folder': no such file or folder; npz files needed"),
    (
        lambda: net().fit(((X[:8], Y[:8]) for _ in range(2)), epochs=2, progress=False),
        "epoch 1: x is an iterator that an earlier epoch used up; give a list,",
    ),
    (
        lambda: net().fit(iter([3]), progress=False),
        "batch 0: x: a single number found, an array with one row a sample needed",
    ),
    (lambda: net().fit(iter([]), progress=False), "fit: 0 samples found, 1 or more needed"),
    (lambda: net().fit(X, {"p": Y}), "y: output 'p' is unknown; those with a loss: 'o'"),
    (
        lambda: net().fit([(X[:8], Y[:3])], progress=False),
        "batch 0: y: 3 rows found, 8 needed as in input 'x'",
    ),
    (lambda: net().fit(X, Y, shuffle="yes"), "fit: shuffle: str 'yes' found, True or False needed"),
    (
        lambda: ids().fit(np.full((8, 3), 10), Y[:8]),
        "fit: ids: 10 at row 0; layer 'e' has 10 rows (0-9)",
    ),
    (lambda: ids().fit(np.zeros((8, 3)), Y[:8]), "fit: input 'ids': float64 found, int32 needed"),
    (
        lambda: ids().fit(np.full((8, 3), -1), Y[:8]),
        "fit: ids: -1 at row 0; layer 'e' has 10 rows (0-9)",
    ),
    (
        lambda: net(1, loss="bce_with_logits", metrics=()).fit(X, Y[:, None], progress=False),
        "fit: labels: 2 at row 2; numbers from 0 to 1 needed",
    ),
]
RUNNING: list[tuple[Any, ...]] = [
    (
        lambda: net().predict(X[:, :2]),
        "predict: input 'x': samples of shape (2,) found, (6,) needed",
    ),
    (lambda: net().predict(X[:0]), "predict: 0 samples found, 1 or more needed"),
    (lambda: net().predict(X[0]), "predict: input 'x': samples of shape () found, (6,) needed"),
    (
        lambda: net(compiled=False).predict(X[:, :2]),
        "model 'net': input 'x': float32[8, 2] found, x: float32[batch, 6] needed",
    ),
    (
        lambda: net().predict({"image": X}),
        "input 'image' is unknown, 'x' is missing; model 'net' takes 'x'",
    ),
    (lambda: net().evaluate(X), "evaluate: labels are missing; y, or files with y, needed"),
    (
        lambda: net().evaluate(X, Y + 1),
        "evaluate: labels: 4 at row 3; layer 'o' has 4 classes (0-3)",
    ),
    (
        lambda: net().inference().run({"image": X}),
        "model 'net': unknown input 'image'; inputs are x: float32[batch, 6]",
    ),
    (
        lambda: net().inference().run({"x": X.astype(str)}),
        "model 'net': input 'x': str1024[20, 6] found, x: float32[batch, 6]",
    ),
    (
        lambda: net().train_on_batch(X[:0], Y[:0]),
        "train_on_batch: 0 samples found, 1 or more needed",
    ),
    (
        lambda: net().train_on_batch([(X[:8], Y[:8]), (X[8:], Y[8:])]),
        "train_on_batch: several batches found, one needed",
    ),
    (lambda: net().gradients(lambda: iter(())), "gradients: no batch found, one needed"),
    (lambda: net().train_on_batch(None, Y), "train_on_batch: x: None found, an array with one row"),
    (lambda: net().gradients(iter([X])), "gradients: labels are missing; y needed"),
    (
        lambda: net(compiled=False).predict(Buckets([[1], [2, 3]])),
        "predict: buckets found, whose batches have an order of their own;",
    ),
    (
        lambda: net().predict(Samples((X, Y), balance=Y)),
        "predict: samples with a balance found, whose order is drawn;",
    ),
    (
        lambda: net().train_on_batch(X, Y, learning_rate="a"),
        "train_on_batch: learning_rate: str 'a' found, a number needed",
    ),
    (
        lambda: net(compiled=False).gradients(X, Y),
        "model 'net' is not compiled; call model.compile(…) first",
    ),
]
COMPILING: list[tuple[Any, ...]] = [
    (lambda: net(optimizer="adm"), "optimizer 'adm'", "did you mean 'adam'?"),
    (
        lambda: net(optimizer=Adam),
        "optimizer class Adam in place of an instance, Adam(…), found, one of",
    ),
    (lambda: net(optimizer=0.1), "optimizer 0.1 found, one of sgd, adam, adamw, rmsprop,"),
    (lambda: net(optimizer="RMSProp"), "optimizer 'RMSProp'", "did you mean 'rmsprop'?"),
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
    (lambda: net(cpus=0), "Machine.local: field 'cpus' is 0, an integer >= 1 needed"),
    (lambda: net(cpus="2"), "compile: cpus: str '2' found, an integer needed"),
    (lambda: net(threads=1.5), "compile: threads: float 1.5 found, an integer needed"),
    (lambda: net(executor="cuda"), "executor 'cuda' found; one of local, mpi, legate needed"),
    (lambda: net(executor="gpu"), "executor 'gpu' found; one of local, mpi, legate needed"),
    (lambda: net(mapper="data-paralel"), "mapper 'data-paralel'", "did you mean 'data_parallel'?"),
    (
        lambda: net(learning_rate=0.1),
        "compile: unknown argument 'learning_rate'; compile(optimizer, loss,",
    ),
    (lambda: net(micro_batches=0), "micro_batches: 0 found, an integer of 1 or more needed"),
    (lambda: net(seed="a"), "compile: seed: str 'a' found, an integer needed"),
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
    (lambda: net(compiled=False).Linear, "Model has no 'Linear'", "did you mean 'dense'?"),
    (
        lambda: net(metrics=[TopK(9)]),
        "metric 'top_9_accuracy': output float32[8, 4], labels int32[8]; 4",
    ),
]
LAYERS: list[tuple[Any, ...]] = [
    (lambda: Model("n").compile(), "model 'n' has no output; call model.output(tensor)"),
    (lambda: Model(3), "model: name 3 found, a string needed"),
    (lambda: Model("n", seed=1.5), "model 'n': seed: 1.5 found, an integer of 0 or more needed"),
    (
        lambda: Model("n").input("x", (-1, 3)),
        "input 'x': an extent: -1 found, an integer of 0 or more needed",
    ),
    (
        lambda: Model("n").input("x", (None, 3)),
        "input 'x': an extent: None found, an integer of 0 or more needed",
    ),
    (
        lambda: Model("n").input("x", 3),
        "input 'x': shape 3 found; extents needed, the batch size first",
    ),
    (
        lambda: Model("n").input("x", "33"),
        "input 'x': shape '33' found; extents needed, the batch size first",
    ),
    (
        lambda: Model("n").input("x", (8, 3), "float33"),
        "dtype 'float33' is not one of float32, float64, float16, int8, int16,",
    ),
    (
        lambda: Model("n").input((8, 3)),
        "input: missing a required argument: 'shape'; input(name, shape, dtype, varying=…)",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), units=3)),
        "dense: unknown argument 'units'",
        "did you mean 'width'?",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 0)),
        "dense 'dense': width 0 and x float32[8, 3] found; 1 or more needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 8.7)),
        "dense: width: float 8.7 found, an integer needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 3, "relo")),
        "linear 'dense': attribute activation: 'relo'",
        "did you mean 'relu'?",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)), 3, m.relu)),
        "dense: activation: function 'relu' found, a string needed",
    ),
    (
        lambda: Model("n").dense(X, 3),
        "dense: x: ndarray of shape (20, 6) found, a tensor of the model needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.input("x", (8, 3)))),
        "dense: missing a required argument: 'width'; dense(x, width,",
    ),
    (
        lambda: Model("n").relu(net(compiled=False).tensors[0]),
        "model 'n': Tensor(x: float32[8, 6]) is not a tensor of this model",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 28, 28)), 3, 3)),
        "conv2d 'conv2d': x has rank 3 (shape (8, 28, 28)); n c h w needed",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 3, 9)),
        "conv2d 'conv2d': dim h: the window spans 9 positions, but the padded",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 3, 3, padding="sme")),
        'padding: \'sme\' found; "same", "valid", 1, 2 or 4 integers needed',
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 4, 3, groups=2)),
        "conv2d 'conv2d': 3 input and 4 output channels found; multiples of",
    ),
    (
        lambda: of(lambda m: m.max_pool2d(m.input("x", (8, 3, 8, 8)), 0)),
        "max_pool2d 'max_pool2d': attribute kernel: (0, 0) found, at least 1",
    ),
    (
        lambda: of(lambda m: m.conv2d(m.input("x", (8, 3, 8, 8)), 4, 3, 0)),
        "conv2d 'conv2d': attribute stride: (0, 0) found, at least 1 needed",
    ),
    (
        lambda: of(lambda m: m.concat([m.input("x", (8, 3, 2)), m.input("y", (8, 3, 3))])),
        "concat 'concat': dim d2 is 2 in input 0 but 3 in input 1",
    ),
    (
        lambda: of(lambda m: m.concat(m.input("x", (8, 3, 2)), 1)),
        "concat: Tensor(x: float32[8, 3, 2]) found, a list of tensors needed",
    ),
    (
        lambda: of(lambda m: m.input("x", (8, 3)) + m.input("y", (8, 4))),
        "add 'add': dim d1 is 4 but 3 in input 0 (shape (8, 3))",
    ),
    (
        lambda: of(lambda m: m.reshape(m.input("x", (8, 3)), (8, 4))),
        "reshape 'reshape': shape (8, 4) of 32 elements found, 24 needed as in",
    ),
    (
        lambda: of(lambda m: m.dropout(m.input("x", (8, 3)), 1.0)),
        "dropout 'dropout': rate 1.0 found, 0 <= rate < 1 needed",
    ),
    (
        lambda: of(lambda m: m.dropout(m.input("x", (8, 3)), 50)),
        "dropout 'dropout': rate 50 found, 0 <= rate < 1 needed",
    ),
    (
        lambda: of(lambda m: m.embedding(m.input("x", (8, 3)), 10, 4)),
        "embedding 'embedding': input 0 has type float32; int32 or int64 needed",
    ),
    (
        lambda: of(lambda m: m.lstm(m.input("x", (8, 3)), 4)),
        "lstm 'lstm': x has shape (8, 3); n t k needed",
    ),
    (
        lambda: of(lambda m: m.dense(m.lstm(m.input("x", (8, 3, 2)), 4), 3)),
        "dense: x: tuple of 2 values, such as a layer of several outputs",
    ),
    (
        lambda: of(lambda m: m.softmax(m.input("x", (8, 3)), 2)),
        "softmax: axis 2 found, -2 to 1 needed for float32[8, 3]",
    ),
    (
        lambda: of(lambda m: m.matmul(m.input("x", (8, 3)), m.input("y", (8, 3)))),
        "matmul 'matmul': dim k is 3 in input 0 but 8 in input 1",
    ),
    (
        lambda: of(lambda m: 1 if m.input("x", (8, 3)) else 2),
        "Tensor(x: float32[8, 3]) has no contents where layers are recorded; a",
    ),
    (
        lambda: of(lambda m: m.input("x", (8, 3))[0]),
        "[0]: axis 0 runs over samples and is kept whole; [:, …] cuts the others",
    ),
    (
        lambda: of(lambda m: (lambda t: t[t > 0])(m.input("x", (8, 3)))),
        "[Tensor(greater: bool[8, 3])]: Tensor found; integers, slices, None and",
    ),
    (
        lambda: of(lambda m: m.transpose(m.input("x", (8, 3, 2)), (0, 1))),
        "transpose 'transpose': input 0 has rank 3 (shape (8, 3, 2)); attribute",
    ),
    (
        lambda: of(lambda m: m.output([m.input("x", (8, 3))])),
        "output: tensors: list [Tensor(x: float32[8, 3])] found, a tensor of the",
    ),
    (
        lambda: of(lambda m: m.output(None)),
        "output: tensors: NoneType None found, a tensor of the model needed",
    ),
    (lambda: Model("n").output(), "model 'n': output of no tensors found, 1 or more needed"),
]
OTHERS: list[tuple[Any, ...]] = [
    (lambda: Adam("0.1"), "Adam: learning_rate: '0.1' found, a number needed"),
    (lambda: SGD(-1), "SGD: learning_rate -1 found, a number of 0 or more needed"),
    (lambda: SGD(lr=0.1), "SGD: unknown argument 'lr'", "did you mean 'learning_rate'?"),
    (lambda: Adam(beta_1=0.9), "Adam: unknown argument 'beta_1'", "did you mean 'beta1'?"),
    (lambda: SGD(float("nan")), "SGD: learning_rate: nan found, a finite number needed"),
    (
        lambda: net().relu(net().tensors[0]),
        "model 'net' is compiled; layers are added before compile",
    ),
    (lambda: net().set_weights({"q": X}), "parameter 'q' does not exist in model 'net'"),
    (
        lambda: net().set_weights({"h.weight": X}),
        "parameter 'h.weight': float32 of shape (20, 6) found, float32[6, 5]",
    ),
    (lambda: net().set_weights([X]), "set_weights: list found, arrays by name needed"),
    (
        lambda: net().set_weights({"h.bias": np.ones(5, complex)}),
        "parameter 'h.bias': complex128 of shape (5,) found, float32[5] needed",
    ),
    (
        lambda: net().save("m.pt"),
        "checkpoint 'm.pt': suffix '.pt' found, .safetensors or .npz needed",
    ),
    (
        lambda: net().save("no/m.safetensors"),
        "checkpoint 'no/m.safetensors': there is no folder 'no'",
    ),
    (lambda: sp.from_onnx("none.onnx"), "file 'none.onnx': no such file or directory"),
    (lambda: sp.InferenceSession("none.onnx"), "file 'none.onnx': no such file or directory"),
    (lambda: of(lambda m: np.sum(m.input("x", (8, 3)))), "numpy.sum: a tensor found, arrays"),
    (lambda: of(lambda m: np.cbrt(m.input("x", (8, 3)))), "numpy.cbrt: a tensor found, arrays"),
    (lambda: sp.load("none.safetensors"), "checkpoint 'none.safetensors': no such file"),
    (lambda: net().load_checkpoint("none.npz"), "checkpoint 'none.npz': no such file"),
    (lambda: net().load_weights("none.safetensors"), "weights 'none.safetensors': no such file"),
    (lambda: net().load_weights(3), "weights: int found, a path or arrays needed"),
    (lambda: net().freeze("hh"), "freeze: no parameter 'hh'; 'h' is there"),
    (lambda: net().freeze(["h"]), "freeze: patterns: list ['h'] found, a string needed"),
    (lambda: net().regularize("h", l2=-1), "regularize: l2 -1 found, a number of 0 or more needed"),
    (lambda: sp.Modle, "module 'soapstone' has no attribute 'Modle'", "did you mean 'Model'?"),
    (lambda: cosine(0.1, steps=0), "Cosine: steps: 0 found, an integer of 1 or more needed"),
    (lambda: cosine("a", steps=10), "Cosine: rate: 'a' found, a number of 0 or more needed"),
    (
        lambda: Checkpoint("m.pt"),
        "checkpoint 'm.pt': suffix '.pt' found, .safetensors or .npz needed",
    ),
    (
        lambda: EarlyStopping("loss", patience=0),
        "EarlyStopping: patience: 0 found, an integer of 1 or more needed",
    ),
    (lambda: TopK(0), "TopK: k: 0 found, an integer of 1 or more needed"),
    (
        lambda: CrossEntropy(label_smoothing=2),
        "CrossEntropy: label_smoothing 2 found, 0 to 1 needed",
    ),
    (lambda: Huber(0), "Huber: delta 0 found, a number above 0 needed"),
]


MORE: list[tuple[Any, ...]] = [
    (
        lambda: two().fit(X, [Y, X[:, 0]]),
        "fit: y: 2 rows found, 20 needed as in input 'x'; arrays of several inputs or outputs are",
    ),
    (
        lambda: two().fit(X, (Y, X[:, :1])),
        "y: a tuple found, an array needed",
        "given as a dict by name",
    ),
    (lambda: two().fit(X, Y), "y: one array found, a dict by output needed: 'a', 'b'"),
    (lambda: two().fit(X, {"a": Y}), "y: labels of output 'b' are missing"),
    (
        lambda: two().fit(X, {"a": X[:, 0], "b": Y}),
        "fit: labels of output a: float32 found, int32 needed",
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
    (lambda: pair().fit(X, Y), "x: one array found, a dict by input needed: 'a', 'b'"),
    (
        lambda: pair().fit([X[:, :2], X[:, 2:4]], Y),
        "fit: y: 20 rows found, 2 needed as in input 'x'; arrays of several inputs or outputs are",
    ),
    (
        lambda: pair().fit({"a": X[:, :2], "b": X[:5, :2]}, Y),
        "fit: b: 5 rows found, 20 needed as in input 'a'",
    ),
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
    (
        lambda: net(loss="cross_entropy_dense").fit(X, np.eye(4)[Y] * 3),
        "fit: labels: 3.0 at row 0; numbers from 0 to 1 needed",
    ),
    (
        lambda: of(lambda m: (m.output(m.dense(m.flatten(image(m)), 4)), m.compile(), m)[2]).fit(
            np.zeros((20, 8, 8, 3)), Y
        ),
        "samples of shape (8, 8, 3) found, (3, 8, 8) needed; channels come before rows and columns",
    ),
    (lambda: net(metrics="auc"), "metric 'auc': output float32[8, 4]", "two classes needed"),
    (
        lambda: net(metrics=[lambda o, y: 1.0]),
        "metric '<lambda>': a function of (model, output, la",
    ),
    (lambda: OfArrays(3), "OfArrays: 3 found, a function of arrays needed"),  # type: ignore[arg-type]
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
    (lambda: SGD(cosine), "SGD: learning_rate function 'cosine' found, a number or a function of"),
    (lambda: SGD(lambda: 0.1), "SGD: learning_rate function '<lambda>' found, a number or a"),
    (
        lambda: net(optimizer=SGD(lambda step: "a")).fit(X, Y, progress=False),
        "SGD: learning_rate of step 0: 'a' found, a number needed",
    ),
    (
        lambda: net(optimizer=SGD(lambda step: -1.0)).fit(X, Y, progress=False),
        "SGD: learning_rate of step 0: -1.0 found, a number of 0 or more needed",
    ),
    (lambda: SGD(0.1, momentum=90), "SGD: momentum 90 found, 0 to 1 needed"),
    (lambda: Adam(beta1=2), "Adam: beta1 2 found, 0 to 1 needed"),
    (lambda: SGD(0.1, rates=["h"]), "SGD: rates ['h'] found, factors by layer needed"),
    (lambda: SGD(0.1, clipnorm=1), "SGD: unknown argument 'clipnorm'", "did you mean 'clip_norm'?"),
    (
        lambda: net(optimizer=SGD(0.1, rates={"q": 2})),
        "SGD: rates: no parameter 'q'; there are h, o",
    ),
    (
        lambda: net(optimizer=Adam(0.1, weight_decay=0.1, decayed=("q",))),
        "Adam: decayed: no parameter 'q'; there are h, o",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[lambda state: 1]),
        "fit: callbacks: function '<lambda>' found, one of soapstone.callbacks",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Short()]),
        "callback Short: on_epoch_end takes other arguments than (self, state)",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Misspelt()]),
        "callback Misspelt: 'on_epoch_ended' found, hooks are on_train_begin",
        "did you mean 'on_epoch_end'?",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Loud()], progress=False),
        "learning_rate: 'high' set by a callback, 0 or more needed",
    ),
    (
        lambda: EarlyStopping(mode="min"),
        "EarlyStopping: unknown argument 'mode'; EarlyStopping(mon",
    ),
    (lambda: EarlyStopping("loss", 3, "a"), "EarlyStopping: minimum_delta: 'a' found, a number"),
    (lambda: CSVLogger(), "CSVLogger: missing a required argument: 'path'"),
    (
        lambda: net().fit(X, Y, callbacks=[CSVLogger("no/c.csv")], progress=False),
        "file 'no/c.csv': folder 'no' does not exist",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Checkpoint("c.npz", best="val_accuracy")]),
        "Checkpoint: monitor 'val_accuracy' found, one of loss, accuracy needed",
    ),
    (lambda: TensorBoard(3), "TensorBoard: folder 3 found, a path needed"),
    (lambda: Samples(None), "samples: NoneType found; an object with a length and items by number"),
    (
        lambda: token_ids("text", list, 3),
        "token_ids: texts: one text found, a list of texts needed",
    ),
    (
        lambda: of(lambda m: (m.input("x", (8, 3)), m.input("x", (8, 3)))),
        "input 'x': the name is taken",
    ),
    (
        lambda: of(lambda m: m.batch_norm(m.input("x", (8, 3)), momentum=3)),
        "batch_norm 'batch_norm': momentum 3 found, 0 to 1 needed",
    ),
    (
        lambda: of(lambda m: m.concat([m.input("a", (8, 3)), m.input("b", (8, 3))], 0)),
        "concat: axis 0 runs over samples, which are not joined; 1 or more needed",
    ),
    (
        lambda: of(lambda m: m.reshape(m.input("x", (8, 3)), "ab")),
        "reshape 'reshape': shape 'ab' found, integers needed",
    ),
    (lambda: of(lambda m: m.parameter("p", -3)), "parameter 'p': shape -3 found, integers needed"),
    (lambda: of(lambda m: m.constant("c", "a")), "constant 'c': element type <U1 found, numbers"),
    (
        lambda: of(lambda m: m.input("x", (8, 3)).view(4, 6)),
        "Tensor has no 'view'; layers are methods of its model",
        "did you mean 'reshape'?",
    ),
    (lambda: of(lambda m: m.input("x", (8, 3)).numpy()), "Tensor has no 'numpy'"),
    (lambda: net().eval(), "Model has no 'eval'", "did you mean 'evaluate'?"),
    (lambda: net().get_weights(), "Model has no 'get_weights'", "did you mean 'weights'?"),
    (lambda: net().cuda(), "Model has no 'cuda'", "did you mean 'compile'?"),
    (
        lambda: sp.Sequential,
        "module 'soapstone' has no attribute 'Sequential'; soapstone.Model has",
    ),
    (lambda: sp.nn, "module 'soapstone' has no attribute 'nn'; soapstone.Model has the layers as"),
    (lambda: sp.loses, "did you mean 'losses'?"),
    (lambda: sp.to_onnx(net(), "no/x.onnx"), "file 'no/x.onnx': folder 'no' does not exist"),
    (lambda: sp.to_onnx(net()), "to_onnx: path: None found, the path of a file needed"),
    (
        lambda: sp.to_onnx(3, "x.onnx"),
        "to_onnx: int found, a Model, a Graph or an OnnxModel needed",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims={"n": 3}),
        "to_onnx: dims: 'n' found, 'batch' alone needed of a Model",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims={"batch": 0}),
        "to_onnx: dims: batch: 0 found, an integer of 1 or more needed",
    ),
    (
        lambda: sp.to_onnx(net(), "x.onnx", dims=["batch"]),
        "to_onnx: dims: ['batch'] found, extents",
    ),
    (lambda: sp.to_onnx(net(), "x.onnx", dims={"batch": ""}), "dims: batch: '' found, an integer"),
    (
        lambda: OneCycle(0.1),
        "OneCycle: missing a required argument: 'steps'; OneCycle(rate, steps,",
    ),
    (
        lambda: net(optimizer=Forgetful()),
        "Forgetful: next of 'o.bias': None returned, float32[4] needed",
    ),
    (
        lambda: net(loss="kl_divergence", metrics=()).fit(X, Y),
        "fit: labels: samples of shape () found, (4,) needed",
    ),
    (
        lambda: net(1, loss="poisson", metrics=()).fit(X, -Y),
        "fit: labels: -1 at row 1; numbers from 0 to inf needed",
    ),
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
    (lambda: sp.to_onnx(net(), "x.onnx", opset=3), "opset 3 found; 20 to 23 are written"),
]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [(each[0], each[1:]) for each in (*FITTING, *RUNNING, *COMPILING, *LAYERS, *OTHERS, *MORE)],
)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_one_clear_sentence(
    mistake: Any, said: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError, AttributeError, OSError, RuntimeError)) as raised:
        mistake()
    text = str(raised.value)
    for part in said:
        assert part in text
    assert "\n" not in text and len(text) < 400
    assert not re.search(r"Errno|object at 0x|NoneType object|positional argument|__init__", text)


def test_the_table_is_long() -> None:
    assert (
        len(FITTING) + len(RUNNING) + len(COMPILING) + len(LAYERS) + len(OTHERS) + len(MORE) >= 215
    )
