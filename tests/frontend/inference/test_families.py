"""Graphs for new shapes out of those for others: answers are those of sessions of their own."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from helpers.session_runs import fresh_answers

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.purpose import Purpose
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import Family
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.standard_normal((8, 8)).astype(np.float32),
    "table": RANDOM.standard_normal((32, 8)).astype(np.float32),
    "filters": RANDOM.standard_normal((8, 3, 3, 3)).astype(np.float32),
    "thin": RANDOM.standard_normal((4, 3, 2, 2)).astype(np.float32),
    "mix": RANDOM.standard_normal((8, 3)).astype(np.float32),
    "deeper": RANDOM.standard_normal((8, 8, 3, 3)).astype(np.float32),
    "spatial": np.array([2, 3]),
    "token": RANDOM.standard_normal((1, 1, 8)).astype(np.float32),
    "seven": RANDOM.standard_normal((7, 8)).astype(np.float32),
    **{f"i{n}".replace("-", "m"): np.array(n) for n in (-1, 0, 1, 2, 6)},
    **{f"v{n}".replace("-", "m"): np.array([n]) for n in (-1, 0, 1, 2, 3, 4, 6, 8)},
}
LENGTH = "s = Shape(x)  t = Gather(s, i1)  tv = Unsqueeze(t, v0)  "
IMAGE = "float[n, 3, h, w0] x"


def model_of(body: str, given: str = "float[n, t, 8] x", made: str = "float[n, a, b] y") -> bytes:
    text = f'<ir_version: 9, opset_import: ["" : 18]>\ng ({given}) => ({made})\n{{ {body} }}'
    proto = onnx.parser.parse_model(text)
    kept = [onnx.numpy_helper.from_array(array, n) for n, array in WEIGHTS.items() if n in body]
    proto.graph.initializer.extend(kept)
    model: bytes = proto.SerializeToString()
    return model


# What depends on extents by shapes alone, and how many graphs are made of it at most.
EVEN = {
    "attention": model_of(
        LENGTH
        + """n = Gather(s, i0)  nv = Unsqueeze(n, v0)  d = Gather(s, i2)  real = Cast<to = 1>(d)
        root = Sqrt(real)  p = Slice(table, v0, tv, v0)  placed = Add(x, p)  h = MatMul(placed, w)
        two = Constant<value_ints = [2, 4]>()  shape = Concat<axis = 0>(nv, tv, two)
        q = Reshape(h, shape)  k = Transpose<perm = [0, 2, 1, 3]>(q)
        kt = Transpose<perm = [0, 1, 3, 2]>(k)  met = MatMul(k, kt)  scaled = Div(met, root)
        r = Range(i0, t, i1)  column = Unsqueeze(r, v1)  hidden = Less(column, r)
        low = Constant<value_float = -1000.0>()  masked = Where(hidden, low, scaled)
        share = Softmax<axis = -1>(masked)  mixed = MatMul(share, k)
        back = Transpose<perm = [0, 2, 1, 3]>(mixed)  last = Concat<axis = 0>(nv, tv, vm1)
        y = Reshape(back, last)"""
    ),
    "heads": model_of(
        LENGTH
        + """n = Gather(s, i0)  nv = Unsqueeze(n, v0)  h = MatMul(x, w)
        two = Constant<value_ints = [2, -1]>()  shape = Concat<axis = 0>(nv, tv, two)
        q = Reshape(h, shape)  k = Transpose<perm = [0, 2, 1, 3]>(q)  of = Shape(k)
        d = Slice(of, vm1, v6)  real = Cast<to = 1>(d)  root = Sqrt(real)
        scaled = Div(k, root)  met = ReduceSum<keepdims = 0>(scaled, v1)  y = Relu(met)""",
        made="float[n, a, b] y",
    ),
    "joined": model_of(
        """s = Shape<start = 0, end = 1>(x)  shape = Concat<axis = 0>(s, v1, v8)
        first = Expand(token, shape)  j = Concat<axis = 1>(first, x)  h = MatMul(j, w)
        f = Gather<axis = 1>(h, i0)  g = Relu(h)  m = ReduceMean<keepdims = 1>(g, v1)
        u = Unsqueeze(f, v1)  y = Add(m, u)"""
    ),
    "image": model_of(
        """a = Conv<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x, filters)
        r = Relu(a)  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
        g = GlobalAveragePool(p)  f = Flatten(g)  h = MatMul(f, w)  y = Unsqueeze(h, v1)""",
        IMAGE,
    ),
    "declared": model_of("c = CumSum(x, i1)  m = LRN<size = 3>(c)  y = MatMul(m, w)"),
}
# What goes by extents otherwise: thresholds, halves, ends.
UNEVEN = {
    "least": model_of(LENGTH + "m = Min(tv, v6)  p = Slice(x, v0, m, v1)  y = MatMul(p, w)"),
    "least as a number": model_of(
        LENGTH + "m = Min(tv, v6)  f = Cast<to = 1>(m)  h = Div(x, f)  y = MatMul(h, w)"
    ),
    "half": model_of(LENGTH + "m = Div(tv, v2)  p = Slice(x, v0, m, v1)  y = MatMul(p, w)"),
    "even part": model_of(
        LENGTH + "m = Div(tv, v2)  e = Mul(m, v2)  p = Slice(x, v0, e, v1)  y = MatMul(p, w)"
    ),
    "at most six": model_of("p = Slice(x, v0, v6, v1)  y = MatMul(p, w)"),
    "the last": model_of("p = Slice(x, vm1, v8, v1)  y = MatMul(p, w)"),
    "all but one": model_of("p = Slice(x, v0, vm1, v1)  y = MatMul(p, w)"),
    "one by length": model_of(LENGTH + "f = Cast<to = 1>(t)  h = Div(x, f)  y = MatMul(h, w)"),
    "backwards": model_of(
        LENGTH
        + """last = Sub(t, i1)  r = Range(i0, t, i1)  b = Sub(last, r)  p = Gather(table, b)
        h = Add(x, p)  y = MatMul(h, w)"""
    ),
    "a branch": model_of(
        LENGTH
        + """more = Greater(t, i6)  h = If(more) <then_branch = a () => (float[n, t, 8] l)
        { l = MatMul(x, w) }, else_branch = b () => (float[n, t, 8] o) { o = Relu(x) }>
        y = Tanh(h)"""
    ),
    "padded to blocks": model_of(
        LENGTH
        + """short = Mod(tv, v4)  need = Sub(v4, short)  rest = Mod(need, v4)
        pads = Concat<axis = 0>(v0, v0, v0, v0, rest, v0)  p = Pad(x, pads)
        y = MatMul(p, w)"""
    ),
    "squares": model_of(
        LENGTH
        + """square = Mul(tv, tv)  one = Concat<axis = 0>(square, v8)  f = Expand(token, one)
        y = MatMul(f, w)"""
    ),
    "as large": model_of(
        """a = Conv<auto_pad = "SAME_UPPER", strides = [2, 2], kernel_shape = [3, 3]>(x, filters)
        r = Relu(a)  y = ReduceMean<keepdims = 0>(r, v1)""",
        IMAGE,
    ),
    "rounded up": model_of(
        """p = AveragePool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(x)
        y = ReduceMean<keepdims = 0>(p, v1)""",
        IMAGE,
    ),
    "enlarged": model_of(
        """f = Constant<value_floats = [1.0, 1.0, 1.5, 1.5]>()  p = Resize<mode = "nearest">(x, , f)
        y = ReduceMean<keepdims = 0>(p, v1)""",
        IMAGE,
    ),
}


# Extents that follow in steps from those of inputs, and ends of ranges and constants that do: two
# lengths may have them in common, or lie on a line that a third is not on.
STEPS = (
    "c = Transpose<perm = [0, 2, 1]>(x)  p = AveragePool<kernel_shape = [2], strides = [2]>(c)  "
)
PLACE = LENGTH + "one = Slice(x, v0, v1, v1)  "
BENT = {
    "mean behind strides": STEPS
    + """s = Shape(p)  t = Gather(s, i2)  f = Cast<to = 1>(t)  a = ReduceSum<keepdims = 1>(p, v2)
    y = Div(a, f)""",
    "range behind strides": STEPS
    + """s = Shape(p)  t = Gather(s, i2)  r = Range(i0, t, i1)  f = Cast<to = 1>(r)
    a = ReduceMean(f)  y = Mul(p, a)""",
    "expanded behind strides": STEPS
    + """s = Shape(p)  a = ReduceMean<keepdims = 1>(x, v1)  u = ReduceMean<keepdims = 1>(a, v2)
    y = Expand(u, s)""",
    "sliced behind strides": STEPS + "y = Slice(p, v1, v4, v2)",
    "the last behind strides": STEPS + "g = Gather<axis = 2>(p, im1)  y = Unsqueeze(g, v1)",
    "as large behind strides": STEPS
    + 'y = MaxPool<auto_pad = "SAME_UPPER", kernel_shape = [3], strides = [2]>(p)',
    "every second": PLACE + "r = Range(i0, t, i2)  y = Gather<axis = 1>(x, r)",
    "from six": PLACE
    + """r = Range(i6, t, i1)  f = Cast<to = 1>(r)  a = ReduceSum<keepdims = 0>(f)
    y = Add(one, a)""",
    "at most all rows": PLACE
    + """p = Slice(seven, v0, tv, v0)  a = ReduceSum<keepdims = 0>(p)  y = Add(one, a)""",
    "every second row": PLACE
    + """p = Slice(table, v0, tv, v0, v2)  a = ReduceSum<keepdims = 0>(p)  y = Add(one, a)""",
    "sum of what is filled": LENGTH
    + """f = ConstantOfShape<value = float[1] {0.5}>(tv)  a = ReduceSum<keepdims = 0>(f)
    h = MatMul(x, w)  y = Add(h, a)""",
    "part of a range": PLACE
    + """r = Range(i0, t, i1)  f = Cast<to = 1>(r)  p = Slice(f, v0, v6, v0)
    a = ReduceSum<keepdims = 0>(p)  y = Add(one, a)""",
    "difference": LENGTH
    + "n = Gather(s, i0)  d = Sub(t, n)  f = Cast<to = 1>(d)  h = Add(x, f)  y = MatMul(h, w)",
    "one step is left": """c = Transpose<perm = [0, 2, 1]>(x)  p = MaxPool<kernel_shape = [3]>(c)
    q = Squeeze(p)  t = Shape(q)  d = Cast<to = 1>(t)  a = ReduceSum<keepdims = 0>(d)
    o = Add(p, a)  y = Relu(o)""",
}
# Parts that are cut of what is as long as the inputs: known between two lengths.
CUT = {
    "neighbours": LENGTH
    + """r = Range(i0, t, i1)  far = Constant<value_ints = [9223372036854775807]>()
    before = Slice(r, v0, vm1, v0)  after = Slice(r, v1, far, v0)  d = Sub(after, before)
    all = Concat<axis = 0>(v1, d)  c = CumSum(all, i0)  f = Cast<to = 1>(c)
    none = Mul(r, i0)  first = Unsqueeze(none, v1)  g = GatherND(f, first)  k = Add(f, g)
    column = Unsqueeze(k, v1)  h = Add(x, column)  y = MatMul(h, w)""",
    "as many of one more": LENGTH
    + """more = Add(t, i1)  r = Range(i0, more, i1)  f = Cast<to = 1>(r)  p = Slice(f, v0, tv, v0)
    column = Unsqueeze(p, v1)  h = Add(x, column)  y = MatMul(h, w)""",
    "four of a range": PLACE
    + """r = Range(i0, t, i1)  f = Cast<to = 1>(r)  p = Slice(f, v4, v8, v0)
    a = ReduceSum<keepdims = 0>(p)  y = Add(one, a)""",
}
BENT |= CUT
# Contents that go along extents, by which a translation goes: the same between some lengths.
LEAST = PLACE + "r = Range(i0, t, i1)  m = Min(r, i6)  "
TOLD = {
    "a range as long as the most": LEAST
    + """n = ReduceMax<keepdims = 0>(m)  u = Range(i0, n, i1)  f = Cast<to = 1>(u)
    a = ReduceSum<keepdims = 0>(f)  y = Add(one, a)""",
    "the place of the most": LEAST
    + """n = ReduceMax<keepdims = 0>(m)  g = Gather<axis = 1>(x, n)  h = MatMul(g, w)
    y = Unsqueeze(h, v1)""",
    "times the most": LEAST
    + "n = ReduceMax<keepdims = 0>(m)  f = Cast<to = 1>(n)  h = Mul(x, f)  y = Relu(h)",
    "all in order": LEAST + "g = Gather<axis = 1>(x, m)  y = MatMul(g, w)",
}
BENT |= TOLD
UNEVEN |= {name: model_of(body) for name, body in BENT.items()}


def arrays(session: InferenceSession, *extents: int) -> dict[str, Array]:
    known = dict(
        zip(dict.fromkeys(d for d in session.inputs[0].shape if isinstance(d, str)), extents)
    )
    shape = [known.get(dim, dim) for dim in session.inputs[0].shape]  # type: ignore[arg-type]
    return {"x": RANDOM.standard_normal(shape).astype(np.float32)}  # type: ignore[arg-type]


def graphs_made(session: InferenceSession) -> list[object]:
    """The shapes of inputs that a session's model is translated for from now on."""
    session.serial.binder.packed.warmup.close()  # see test_shape_warmup.py
    made: list[object] = []
    noted = session._source.noted

    def told(given: dict[str, Array], purpose: Purpose) -> object:
        made.append({name: array.shape for name, array in given.items()})
        return noted(given, purpose)

    object.__setattr__(session._source, "noted", told)
    return made


@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
def test_random_shapes_are_answered_as_by_a_session_of_their_own(name: str) -> None:
    model = {**EVEN, **UNEVEN}[name]
    random = np.random.default_rng(5)
    with InferenceSession(from_onnx(model), threads=1, bound_shapes=3, tune=False) as session:
        made = graphs_made(session)
        count = 16
        rank = len(session.inputs[0].shape)
        for _ in range(count):
            low, high = (5, 24) if rank == 4 or name in BENT else (1, 14)
            rows, *extents = (int(random.integers(1, 4)), *random.integers(low, high, 2).tolist())
            feeds = arrays(session, rows, *extents)
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            found = session.run(feeds)["y"]
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
            assert len(session.serial.bounds.held) <= 3
        assert len(made) < count or name in UNEVEN


@pytest.mark.parametrize("name", BENT)
def test_lengths_after_one_another(name: str) -> None:
    """Neighbours have most in common."""
    with InferenceSession(from_onnx(UNEVEN[name]), threads=1, tune=False) as session:
        for length in (13, 12, 11, 6, 5, 4, 3, 16):
            feeds = arrays(session, 2, length)
            expected = fresh_answers(from_onnx(UNEVEN[name]), feeds)["y"]
            found = session.run(feeds)["y"]
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lengths", [(7, 6, 5, 4, 16), (16, 15, 13, 12, 4)])
@pytest.mark.parametrize("name", TOLD)
def test_contents_that_are_the_same_for_some_lengths(name: str, lengths: tuple[int, ...]) -> None:
    with InferenceSession(from_onnx(UNEVEN[name]), threads=1, tune=False) as session:
        graphs_made(session)
        for length in lengths:
            feeds = arrays(session, 2, length)
            found = session.run(feeds)["y"]
    with InferenceSession(from_onnx(UNEVEN[name]), threads=1, tune=False) as fresh:
        np.testing.assert_allclose(found, fresh.run(feeds)["y"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CUT)
def test_parts_that_are_cut_are_known_where_they_lie_alike(name: str) -> None:
    """Within what they are cut of, or not: whatever the lengths of the graphs were."""
    with InferenceSession(from_onnx(UNEVEN[name]), threads=1, tune=False) as session:
        made = graphs_made(session)
        for length in (31, 9, 12, 20, 10, 30, 8):
            session.run(arrays(session, 2, length))
        assert len(made) == 3
        feeds = arrays(session, 2, 7)
        found = session.run(feeds)["y"]
        assert len(made) == (4 if name == "four of a range" else 3)
    expected = fresh_answers(from_onnx(UNEVEN[name]), feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heights", [(14, 10, 8, 12, 7), (9, 13, 21, 11, 8)])
def test_extents_that_are_equal_for_even_ones_alone(heights: tuple[int, ...]) -> None:
    """Twice the half of a height, rounded up, is the height, or one more."""
    body = """a = Conv<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x, filters)
    f = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>()
    u = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
    nearest_mode = "floor">(a, , f)  y = ReduceMean<keepdims = 0>(u, v3)"""
    model = from_onnx(model_of(body, IMAGE))
    with InferenceSession(model, threads=1, tune=False) as session:
        graphs_made(session)
        for rows, height, width in zip((3, 2, 5, 4, 4), heights, (11, 15, 13, 19, 17)):
            feeds = arrays(session, rows, height, width)
            found = session.run(feeds)["y"]
            np.testing.assert_allclose(found, fresh_answers(model, feeds)["y"], 2e-5, 2e-5)


def test_what_lies_behind_strides_needs_few_graphs() -> None:
    """Heads and the mean of what a strided convolution leaves, and the last step cut off."""
    body = """c = Transpose<perm = [0, 2, 1]>(x)
    p = AveragePool<kernel_shape = [3], strides = [2]>(c)  q = Slice(p, v0, vm1, v2)
    back = Transpose<perm = [0, 2, 1]>(q)  s = Shape(back)  nt = Slice(s, v0, v2, v0)
    two = Constant<value_ints = [2, 4]>()  shape = Concat<axis = 0>(nt, two)
    h = Reshape(back, shape)  k = Transpose<perm = [0, 2, 1, 3]>(h)
    kt = Transpose<perm = [0, 1, 3, 2]>(k)  met = MatMul(k, kt)  share = Softmax(met)
    mixed = MatMul(share, k)  m = Transpose<perm = [0, 2, 1, 3]>(mixed)
    last = Concat<axis = 0>(nt, v8)  y = Reshape(m, last)"""
    model = model_of(body)
    with InferenceSession(from_onnx(model), threads=1, tune=False) as session:
        made = graphs_made(session)
        shapes = ((2, 60), (3, 51), (5, 77), (4, 66), (2, 49), (7, 71), (3, 50), (6, 64))
        for number, shape in enumerate(shapes):
            feeds = arrays(session, *shape)
            expected = fresh_answers(from_onnx(model), feeds)["y"]
            np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=2e-5, atol=2e-5)
            assert len(made) == min(number + 1, 3)


def test_extents_behind_strides_are_those_of_a_batch_of_another_size() -> None:
    """What follows in steps from extents that stay does not keep others from varying."""
    body = """a = Conv<kernel_shape = [3, 3], strides = [2, 2]>(x, filters)  s = Shape(a)
    n = Gather(s, v0)  h = Gather(s, v2)  c = Gather(s, v1)  area = Concat<axis = 0>(n, c, vm1)
    f = Reshape(a, area)  g = Gather<axis = 2>(f, i0)  r = Cast<to = 1>(h)  d = Div(g, r)
    y = Unsqueeze(d, v1)"""
    _check_batches_of_images(body)


def _check_batches_of_images(body: str) -> None:
    model = from_onnx(model_of(body, IMAGE))
    with InferenceSession(model, threads=1, tune=False) as session:
        made = graphs_made(session)
        for number, rows in enumerate((2, 5, 3, 4)):
            feeds = arrays(session, rows, 9, 9)
            found = session.run(feeds)["y"]
            assert len(made) == min(number + 1, 3)
            np.testing.assert_allclose(found, fresh_answers(model, feeds)["y"], 2e-5, 2e-5)


def test_what_is_reshaped_follows_from_the_axes_it_is_given() -> None:
    """Group norms, embedded steps and attention behind strides, as exporters write diffusion's."""
    body = """a = Conv<kernel_shape = [3, 3], strides = [2, 2]>(x, filters)
    groups = Constant<value_ints = [0, 2, -1]>()  one = Constant<value_floats = [1.0, 1.0]>()
    none = Constant<value_floats = [0.0, 0.0]>()  m = ReduceMean<keepdims = 0>(x, spatial)
    e = Gemm<transB = 1>(m, mix)  u = Unsqueeze(e, spatial)  b = Add(a, u)
    r = Reshape(b, groups)  i = InstanceNormalization(r, one, none)  s = Shape(b)
    z = Reshape(i, s)  n = Slice(s, v0, v1)  c = Slice(s, v1, v2)  h = Slice(s, v2, v4)
    t = Transpose<perm = [0, 2, 3, 1]>(z)  flat = Concat<axis = 0>(n, vm1, c)
    f = Reshape(t, flat)  q = MatMul(f, w)  k = Transpose<perm = [0, 2, 1]>(q)
    met = MatMul(q, k)  share = Softmax(met)  o = MatMul(share, q)
    whole = Concat<axis = 0>(n, h, c)  d = Reshape(o, whole)  l = Transpose<perm = [0, 3, 1, 2]>(d)
    p = Add(l, b)  v = Conv<kernel_shape = [3, 3], strides = [2, 2]>(p, deeper)
    g = Reshape(v, groups)  j = InstanceNormalization(g, one, none)  w2 = Shape(v)
    back = Reshape(j, w2)  y = ReduceMean<keepdims = 0>(back, v3)"""
    _check_batches_of_images(body)


def test_what_is_padded_cut_and_expanded_follows_along_its_axes() -> None:
    body = """a = Conv<kernel_shape = [3, 3], strides = [2, 2]>(x, filters)
    pads = Constant<value_ints = [0, 0, 0, 0, 0, 0, 1, 1]>()  p = Pad(a, pads)
    far = Constant<value_ints = [99, 99]>()  one = Constant<value_ints = [1, 1]>()
    c = Slice(p, one, far, spatial)  b = Conv<kernel_shape = [3, 3], strides = [2, 2]>(c, deeper)
    s = Shape(b)  h = Slice(s, v2, v3)  f = Cast<to = 1>(h)  d = Div(b, f)
    e = Expand(f, s)  t = Add(d, e)  y = ReduceMean<keepdims = 0>(t, v3)"""
    _check_batches_of_images(body)


@pytest.mark.parametrize("name", EVEN)
def test_a_fourth_extent_needs_no_graph(name: str) -> None:
    """Three make it; of lengths none is longer than theirs, where a constant goes along."""
    with InferenceSession(from_onnx(EVEN[name]), threads=1) as session:
        made = graphs_made(session)
        for number, length in enumerate((31, 19, 22, 20, 25, 24)):
            session.run(arrays(session, 2, length, length))
            assert len(made) == min(number + 1, 3)


@pytest.mark.parametrize("name", EVEN)
def test_rows_and_lengths_that_change_together_need_few_graphs(name: str) -> None:
    """Of two numbers three graphs make others, of three ("image") four.

    No rows are more than theirs, where a constant goes along ("joined").
    """
    shapes = ((2, 31, 30), (7, 19, 21), (3, 24, 22), (6, 17, 20), (4, 27, 25), (5, 30, 18))
    with InferenceSession(from_onnx(EVEN[name]), threads=1, tune=False) as session:
        made = graphs_made(session)
        for number, shape in enumerate(shapes):
            feeds = arrays(session, *shape)
            expected = fresh_answers(from_onnx(EVEN[name]), feeds)["y"]
            np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=2e-5, atol=2e-5)
            assert len(made) == min(number + 1, 4 if name == "image" else 3)


GROWN = {
    "three more": LENGTH
    + """n = Gather(s, v0)  more = Add(tv, v3)  a = ReduceMax<keepdims = 1>(x, v1)
    shape = Concat<axis = 0>(n, more, v8)  f = Expand(a, shape)  y = Softmax<axis = 1>(f)""",
    "three rows before": """s = Shape<start = 0, end = 1>(x)  shape = Concat<axis = 0>(s, v3, v8)
    first = Expand(token, shape)  r = Relu(x)  j = Concat<axis = 1>(first, r)  y = MatMul(j, w)""",
}


@pytest.mark.parametrize("name", GROWN)
def test_extents_that_grow_together_are_not_taken_for_each_other(name: str) -> None:
    """Three more than a length is three times as much as there are rows, as long as both grow."""
    model = from_onnx(model_of(GROWN[name]))
    with InferenceSession(model, threads=1, tune=False) as session:
        graphs_made(session)
        for shape in ((2, 3), (3, 6), (4, 9), (5, 12), (4, 5), (6, 20), (3, 4)):
            feeds = arrays(session, *shape)
            expected = fresh_answers(model, feeds)["y"]
            found = session.run(feeds)["y"]
            session.serial.binder.prepare_families(session.serial.bounds.session)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_family_outlives_graphs_that_form_none() -> None:
    with InferenceSession(from_onnx(EVEN["attention"]), threads=1, tune=False) as session:
        made = graphs_made(session)
        lengths = [(2, 31), (2, 22), (2, 20)]
        others = [(1, 31), (1, 19)]
        for rows, length in (*lengths, *others, (2, 18)):
            session.run(arrays(session, rows, length))
        assert len(made) == len(lengths) + len(others)


def test_several_extents_are_told_apart_by_products() -> None:
    """What two graphs have is a multiple of one product, or of none; a sum is no multiple."""
    body = """s = Shape(x)  t = Gather(s, v1)  n = Gather(s, v0)  nt = Mul(n, t)
    shape = Concat<axis = 0>(nt, v8)  f = Reshape(x, shape)  h = MatMul(f, w)
    y = Unsqueeze(h, v1)"""
    model = from_onnx(model_of(body))

    def graph(n: int, t: int) -> Graph:
        return model.graph({"n": n, "t": t})

    family = Family([graph(2, 5), graph(3, 9)], [model.weights] * 2)
    assert str(family.at({"x": (7, 4, 8)})[0]) == str(graph(7, 4))
    with pytest.raises(GraphError, match="ratio"):
        Family([graph(2, 6), graph(3, 9)], [model.weights] * 2)


def test_a_graph_that_two_others_do_not_determine_is_not_derived_from_them() -> None:
    """As if nothing were noted: the third graph shows that the model goes by a threshold."""
    with InferenceSession(from_onnx(UNEVEN["least"]), threads=1, tune=False) as session:
        noted = session._source.noted
        unnoted = lambda *given: (*noted(*given)[:2], ())  # noqa: E731
        object.__setattr__(session._source, "noted", unnoted)
        for length in (8, 9, 4, 5, 7, 3):
            feeds = arrays(session, 2, length)
            expected = fresh_answers(from_onnx(UNEVEN["least"]), feeds)["y"]
            np.testing.assert_allclose(session.run(feeds)["y"], expected)


def test_weights_that_go_along_are_cut_and_never_made_up() -> None:
    """Even numbers that no operator makes are a constant: of a longer one nothing is known."""
    model = from_onnx(
        model_of(
            LENGTH + "both = Add(t, t)  two = Add(i1, i1)  r = Range(i0, both, two)"
            "  f = Cast<to = 1>(r)  c = Unsqueeze(f, v1)  h = Add(x, c)  y = MatMul(h, w)"
        )
    )
    two = [model.graph({"n": 2, "t": length}) for length in (5, 9)]
    family = Family(two, [model.weights] * 2)
    graph, weights, _ = family.at({"x": (2, 7, 8)})
    assert str(graph) == str(model.graph({"n": 2, "t": 7})).replace("c.2", "c").replace("c.1", "c")
    (cut,) = weights.values()
    np.testing.assert_array_equal(cut.ravel(), 2 * np.arange(7))
    for shape in ((2, 10, 8), (2, 1, 8), (3, 7, 8), (2, 7)):
        with pytest.raises(GraphError):
            family.at({"x": shape})


def test_what_operators_make_of_extents_is_made_of_longer_ones() -> None:
    """Places of a sequence are operators in its graph, which no input goes into."""
    model = from_onnx(
        model_of(
            LENGTH
            + "r = Range(i0, t, i1)  f = Cast<to = 1>(r)  c = Unsqueeze(f, v1)  y = Add(x, c)"
        )
    )
    inputs = [{"x": np.zeros((2, length, 8), np.float32)} for length in (5, 9)]
    two = [model.noted_for(each, purpose="lasting")[0] for each in inputs]
    family = Family(two, [model.weights] * 2)
    graph, cut, _ = family.at({"x": (2, 30, 8)})
    weights = {name: model.weights[name] for name in graph.roles if name != "x"}
    found = interpret(graph, {**weights, "x": np.zeros((2, 30, 8), np.float32)})["y"]
    np.testing.assert_array_equal(found, np.tile(np.arange(30.0)[:, None], (2, 1, 8)))
    assert not cut
