"""Malformed and hostile ONNX files end in an OnnxError, within bounded memory and time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from programs.hostile_files import outcomes
from test_onnx_import import model_of

from soapstone import from_onnx
from soapstone.frontend.onnx import OnnxError, build


def refused(model: onnx.ModelProto | bytes, message: str) -> None:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    with pytest.raises(OnnxError, match=message):
        from_onnx(data).graph()


ILLEGAL = {
    "cycle": ("{ a = Relu(y)  y = Relu(a) }", "'y' is not made before it is used"),
    "missing": ("{ y = Add(x, nowhere) }", "'nowhere' is not made before it is used"),
    "twice": ("{ y = Relu(x)  y = Exp(x) }", "output 'y' exists already"),
    "types": ("{ i = Cast<to = 7>(x)  y = Add(x, i) }", "types of inputs differ"),
    "not allowed": ("{ i = Cast<to = 9>(x)  y = Add(i, i) }", "its type is not allowed"),
    "attribute": ("{ y = Relu<alpha = 1.0>(x) }", "attribute 'alpha' does not exist"),
    "attribute's type": ('{ y = LeakyRelu<alpha = "a">(x) }', "has another type than FLOAT"),
    "attribute is missing": ("{ y = Cast(x) }", "attribute 'to' is missing"),
    "inputs": ("{ y = Add(x) }", "1 inputs found, 2 to 2 needed"),
    "outputs": ("{ y, z = Relu(x) }", "2 outputs found"),
    "operator": ("{ y = Reluu(x) }", "operator 'Reluu'.* is not supported"),
    "domain": ("{ y = else.Relu(x) }", "domain 'else' is not imported"),
    "shapes": ("{ w = Transpose(x)  y = Add(x, w) }", "dim d"),
    "output": ("{ z = Relu(x) }", "output 'y' is made by no node"),
    "declared type": ("{ y = Cast<to = 7>(x) }", "output 'y': int64 found, float32 declared"),
    "axis": ("{ y = Softmax<axis = 5>(x) }", "axis 5 found"),
    "index": ("{ i = Constant<value_ints = [0, 9]>()  y = Gather(x, i) }", "index 9 found"),
    "place": (
        "{ i = Constant<value_ints = [0, 9]>()  y = ScatterND(x, i, x) }",
        "index 9 found, -3 to 2 needed",
    ),
    "permutation": ("{ y = Transpose<perm = [0, 0]>(x) }", "each axis below 2 once"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_graphs(name: str) -> None:
    body, message = ILLEGAL[name]
    refused(model_of(f"g (float[2, 3] x) => (float[2, 3] y) {body}"), message)


HUGE = {
    "constant": "s = Constant<value_ints = [1000000, 1000000, 4]>()  y = ConstantOfShape(s)",
    "expand": "s = Constant<value_ints = [1000000000000, 1, 2]>()  y = Expand(x, s)",
    "tile": "s = Constant<value_ints = [1000000000000, 1]>()  y = Tile(x, s)",
    "tiles of tiles": "s = Constant<value_ints = [1000000, 1000]>()  a = Tile(x, s)"
    " b = Tile(a, s)  y = Relu(b)",
    "pad": "s = Constant<value_ints = [1000000000000, 0, 0, 0]>()  y = Pad(x, s)",
    "range": "a = Constant<value_float = 0.0>()  b = Constant<value_float = 1e12>()"
    " c = Constant<value_float = 1.0>()  y = Range(a, b, c)",
    "one hot": "i = Cast<to = 7>(x)  d = Constant<value_int = 1000000000000>()"
    " v = Constant<value_floats = [0.0, 1.0]>()  y = OneHot(i, d, v)",
    "resize": "s = Constant<value_floats = [1e6, 1e6]>()  e = Constant<value_floats = [1.0]>()"
    " y = Resize(x, , s)",
    "one value": "s = Constant<value_ints = [137438953472]>()  c = ConstantOfShape(s)"
    " y = Add(c, c)",
    "folded": "s = Constant<value_ints = [137438953472]>()  c = ConstantOfShape(s)  y = Shape(c)",
    "eye": "s = Constant<value_ints = [100000, 100000]>()  c = ConstantOfShape(s) y = EyeLike(c)",
    "unpooled": "s = Constant<value_ints = [1, 1, 2, 3]>()  r = Reshape(x, s)"
    " m, i = MaxPool<kernel_shape = [1, 1]>(r)"
    " o = Constant<value_ints = [1, 1, 1000000, 1000000]>()"
    " y = MaxUnpool<kernel_shape = [1, 1]>(m, i, o)",
    "crop": "s = Constant<value_ints = [1000000, 1000000]>()  y = CenterCropPad(x, s)",
    "negative": "s = Constant<value_ints = [-3, -4]>()  y = ConstantOfShape(s)",
    "kernel": "s = Constant<value_ints = [1, 1, 2, 3]>()  r = Reshape(x, s)"
    " y = MaxPool<kernel_shape = [99999999999, 2]>(r)",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_shapes(name: str) -> None:
    refused(model_of(f"g (float[2, 3] x) => (float[a, b] y) {{ {HUGE[name]} }}"), "node")


def test_nothing_huge_is_allocated(tmp_path: Path) -> None:
    """In a process of its own with half a gigabyte of address space to spare, and a limit below."""
    for name, body in HUGE.items():
        model = model_of(f"g (float[2, 3] x) => (float[a, b] y) {{ {body} }}")
        onnx.save(model, tmp_path / f"{name}.onnx")
    for name, found in outcomes(tmp_path).items():
        assert found is not None and found[0] in ("OnnxError", "UnsupportedError"), (name, found)
        assert "node" in found[1], found


def test_huge_inputs() -> None:
    refused(model_of("g (float[9999999999999, 9] x) => (float[n] y) { y = Relu(x) }"), "bytes")
    with pytest.raises(OnnxError, match="bytes"):
        from_onnx(model_of("g (float[n] x) => (float[n] y) { y = Relu(x) }")).graph({"n": 1 << 60})
    with pytest.raises(OnnxError, match="n"):
        from_onnx(model_of("g (float[n] x) => (float[n] y) { y = Relu(x) }")).graph({"n": -1})


def test_initializers_that_do_not_fit_their_shape() -> None:
    graph = "g (float[2] x) => (float[2] y) { y = Add(x, w) }"
    for dims in ([1 << 40], [3], [-2], [1 << 62, 1 << 62]):
        model = model_of(graph, w=np.ones(2, np.float32))
        model.graph.initializer[0].dims[:] = dims
        refused(model, "'w'")
    model = model_of(graph, w=np.ones(2, np.float32))
    model.graph.initializer.append(model.graph.initializer[0])
    refused(model, "initializer 'w' exists twice")
    model = model_of(graph)
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0]))
    model.graph.initializer[0].dims[:] = [1 << 50]
    refused(model, "'w'")


def test_functions_that_call_themselves() -> None:
    refused(
        model_of(
            """g (float[2] x) => (float[2] y) { y = own.f(x) }
            <domain: "own", opset_import: ["" : 18, "own" : 1]> f (v) => (r) { r = own.h(v) }
            <domain: "own", opset_import: ["" : 18, "own" : 1]> h (v) => (r) { r = own.f(v) }"""
        ),
        "function 'f' calls itself",
    )


@pytest.mark.parametrize(
    ("count", "calls", "message"),
    [
        (20, "a = own.f{next}(v)  r = own.f{next}(a)", "more than 5000 nodes"),
        (40, "r = own.f{next}(v)", "25 deep"),
    ],
)
def test_functions_that_double_or_nest_at_every_level(
    count: int, calls: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MOST_STEPS", 5000)
    head = '<domain: "own", opset_import: ["" : 18, "own" : 1]>'
    bodies = [*(calls.format(next=i + 1) for i in range(count)), "r = Relu(v)"]
    functions = "\n".join(f"{head} f{i} (v) => (r) {{ {body} }}" for i, body in enumerate(bodies))
    refused(model_of(f"g (float[2] x) => (float[2] y) {{ y = own.f0(x) }} {functions}"), message)


def test_loops_without_end() -> None:
    text = """g (float[2] x) => (float[2] y) { y = Loop( , , x) <body = body
        (int64 i, bool going, float[2] s) => (bool on, float[2] t)
        { on = Identity(going)  t = Relu(s) }> }"""
    refused(model_of(text), "Loop")


def external(change: Callable[[onnx.TensorProto, Path], None], folder: Path) -> Path:
    """Return a model whose weight is outside, after a change to where it says that is."""
    (folder / "model").mkdir()
    path = folder / "model" / "model.onnx"
    model = model_of(
        "g (float[1, 400] x) => (float[1, 400] y) { y = Add(x, w) }",
        w=np.ones((1, 400), np.float32),
    )
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    change(model.graph.initializer[0], folder)
    onnx.save(model, path)
    return path


def located(text: str) -> Callable[[onnx.TensorProto, Path], None]:
    def change(tensor: onnx.TensorProto, folder: Path) -> None:
        entry = next(e for e in tensor.external_data if e.key == "location")
        entry.value = text.format(folder=folder)

    return change


def sized(key: str, value: str) -> Callable[[onnx.TensorProto, Path], None]:
    def change(tensor: onnx.TensorProto, folder: Path) -> None:
        kept = [e for e in tensor.external_data if e.key != key]
        copies = [(e.key, e.value) for e in kept] + [(key, value)]
        del tensor.external_data[:]
        for name, text in copies:
            tensor.external_data.add(key=name, value=text)

    return change


def linked(tensor: onnx.TensorProto, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(1600))
    data = folder / "model" / "w.data"
    data.unlink()
    data.symlink_to(folder / "secret")


@pytest.mark.parametrize(
    "change",
    [
        located("../secret"),
        located("{folder}/secret"),
        located("sub/../../secret"),
        located("nowhere.data"),
        located(""),
        located("."),
        linked,
        sized("offset", "4"),
        sized("offset", "-4"),
        sized("offset", "99999999999999999999"),
        sized("length", "12"),
        sized("length", "١٦٠٠"),
    ],
)
def test_external_data_stays_in_the_folder(
    change: Callable[[onnx.TensorProto, Path], None], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(bytes(1600))
    with pytest.raises(OnnxError, match=r"'w': external data"):
        from_onnx(external(change, tmp_path))


def test_external_data_inside_the_folder_is_read(tmp_path: Path) -> None:
    path = external(lambda tensor, folder: None, tmp_path)
    assert from_onnx(path).weights["w"].sum() == 400
    with pytest.raises(OnnxError, match="give the model's path"):
        from_onnx(path.read_bytes())


def samples() -> list[bytes]:
    weights = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    texts = [
        """g (float[n, 20] x) => (float[n, 30] y) {
            s = Shape(x)  z = MatMul(x, w)  i = Constant<value_ints = [0]>()
            k = Gather(s, i)  m = Constant<value_ints = [-1]>()
            c = Concat<axis = 0>(k, m)  y = Reshape(z, c)
        }""",
        """g (float[1, 1, 20, 30] x) => (float[1, 2, h, v] y) {
            r = Add(x, w)  c = Constant<value = float[2, 1, 2, 2] {1, 2, 3, 4, 5, 6, 7, 8}>()
            p = Conv<pads = [1, 0, 1, 0], strides = [2, 2]>(r, c)
            y = MaxPool<kernel_shape = [2, 2], ceil_mode = 1>(p)
        }""",
    ]
    return [model_of(text, w=weights).SerializeToString() for text in texts]


def survive(data: bytes) -> None:
    """Import what is left of a model: it works, or an OnnxError says why not."""
    try:
        model = from_onnx(data)
        model.graph(dict.fromkeys(model.symbolic, 2))
    except OnnxError:
        pass


@pytest.mark.parametrize("number", range(2))
def test_truncated_files(number: int) -> None:
    data = samples()[number]
    for length in [*range(0, min(len(data), 700), 7), *range(0, len(data), 151)]:
        survive(data[:length])


@pytest.mark.parametrize("number", range(2))
def test_mutated_files(number: int) -> None:
    generator = np.random.default_rng(number)
    original = samples()[number]
    structure = [i for i in range(len(original)) if i < 600 or i > len(original) - 200]
    for _ in range(600):
        data = bytearray(original)
        for place in generator.choice(structure, generator.integers(1, 4)):
            data[place] = generator.integers(256)
        survive(bytes(data))
