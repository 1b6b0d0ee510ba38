"""Operators of `ai.onnx.ml` that are arithmetic: scalers, encoders, linear models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.text import cast_text
from soapstone.frontend.onnx.texts import is_text, places_of
from soapstone.frontend.onnx.values import Value, rule
from soapstone.ir.tensor import Array

DOMAIN = "ai.onnx.ml"
_WINITZKI = 0.147


def samples(n: Call) -> Value:
    """Return input 0 as rows of floating-point features, one row where there is one sample.

    Raises:
        OnnxError: it has another rank than 1 or 2.
    """
    x = n.value()
    if x.rank not in (1, 2):
        raise OnnxError(f"input 0 has rank {x.rank}; 1 or 2 needed")
    x = x if x.dtype == "float64" else n.cast(x, "float32")
    return x if x.rank == 2 else n.reshape(x, (1, x.shape[0]))


def post_transform(n: Call, x: Value, kind: str) -> Value:
    """Return scores (samples, classes) as an attribute `post_transform` has them.

    Raises:
        UnsupportedError: another one.
    """
    if kind == "NONE":
        return x
    if kind == "PROBIT":
        return _probit(n, x)
    if kind == "LOGISTIC":
        return n("sigmoid", x)
    if kind == "SOFTMAX":
        return n("softmax", x, axis=1)
    if kind != "SOFTMAX_ZERO":
        raise UnsupportedError(f"attribute 'post_transform' is {kind!r}")
    # Zeros, which stand for classes without a score, keep their place and get no share.
    most = n("reduce_max", x, axes=(1,), keepdims=True)
    powers = n("exp", n("sub", x, most))
    here = n.cast(n("greater", n("abs", x), n.like(1e-7, x)), x.dtype)
    total = n("reduce_sum", n("mul", powers, here), axes=(1,), keepdims=True)
    rest = n("mul", x, n("exp", n("neg", most)))
    chosen = n("add", n("mul", powers, here), n("mul", rest, n("sub", n.like(1, x), here)))
    return n("div", chosen, total)


def _probit(n: Call, x: Value) -> Value:
    """Return the inverse of the normal distribution, as near as ONNX Runtime takes it.

    Source: Winitzki, A handy approximation for the error function and its inverse, 2008.
    """
    at = n("affine", x, scale=2.0, shift=-1.0)
    log = n("log", n("sub", n.like(1, x), n("mul", at, at)))
    middle = n("affine", log, scale=0.5, shift=2 / (3.14159 * _WINITZKI))
    rest = n("sub", n("mul", middle, middle), n("affine", log, scale=1 / _WINITZKI))
    size = n("sqrt", n("sub", n("sqrt", rest), middle))
    return n("affine", n("mul", n("sign", at), size), scale=2**0.5)


def labelled(n: Call, scores: Value, labels: Sequence[Any], *, halves: bool) -> list[Value]:
    """Return the label of each sample and the scores of all classes.

    halves: whether one score of two classes is the probability of the second; else its sign
        decides, and the other's score is its opposite.
    """
    if not labels:
        raise OnnxError("attributes with the classes' labels are missing")
    kind = n.attribute("post_transform", "NONE")
    if scores.shape[1] == 1 and len(labels) == 2:
        second = n("greater", scores, n.like(0.5 if halves else 0.0, scores))
        place = n.cast(n.reshape(second, (scores.shape[0],)), "int64")
        if kind == "PROBIT":
            raise UnsupportedError("attribute 'post_transform' is 'PROBIT' of one score of two")
        if halves:
            other, kind = n("sub", n.like(1, scores), scores), "NONE"
        else:
            other = n("neg", scores)
            kind = kind if kind == "LOGISTIC" else "NONE"
        scores = n("concat", other, scores, axis=1)
    else:
        if scores.shape[1] != len(labels):
            raise OnnxError(f"{scores.shape[1]} scores found for {len(labels)} labels")
        place = n.cast(n("argmax", scores, axis=1, keepdims=False), "int64")
    scores = n.cast(post_transform(n, scores, kind), "float32")
    return [looked_up_label(n, place, labels), scores]


def looked_up_label(n: Call, place: Value, labels: Sequence[Any]) -> Value:
    """Return the label at each place."""
    plain = list(labels) == list(range(len(labels)))
    return place if plain else n("gather", n.known(labels), place, axis=0)


def classlabels(n: Call) -> list[Any]:
    """Return the labels of a classifier's classes: numbers or texts."""
    names = ("classlabels_ints", "classlabels_int64s", "classlabels_strings")
    found: list[Any] = next(filter(None, (list(n.attribute(name, ())) for name in names)), [])
    return found


def given_numbers(n: Call, name: str, *counts: int) -> Array | None:
    """Return an attribute's numbers, or None; there must be as many as one of the counts."""
    found = n.attribute(name)
    if found is None:
        return None
    if len(found) not in counts:
        needed = " or ".join(map(str, counts))
        raise OnnxError(f"attribute {name!r} has {len(found)} numbers; {needed} needed")
    return np.asarray(found, np.float64)


@rule("Scaler", domain=DOMAIN)
def scaler(n: Call) -> Value:
    x = samples(n)
    offset, scale = (given_numbers(n, name, 1, x.shape[1]) for name in ("offset", "scale"))
    if offset is not None:
        x = n("sub", x, n.known(offset, x.dtype))
    if scale is not None:
        x = n("mul", x, n.known(scale, x.dtype))
    return n.cast(n.reshape(x, n.value().shape), "float32")


@rule("Normalizer", domain=DOMAIN)
def normalizer(n: Call) -> Value:
    x, kind = samples(n), n.text("norm", "MAX", ("MAX", "L1", "L2"))
    if kind == "MAX":
        size = n("reduce_max", x, axes=(1,), keepdims=True)
    elif kind == "L1":
        size = n("reduce_sum", n("abs", x), axes=(1,), keepdims=True)
    else:
        size = n("sqrt", n("reduce_sum_square", x, axes=(1,), keepdims=True))
    nothing = n("equal", size, n.like(0, size))
    size = n("where", nothing, n.like(1, size), size)
    return n.cast(n.reshape(n("div", x, size), n.value().shape), "float32")


@rule("Binarizer", domain=DOMAIN)
def binarizer(n: Call) -> Value:
    x = n.value()
    return n.cast(n("greater", x, n.like(n.attribute("threshold", 0.0), x)), x.dtype)


@rule("Imputer", domain=DOMAIN)
def imputer(n: Call) -> Value:
    x = n.value()
    kind = "float" if x.spec.is_float else "int64"
    last = x.shape[-1] if x.rank else 1
    new = given_numbers(n, f"imputed_value_{kind}s", 1, last)
    if new is None:
        raise OnnxError(f"attribute 'imputed_value_{kind}s' is missing")
    old = n.attribute(f"replaced_value_{kind}", 0)
    hit = n("is_nan", x) if np.isnan(old) else n("equal", x, n.like(old, x))
    return n("where", hit, n.broadcast(n.known(new, x.dtype), x.shape), x)


@rule("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(n: Call) -> Value:
    x, ids = n.value(0), n.value(1)
    made = n("gather", x, n.reshape(ids, (ids.spec.size,)), axis=x.rank - 1)
    return n.reshape(made, (1, made.spec.size)) if x.rank == 1 else made


@rule("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(n: Call) -> Value:
    parts = [n.cast(x, "float32") for x in n.values()]
    return n("concat", *parts, axis=1) if len(parts) > 1 else parts[0]


@rule("ZipMap", domain=DOMAIN)
def zip_map(n: Call) -> Value:
    """The scores themselves, a column for each label, where ONNX has a dictionary a sample."""
    return n.value()


@rule("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(n: Call) -> Value:
    """A row with a column for each word of a vocabulary, 0 for those that a map leaves out."""
    keys, values = _map(n)
    words = _first(n, "string_vocabulary", "int64_vocabulary")
    _check_keys(keys, is_text(words))
    made = np.full((1, words.size), "" if is_text(values) else 0, values.dtype)
    places = places_of(words, keys)
    made[0, places[places < words.size]] = values[places < words.size]
    return n.known(made)


@rule("CastMap", domain=DOMAIN)
def cast_map(n: Call) -> Value:
    """The values of a map by ascending keys; if sparse, each at the place that its key is."""
    keys, values = _map(n)
    _check_keys(keys, False)
    to = n.text("cast_to", "TO_FLOAT", ("TO_FLOAT", "TO_INT64", "TO_STRING"))
    if to == "TO_STRING":
        row = values if is_text(values) else np.array([f"{x:f}" for x in values], object)
    else:
        kind = "float32" if to == "TO_FLOAT" else "int64"
        row = n.array(cast_text(n, n.known(values), kind)) if is_text(values) else values
        row = row.astype(kind)
    if n.text("map_form", "DENSE", ("DENSE", "SPARSE")) == "DENSE":
        return n.known(row[np.argsort(keys)][None])
    if keys.min(initial=0) < 0:
        raise OnnxError(f"key {keys.min()} found; 0 or more needed")
    made = np.full((1, n.attribute("max_map", 1)), "0.f" if is_text(row) else 0, row.dtype)
    here = keys < made.size
    made[0, keys[here]] = row[here]
    return n.known(made)


def _map(n: Call) -> tuple[Array, Array]:
    """Return the keys and values of input 0."""
    slot = n.inputs[0] if n.has(0) else None
    if not isinstance(slot, tuple) or len(slot) != 2:
        raise OnnxError("input 0: no map found; one needed")
    keys, values = (n.array(each, apart=True) for each in slot)
    return keys, values


def _check_keys(keys: Array, texts: bool) -> None:
    if keys.size and is_text(keys) != texts:
        kinds = ("integers", "texts")
        raise OnnxError(f"keys are {kinds[is_text(keys)]}; {kinds[texts]} needed")


@rule("LabelEncoder", domain=DOMAIN)
def label_encoder(n: Call) -> Value:
    x = n.value()
    keys = _first(n, "keys_tensor", "keys_int64s", "keys_floats", "keys_strings")
    values = _first(n, "values_tensor", "values_int64s", "values_floats", "values_strings")
    if keys.shape != values.shape or not keys.size:
        raise OnnxError(f"keys {keys.shape} and values {values.shape} found")
    default = n.attribute("default_tensor")
    if default is None:
        name, other = {"i": ("int64", -1), "f": ("float", -0.0)}.get(
            values.dtype.kind, ("string", "_Unused")
        )
        default = n.attribute(f"default_{name}", other)
    default = np.asarray(default).reshape(-1)[:1].astype(values.dtype)
    return _looked_up(n, x, keys.reshape(-1), values.reshape(-1), default)


@rule("CategoryMapper", domain=DOMAIN)
def category_mapper(n: Call) -> Value:
    texts, numbers = _first(n, "cats_strings"), _first(n, "cats_int64s")
    if texts.shape != numbers.shape or not texts.size:
        raise OnnxError(f"{texts.size} texts and {numbers.size} numbers found")
    if n.value().is_text:
        return _looked_up(
            n, n.value(), texts, numbers, np.array([n.attribute("default_int64", -1)])
        )
    default = np.array([n.attribute("default_string", "_Unused")], object)
    return _looked_up(n, n.value(), numbers, texts, default)


def _looked_up(n: Call, x: Value, keys: Array, values: Array, default: Array) -> Value:
    """Return the value of each element's key, the first of equal ones, or the default."""
    if is_text(keys):
        places = places_of(keys, n.array(x))
        return n.known(np.concatenate([values, default])[places])
    wide, known = n.reshape(x, (*x.shape, 1)), n.known(keys.reshape(-1), x.dtype)
    hit = n("equal", wide, known)
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        missing = n("logical_and", n("is_nan", wide), n.known(np.isnan(keys).reshape(-1), "bool"))
        hit = n("logical_or", hit, missing)
    count = n.cast(hit, "float32")
    place = n("argmax", count, axis=x.rank, keepdims=False)
    found = n("gather", n.known(values), place, axis=0)
    here = n("greater", n("reduce_max", count, axes=(x.rank,), keepdims=False), n.like(0.5, count))
    other = n.known(default.reshape(()))
    return n("where", here, found, n.broadcast(other, found.shape))


def _first(n: Call, *names: str) -> Array:
    for name in names:
        found = n.attribute(name)
        if found is not None:
            kind = {"floats": np.float32, "strings": object}.get(name.rsplit("_", 1)[-1])
            return np.asarray(found, kind)
    raise OnnxError(f"one of the attributes {', '.join(names)} needed")


@rule("OneHotEncoder", domain=DOMAIN)
def one_hot_encoder(n: Call) -> Value:
    x, known = n.value(), n.attribute("cats_int64s", ())
    if x.is_text:
        texts = _first(n, "cats_strings")
        found = places_of(texts, n.array(x))
        if not n.attribute("zeros", 1) and (found == texts.size).any():
            raise OnnxError(f"{n.array(x)[found == texts.size][0]!r} found, which is no category")
        return n.known((found[..., None] == np.arange(texts.size)).astype(np.float32))
    if not known:
        raise OnnxError(f"input 0 is {x.spec}; attribute 'cats_int64s' needed for numbers")
    if not n.attribute("zeros", 1):
        raise UnsupportedError("attribute 'zeros' is 0, by which an unknown category is an error")
    wide = n.reshape(n.cast(x, "int64"), (*x.shape, 1))
    return n.cast(n("equal", wide, n.known(known, "int64")), "float32")


def _linear(n: Call, count: int) -> Value:
    """Return x times rows of coefficients, plus intercepts: (samples, count)."""
    x = samples(n)
    rows = given_numbers(n, "coefficients", count * x.shape[1])
    if rows is None:
        raise OnnxError("attribute 'coefficients' is missing")
    weight = n.known(rows.reshape(count, x.shape[1]).T, x.dtype)
    made = n("matmul", x, weight)
    add = given_numbers(n, "intercepts", 0, count)
    return made if add is None or not add.size else n("add", made, n.known(add, x.dtype))


@rule("LinearRegressor", domain=DOMAIN)
def linear_regressor(n: Call) -> Value:
    made = _linear(n, n.attribute("targets", 1))
    return n.cast(post_transform(n, made, n.attribute("post_transform", "NONE")), "float32")


@rule("LinearClassifier", domain=DOMAIN)
def linear_classifier(n: Call) -> list[Value]:
    labels = classlabels(n)
    count = len(n.attribute("intercepts", ())) or len(labels)
    return labelled(n, _linear(n, count), labels, halves=False)
