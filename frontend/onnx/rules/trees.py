"""Tables of decision trees (`ai.onnx.ml`), classified and regressed by one walk of all trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.learned import (
    DOMAIN,
    classlabels,
    labelled,
    post_transform,
    samples,
)
from soapstone.frontend.onnx.values import Value, rule
from soapstone.ir.ops.indexing.trees import COMPARISONS, MISSING
from soapstone.ir.tensor import Array

_MODES = {
    "LEAF": "leaf",
    "BRANCH_LEQ": "<=",
    "BRANCH_LT": "<",
    "BRANCH_GTE": ">=",
    "BRANCH_GT": ">",
    "BRANCH_EQ": "==",
    "BRANCH_NEQ": "!=",
}
_NUMBERED = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_MEMBER = 6  # a node that holds for each value of a set
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


class _Trees(NamedTuple):
    """Nodes of all trees, by their place, and where trees begin; a leaf leads to itself."""

    feature: Array
    threshold: Array
    yes: Array
    no: Array
    comparison: Array
    roots: Array


def _numbers(n: Call, name: str, count: int, default: float | None = None) -> Array:
    """Return numbers of an attribute, or of its tensor, one for each of so many nodes.

    Raises:
        OnnxError: there are more or fewer of them.
    """
    found = n.attribute(f"{name}_as_tensor")
    given = np.asarray(n.attribute(name, ()) if found is None else found)
    if given.size == 0 and default is not None:
        return np.full(count, default)
    if given.shape != (count,):
        raise OnnxError(f"attribute {name!r} has shape {given.shape}; ({count},) needed")
    return given


def _read(n: Call) -> tuple[_Trees, dict[tuple[int, int], int]]:
    """Return the nodes that the attributes of earlier versions list, and the place of each.

    Raises:
        OnnxError: a node stands twice, leads to none, or a tree has no or several roots.
    """
    trees = [int(tree) for tree in n.attribute("nodes_treeids", ())]
    count = len(trees)
    if not count:
        raise OnnxError("attribute 'nodes_treeids' is empty; one node needed")
    names = list(zip(trees, _numbers(n, "nodes_nodeids", count).tolist()))
    place = {name: i for i, name in enumerate(names)}
    if len(place) != count:
        twice = next(name for i, name in enumerate(names) if place[name] != i)
        raise OnnxError(f"node {twice[1]} of tree {twice[0]} stands twice")
    modes = _numbers(n, "nodes_modes", count).tolist()
    unknown = set(modes) - _MODES.keys()
    if unknown:
        raise OnnxError(f"mode {unknown.pop()!r} found; one of {', '.join(_MODES)} needed")
    comparison = np.array([COMPARISONS.index(_MODES[mode]) for mode in modes])
    comparison += MISSING * (_numbers(n, "nodes_missing_value_tracks_true", count, 0) != 0)
    leads = []
    for name in ("nodes_truenodeids", "nodes_falsenodeids"):
        ends = list(zip(trees, _numbers(n, name, count).tolist()))
        for i, end in enumerate(ends):
            if comparison[i] % MISSING and end not in place:
                raise OnnxError(f"attribute {name!r}: node {end[1]} of tree {end[0]} is not there")
        leads.append([place[e] if comparison[i] % MISSING else i for i, e in enumerate(ends)])
    below = {end for lead in leads for i, end in enumerate(lead) if end != i}
    roots = [i for i in range(count) if i not in below]
    if [trees[i] for i in roots] != list(dict.fromkeys(trees)):
        raise OnnxError("a tree without a root, or with several, found")
    feature = np.where(comparison % MISSING, _numbers(n, "nodes_featureids", count), 0)
    values = _numbers(n, "nodes_values", count)
    yes, no = map(np.array, leads)
    return _Trees(feature, values, yes, no, comparison, np.array(roots)), place


def _walked(n: Call, trees: _Trees) -> Value:
    """Return the leaf of each sample and tree."""
    x = samples(n)
    wrong = trees.feature[(trees.feature < 0) | (trees.feature >= x.shape[1])]
    if wrong.size:
        raise OnnxError(f"feature {wrong[0]} found; input 0 has {x.shape[1]}")
    rest = (trees.feature, trees.yes, trees.no, trees.comparison, trees.roots)
    numbers = [n.known(each, "int32") for each in rest]
    return n("tree_leaves", x, n.known(trees.threshold, x.dtype), *numbers)


def _combined(n: Call, leaves: Value, table: Array, known: Array, how: str) -> Value:
    """Return what leaves say together: `table` (nodes, numbers), where `known`."""
    dtype = n.value().dtype if n.value().dtype == "float64" else "float32"
    if how in ("SUM", "AVERAGE"):
        total = n("embedding_bag", leaves, n.known(table, dtype), reduction="sum")
        return total if how == "SUM" else n("affine", total, scale=1 / leaves.shape[1])
    if not known.all():
        raise UnsupportedError(f"{how} of leaves that leave out numbers")
    sign = -1.0 if how == "MIN" else 1.0
    most = n("embedding_bag", leaves, n.known(sign * table, dtype), reduction="max")
    return n("neg", most) if how == "MIN" else most


def _weights(
    n: Call, what: str, place: dict[tuple[int, int], int], columns: int | None
) -> tuple[Array, Array, Sequence[int]]:
    """Return leaves' weights (nodes, columns), which of them are leaves or given, and their ids."""
    ids = [int(i) for i in n.attribute(f"{what}_ids", ())]
    nodes = zip(n.attribute(f"{what}_treeids", ()), n.attribute(f"{what}_nodeids", ()))
    rows = [place.get(node, -1) for node in nodes]
    values = _numbers(n, f"{what}_weights", len(ids))
    if len(rows) != len(ids) or -1 in rows:
        raise OnnxError(f"attributes '{what}_nodeids', '{what}_ids': nodes and ids do not fit")
    found = sorted(set(ids))
    width = len(found) if columns is None else columns
    column = {i: k for k, i in enumerate(found)} if columns is None else {i: i for i in ids}
    if found and not (columns is None or 0 <= found[0] <= found[-1] < columns):
        raise OnnxError(f"attribute '{what}_ids': {found[0]} to {found[-1]} found, {width} needed")
    table, known = np.zeros((len(place), width)), np.zeros((len(place), width), bool)
    at = (np.array(rows, np.int64), np.array([column[i] for i in ids], np.int64))
    np.add.at(table, at, values)
    known[at] = True
    return table, known, found


def _based(n: Call, scores: Value) -> Value:
    base = n.attribute("base_values_as_tensor")
    base = np.asarray(n.attribute("base_values", ()) if base is None else base)
    if base.size == 0:
        return scores
    if base.size not in (1, scores.shape[1]):
        raise UnsupportedError(f"{base.size} base values for {scores.shape[1]} scores")
    return n("add", scores, n.known(base.reshape(-1), scores.dtype))


@rule("TreeEnsembleRegressor", domain=DOMAIN)
def tree_regressor(n: Call) -> Value:
    trees, place = _read(n)
    table, known, _ = _weights(n, "target", place, n.attribute("n_targets", 1))
    how = n.text("aggregate_function", "SUM", _AGGREGATES)
    known |= (trees.comparison % MISSING != 0)[:, None]  # where no sample ends
    total = _based(n, _combined(n, _walked(n, trees), table, known, how))
    return n.cast(post_transform(n, total, n.attribute("post_transform", "NONE")), "float32")


@rule("TreeEnsembleClassifier", domain=DOMAIN)
def tree_classifier(n: Call) -> list[Value]:
    trees, place = _read(n)
    labels = classlabels(n)
    one = len(set(n.attribute("class_ids", ()))) == 1 and len(labels) == 2
    table, known, _ = _weights(n, "class", place, None if one else len(labels))
    scores = _based(n, _combined(n, _walked(n, trees), table, known, "SUM"))
    return labelled(n, scores, labels, halves=bool((table >= 0).all()))


@rule("TreeEnsemble", domain=DOMAIN)
def tree_ensemble(n: Call) -> Value:
    trees, leaves = _read_packed(n)
    width = n.attribute("n_targets", 1)
    targets = np.asarray(n.attribute("leaf_targetids", ()), np.int64)
    weights = np.asarray(n.attribute("leaf_weights", ())).reshape(-1)
    if targets.shape != weights.shape or ((targets < 0) | (targets >= width)).any():
        raise OnnxError(f"attribute 'leaf_targetids': {targets} found for {width} targets")
    table, known = np.zeros((len(leaves), width)), np.zeros((len(leaves), width), bool)
    at = (np.flatnonzero(leaves >= 0), targets[leaves[leaves >= 0]])
    table[at], known[at] = weights[leaves[leaves >= 0]], True
    known |= (leaves < 0)[:, None]
    how = _AGGREGATES[_choice(n, "aggregate_function", 1, len(_AGGREGATES))]
    total = _combined(n, _walked(n, trees), table, known, how)
    kind = _TRANSFORMS[_choice(n, "post_transform", 0, len(_TRANSFORMS))]
    return n.cast(post_transform(n, total, kind), n.value().dtype)


def _choice(n: Call, name: str, default: int, count: int) -> int:
    found = int(n.attribute(name, default))
    if not 0 <= found < count:
        raise OnnxError(f"attribute {name!r} is {found}; 0 to {count - 1} needed")
    return found


def _read_packed(n: Call) -> tuple[_Trees, Array]:
    """Return the nodes of the newer form, where leaves are apart, and which leaf each node is.

    A node that holds for each value of a set becomes a chain of nodes that each look for one.

    Raises:
        OnnxError: a node, a leaf or a set is not there.
    """
    features = np.asarray(n.attribute("nodes_featureids", ()), np.int64)
    count, leaves = len(features), len(np.asarray(n.attribute("leaf_weights", ())).reshape(-1))
    modes = _numbers(n, "nodes_modes", count).astype(np.int64)
    splits = _numbers(n, "nodes_splits", count)
    tracks = _numbers(n, "nodes_missing_value_tracks_true", count, 0) != 0
    if count and not 0 <= modes.min() <= modes.max() <= _MEMBER:
        raise OnnxError(f"attribute 'nodes_modes': {modes.min()} to {modes.max()} found, 0 to 6")
    ends = []
    for side in ("true", "false"):
        to = _numbers(n, f"nodes_{side}nodeids", count).astype(np.int64)
        leaf = _numbers(n, f"nodes_{side}leafs", count) != 0
        most = np.where(leaf, leaves, count)
        if ((to < 0) | (to >= most)).any():
            raise OnnxError(f"attribute 'nodes_{side}nodeids': a node or leaf that is not there")
        ends.append(np.where(leaf, count + to, to))
    roots = np.asarray(n.attribute("tree_roots", ()), np.int64)
    if not roots.size or ((roots < 0) | (roots >= count)).any():
        raise OnnxError(f"attribute 'tree_roots': {roots} found, 0 to {count - 1} needed")
    sets = _sets(n, int((modes == _MEMBER).sum()))
    total = count + leaves
    made: list[Array] = []  # beyond nodes and leaves: the rests of chains
    kinds: list[int] = []
    comparison = np.zeros(total, np.int64)
    table = np.stack([features, *ends, splits], 1) if count else np.zeros((0, 4))
    for i in range(count):
        values = sets.pop(0) if modes[i] == _MEMBER else [splits[i]]
        equal = COMPARISONS.index("==") if modes[i] == _MEMBER else None
        kind = equal or COMPARISONS.index(_MODES[_NUMBERED[modes[i]]])
        comparison[i] = kind + MISSING * tracks[i]
        table[i, 3] = values[0]
        row = table[i]
        for value in values[1:]:
            row[2] = total + len(made)
            row = np.array([features[i], ends[0][i], ends[1][i], value])
            made.append(row)
        kinds += [comparison[i]] * (len(values) - 1)
    own = np.arange(count, total)
    ends_of = np.stack([0 * own, own, own, 0 * own], 1)
    padded = np.concatenate([table, ends_of, np.reshape(made, (-1, 4))])
    comparison = np.concatenate([comparison, np.array(kinds, np.int64)])
    which = np.full(len(padded), -1)
    which[count:total] = np.arange(leaves)
    feature, yes, no, threshold = padded.T
    whole: Any = (each.astype(np.int64) for each in (feature, yes, no))
    feature, yes, no = whole
    return _Trees(feature, threshold, yes, no, comparison, roots), which


def _sets(n: Call, count: int) -> list[list[float]]:
    """Return the sets of values that nodes look for, which NaN parts."""
    values = np.asarray(n.attribute("membership_values", ())).reshape(-1)
    sets: list[list[float]] = [[]]
    for value in values.tolist():
        if np.isnan(value):
            sets.append([])
        else:
            sets[-1].append(value)
    sets = [each for each in sets if each]
    if len(sets) != count:
        raise OnnxError(f"attribute 'membership_values': {len(sets)} sets found, {count} needed")
    return sets
