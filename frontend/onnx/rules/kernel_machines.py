"""Kernel machines of `ai.onnx.ml`: support vectors, products with them, and distances of rows.

Source: Chang and Lin, LIBSVM: a library for support vector machines, 2011, and ONNX Runtime, whose
scores these are.
"""

from __future__ import annotations

import itertools

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.learned import (
    DOMAIN,
    classlabels,
    given_numbers,
    labelled,
    looked_up_label,
    post_transform,
    samples,
)
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule

_KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
_METRICS = ("sqeuclidean", "euclidean")
_LEAST = 1e-7  # of the probability of one class against another


@rule("SVMRegressor", domain=DOMAIN)
def svm_regressor(n: Call) -> Value:
    x = samples(n)
    count = n.attribute("n_supports", 0)
    factors = given_numbers(n, "coefficients", count or x.shape[1])
    rho = given_numbers(n, "rho", 1)
    if factors is None or rho is None:
        raise OnnxError("attributes 'coefficients' and 'rho' are needed")
    made = n("matmul", _against(n, x, count) if count else x, n.known(factors[:, None], x.dtype))
    made = n("add", made, n.known(rho, x.dtype))
    if n.attribute("one_class", 0):
        made = n("sign", made)
    return n.cast(post_transform(n, made, n.attribute("post_transform", "NONE")), "float32")


@rule("SVMClassifier", domain=DOMAIN)
def svm_classifier(n: Call) -> list[Value]:
    x, labels = samples(n), classlabels(n)
    sizes = n.attribute("vectors_per_class", ())
    if not sizes:
        return _linear(n, x, labels)
    count = len(sizes)
    if len(labels) != count or count < 2:
        raise OnnxError(f"{len(labels)} labels found for {count} classes; 2 or more of each needed")
    pairs = list(itertools.combinations(range(count), 2))
    factors = given_numbers(n, "coefficients", (count - 1) * sum(sizes))
    rho = given_numbers(n, "rho", len(pairs))
    if factors is None or rho is None:
        raise OnnxError("attributes 'coefficients' and 'rho' are needed")
    factors = factors.reshape(count - 1, -1)
    ends = np.cumsum((0, *sizes))
    weights = np.zeros((factors.shape[1], len(pairs)))
    for k, (i, j) in enumerate(pairs):  # of each class the vectors have factors for each other
        weights[ends[i] : ends[i + 1], k] = factors[j - 1, ends[i] : ends[i + 1]]
        weights[ends[j] : ends[j + 1], k] = factors[i, ends[j] : ends[j + 1]]
    made = n("matmul", _against(n, x, factors.shape[1]), n.known(weights, x.dtype))
    made = n("add", made, n.known(rho, x.dtype))
    label = looked_up_label(n, _most_votes(n, made, pairs, count), labels)
    scores = _coupled(n, made, pairs, count)
    if scores is None:
        scores = _decisions(n, made, count)
    else:
        scores = post_transform(n, scores, n.attribute("post_transform", "NONE"))
    return [label, n.cast(scores, "float32")]


def _linear(n: Call, x: Value, labels: list[str] | list[int]) -> list[Value]:
    """Return label and scores of a product with a row for each class."""
    count = len(labels)
    rows = given_numbers(n, "coefficients", count * x.shape[1])
    rho = given_numbers(n, "rho", 1)
    if rows is None or rho is None:
        raise OnnxError("attributes 'coefficients' and 'rho' are needed")
    made = n("matmul", x, n.known(rows.reshape(count, -1).T, x.dtype))
    return labelled(n, n("add", made, n.known(rho, x.dtype)), labels, halves=False)


def _most_votes(n: Call, made: Value, pairs: list[tuple[int, int]], count: int) -> Value:
    """Return the class that wins most often against another, the first of several."""
    first, second = np.zeros((2, len(pairs), count), np.float32)
    for k, (i, j) in enumerate(pairs):
        first[k, i] = second[k, j] = 1
    won = n.cast(n("greater", made, n.like(0, made)), "float32")
    votes = n("matmul", won, n.known(first - second))
    votes = n("add", votes, n.known(second.sum(axis=0)))
    return n.cast(n("argmax", votes, axis=1, keepdims=False), "int64")


def _coupled(n: Call, made: Value, pairs: list[tuple[int, int]], count: int) -> Value | None:
    """Return the classes' probabilities, or None where the file does not say how to make them."""
    a, b = (given_numbers(n, name, 0, len(pairs)) for name in ("prob_a", "prob_b"))
    if a is None or not a.size:
        return None
    if b is None or not b.size:
        raise OnnxError("attribute 'prob_b' is missing; as many numbers as in 'prob_a' needed")
    scaled = n("add", n("mul", made, n.known(-a, made.dtype)), n.known(-b, made.dtype))
    r = n("clip", n("sigmoid", scaled), low=_LEAST, high=1 - _LEAST)
    both = n("concat", r, n("affine", r, scale=-1.0, shift=1.0), axis=1)
    place = np.zeros((count, count), np.int64)
    for k, (i, j) in enumerate(pairs):
        place[i, j], place[j, i] = k, k + len(pairs)
    square = n("gather", both, n.known(place.reshape(-1)), axis=1)
    return n("couple_pairs", n.reshape(square, (made.shape[0], count, count)))


def _decisions(n: Call, made: Value, count: int) -> Value:
    """Return what each two classes' vectors decide; of two classes, a column for each."""
    kind = n.attribute("post_transform", "NONE")
    if count > 2:
        return post_transform(n, made, kind)
    if kind != "NONE":
        raise UnsupportedError(f"attribute 'post_transform' is {kind!r} of two classes")
    return n("concat", n("neg", made), made, axis=1)


def _against(n: Call, x: Value, count: int) -> Value:
    """Return the kernel of each sample and each of so many support vectors: (samples, vectors)."""
    kind = n.text("kernel_type", "LINEAR", _KERNELS)
    rows = given_numbers(n, "support_vectors", count * x.shape[1])
    if rows is None:
        raise OnnxError("attribute 'support_vectors' is missing")
    rows = rows.reshape(count, x.shape[1])
    gamma, shift, degree = (*n.attribute("kernel_params", ()), 0.0, 0.0, 0.0)[:3]
    if kind == "RBF":
        return n("exp", n("affine", _apart(n, x, n.known(rows)), scale=-float(gamma)))
    product = n("matmul", x, n.known(rows.T, x.dtype))
    if kind == "LINEAR":
        return product
    made = n("affine", product, scale=float(gamma), shift=float(shift))
    return n("tanh", made) if kind == "SIGMOID" else n("pow", made, n.like(degree, made))


@rule("CDist", domain=MICROSOFT)
def distances(n: Call) -> Value:
    """Distances of all rows of one matrix to all of another, as converters write neighbours."""
    metric, a, b = n.text("metric", "sqeuclidean", _METRICS), n.value(0), n.value(1)
    if (a.rank, b.rank) != (2, 2) or a.shape[1] != b.shape[1]:
        raise OnnxError(f"{a.spec} and {b.spec} found; two matrices of equally many columns needed")
    apart = _apart(n, a, b)
    return n("sqrt", apart) if metric == "euclidean" else apart


def _apart(n: Call, a: Value, b: Value) -> Value:
    """Return squared distances of rows, (m, k) and (n, k): (m, n).

    Those of neighbours are small differences of large squares, which float32 would not hold.
    """
    x, y = (n.cast(each, "float64") for each in (a, b))
    squares = (n("reduce_sum_square", each, axes=(1,), keepdims=True) for each in (x, y))
    both = n("add", next(squares), n("transpose", next(squares), permutation=(1, 0)))
    twice = n("affine", n("matmul", x, y, transpose_b=True), scale=2.0)
    return n.cast(n("clip", n("sub", both, twice), low=0.0), a.dtype)
