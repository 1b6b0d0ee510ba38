"""Losses, their weights, clipping and steps in parts against torch; metrics against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from soapstone import SGD, Adam, DataError, GraphError, Model
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.ir.tensor import Array
from soapstone.losses import CrossEntropy, Focal, FunctionLoss, Huber, Poisson, Quantile, SmoothL1
from soapstone.metrics import F1, IoU, OfArrays, Precision, Recall, TopK

ROWS, WIDTH, CLASSES = 22, 6, 4
RANDOM = np.random.default_rng(1)
X = RANDOM.standard_normal((ROWS, WIDTH)).astype(np.float32)
LABELS = RANDOM.integers(0, CLASSES, ROWS)
REAL = (2 * RANDOM.standard_normal((ROWS, CLASSES))).astype(np.float32)
COUNTS = RANDOM.poisson(2, (ROWS, CLASSES)).astype(np.float32)
BITS = (REAL > 0).astype(np.float32)
SHARES = functional.softmax(torch.tensor(REAL), -1).numpy()
WEIGHTS = RANDOM.uniform(0, 2, ROWS).astype(np.float32)
CLASS_WEIGHTS = (0.5, 2.0, 1.0, 3.0)


def net(width: int = CLASSES, activation: str | None = None, name: str = "o") -> Model:
    model = Model("net", seed=2)
    h = model.dense(model.input("x", (8, WIDTH)), 9, activation="tanh", name="h")
    model.output(model.dense(h, width, activation=activation, name=name))
    return model


class Twin:
    """The same weights in torch."""

    def __init__(self, model: Model) -> None:
        self.w = {n: torch.tensor(v, requires_grad=True) for n, v in model.weights().items()}

    def __call__(self, rows: slice = slice(None), name: str = "o") -> torch.Tensor:
        h = torch.tanh(torch.tensor(X[rows]) @ self.w["h.weight"] + self.w["h.bias"])
        return h @ self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def grads(self, loss: torch.Tensor) -> dict[str, Array]:
        return dict(zip(self.w, (g.numpy() for g in torch.autograd.grad(loss, self.w.values()))))


def near(found: dict[str, Array], expected: dict[str, Array], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def weighted(each: torch.Tensor) -> torch.Tensor:
    w = torch.tensor(WEIGHTS).reshape(-1, *(1,) * (each.dim() - 1)).expand(each.shape)
    return (each * w).sum() / w.sum()


def smooth_focal(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(y, labels, reduction="none")
    return (1 - torch.exp(-each)) ** 2 * each


T = torch.tensor
OF_LABELS = T(LABELS)
# loss, labels, activation of the output, and each element's loss in torch
CASES: dict[str, tuple[Any, Array, str | None, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cross_entropy": (
        *("cross_entropy", LABELS, None),
        lambda y: functional.cross_entropy(y, OF_LABELS, reduction="none"),
    ),
    "log_cosh": (
        *("log_cosh", REAL, None),
        lambda y: torch.log(torch.cosh((y - T(REAL)).double())).float(),
    ),
    "quantile": (
        *(Quantile(0.9), REAL, None),
        lambda y: torch.maximum(0.9 * (T(REAL) - y), -0.1 * (T(REAL) - y)),
    ),
    "smooth_l1": (
        *(SmoothL1(0.5), REAL, None),
        lambda y: functional.smooth_l1_loss(y, T(REAL), beta=0.5, reduction="none"),
    ),
    "msle": (
        *("msle", abs(REAL), "sigmoid"),
        lambda y: (torch.log1p(torch.sigmoid(y)) - torch.log1p(T(abs(REAL)))) ** 2,
    ),
    "mape": (*("mape", REAL, None), lambda y: 100 * abs(y - T(REAL)) / abs(T(REAL))),
    "poisson": (
        *("poisson", COUNTS, None),
        lambda y: functional.poisson_nll_loss(y, T(COUNTS), reduction="none"),
    ),
    "poisson of rates": (
        *(Poisson(log_rates=False), COUNTS, "sigmoid"),
        lambda y: functional.poisson_nll_loss(
            torch.sigmoid(y), T(COUNTS), log_input=False, reduction="none"
        ),
    ),
    "hinge": (*("hinge", 2 * BITS - 1, None), lambda y: torch.relu(1 - y * T(2 * BITS - 1))),
    "squared_hinge": (
        *("squared_hinge", 2 * BITS - 1, None),
        lambda y: torch.relu(1 - y * T(2 * BITS - 1)) ** 2,
    ),
    "kl_divergence": (
        *("kl_divergence", SHARES, None),
        lambda y: functional.kl_div(y.log_softmax(-1), T(SHARES), reduction="none").sum(-1),
    ),
    "cosine_similarity": (
        *("cosine_similarity", REAL, None),
        lambda y: 1 - functional.cosine_similarity(y, T(REAL), dim=-1),
    ),
    "smoothing": (
        *(CrossEntropy(label_smoothing=0.1), LABELS, None),
        lambda y: functional.cross_entropy(y, OF_LABELS, label_smoothing=0.1, reduction="none"),
    ),
    "focal": ("focal", LABELS, None, lambda y: smooth_focal(y, OF_LABELS)),
    "dense": (
        *("cross_entropy_dense", SHARES, None),
        lambda y: functional.cross_entropy(y, T(SHARES), reduction="none"),
    ),
    "mse": ("mse", REAL, None, lambda y: (y - T(REAL)) ** 2),
    "mae": ("mae", REAL, None, lambda y: (y - T(REAL)).abs()),
    "huber": (
        *(Huber(delta=0.7), REAL, None),
        lambda y: functional.huber_loss(y, T(REAL), delta=0.7, reduction="none"),
    ),
    "bce": (
        *("bce", BITS, "sigmoid"),
        lambda y: functional.binary_cross_entropy(torch.sigmoid(y), T(BITS), reduction="none"),
    ),
    "bce_with_logits": (
        *("bce_with_logits", BITS, None),
        lambda y: functional.binary_cross_entropy_with_logits(y, T(BITS), reduction="none"),
    ),
    "function": (
        lambda m, y, labels: m.reduce_mean(m.abs(y - labels)),
        *(REAL, None),
        lambda y: (y - T(REAL)).abs(),
    ),
}


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_torch(case: str, with_weights: bool) -> None:
    loss, labels, activation, each = CASES[case]
    if case == "function" and with_weights:

        def loss(m: Any, y: Any, labels: Any, w: Any) -> Any:
            return m.reduce_sum(m.abs(y - labels) * w) / m.reduce_sum(w)

    with net(activation=activation) as model:
        model.compile(SGD(0.1), loss=loss, weighted=with_weights, cpus=2)
        twin = Twin(model)
        made = each(twin())
        expected = weighted(made) if with_weights else made.mean()
        given = {"sample_weights": WEIGHTS} if with_weights else {}
        near(model.gradients(X, labels, **given), twin.grads(expected))
        found = model.evaluate(X, labels, batch_size=7, **given)
        assert found == {"loss": pytest.approx(expected.item(), rel=1e-5)}


def test_class_weights_are_those_of_torch() -> None:
    for given in (CLASS_WEIGHTS, {0: 0.5, 1: 2.0, 3: 3.0}):
        with net() as model:
            model.compile("sgd", loss=CrossEntropy(class_weights=given), cpus=2)
            twin = Twin(model)
            loss = functional.cross_entropy(twin(), OF_LABELS, weight=T(CLASS_WEIGHTS))
            near(model.gradients(X, LABELS), twin.grads(loss))
            found = model.evaluate(X, LABELS, batch_size=5)["loss"]
            assert found == pytest.approx(float(loss.detach()), rel=1e-5)


def test_weights_of_places_leave_some_of_a_sequence_out() -> None:
    """Weights of the labels' shape: those of 0 are a mask."""
    labels, mask = LABELS[:12].reshape(4, 3), (WEIGHTS[:12] > 1).reshape(4, 3).astype("f4")
    model = Model("sequence", seed=1)
    model.output(model.dense(model.input("x", (4, 3, WIDTH)), CLASSES, name="o"))
    x = X[:12].reshape(4, 3, WIDTH)
    with model:
        model.compile("sgd", weighted=True, cpus=2)
        w = model.weights()
        y = T(x @ w["o.weight"] + w["o.bias"])[T(mask) > 0]
        expected = functional.cross_entropy(y, T(labels)[T(mask) > 0])
        found = model.evaluate(x, labels, sample_weights=mask, batch_size=3)["loss"]
        assert found == pytest.approx(float(expected), rel=1e-5)


def two() -> Model:
    model = Model("two", seed=2)
    h = model.dense(model.input("x", (8, WIDTH)), 9, activation="tanh", name="h")
    model.output(model.dense(h, CLASSES, name="cls"), model.dense(h, 1, name="reg"))
    return model


@pytest.mark.parametrize("cpus", [1, 2])
def test_two_outputs_with_a_loss_and_a_weight_each(cpus: int) -> None:
    labels = {"cls": LABELS, "reg": REAL[:, 0]}
    with two() as model:
        model.compile(
            SGD(0.1),
            loss={"cls": "cross_entropy", "reg": "mse"},
            loss_weights={"reg": 0.25},
            metrics={"cls": ["accuracy"], "reg": "mae"},
            cpus=cpus,
        )
        twin = Twin(model)
        off = twin(name="reg")[:, 0] - T(REAL[:, 0])
        parts = [functional.cross_entropy(twin(name="cls"), OF_LABELS), (off**2).mean()]
        loss = parts[0] + 0.25 * parts[1]
        near(model.gradients(X, labels), twin.grads(loss))
        right = float((twin(name="cls").argmax(1) == OF_LABELS).double().mean())
        expected = [loss, parts[0], right, parts[1], off.abs().mean()]
        names = ["loss", "cls_loss", "cls_accuracy", "reg_loss", "reg_mae"]
        found = model.evaluate(X, labels, batch_size=9)
        assert list(found) == names
        for name, value in zip(names, expected):
            assert found[name] == pytest.approx(float(torch.as_tensor(value).detach()), rel=1e-5), (
                name
            )
        assert model.train_on_batch(X, labels) == pytest.approx(found, rel=1e-5)


def trained(optimizer: Optimizer, steps: int = 3, **options: Any) -> dict[str, Array]:
    with net() as model:
        model.compile(optimizer, cpus=2, **options)
        for _ in range(steps):
            model.train_on_batch(X, LABELS)
        return model.weights()


def torch_trained(
    make: Callable[[Any], torch.optim.Optimizer],
    clip: Callable[[Any], object] = lambda p: None,
    loss: Callable[[Twin], torch.Tensor] = lambda t: functional.cross_entropy(t(), OF_LABELS),
    steps: int = 3,
) -> dict[str, Array]:
    twin = Twin(net())
    optimizer = make(twin)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(twin).backward()  # type: ignore[no-untyped-call]
        clip(list(twin.w.values()))
        optimizer.step()
    return {name: value.detach().numpy() for name, value in twin.w.items()}


def sgd(twin: Twin) -> torch.optim.Optimizer:
    return torch.optim.SGD(twin.w.values(), 0.5, momentum=0.9)


def test_clipping_is_that_of_torch() -> None:
    utils = torch.nn.utils
    for options, clip in (
        ({"clip_norm": 0.2}, lambda p: utils.clip_grad_norm_(p, 0.2)),
        ({"clip_norm": 50.0}, lambda p: utils.clip_grad_norm_(p, 50.0)),
        ({"clip_value": 0.01}, lambda p: utils.clip_grad_value_(p, 0.01)),
    ):
        near(trained(SGD(0.5, momentum=0.9, **options)), torch_trained(sgd, clip))


def test_rates_by_parameter_are_torch_s_groups() -> None:
    def grouped(twin: Twin) -> torch.optim.Optimizer:
        rates = {"h.weight": 0.2, "h.bias": 0.0, "o.weight": 0.5, "o.bias": 0.5}
        return torch.optim.SGD([{"params": [p], "lr": rates[n]} for n, p in twin.w.items()])

    near(trained(SGD(0.5, rates={"h": 0.4, "h.bias": 0})), torch_trained(grouped))
    with pytest.raises(GraphError, match="rates: no parameter 'hh'; 'h' is there"):
        net().compile(SGD(rates={"hh": 2}))


@pytest.mark.parametrize("parts", [2, 3, 22])
def test_a_step_in_parts_is_the_whole_step(parts: int) -> None:
    whole = torch_trained(lambda t: torch.optim.Adam(t.w.values(), 0.05))
    near(trained(Adam(0.05), micro_batches=parts), whole, 2e-5)
    weights = CrossEntropy(class_weights=CLASS_WEIGHTS)
    one = trained(SGD(0.5, clip_norm=0.3), loss=weights)
    near(trained(SGD(0.5, clip_norm=0.3), loss=weights, micro_batches=parts), one, 2e-5)


def test_penalties_and_frozen_layers() -> None:
    with net() as model:
        model.regularize("*.weight", l2=0.1)
        model.regularize("o.weight", l1=0.05)
        model.freeze("h.bias")
        model.compile(SGD(0.5), cpus=2)
        twin = Twin(model)
        size = 0.1 * (twin.w["h.weight"] ** 2).sum() + 0.05 * twin.w["o.weight"].abs().sum()
        loss = functional.cross_entropy(twin(), OF_LABELS) + size
        expected = twin.grads(loss)
        before = model.weights()
        expected.pop("h.bias")
        near(model.gradients(X, LABELS), expected)
        assert model.evaluate(X, LABELS)["loss"] == pytest.approx(float(loss), rel=1e-5)
        model.train_on_batch(X, LABELS)
        after = model.weights()
        for name, value in before.items():
            np.testing.assert_allclose(
                after[name], value - 0.5 * expected.get(name, 0), rtol=1e-5, atol=1e-6
            )
        model.unfreeze()
        with pytest.raises(GraphError, match="compile again"):
            model.fit(X, LABELS, progress=False)
        model.compile(SGD(0.5), cpus=2)
        model.train_on_batch(X, LABELS)
        assert (model.weights()["h.bias"] != before["h.bias"]).any()
    with pytest.raises(GraphError, match=r"freeze: no parameter 'conv\*'; there are h, o"):
        net().freeze("conv*")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("loss", ["masked_cross_entropy", "masked_bce"])
def test_batches_of_which_no_label_counts_report_their_penalties(loss: str, parts: int) -> None:
    labels = LABELS if loss == "masked_cross_entropy" else BITS
    hidden = np.full_like(labels, -1)
    with net() as model:
        model.regularize("*.weight", l2=0.1)
        model.compile(SGD(0.5), loss=loss, micro_batches=parts)
        size = sum(0.1 * (w**2).sum() for n, w in model.weights().items() if n.endswith("weight"))
        plain = model.evaluate(X, labels)["loss"]
        assert model.evaluate(X, hidden)["loss"] == pytest.approx(size, rel=1e-5)
        # Beside batches whose labels count it is nothing to the mean, as its labels are none.
        both = model.evaluate(np.concatenate([X, X]), np.concatenate([hidden, labels]))["loss"]
        assert both == pytest.approx(plain, rel=1e-5)
        assert model.train_on_batch(X, hidden)["loss"] == pytest.approx(size, rel=1e-5)
        shrunk = sum(0.1 * (w**2).sum() for n, w in model.weights().items() if n.endswith("weight"))
        found = model.fit(X, hidden, batch_size=ROWS, progress=False).history["loss"]
        assert found == pytest.approx([shrunk], rel=1e-5) and shrunk < size


def outputs(model: Model) -> Array:
    found = model.predict(X)
    assert isinstance(found, np.ndarray)
    return found


def test_metrics_of_classes() -> None:
    def confidence(m: Any, y: Any, labels: Any) -> Any:
        return m.reduce_mean(m.reduce_max(m.softmax(y, axis=-1), axes=(1,)))

    chosen = [
        *("accuracy", TopK(2), "perplexity", F1("macro"), Precision("macro"), Recall("micro")),
        *(IoU("macro"), F1("micro", called="all")),
        *(confidence, OfArrays(lambda y, labels: float(y.max()), "largest")),
        OfArrays(lambda a, b: float(a / b), "share", lambda y, labels: (labels.sum(), labels.size)),
    ]
    for loss in ("cross_entropy", CrossEntropy(label_smoothing=0.2)):
        with net() as model:
            model.compile("sgd", loss=loss, metrics=chosen, cpus=2)
            y = outputs(model)
            guess, hit = y.argmax(1), np.eye(CLASSES)[LABELS]
            guesses = np.eye(CLASSES)[guess]
            found, of = (hit * guesses).sum(0), hit.sum(0)
            order = np.argsort(-y, 1)
            softmax = functional.softmax(T(y), -1).numpy()
            expected = {
                "accuracy": (guess == LABELS).mean(),
                "top_2_accuracy": np.mean([label in row[:2] for row, label in zip(order, LABELS)]),
                "perplexity": np.exp(functional.cross_entropy(T(y), OF_LABELS).item()),
                "f1": np.mean(2 * found / (guesses.sum(0) + of)),
                "all": found.sum() / of.sum(),
                "precision": np.mean(found / np.maximum(guesses.sum(0), 1)),
                "recall": found.sum() / of.sum(),
                "iou": np.mean(found / (guesses.sum(0) + of - found)),
                "confidence": softmax.max(1).mean(),
                "largest": y.max(),
                "share": LABELS.mean(),
            }
            given = model.evaluate(X, LABELS, batch_size=6)
            for name, value in expected.items():
                assert given[name] == pytest.approx(float(value), rel=1e-5), name


def test_metrics_of_two_classes() -> None:
    labels = BITS[:, 0]
    for loss, width in (("bce_with_logits", 1), ("bce", 1), ("cross_entropy", 2)):
        with net(width, "sigmoid" if loss == "bce" else None) as model:
            chosen = ["accuracy", "auc", "f1", "precision", "recall"]
            model.compile("sgd", loss=loss, metrics=chosen, cpus=2)
            y = outputs(model)
            score = y[:, 1] - y[:, 0] if width == 2 else y[:, 0]
            guess = score > (0.5 if loss == "bce" else 0)
            ones = labels > 0
            pairs = [(a > b) + (a == b) / 2 for a in score[ones] for b in score[~ones]]
            hits = (guess & ones).sum()
            expected = {
                "accuracy": (guess == ones).mean(),
                "auc": np.mean(pairs),
                "f1": 2 * hits / (guess.sum() + ones.sum()),
                "precision": hits / guess.sum(),
                "recall": hits / ones.sum(),
            }
            given = model.evaluate(X, labels.astype(int) if width == 2 else labels, batch_size=6)
            for name, value in expected.items():
                assert given[name] == pytest.approx(float(value), rel=1e-5), (loss, name)


def test_accuracy_of_probabilities_of_classes() -> None:
    with net() as model:
        model.compile("sgd", loss="cross_entropy_dense", metrics=["accuracy"], cpus=2)
        right = outputs(model).argmax(1) == SHARES.argmax(1)
        assert model.evaluate(X, SHARES)["accuracy"] == pytest.approx(right.mean())


METRICS_OF_NUMBERS = ["mae", "mse", "rmse", "r2", SmoothL1(), "cosine_similarity"]


def test_metrics_of_numbers() -> None:
    with net() as model:
        model.compile("sgd", loss="huber", metrics=METRICS_OF_NUMBERS, cpus=2)
        off = outputs(model) - REAL
        given = model.evaluate(X, REAL, batch_size=9)
        for name, value in (
            ("mae", np.abs(off).mean()),
            ("r2", np.mean(1 - (off**2).sum(0) / ((REAL - REAL.mean(0)) ** 2).sum(0))),
            ("smooth_l1", functional.smooth_l1_loss(T(off), T(0 * off)).item()),
            ("cosine_similarity", 1 - functional.cosine_similarity(T(off + REAL), T(REAL)).mean()),
            ("mse", (off**2).mean()),
            ("rmse", np.sqrt((off**2).mean())),
        ):
            assert given[name] == pytest.approx(float(value), rel=1e-5)


def test_what_does_not_fit_is_said_before_the_first_step() -> None:
    def compiled(**options: Any) -> Model:
        model = two()
        model.compile("sgd", **options)
        return model

    several = {"cls": "cross_entropy", "reg": "mse"}
    for options, message in (
        ({}, "does not depend on 'reg.weight'; output 'reg' has no loss; .* model.freeze"),
        ({"loss": {"clas": "mse"}}, "loss: output 'clas' found, one of 'cls', 'reg' needed"),
        ({"loss": {}}, "an empty dict"),
        ({"loss": several, "metrics": "accuracy"}, "metrics: accuracy found for 2 outputs"),
        ({"loss": several, "metrics": {"a": "mae"}}, "metrics: output 'a' found"),
        ({"loss": several, "metrics": {"reg": "accuracy"}}, "needs class numbers"),
        ({"loss": several, "loss_weights": {"c": 1}}, "loss_weights: output 'c' found"),
        ({"loss": several, "loss_weights": {"cls": "1"}}, "a number needed"),
        ({"loss": several, "micro_batches": 0}, "micro_batches: 0 found"),
        ({"loss": {"cls": lambda m, y, t: y, "reg": "mse"}}, "one float32 number needed"),
        ({"loss": {"cls": lambda m, y, t: 3, "reg": "mse"}}, "3 returned; a tensor"),
        ({"loss": {"cls": lambda m, y: y, "reg": "mse"}}, r"function of \(model, output, labels\)"),
        (
            {"loss": {"cls": lambda m, y, t: m.reduce_mean(m.dense(y, 1)), "reg": "mse"}},
            "belongs to the model",
        ),
        (
            {"loss": {"cls": CrossEntropy(class_weights=[1] * 5), "reg": "mse"}},
            "5 class weights found, at most 4",
        ),
    ):
        with pytest.raises(GraphError, match=message):
            compiled(**options)
    for wrong, message in (
        (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing 1.5 found, 0 to 1 needed"),
        (lambda: CrossEntropy(class_weights=[1, -1]), "that of class 1 is -1"),
        (lambda: Focal(focus=-1), "focus -1 found"),
        (lambda: F1("weighted"), "average 'weighted' found"),
        (lambda: SGD(clip_norm=0), "clip_norm 0 found, a number above 0"),
    ):
        with pytest.raises(GraphError, match=message):
            wrong()
    labels = {"cls": LABELS, "reg": REAL[:, :1]}
    with compiled(loss=several) as model:
        for y, weights, message in (
            (LABELS, None, "y: one array found, a dict by output needed: 'cls', 'reg'"),
            ({"cls": LABELS}, None, "labels of output 'reg' are missing"),
            ({**labels, "a": LABELS}, None, "output 'a' is unknown"),
            ({**labels, "cls": LABELS + 9}, None, "labels.cls: .* layer 'cls' has 4 classes"),
            ({**labels, "cls": LABELS[:3]}, None, r"labels.cls: 3 rows found"),
            (labels, WEIGHTS, r"takes none: compile\(weighted=True\)"),
        ):
            with pytest.raises(DataError, match=message):
                model.fit(X, y, sample_weights=weights, progress=False)
    with compiled(loss=several, weighted=True) as model:
        for weights, message in (
            (None, "sample_weights of output 'cls' are missing"),
            (-WEIGHTS, "a number below 0"),
            (np.ones((ROWS, 2)), r"shape \(22, 2\) found"),
            ({"cls": WEIGHTS}, "sample_weights of output 'reg' are missing"),
        ):
            with pytest.raises(DataError, match=message):
                model.fit(X, labels, sample_weights=weights, progress=False)


def test_a_function_of_class_numbers() -> None:
    def hinge(m: Any, y: Any, labels: Any) -> Any:
        ones = m.one_hot(labels, classes=CLASSES)
        margin = m.relu(1 - y * (2 * ones - 1))
        return m.reduce_mean(margin)

    with net() as model:
        model.compile("sgd", loss=FunctionLoss(hinge, of_classes=True))
        twin = Twin(model)
        sign = 2 * functional.one_hot(OF_LABELS, CLASSES) - 1
        near(model.gradients(X, LABELS), twin.grads(functional.relu(1 - twin() * sign).mean()))
