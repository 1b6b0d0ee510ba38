"""First answers of an installed wheel that has machine code: none of its kernels is compiled.

    python tests/programs/packaged_answer.py

Run with a cache that is empty (`.ci/wheel`), in an environment that has the wheel. A convolutional
network, an encoder and a recurrent one with a batch of their own each answer once. Printed is how
many kernels came from where; the exit status says whether all came from the package, and what is
known of its sources too.
"""

from __future__ import annotations

import sys

import numpy as np

import soapstone
from soapstone import InferenceSession, Model
from soapstone.cache.environment import folder
from soapstone.cache.objects import FOUND
from soapstone.cache.places import root


def convolutional() -> Model:
    """Return convolutions with batch norm, a residual and pools."""
    model = Model("convolutional", seed=0)
    x = model.input("image", (1, 3, 32, 32))
    x = model.relu(model.batch_norm(model.conv2d(x, 32, kernel=3, padding=1, bias=False)))
    x = model.max_pool2d(model.relu(x + model.conv2d(x, 32, kernel=3, padding=1)), 2)
    x = model.conv2d(x, 64, kernel=1, activation="relu")
    model.output(model.softmax(model.dense(model.flatten(model.avg_pool2d(x, 4)), 10)))
    return model


def encoder() -> Model:
    """Return a layer of a transformer over embedded words."""
    model = Model("encoder", seed=0)
    x = model.embedding(model.input("ids", (1, 24), "int64"), 1000, 64)
    x = model.layer_norm(x + model.multi_head_attention(x, x, x, 4))
    y = model.dense(model.gelu(model.dense(x, 256)), 64)
    model.output(model.layer_norm(x + y))
    return model


def recurrent() -> Model:
    """Return a recurrent layer in both directions."""
    model = Model("recurrent", seed=0)
    y, _ = model.lstm(model.input("x", (1, 12, 32)), 48, bidirectional=True)
    model.output(model.tanh(model.dense(y, 8)))
    return model


def main() -> None:
    """Answer, and count."""
    for build in (convolutional, encoder, recurrent):
        model = build()
        with InferenceSession(model) as session:
            for batch in (1, 3):
                inputs = {
                    field.name: np.ones((batch, *map(int, field.shape[1:])), field.dtype)  # type: ignore[arg-type]
                    for field in session.inputs
                }
                found = session.run(inputs)
                assert all(np.isfinite(array).all() for array in found.values()), model.name
    made = [path.name for path in root().rglob("*.o")]
    counts = ", ".join(f"{FOUND[of]} {of}" for of in ("package", "cache", "compiled"))
    print(f"{soapstone.__file__}: kernels: {counts}", *made, sep="\n")
    asked = [name for name in ("operators", "kernels", "sources") if (folder() / name).exists()]
    print(f"asked of its sources: {', '.join(asked) or 'nothing'}")
    found = FOUND["cache"] or FOUND["compiled"] or made or asked
    whole = FOUND["package"] > 0 and not found
    sys.exit(0 if whole and "numba" not in sys.modules else 1)


if __name__ == "__main__":
    main()
