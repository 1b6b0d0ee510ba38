"""Operators of texts in sessions, against ONNX Runtime."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from typer.testing import CliRunner

from soapstone import Batcher, DataError, InferenceSession, from_onnx, optimize
from soapstone.cli.main import app
from soapstone.frontend.inference.latency import measure
from soapstone.frontend.onnx import OnnxError, UnboundError
from soapstone.frontend.onnx.check import check_onnx

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")


def model_of(text: str) -> bytes:
    header = '<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>'
    model: bytes = onnx.parser.parse_model(f"{header}\ng {text}").SerializeToString()
    return model


def texts(*values: Any) -> Any:
    return np.array(values, object)


WORDS = texts(["red", "big red", "red"], ["e", "Blue", "a  b c"])
REALS = np.array([[1.5, -2, 0], [3, 0.25, 1]], np.float32)
MODELS: dict[str, str] = {
    "concat": "(string[n, 3] x) => (string[n, 3] y) { y = StringConcat(x, x) }",
    "broadcast": """(string[n, 3] x) => (string[n, 3] y) <string[1] end = {"!"}> {
        y = StringConcat(x, end) }""",
    "split": "(string[n, 3] x) => (string[n, 3, k] y, int64[n, 3] z) { y, z = StringSplit(x) }",
    "split by": """(string[n, 3] x) => (string[n, 3, k] y, int64[n, 3] z) {
        y, z = StringSplit<delimiter = "e", maxsplit = 1>(x) }""",
    "match": """(string[n, 3] x) => (bool[n, 3] y) {
        y = RegexFullMatch<pattern = "(\\\\w+ )?red">(x) }""",
    "equal": """(string[n, 3] x) => (bool[n, 3] y, int64[2, k] z) <string red = {"red"}> {
        y = Equal(x, red)  z = NonZero(y) }""",
    "where": """(string[n, 3] x, float[n, 3] r) => (string[n, 3] y)
        <string other = {"other"}, float zero = {0}> {
        more = Greater(r, zero)  y = Where(more, x, other) }""",
    "moved": """(string[n, 3] x) => (string[3, k] y) {
        t = Transpose(x)  both = Concat<axis = 1>(t, t)  y = Identity(both) }""",
    "gathered": """(string[n, 3] x, float[n, 3] r) => (string[n, 1] y) {
        at = ArgMax<axis = 1>(r)  y = GatherElements<axis = 1>(x, at) }""",
    "places of known texts": """(float[n, 3] r) => (string[n] y, bool[n] z)
        <string[3] names = {"b", "a", "c"}, string b = {"b"}> {
        at = ArgMax<axis = 1, keepdims = 0>(r)  chosen = Gather(names, at)
        axis = Constant<value = int64[1] {1}>()
        up = Unsqueeze(chosen, axis)  y = Squeeze(up, axis)  z = Equal(y, b) }""",
    "numbers from texts": """(float[n, 3] r) => (int64[n, 3] y) {
        t = Cast<to = 8>(r)  f = Cast<to = 1>(t)  y = Cast<to = 7>(f) }""",
    "unique": """(string[n, 3] x) => (string[k] y, int64[k] at, int64[m] back, int64[k] many) {
        y, at, back, many = Unique(x) }""",
    "unique in order": """(string[n, 3] x) => (string[k] y) { y = Unique<sorted = 0>(x) }""",
    "tokens": """(string[n, 3] x) => (string[n, 3, k] y) {
        y = com.microsoft.Tokenizer
            <tokenexp = "[a-zA-Z]+", mark = 0, mincharnum = 1, pad_value = "#">(x) }""",
    "characters": """(string[n, 3] x) => (string[n, 3, k] y) {
        y = com.microsoft.Tokenizer
            <separators = [""], mark = 1, mincharnum = 1, pad_value = "#">(x) }""",
    "parts": """(string[n, 3] x) => (string[n, 3, k] y) {
        y = com.microsoft.Tokenizer
            <separators = [" "], mark = 0, mincharnum = 2, pad_value = "">(x) }""",
    "normalized": """(string[1, m] w) => (string[1, k] y) {
        y = StringNormalizer
            <case_change_action = "UPPER", locale = "C", stopwords = ["RED", "b"]>(w) }""",
    "nothing left": """(string[1, m] w) => (string[1, k] y) {
        y = StringNormalizer<is_case_sensitive = 1, stopwords = ["red", "a", "Blue", ""]>(w) }""",
    "loop": """(string[n, 3] x) => (string[n, 3] y, string[k, n, 3] z) {
        trips = Constant<value = int64 {3}>()  yes = Constant<value = bool {1}>()
        y, z = Loop(trips, yes, x) <body = b (int64 i, bool c, string[n, 3] s)
            => (bool d, string[n, 3] r, string[n, 3] o) {
                d = Identity(c)  e = Constant<value_string = "!">()
                r = StringConcat(s, e)  o = Identity(r) }> }""",
    "scan": """(string[n, 3] x) => (string[n, 3] y) {
        y = Scan(x) <num_scan_inputs = 1, body = b (string[3] r) => (string[3] o) {
            e = Constant<value_strings = ["1", "2", "3"]>()  o = StringConcat(r, e) }> }""",
    "scattered": """(string[n, 3] x) => (string[n, 3] y)
        <int64[1, 1] at = {0}, string[1, 3] rows = {"q", "r", "s"}> {
        y = ScatterND(x, at, rows) }""",
    "compressed": """(string[n, 3] x) => (string[n, 2] y, string[n, k] z)
        <bool[3] keep = {1, 0, 1}> {
        y = Compress<axis = 1>(x, keep)  z = Unique<axis = 1>(x) }""",
    "one hot": """(float[n, 3] r) => (string[n, 3] y) <string[2] names = {"off", "on"}> {
        at = ArgMax<axis = 1, keepdims = 0>(r)  depth = Constant<value = int64 {3}>()
        y = OneHot(at, depth, names) }""",
    "if": """(string[n, 3] x, float[n, 3] r) => (string[k, 3] y) {
        sum = ReduceSum<keepdims = 0>(r)  zero = Constant<value = float {0}>()
        more = Greater(sum, zero)
        y = If(more) <then_branch = yes () => (string[k, 3] a) { a = Concat<axis = 0>(x, x) },
                      else_branch = no () => (string[k, 3] b) { b = Identity(x) }> }""",
}


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_as_onnx_runtime_has_them(name: str) -> None:
    model = model_of(MODELS[name])
    reference = theirs.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {"x": WORDS, "r": REALS, "w": WORDS[:1]}
    with InferenceSession(from_onnx(model), threads=1) as session:
        for rows in (2, 1, 2):
            given = {field.name: feeds[field.name][:rows] for field in session.inputs}
            found = session.run(given)
            for mine, other in zip(found.values(), reference.run(None, given), strict=True):
                assert mine.shape == other.shape
                assert mine.dtype == other.dtype
                np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("options", ["positive = 0", "positive = 1, seed = 7", "seed = -3"])
@pytest.mark.parametrize("kind", ["string", "int32", "int64", "float", "double"])
def test_texts_and_numbers_are_hashed(kind: str, options: str) -> None:
    made = "int32" if options == "positive = 0" else "uint32"
    call = f"com.microsoft.MurmurHash3<{options}>(x)"
    model = model_of(f"({kind}[n, m] x) => ({made}[n, m] y) {{ y = {call} }}")
    words = texts(["", "a", "ab", "abc"], ["abcd", "naïve", "x" * 31, "abc"])
    types = {"float": "float32", "double": "float64"}
    x = words if kind == "string" else np.arange(-4, 4).reshape(2, 4).astype(types.get(kind, kind))
    (needed,) = theirs.InferenceSession(model).run(None, {"x": x})
    with InferenceSession(from_onnx(model), threads=1) as session:
        (found,) = session.run(x).values()
    assert found.dtype == needed.dtype
    np.testing.assert_array_equal(found, needed)


@pytest.mark.parametrize("rows", [2, 0])
def test_texts_are_padded_with_text(rows: int) -> None:
    """ONNX Runtime has no padding of texts."""
    text = """(string[n, 3] x) => (string[a, 4] y, string[a, 4] z, string[b, 3] c)
        <string by = {"-"}, int64[4] pads = {0, 1, 1, 0}, int64[1] four = {4}> {
        y = Pad(x, pads)  z = Pad(x, pads, by)  c = CenterCropPad<axes = [0]>(x, four) }"""
    with InferenceSession(from_onnx(model_of(text)), threads=1) as session:
        found = session.run(WORDS[:rows])
    for name, by in (("y", ""), ("z", "-")):
        wanted = np.full((rows + 1, 4), by, object)
        wanted[:rows, 1:] = WORDS[:rows]
        np.testing.assert_array_equal(found[name], wanted)
    wanted = np.full((4, 3), "", object)
    wanted[2 - rows // 2 : 2 + rows // 2] = WORDS[:rows]
    np.testing.assert_array_equal(found["c"], wanted)


GRAMS = {
    "pool_strings": ["red", "big", "blue", "big", "big", "red", "blue", "red", "red"],
    "ngram_counts": [0, 3],
    "ngram_indexes": [5, 0, 2, 1, 4, 3],
    "max_skip_count": 0,
    "min_gram_length": 1,
    "max_gram_length": 2,
}


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("skips", [0, 1, 3])
@pytest.mark.parametrize("numbers", [False, True])
def test_sequences_of_words_are_counted(mode: str, skips: int, numbers: bool) -> None:
    words = ["red", "big", "blue", "other"]
    given = dict(GRAMS, mode=mode, max_skip_count=skips, ngram_indexes=[0, 1, 2, 3, 4, 5])
    given["weights"] = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    if numbers:
        given["pool_int64s"] = [words.index(word) for word in given.pop("pool_strings")]
    node = onnx.helper.make_node("TfIdfVectorizer", ["x"], ["y"], **given)
    kinds = onnx.TensorProto
    of = kinds.INT64 if numbers else kinds.STRING
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", of, ["n", "c"])],
        [onnx.helper.make_tensor_value_info("y", kinds.FLOAT, ["n", 6])],
    )
    imports = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    drawn = np.random.default_rng(skips).integers(0, 4, (5, 9))
    x = drawn if numbers else np.array(words, object)[drawn]
    reference = theirs.InferenceSession(model, providers=["CPUExecutionProvider"])
    with InferenceSession(from_onnx(model), threads=1) as session:
        for part in (x, x[:, :1]):
            (wanted,) = reference.run(None, {"x": part})
            np.testing.assert_allclose(session.run(part)["y"], wanted, rtol=1e-6)


def test_columns_of_counts_are_where_the_file_says() -> None:
    node = onnx.helper.make_node("TfIdfVectorizer", ["x"], ["y"], mode="TF", **GRAMS)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, ["c"])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [6])],
    )
    imports = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)
    x = texts("red", "big", "red", "red")
    (wanted,) = theirs.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    with InferenceSession(from_onnx(model), threads=1) as session:
        np.testing.assert_array_equal(session.run(x)["y"], wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '(string[n] x) => (bool[n] y) { y = RegexFullMatch<pattern = "(">(x) }',
            r"expression '\(' is not supported",
        ),
        (
            "(string[n] x) => (float[n] y) { y = Cast<to = 1>(x) }",
            "a text that is no float32 found: could not convert string to float: 'red'",
        ),
        (
            "(string[n, m] x) => (string[k] y) { y = StringNormalizer(x) }",
            r"shape \(2, 3\); \(c,\) or \(1, c\) needed",
        ),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    session = InferenceSession(from_onnx(model_of(text)), threads=1)
    with pytest.raises(OnnxError, match=message):
        session.run(WORDS if session.inputs[0].shape[1:] else WORDS[0])


@pytest.mark.parametrize("wrong", [None, 3, b"a"])
def test_texts_have_nothing_else_among_them(wrong: Any) -> None:
    session = InferenceSession(model_of("(string[n] x) => (string[n] y) { y = Identity(x) }"))
    with pytest.raises(DataError, match=f"{type(wrong).__name__} found among texts; str needed"):
        session.run({"x": texts("a", wrong)})


def test_a_check_tells_where_texts_are_read(tmp_path: Any) -> None:
    path = tmp_path / "texts.onnx"
    path.write_bytes(model_of(MODELS["equal"]))
    report = check_onnx(path)
    assert (report.problem, report.unsupported) == (None, ())
    assert report.cuts == ("node 0 (Equal)",)


def test_weights_that_are_text_are_kept_with_a_session() -> None:
    """A file's texts are among its weights, and are not mistaken for others of their shape."""
    text = """(string[n] x) => (string[n] y) <string[1] first = {"a"}, string[1] second = {"b"}> {
        left = StringConcat(first, x)  y = StringConcat(left, second) }"""
    with InferenceSession(from_onnx(model_of(text)), threads=1) as session:
        assert session.run(["1", "2"])["y"].tolist() == ["a1b", "a2b"]
        assert session.run(["3", "4"])["y"].tolist() == ["a3b", "a4b"]


def test_runs_on_texts_are_measured(tmp_path: Any) -> None:
    path = tmp_path / "texts.onnx"
    path.write_bytes(model_of(MODELS["concat"]))
    assert measure(str(path), dims={"n": 2}, runs=3, threads=1).inputs == {"x": "string[2, 3]"}


def test_texts_are_written_where_a_run_is_told() -> None:
    with InferenceSession(from_onnx(model_of(MODELS["concat"])), threads=1) as session:
        into = np.empty(WORDS.shape, object)
        assert session.run(WORDS, out={"y": into})["y"] is into
        np.testing.assert_array_equal(into, WORDS + WORDS)
        with pytest.raises(
            DataError, match=r"out 'y': float32\[2, 3\] found, string\[2, 3\] needed"
        ):
            session.run(WORDS, out={"y": REALS.copy()})


def test_what_needs_a_graph_says_that_texts_have_none(tmp_path: Any) -> None:
    path = tmp_path / "texts.onnx"
    path.write_bytes(model_of(MODELS["concat"]))
    with pytest.raises(UnboundError, match="they are text, which no graph holds"):
        optimize(path, dims={"n": 2})
    model = from_onnx(model_of("(float[n] x) => (string[n] y) { y = Bernoulli<dtype = 8>(x) }"))
    with pytest.raises(OnnxError, match="bool found, string needed"):
        InferenceSession(model, threads=1).run(np.zeros(2, np.float32))


def test_requests_on_texts_are_joined() -> None:
    model = from_onnx(model_of(MODELS["concat"]))
    with InferenceSession(model, threads=1) as session, Batcher(session) as batcher:
        np.testing.assert_array_equal(batcher.run(WORDS)["y"], WORDS + WORDS)


def test_the_command_reads_and_writes_texts(tmp_path: Any) -> None:
    path, given, made = (tmp_path / name for name in ("t.onnx", "x.npz", "y.npz"))
    path.write_bytes(model_of(MODELS["concat"]))
    np.savez(given, x=WORDS.astype(str))
    told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given), "-o", str(made)])
    assert told.exit_code == 0, told.output
    assert "y: string[2, 3]" in told.output
    with np.load(made, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["y"], (WORDS + WORDS).astype(str))
    told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given), "--json"])
    assert json.loads(told.stdout)["outputs"] == {"y": {"dtype": "string", "shape": [2, 3]}}
