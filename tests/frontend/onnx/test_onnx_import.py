"""Imported models: names, symbolic dims, folding, functions, control flow, torch's exports."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper, parser

from soapstone import InferenceSession, from_onnx
from soapstone.cache.places import root
from soapstone.frontend.onnx import OnnxError, OnnxModel, UnboundError, UnsupportedError
from soapstone.frontend.onnx.check import check_onnx
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role
from soapstone.native.arrays import mapping
from soapstone.native.files import MappedFile


def model_of(text: str, opset: int = 18, **weights: Array) -> onnx.ModelProto:
    """Return the model of a graph in ONNX's text form, with these initializers."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]>'
    model = parser.parse_model(f"{head} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return model


def run(model: OnnxModel, feeds: Mapping[str, Array]) -> dict[str, Array]:
    graph, _ = model.graph_for(feeds)
    weights = model.weights
    values = {n: feeds[n] if n in feeds else weights[n] for n in graph.roles}
    return interpret(graph, values)


def reals(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def equal_runtime(model: onnx.ModelProto, feeds: Mapping[str, Array], atol: float = 1e-4) -> None:
    """Check every output against ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [value.name for value in model.graph.output]
    made = run(from_onnx(model.SerializeToString()), feeds)
    for name, wanted in zip(names, session.run(names, dict(feeds))):
        assert made[name].dtype == wanted.dtype
        np.testing.assert_allclose(made[name], wanted, rtol=1e-3, atol=atol)


def test_an_output_whose_rank_a_file_leaves_out_is_shown_so() -> None:
    ends = helper.make_tensor_value_info("x", 1, ["n", 2]), helper.make_empty_tensor_value_info("y")
    ends[1].type.tensor_type.elem_type = 1
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert [str(each) for each in (*model.inputs, *model.outputs)] == [
        "x: float32[n, 2]",
        "y: float32[...]",
    ]


def test_names_roles_and_symbolic_dims() -> None:
    model = model_of(
        "g (float[batch, 3] x, float[batch, t] z) => (float[batch, 2] y) "
        "{ m = MatMul(x, w)  y = Add(m, b) }",
        w=reals(3, 2),
        b=reals(2),
    )
    found = from_onnx(model.SerializeToString())
    assert [str(v) for v in found.inputs] == ["x: float32[batch, 3]", "z: float32[batch, t]"]
    assert found.symbolic == ("batch", "t")
    assert found.opset == 18
    with pytest.raises(UnboundError, match="input 'x': axis 0 is the symbolic dim 'batch'"):
        found.graph()
    for batch in (1, 4):
        graph = found.graph({"batch": batch, "t": 5})
        assert graph.tensors["y"].shape == (batch, 2)
        assert graph.inputs(Role.INPUT) == ("x", "z")
        assert graph.inputs(Role.PARAMETER) == ("w", "b")
        assert graph.outputs == ("y",)
    with pytest.raises(OnnxError, match=r"input 'z': axis 0 is 3; 2 needed \(batch\)$"):
        found.bind({"x": (2, 3), "z": (3, 5)})
    with pytest.raises(OnnxError, match=r"input 'x': axis 1 is 4; 3 needed$"):
        found.bind({"x": (2, 4), "z": (2, 1)})
    with pytest.raises(OnnxError, match="'rows' found; symbolic dims are batch, t"):
        from_onnx(model, dims={"rows": 3})
    assert from_onnx(model, dims={"t": 5}).graph({"batch": 2}).tensors["z"].shape == (2, 5)


def test_weights_are_views_of_the_file(tmp_path: Path) -> None:
    big = reals(300, 400)
    model = model_of("g (float[n, 300] x) => (float[n, 400] y) { y = MatMul(x, w) }", w=big)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = from_onnx(path)
    weight = found.weights["w"]
    np.testing.assert_array_equal(weight, big)
    assert not weight.flags.owndata and not weight.flags.writeable
    assert isinstance(mapping(weight), MappedFile)


def test_a_file_that_is_written_to_meanwhile_is_an_error(tmp_path: Path) -> None:
    """Weights are read when a shape is bound; a file that takes another's place changes nothing."""
    path, x = tmp_path / "model.onnx", reals(2, 3)

    def model(factor: float) -> bytes:
        text = "g (float[n, 3] x) => (float[n, 3] y) { y = Mul(x, w) }"
        return bytes(model_of(text, w=np.full(3, factor, np.float32)).SerializeToString())

    path.write_bytes(model(2.0))
    with InferenceSession(path) as session:
        (tmp_path / "other").write_bytes(model(3.0))
        os.replace(tmp_path / "other", path)
        np.testing.assert_array_equal(session.run(x)["y"], 2 * x)
    with InferenceSession(path) as session:
        path.write_bytes(model(4.0))
        os.utime(path, ns=(0, 0))
        with pytest.raises(OnnxError, match=r"model\.onnx.*written to after it was opened"):
            session.run(x)


_TABLE = """
import os, sys
import numpy as np
from soapstone import InferenceSession
ids = np.full(3, 4999)
with InferenceSession("table.onnx") as session:
    session.run(ids)
    os.truncate("table.onnx", 100)
    for other in (ids, np.append(ids, 1)):
        try:
            session.run(other)
        except ValueError as error:
            print(error)
"""


def test_a_table_that_a_run_reads_in_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    """Rows of a table are read where they lie: of pages that are gone, which ends a process."""
    path, settings = tmp_path / "table.onnx", {"SOAPSTONE_CACHE": str(tmp_path / "cache")}
    text = "g (int64[n] ids) => (float[n, 8] y) { y = Gather(w, ids) }"
    whole = bytes(model_of(text, w=reals(5000, 8)).SerializeToString())
    for _ in range(2):  # the second process may answer from what the first has bound and kept
        path.write_bytes(whole)
        os.utime(path, ns=(0, 0))
        done = subprocess.run(
            [sys.executable, "-c", _TABLE],
            cwd=tmp_path,
            env={**os.environ, "NUMBA_CACHE_DIR": str(root()), **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        said = "table.onnx': it was written to after it was opened"
        assert done.stdout.count(said) == 2


def test_chains_that_compute_shapes_leave_nothing() -> None:
    model = model_of(
        """g (float[n, c, h] x) => (float[a, b] y) {
            s = Shape(x)
            zero = Constant<value_ints = [0]>()
            one = Constant<value_ints = [1]>()
            n = Gather(s, zero)
            rest = Constant<value_ints = [-1]>()
            shape = Concat<axis = 0>(n, rest)
            r = Reshape(x, shape)
            ones = ConstantOfShape<value = int64[1] {1}>(one)
            same = Equal(ones, one)
            twice = Add(n, n)
            pick = Where(same, n, twice)
            wide = Concat<axis = 0>(pick, one)
            e = Expand(r, wide)
            y = Relu(e)
        }"""
    )
    found = from_onnx(model.SerializeToString())
    graph = found.graph({"n": 2, "c": 3, "h": 4})
    assert [node.operator for node in graph.nodes] == ["reshape", "relu"]
    assert not graph.inputs(Role.STATE)
    equal_runtime(model, {"x": reals(2, 3, 4)})


_MASKED = """masked (float[n, 4] x) => (float[n, 4] y)
{ shape = Shape<start = 0, end = 1>(x)  square = Concat<axis = 0>(shape, shape)
  ones = ConstantOfShape<value = float[1] {1.0}>(square)  mask = Trilu<upper = 0>(ones)
  y = MatMul(mask, x) }"""


def test_constants_of_the_graphs_built_last_are_kept_and_those_that_somebody_has() -> None:
    model = from_onnx(model_of(_MASKED).SerializeToString())
    first = model.weights | {}
    graphs = [model.graph({"n": rows}) for rows in range(2, 5)]
    held = model.weights
    graphs += [model.graph({"n": rows}) for rows in range(5, 160)]
    names = [name for graph in graphs for name in graph.inputs(Role.PARAMETER)]
    assert len(set(names)) == len(graphs)  # none is another's, kept or not
    kept = model.weights
    assert not first and kept.keys() == {*names[:3], *names[-64:]} and len(held) == 3
    for rows, name in zip((2, 3, 4, 159), (*names[:3], names[-1])):
        np.testing.assert_array_equal(kept[name], np.tri(rows, dtype=np.float32))
    assert model.graph({"n": 3}).inputs(Role.PARAMETER) == (names[1],)


def test_a_session_keeps_few_constants_of_the_shapes_it_was_asked_for() -> None:
    model = from_onnx(model_of(_MASKED).SerializeToString())
    with InferenceSession(model, threads=1, bound_shapes=2) as session:
        for rows in (*range(2, 130), *range(2, 6)):
            x = reals(rows, 4, seed=rows)
            found = session.run(x)["y"]
            np.testing.assert_allclose(found, np.tri(rows) @ x, atol=1e-4)
        assert len(model.weights) < 80


def test_shapes_from_an_input_are_for_its_contents() -> None:
    model = model_of("g (float[6] x, int64[2] shape) => (float[a, b] y) { y = Reshape(x, shape) }")
    found = from_onnx(model.SerializeToString())
    with pytest.raises(UnboundError, match="'shape' must be known") as caught:
        found.graph()
    assert caught.value.inputs == ("shape",)
    feeds = {"x": reals(6), "shape": np.array([2, -1])}
    graph, contents = found.graph_for(feeds)
    assert graph.tensors["y"].shape == (2, 3)
    assert list(contents) == ["shape"]
    with pytest.raises(UnboundError, match="depend on input 'x'"):
        run(
            from_onnx(model_of("g (float[2,2] x) => (int64[a, b] y) { y = NonZero(x) }")),
            {"x": reals(2, 2)},
        )


def test_gemm_with_all_its_attributes() -> None:
    for index, (ta, tb) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        a = "4, 3" if ta else "3, 4"
        shape = (5, 4) if tb else (4, 5)
        model = model_of(
            f"g (float[{a}] a, float[3, 1] c) => (float[3, 5] y) "
            f"{{ y = Gemm<alpha = 0.5, beta = 2.0, transA = {ta}, transB = {tb}>(a, w, c) }}",
            w=reals(*shape, seed=index),
        )
        feeds = {"a": reals(*((4, 3) if ta else (3, 4))), "c": reals(3, 1)}
        equal_runtime(model, feeds)


@pytest.mark.parametrize("auto", ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
def test_convolutions_pad_as_they_say(auto: str) -> None:
    pads = "pads = [1, 0, 2, 1]," if auto == "NOTSET" else ""
    model = model_of(
        f"""g (float[2, 4, 9, 7] x) => (float[n, c, h, w] y, float[n, d, i, j] z) {{
            y = Conv<auto_pad = "{auto}", {pads} strides = [2, 1], group = 2>(x, k, b)
            z = ConvTranspose<auto_pad = "{auto}", {pads} strides = [2, 3],
                output_padding = [1, 0]>(x, t)
        }}""",
        k=reals(6, 2, 3, 2),
        b=reals(6),
        t=reals(4, 3, 3, 4),
    )
    equal_runtime(model, {"x": reals(2, 4, 9, 7)})


def test_pooling_rounds_up_where_asked() -> None:
    model = model_of(
        """g (float[1, 2, 7, 8] x) => (float[n, c, h, w] a, float[n, c, i, j] b) {
            a = MaxPool<kernel_shape = [3, 2], strides = [2, 3], ceil_mode = 1>(x)
            b = AveragePool<kernel_shape = [3, 2], strides = [2, 3], ceil_mode = 1,
                pads = [1, 0, 1, 1], count_include_pad = 1>(x)
        }"""
    )
    equal_runtime(model, {"x": reals(1, 2, 7, 8)})


@pytest.mark.parametrize("size", [(1, 3, 4, 5), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("corners", [0, 1])
def test_grids_of_affine_maps(size: tuple[int, ...], corners: int) -> None:
    count = len(size) - 2
    dims = ", ".join("abcde"[: len(size)])
    model = model_of(
        f"g (float[{size[0]}, {count}, {count + 1}] t) => (float[{dims}] y) "
        f"{{ y = AffineGrid<align_corners = {corners}>(t, s) }}",
        opset=20,
        s=np.array(size),
    )
    equal_runtime(model, {"t": reals(size[0], count, count + 1)})


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_in_both_directions(kind: str) -> None:
    gates, states = {"LSTM": (4, 2), "GRU": (3, 1), "RNN": (1, 1)}[kind]
    outputs = ", ".join(["y", "h", "c"][: 1 + states])
    results = ", ".join(f"float[a{n}, b{n}, d{n}] {n}" for n in ("h", "c")[:states])
    extra = "linear_before_reset = 1," if kind == "GRU" else ""
    model = model_of(
        f"g (float[5, 2, 3] x) => (float[t, k, n, h4] y, {results}) {{ "
        f'{outputs} = {kind}<hidden_size = 4, {extra} direction = "bidirectional">'
        "(x, w, r, b) }",
        w=reals(2, gates * 4, 3),
        r=reals(2, gates * 4, 4, seed=1),
        b=reals(2, gates * 8, seed=2),
    )
    equal_runtime(model, {"x": reals(5, 2, 3)})


def test_control_flow_is_taken_or_unrolled() -> None:
    model = model_of(
        """g (float[2] x, bool flag) => (float[2] last, float[3, 2] rows, float[2] chosen) {
            last, rows = Loop(trips, , x) <body = body (int64 i, bool going, float[2] s)
                => (bool on, float[2] twice, float[2] row) {
                    twice = Add(s, s)  on = Identity(going)  row = Identity(twice) }>
            chosen = If(flag) <then_branch = yes () => (float[2] minus) { minus = Neg(x) },
                else_branch = no () => (float[2] power) { power = Exp(x) }>
        }""",
        trips=np.array(3),
    )
    for flag in (True, False):
        equal_runtime(model, {"x": reals(2), "flag": np.array(flag)})


def test_functions_are_expanded_where_they_are_called() -> None:
    model = model_of(
        """g (float[n, 4] x) => (float[n, 4] y) {
            a = own.scaled<by = 3.0>(x)
            y = own.scaled(a)
        }
        <domain: "own", opset_import: ["" : 18]>
        scaled <by: float = 2.0> (v) => (r) {
            k = Constant<value_float: float = @by>()
            r = Mul(v, k)
        }"""
    )
    made = run(from_onnx(model.SerializeToString()), {"x": np.ones((2, 4), np.float32)})
    np.testing.assert_allclose(made["y"], np.full((2, 4), 6.0))


class Encoder(torch.nn.Module):
    """An embedding, a transformer's layer, an LSTM and a classifier, with shapes computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.lstm = torch.nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.gru = torch.nn.GRU(24, 8, batch_first=True)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + torch.arange(ids.shape[1], device=ids.device)[None, :, None] * 0.01
        x = self.layer(x)
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        x = x.view(ids.shape[0], -1, 2, 4).transpose(1, 2).flatten(2).mean(1)
        return self.out(x[:, :8])


class Vision(torch.nn.Module):
    """What convolutional networks have besides convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding="same", dilation=2)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.up = torch.nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)
        self.instance = torch.nn.InstanceNorm2d(4, affine=True)
        self.pool = torch.nn.AvgPool2d(5, 3, 1, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.hardswish(self.norm(self.first(x)))
        y = torch.nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear")
        y = self.instance(self.up(y)).clamp(-1, 2)
        y = torch.nn.functional.pad(y, (1, 2, 0, 1), mode="reflect")
        parts = torch.cat([y[:, :2, 0:48:2], y[:, 2:, 1:49:2]], 1)
        return self.pool(parts[:, :, :24, :24]).flatten(1)


@pytest.mark.parametrize("name", ["Encoder", "Vision"])
def test_models_that_torch_exports(name: str) -> None:
    torch.manual_seed(0)
    net = {"Encoder": Encoder, "Vision": Vision}[name]().eval()
    if name == "Encoder":
        example, axes = torch.randint(0, 50, (2, 7)), {0: "batch"}
        others = [torch.randint(0, 50, (3, 7))]  # torch writes the attention for one length
    else:
        example, axes = torch.randn(2, 3, 12, 10), {0: "batch"}
        others = [torch.randn(3, 3, 12, 10)]
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (example,),
            stream,
            dynamo=False,
            opset_version=17,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": axes},
        )
    model = from_onnx(stream.getvalue())
    for x in [example, *others]:
        with torch.no_grad():
            wanted = net(x).numpy()
        made = run(model, {"x": x.numpy()})
        np.testing.assert_allclose(made["y"], wanted, rtol=1e-3, atol=1e-4)


def test_what_is_not_supported_is_named() -> None:
    texts = {
        "g (uint8[2] x) => (uint8[a, b, c] y) { y = ImageDecoder(x) }": r"node 0 \(ImageDecoder\)",
        "g (complex64[2] x) => (complex64[2] y) { y = Neg(x) }": "input 'x': type complex64",
        "g (float[2] x) => (float[2] y) { y = own.thing(x) }": "operator 'thing' of domain 'own'",
        "g (int32[1, 2] x) => (int32[1, 9] y) { y = com.microsoft.GreedySearch(x) }": (
            "'GreedySearch' of .* it searches with a decoder .* `InferenceSession.generate` finds"
        ),
    }
    for text, message in texts.items():
        with pytest.raises(UnsupportedError, match=message):
            from_onnx(model_of(text, 20)).graph()


def test_all_operators_that_are_not_supported_are_named_at_once() -> None:
    body = "a = own.one(x)  b = ImageDecoder(a)"
    numbers = f"g (float[2] x) => (float[2] y) {{ {body}  y = own.two(b) }}"
    texts = f"g (string[2] t) => (float[2] y) {{ x = Cast<to = 1>(t) {body}  y = own.two(b) }}"
    message = (
        "operator 'one' of domain 'own', opset 1 is not supported, nor are ImageDecoder, own.two;"
    )
    with pytest.raises(UnsupportedError, match=message):
        from_onnx(model_of(numbers, 20)).graph()
    with pytest.raises(UnsupportedError, match=message):
        InferenceSession(from_onnx(model_of(texts, 20)), threads=1).run(["1", "2"])


def test_check_says_supported_of_what_sessions_run(tmp_path: Path) -> None:
    """A shape that comes as an input is known when a session runs."""
    text = "g (float[2, 6] x, int64[2] shape) => (float[a, b] y) { y = Reshape(x, shape) }"
    path = tmp_path / "reshape.onnx"
    onnx.save(model_of(text), path)
    report = check_onnx(path)
    assert report.problem is None and report.contents == ("shape",)
    assert "depend on the contents of shape" in str(report)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    found = InferenceSession(path).run({"x": x, "shape": np.array([3, 4])})["y"]
    np.testing.assert_array_equal(found, x.reshape(3, 4))


def test_what_is_no_file_is_named() -> None:
    with pytest.raises(OnnxError, match="empty; an ONNX model needed"):
        from_onnx(b"")
    with pytest.raises(OnnxError, match="model: int found; a path, the bytes"):
        from_onnx(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("axes", "count"), [("n, m", 2), ("n, 3", 2), ("2, 3", 0)])
def test_of_a_model_for_one_shape_alone_nothing_is_noted_of_extents(axes: str, count: int) -> None:
    text = f"g (float[{axes}] x) => (float[{axes}] y) {{ s = Shape (x) e = Equal (s, k)"
    text += " w = Cast <to = 1> (e) y = Mul (x, one) z = Mul (w, w) }"
    model = model_of(text, k=np.array([2, 5]), one=reals(1))
    _, _, notes = from_onnx(model.SerializeToString()).noted_for({"x": reals(2, 3)})
    assert sum(len(note.several) for note in notes) == count
