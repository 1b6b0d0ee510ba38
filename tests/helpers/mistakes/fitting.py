"""What is trained on: arrays, labels, sizes, weights of samples, and arguments of `fit`.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.mistakes.models import X, Y, ids, image, masked, net, of, pair, still, two

from soapstone import Model
from soapstone.callbacks import EarlyStopping
from soapstone.data import Samples, token_ids

FITTING: list[tuple[Any, ...]] = [
    (
        lambda: Model.fit(X, Y),
        "fit: ndarray of shape (20, 6) found in place of a model; it is called of one that was",
        "model = Model(…), model.fit(…)",
    ),
    (lambda: net().fit(X, Y, resume=3), "fit: resume: int 3 found, the path of a file needed"),
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
    (lambda: net().fit(masked(X), Y), "fit: x: 20 masked elements found; an array without needed"),
    (
        lambda: net().fit(Samples([(masked(X)[i], Y[i]) for i in range(20)])),
        "sample ",
        ": 1 masked elements found",
    ),
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
        lambda: net(loss="cross_entropy_dense").fit(X, np.eye(4)[Y] * 3),
        "fit: labels: 3.0 at row 0; numbers from 0 to 1 needed",
    ),
    (
        lambda: of(lambda m: (m.output(m.dense(m.flatten(image(m)), 4)), m.compile(), m)[2]).fit(
            np.zeros((20, 8, 8, 3)), Y
        ),
        "samples of shape (8, 8, 3) found, (3, 8, 8) needed; channels come before rows and columns",
    ),
    (lambda: Samples(None), "samples: NoneType found; an object with a length and items by number"),
    (
        lambda: token_ids("text", list, 3),
        "token_ids: texts: one text found, a list of texts needed",
    ),
    (
        lambda: net(loss="kl_divergence", metrics=()).fit(X, Y),
        "fit: labels: samples of shape () found, (4,) needed",
    ),
    (
        lambda: net(1, loss="poisson", metrics=()).fit(X, -Y),
        "fit: labels: -1 at row 1; numbers from 0 to inf needed",
    ),
]
