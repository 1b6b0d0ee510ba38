"""Models of `ai.onnx.ml` give what ONNX Runtime gives: trees, linear models, encoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

import soapstone.onnxruntime as facade
from soapstone import DataError, InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

FEATURES = 5
_BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_TYPES = {1: TensorProto.FLOAT, 7: TensorProto.INT64, 8: TensorProto.STRING}


def model_of(kind: str, outputs: tuple[int, ...], version: int = 3, **attributes: Any) -> bytes:
    """Return a model of one node, of samples of five features."""
    names = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(kind, ["x"], names, domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", FEATURES])],
        [helper.make_tensor_value_info(n, _TYPES[t], None) for n, t in zip(names, outputs)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def both(model: bytes, x: Array) -> tuple[list[Array], list[Array]]:
    """Return what ONNX Runtime and a session here give."""
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    theirs = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    with InferenceSession(from_onnx(model)) as session:
        return theirs, list(session.run({"x": x}).values())


def samples(count: int = 40) -> Array:
    """Return samples whose features are often equal to thresholds, and sometimes missing."""
    random = np.random.default_rng(1)
    x = random.integers(-3, 4, (count, FEATURES)).astype(np.float32) / 2
    x[random.random(x.shape) < 0.05] = np.nan
    return x


def drawn(seed: int, what: str, ids: int, trees: int = 6) -> dict[str, Any]:
    """Return the attributes of random trees, whose leaves have weights for all of so many ids."""
    random = np.random.default_rng(seed)
    nodes: list[tuple[Any, ...]] = []
    weights: list[tuple[int, int, int, float]] = []

    def grow(tree: int, depth: int) -> int:
        me = len([each for each in nodes if each[0] == tree])
        nodes.append(())
        place = len(nodes) - 1
        nodes[place] = (tree, me, 0, "LEAF", 0.0, 0, 0, 0)
        if depth == 0 or (depth < 4 and random.random() < 0.3):
            for each in range(ids):
                weights.append((tree, me, each, float(random.integers(-4, 9)) / 4))
            return me
        yes, no = grow(tree, depth - 1), grow(tree, depth - 1)
        kind = _BRANCHES[random.integers(len(_BRANCHES) if seed % 2 else 1)]
        threshold = float(random.integers(-3, 4)) / 2
        missing = int(random.integers(2))
        feature = int(random.integers(FEATURES))
        nodes[place] = (tree, me, feature, kind, threshold, yes, no, missing)
        return me

    for tree in range(trees):
        grow(tree, 4)
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    columns = zip((*names, "missing_value_tracks_true"), zip(*nodes))
    made: dict[str, Any] = {f"nodes_{name}": list(column) for name, column in columns}
    named = zip(
        (f"{what}_treeids", f"{what}_nodeids", f"{what}_ids", f"{what}_weights"), zip(*weights)
    )
    return made | {name: list(column) for name, column in named}


@pytest.mark.parametrize("seed", range(6))
def test_trees_regress(seed: int) -> None:
    how = ("SUM", "AVERAGE")[seed % 2]
    given = drawn(seed, "target", 2)
    options = {"n_targets": 2, "aggregate_function": how, "base_values": [0.5, -1.0]}
    theirs, ours = both(model_of("TreeEnsembleRegressor", (1,), **given, **options), samples())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["MIN", "MAX"])
def test_the_least_and_greatest_of_trees(how: str) -> None:
    given = drawn(3, "target", 1)
    options = {"n_targets": 1, "aggregate_function": how}
    theirs, ours = both(model_of("TreeEnsembleRegressor", (1,), **given, **options), samples())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("classes", [1, 2, 3])
def test_trees_classify(classes: int, transform: str) -> None:
    """One score of two classes, or a score of each.

    Of two scores ONNX Runtime looks at the sign of the second alone, and says 0 or 1.
    """
    given = drawn(classes, "class", classes)
    labels = [4, 7] if classes == 1 else list(range(3, 3 + classes))
    options = {"classlabels_int64s": labels, "post_transform": transform}
    theirs, ours = both(model_of("TreeEnsembleClassifier", (7, 1), **given, **options), samples())
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    wanted = np.array(labels)[theirs[1].argmax(1)] if classes == 2 else theirs[0]
    np.testing.assert_array_equal(ours[0], wanted)


def test_nodes_that_look_for_values_of_a_set() -> None:
    numbers = np.array([1.0, -0.5, 0.5, np.nan, 0.0, np.nan], np.float32)
    model = model_of(
        "TreeEnsemble",
        (1,),
        version=5,
        n_targets=1,
        tree_roots=[0],
        nodes_featureids=[0, 1],
        nodes_modes=helper.make_tensor("m", TensorProto.UINT8, (2,), [6, 6]),
        nodes_splits=helper.make_tensor("s", TensorProto.FLOAT, (2,), [0.0, 0.0]),
        nodes_truenodeids=[0, 1],
        nodes_trueleafs=[1, 1],
        nodes_falsenodeids=[1, 2],
        nodes_falseleafs=[0, 1],
        leaf_targetids=[0, 0, 0],
        leaf_weights=helper.make_tensor("w", TensorProto.FLOAT, (3,), [1.0, 2.0, 3.0]),
        membership_values=helper.make_tensor("v", TensorProto.FLOAT, (6,), numbers),
    )
    x = np.nan_to_num(samples())
    with InferenceSession(from_onnx(model)) as session:
        (found,) = session.run({"x": x}).values()
    first, second = np.isin(x[:, 0], [1.0, -0.5, 0.5]), x[:, 1] == 0
    np.testing.assert_array_equal(found[:, 0], np.where(first, 1, np.where(second, 2, 3)))


def test_scores_as_the_inverse_of_a_normal_distribution() -> None:
    options = {"n_targets": 2, "post_transform": "PROBIT"}
    given = drawn(2, "target", 2, trees=1) | options
    given["target_weights"] = np.linspace(0.02, 0.98, len(given["target_weights"])).tolist()
    theirs, ours = both(model_of("TreeEnsembleRegressor", (1,), **given), samples())
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    given = {"coefficients": ROWS, "intercepts": [0.5, 0.4, 0.6], "classlabels_ints": [0, 1, 2]}
    given["coefficients"] = [each / 100 for each in ROWS]
    model = model_of("LinearClassifier", (7, 1), **given, post_transform="PROBIT")
    theirs, ours = both(model, np.nan_to_num(samples()))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


ROWS = np.random.default_rng(2).standard_normal(3 * FEATURES).round(2).tolist()
SIMPLE: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "scaler": ("Scaler", (1,), {"offset": [1.0, 2, 3, 4, 5], "scale": [0.5, 1, 2, 3, 4]}),
    "l1": ("Normalizer", (1,), {"norm": "L1"}),
    "l2": ("Normalizer", (1,), {"norm": "L2"}),
    "binarizer": ("Binarizer", (1,), {"threshold": 0.5}),
    "imputer": (
        "Imputer",
        (1,),
        {"imputed_value_floats": [9.0, 8, 7, 6, 5], "replaced_value_float": 0.5},
    ),
    "labels": (
        "LabelEncoder",
        (7,),
        {"keys_floats": [0.5, 1.0, -1.0], "values_int64s": [5, 6, 7], "default_int64": -9},
    ),
    "linear": (
        "LinearRegressor",
        (1,),
        {"coefficients": ROWS, "intercepts": [1.0, 2.0, 3.0], "targets": 3},
    ),
    "classes": (
        "LinearClassifier",
        (7, 1),
        {
            "coefficients": ROWS,
            "intercepts": [0.1, 0.2, 0.3],
            "classlabels_ints": [2, 4, 8],
            "post_transform": "SOFTMAX",
        },
    ),
    "two classes": (
        "LinearClassifier",
        (7, 1),
        {"coefficients": ROWS[:10], "intercepts": [0.1, 0.2], "classlabels_ints": [0, 1]},
    ),
    **{
        f"kernel {kind}": (
            "SVMRegressor",
            (1,),
            {
                "coefficients": [0.5, -1.0, 2.0],
                "support_vectors": ROWS,
                "n_supports": 3,
                "rho": [0.25],
                "kernel_type": kind,
                "kernel_params": [0.3, 0.1, 3.0],
            },
        )
        for kind in ("LINEAR", "RBF", "POLY", "SIGMOID")
    },
}


@pytest.mark.parametrize("name", SIMPLE)
def test_arithmetic(name: str) -> None:
    kind, outputs, attributes = SIMPLE[name]
    theirs, ours = both(model_of(kind, outputs, **attributes), np.nan_to_num(samples()))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_kernels_of_vectors_that_are_near_keep_their_digits() -> None:
    random = np.random.default_rng(0)
    x = (20 + random.standard_normal((30, FEATURES))).astype(np.float32)
    vectors, factors = x[:20].astype(np.float64) + 0.01, random.standard_normal(20)
    attributes = {
        "coefficients": factors.tolist(),
        "support_vectors": vectors.astype(np.float32).reshape(-1).tolist(),
        "n_supports": 20,
        "rho": [0.25],
        "kernel_type": "RBF",
        "kernel_params": [5.0, 0.0, 3.0],
    }
    apart = x[:, None].astype(np.float64) - vectors.astype(np.float32)
    wanted = np.exp(-5 * (apart**2).sum(-1)) @ factors + 0.25
    model = from_onnx(model_of("SVMRegressor", (1,), **attributes))
    (found,) = InferenceSession(model).run({"x": x}).values()
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_distances_of_rows(metric: str) -> None:
    """Neighbours as converters write them; near rows keep their digits."""
    random = np.random.default_rng(1)
    x = (30 + random.standard_normal((9, FEATURES))).astype(np.float32)
    y = np.concatenate([x[:4], x[:4] + np.float32(0.01), -x[:2]])
    text = f"""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
    g (float[n, 5] x, float[m, 5] y) => (float[n, m] d) {{
      d = com.microsoft.CDist<metric = "{metric}">(x, y) }}"""
    session = InferenceSession(from_onnx(onnx.parser.parse_model(text).SerializeToString()))
    squares = ((x[:, None].astype(np.float64) - y) ** 2).sum(-1)
    wanted = np.sqrt(squares) if metric == "euclidean" else squares
    found = session.run({"x": x, "y": y})["d"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("labels", [[3, 1, 2], ["setosa", "versicolor", "ä"]])
def test_dictionaries_of_scores_are_the_scores(labels: list[Any]) -> None:
    """As converters write classifiers, unless told otherwise."""
    text = isinstance(labels[0], str)
    kind = "strings" if text else "int64s"
    given = drawn(3, "class", 3) | {f"classlabels_{kind}": labels}
    of = TensorProto.STRING if text else TensorProto.INT64
    model = onnx.load_from_string(
        model_of("TreeEnsembleClassifier", (8 if text else 7, 1), **given)
    )
    named = {f"classlabels_{kind}": labels}
    zipped = helper.make_node("ZipMap", ["y1"], ["z"], domain="ai.onnx.ml", **named)
    model.graph.node.append(zipped)
    scores = helper.make_map_type_proto(of, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output[1].CopyFrom(
        helper.make_value_info("z", helper.make_sequence_type_proto(scores))
    )
    theirs, ours = both(model.SerializeToString(), samples())
    assert ours[0].dtype == theirs[0].dtype
    np.testing.assert_array_equal(ours[0], theirs[0])
    for row, each in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(row, [each[label] for label in labels], rtol=1e-5, atol=1e-6)


def test_the_facade_gives_dictionaries() -> None:
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    text = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
    g (float[n, 2] x) => (seq(map(string, float)) z) {
      z = ai.onnx.ml.ZipMap<classlabels_strings = ["b", "a"]>(x) }"""
    model = onnx.parser.parse_model(text).SerializeToString()
    theirs = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    ours = facade.InferenceSession(model)
    (mine,), (other,) = ours.get_outputs(), theirs.get_outputs()
    assert (mine.name, mine.type, mine.shape) == (other.name, other.type, other.shape)
    x = np.array([[1, 2], [3, 4]], np.float32)
    assert ours.run(["z"], {"x": x}) == theirs.run(["z"], {"x": x})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes_modes": ["LEAF"]}, r"'nodes_modes' has shape \(1,\)"),
        ({"nodes_featureids": 9}, "feature 9 found; input 0 has 5"),
        ({"nodes_truenodeids": 99}, "node 99 of tree 0 is not there"),
        ({"nodes_nodeids": 0}, "node 0 of tree 0 stands twice"),
        ({"nodes_truenodeids": 0}, "a tree without a root"),
        ({"target_ids": 5}, "'target_ids': 5 to 5 found, 2 needed"),
        ({"post_transform": "CUBIC"}, "'post_transform' is 'CUBIC'"),
    ],
)
def test_wrong_trees_are_refused(changed: dict[str, Any], message: str) -> None:
    given = drawn(0, "target", 2)
    for name, value in changed.items():
        same = isinstance(value, int)
        given[name] = [value] * len(given[name]) if same else value
    model = from_onnx(model_of("TreeEnsembleRegressor", (1,), **given, n_targets=2))
    with pytest.raises(OnnxError, match=message):
        model.graph({"n": 3})


def machine(
    classes: int, kind: str, *, chances: bool = False, text: bool = False
) -> dict[str, Any]:
    """Return the attributes of a random kernel machine of so many classes."""
    random = np.random.default_rng(classes)
    sizes = list(range(2, 2 + classes))
    pairs = classes * (classes - 1) // 2
    drawn = random.standard_normal((sum(sizes), FEATURES + classes - 1)).round(2)
    made: dict[str, Any] = {
        "vectors_per_class": sizes,
        "support_vectors": drawn[:, :FEATURES].reshape(-1).tolist(),
        "coefficients": drawn[:, FEATURES:].T.reshape(-1).tolist(),
        "rho": random.standard_normal(pairs).round(2).tolist(),
        "kernel_type": kind,
        "kernel_params": [0.3, 0.1, 3.0],
    }
    if chances:
        made["prob_a"] = (-1 - random.random(pairs)).round(2).tolist()
        made["prob_b"] = random.standard_normal(pairs).round(2).tolist()
    labels = [f"class {i}" for i in range(classes)] if text else list(range(3, 3 + classes))
    return made | {f"classlabels_{'strings' if text else 'ints'}": labels}


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("chances", [False, True])
@pytest.mark.parametrize("kind", ["LINEAR", "RBF", "POLY", "SIGMOID"])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_kernel_machines_classify(classes: int, kind: str, chances: bool, text: bool) -> None:
    given = machine(classes, kind, chances=chances, text=text)
    model = model_of("SVMClassifier", (8 if text else 7, 1), **given)
    theirs, ours = both(model, np.nan_to_num(samples()))
    assert ours[0].dtype == theirs[0].dtype
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_linear_machines_classify(classes: int) -> None:
    given = {"coefficients": ROWS[: 5 * classes], "rho": [0.2], "classlabels_ints": [4, 2, 9]}
    given["classlabels_ints"] = given["classlabels_ints"][:classes]
    given |= {"kernel_type": "LINEAR", "kernel_params": [0.0, 0.0, 0.0]}
    theirs, ours = both(model_of("SVMClassifier", (7, 1), **given), np.nan_to_num(samples()))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ours[0], np.array(given["classlabels_ints"])[theirs[1].argmax(1)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rho": [1.0]}, "'rho' has 1 numbers; 3 needed"),
        ({"prob_a": [1.0, 1.0, 1.0]}, "'prob_b' is missing"),
        ({"classlabels_ints": [1, 2]}, "2 labels found for 3 classes"),
        ({"kernel_type": "COSINE"}, "'kernel_type' is 'COSINE'"),
    ],
)
def test_wrong_kernel_machines_are_refused(changed: dict[str, Any], message: str) -> None:
    model = from_onnx(model_of("SVMClassifier", (7, 1), **machine(3, "RBF") | changed))
    with pytest.raises(OnnxError, match=message):
        model.graph({"n": 3})


@pytest.mark.parametrize("labels", [["b", "a"], ["a", "b"]])
def test_linear_models_with_labels_that_are_text(labels: list[str]) -> None:
    given = {"coefficients": ROWS[:10], "intercepts": [0.1, 0.2], "classlabels_strings": labels}
    theirs, ours = both(model_of("LinearClassifier", (8, 1), **given), samples())
    assert ours[0].dtype == theirs[0].dtype == object
    np.testing.assert_array_equal(ours[0], theirs[0])


WORDS = np.array([["red", "big"], ["blue", "small"], ["red", ""], ["ä", "red"]], object)
TEXTS: dict[str, str] = {
    "text to numbers": """(string[n, 2] x) => (int64[n, 2] y) {
        y = ai.onnx.ml.LabelEncoder
            <keys_strings = ["red", "big"], values_int64s = [7, 5], default_int64 = -3>(x) }""",
    "text to reals": """(string[n, 2] x) => (float[n, 2] y) {
        y = ai.onnx.ml.LabelEncoder
            <keys_strings = ["red", "red"], values_floats = [0.5, 1.5]>(x) }""",
    "text to text": """(string[n, 2] x) => (string[n, 2] y) {
        y = ai.onnx.ml.LabelEncoder<keys_strings = ["red"], values_strings = ["rot"]>(x) }""",
    "numbers to text": """(string[n, 2] x) => (string[n, 2] y) {
        i = ai.onnx.ml.LabelEncoder<keys_strings = ["red", "big"], values_int64s = [7, 5]>(x)
        y = ai.onnx.ml.LabelEncoder<keys_int64s = [7, -1], values_strings = ["b", "a"]>(i) }""",
    "categories": """(string[n, 2] x) => (float[n, 2, 2] y) {
        y = ai.onnx.ml.OneHotEncoder<cats_strings = ["red", "big"]>(x) }""",
    "names of numbers": """(string[n, 2] x) => (string[n, 2] y) {
        i = ai.onnx.ml.CategoryMapper<cats_int64s = [1, 2], cats_strings = ["red", "ä"]>(x)
        y = ai.onnx.ml.CategoryMapper<cats_int64s = [2, 1], cats_strings = ["x", "y"]>(i) }""",
    "columns": """(string[n, 2] x) => (string[n, 1] y, float[n, 1, 1] z)
        <int64[1] first = {0}, int64[1] second = {1}> {
        y = ai.onnx.ml.ArrayFeatureExtractor(x, second)
        other = Gather<axis = 1>(x, first)
        z = ai.onnx.ml.OneHotEncoder<cats_strings = ["red"]>(other) }""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_encoded(name: str) -> None:
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    header = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>'
    model = onnx.parser.parse_model(f"{header}\ng {TEXTS[name]}").SerializeToString()
    session = InferenceSession(from_onnx(model), threads=1)
    for x in (WORDS, WORDS[:1], WORDS[:0]):
        wanted = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        found = session.run({"x": x})
        for mine, other in zip(found.values(), wanted, strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(mine, other)


def test_unknown_categories_are_refused_where_the_file_says_so() -> None:
    text = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
    g (string[n] x) => (float[n, 1] y) {
      y = ai.onnx.ml.OneHotEncoder<cats_strings = ["red"], zeros = 0>(x) }"""
    session = InferenceSession(from_onnx(onnx.parser.parse_model(text)), threads=1)
    assert session.run(["red"])["y"].tolist() == [[1]]
    with pytest.raises(OnnxError, match="'blue' found, which is no category"):
        session.run(["red", "blue"])


def test_inputs_that_are_text_are_checked() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (string[n] x) => (string[n] y) { y = Identity(x) }"""
    session = InferenceSession(from_onnx(onnx.parser.parse_model(text)), threads=1)
    assert session.run(np.array(["a", "bc"]))["y"].tolist() == ["a", "bc"]
    with pytest.raises(DataError, match="int found among texts; str needed"):
        session.run(["a", 3])
    with pytest.raises(DataError, match=r"float found among texts; str needed"):
        session.run(np.zeros(2, np.float32))
    with pytest.raises(OnnxError, match="they are text, which no graph holds"):
        from_onnx(onnx.parser.parse_model(text)).graph({"n": 2})
