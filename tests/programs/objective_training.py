"""Training with all that a step may have, on an executor.

That is a shared layer, two losses, weights, a penalty, clipping, parts and metrics.

objective_training.py EXECUTOR FILE...: without a strategy and with each; prints how many runs gave
what one processor does. See test_objectives.py.
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
from helpers.processes import say

from soapstone import SGD, Model
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array
from soapstone.losses import CrossEntropy
from soapstone.metrics import F1

ROWS = 36


def network(
    executor: str = "local",
    cpus: int = 1,
    strategy: Strategy | None = None,
    precision: str = "float32",
) -> Model:
    """Return a small network with two outputs, compiled."""
    model = Model("net", seed=1)
    x = model.input("image", (12, 3, 8, 8))
    conv = model.shared(model.conv2d, 8, 3, padding=1, activation="relu", name="conv")
    x = model.flatten(model.max_pool2d(conv(x) + conv(x[..., ::-1]) * 0.5, 2))
    model.output(model.dense(x, 5, name="cls"), model.dense(x, 1, name="bit"))
    model.regularize("conv.weight", l2=1e-3)
    model.compile(
        SGD(0.05, momentum=0.9, clip_norm=0.5, rates={"conv": 0.5}),
        loss={"cls": CrossEntropy(0.1, (1, 2, 1, 0.5, 1)), "bit": "bce_with_logits"},
        loss_weights={"bit": 0.5},
        metrics={"cls": ["accuracy", F1("macro")], "bit": ["auc"]},
        weighted=True,
        micro_batches=2,
        precision=precision,
        executor=executor,
        cpus=cpus,
        strategy=strategy,
    )
    return model


def trained(model: Model) -> tuple[dict[str, float], dict[str, Array]]:
    """Train for some steps; return the last epoch's record, held-out scores too, and weights."""
    random = np.random.default_rng(0)
    images = random.standard_normal((ROWS, 3, 8, 8), np.float32)
    labels = {"cls": random.integers(0, 5, ROWS), "bit": random.integers(0, 2, ROWS)}
    weights = random.uniform(0.1, 2, ROWS).astype(np.float32)
    with model:
        options = {"validation_split": 0.25, "sample_weights": weights}
        result = model.fit(images, labels, epochs=2, progress=False, **options)  # type: ignore[arg-type]
        return result.epochs[-1], {n: np.array(each) for n, each in model.weights().items()}


@cache
def expected(precision: str) -> tuple[dict[str, float], dict[str, Array]]:
    """Return what one processor gives."""
    return trained(network(precision=precision))


def compare(
    executor: str, cpus: int, strategy: Strategy | None = None, precision: str = "float32"
) -> None:
    """Raise an error unless a run gives what one processor does."""
    known, held = expected(precision)
    record, weights = trained(network(executor, cpus, strategy, precision))
    assert record.keys() == known.keys()
    near = {"rtol": 1e-3, "atol": 1e-4 if precision == "float32" else 2e-3}
    for name, value in known.items():
        np.testing.assert_allclose(record[name], value, err_msg=name, **near)
    for name, array in held.items():
        np.testing.assert_allclose(weights[name], array, err_msg=name, **near)


def main() -> None:
    executor, *files = sys.argv[1:]
    cpus = 2 if executor == "legate" else 1
    for strategy in (None, *map(Strategy.load, files)):
        compare(executor, cpus, strategy)
    compare(executor, cpus, precision="mixed_float16")
    say(f"{2 + len(files)} runs equal")


if __name__ == "__main__":
    main()
