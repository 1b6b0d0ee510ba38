"""New numbers of rows are answered by runs that are bound for others, where rows are apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx.parser
import pytest
from helpers.session_runs import fresh_answers

from soapstone import DataError, InferenceSession, Model, from_onnx
from soapstone.engine.session import Bound, Session
from soapstone.frontend.inference import in_rows
from soapstone.frontend.inference.binding import Binder
from soapstone.frontend.inference.families import Known
from soapstone.frontend.inference.in_rows import MOST_STEPS
from soapstone.frontend.onnx import OnnxModel
from soapstone.ir.tensor import Array, Role

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((6, 8)).astype(np.float32)


def model_of(body: str, inputs: str = "float[n, t, 6] x", outputs: str = "float[n, t, k] y") -> str:
    header = '<ir_version: 9, opset_import: ["" : 18]>'
    text = f"{header}\ng ({inputs}) => ({outputs})\n{{ {body} }}"
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(TABLE, "w"))
    model: str = proto.SerializeToString()
    return model


# Shapes become values, and places of a sequence are counted, as exporters write them.
TAGGER = model_of(
    """size = Shape<start = 0, end = 2>(x)  zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()  at = Constant<value_ints = [1]>()
    long = Gather(size, one)  places = Range(zero, long, one)
    counted = Cast<to = 1>(places)  back = Constant<value_ints = [-1]>()
    column = Unsqueeze(counted, back)  hundredth = Constant<value_float = 0.01>()
    small = Mul(column, hundredth)  moved = Add(x, small)  h = MatMul(moved, w)
    heads = Constant<value_ints = [2, 4]>()  shape = Concat<axis = 0>(size, heads)
    split = Reshape(h, shape)  turned = Transpose<perm = [0, 2, 1, 3]>(split)
    keys = Transpose<perm = [0, 1, 3, 2]>(turned)  met = MatMul(turned, keys)
    share = Softmax<axis = -1>(met)  mixed = MatMul(share, turned)
    behind = Transpose<perm = [0, 2, 1, 3]>(mixed)  whole = Constant<value_ints = [0, 0, -1]>()
    y = Reshape(behind, whole)"""
)
TWO_INPUTS = model_of("h = MatMul(x, w)  y = Add(h, bias)", "float[n, t, 6] x, float[n, 1, 8] bias")
WINDOWS = model_of(
    "y = MaxPool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(x)",
    "float[n, 3, 9, 9] x",
    "float[n, 3, a, b] y",
)
JOINED_WINDOWS = model_of(
    """a = MaxPool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(x)  r = Relu(a)
    j = Concat<axis = 1>(a, r)
    b = MaxPool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(j)
    y = MaxPool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(b)""",
    "float[n, 3, 9, 9] x",
    "float[n, 6, a, b] y",
)
# Parts are stretched to sizes that are computed, and one mask is added to windows of all rows.
ENLARGED = model_of(
    """s = Shape<start = 0, end = 2>(x)  twelve = Constant<value_ints = [12]>()
    shape = Concat<axis = 0>(s, twelve)
    y = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
               nearest_mode = "floor">(x, , , shape)"""
)
MASKED = model_of(
    """n = Shape<start = 0, end = 1>(x)  both = Constant<value_ints = [6, 8]>()
    many = Concat<axis = 0>(n, both)  masks = Expand(w, many)
    rows = Constant<value_ints = [-1, 8]>()  mask = Reshape(masks, rows)
    windows = Constant<value_ints = [-1, 6]>()  r = Reshape(x, windows)  h = MatMul(r, w)
    m = Add(h, mask)  parts = Constant<value_ints = [-1, 6, 8]>()  y = Reshape(m, parts)""",
    "float[n, 6, 6] x",
    "float[n, 6, 8] y",
)
# The extent of a head is a constant, of a value whose extents may be any.
SCALED = model_of(
    """size = Shape<start = 0, end = 2>(x)  h = MatMul(x, w)
    heads = Constant<value_ints = [2, 4]>()  shape = Concat<axis = 0>(size, heads)
    split = Reshape(h, shape)
    turned = Transpose<perm = [0, 2, 1, 3]>(split)  of = Shape<start = 3, end = 4>(turned)
    real = Cast<to = 1>(of)  root = Sqrt(real)  scaled = Div(turned, root)
    back = Transpose<perm = [0, 2, 1, 3]>(scaled)  whole = Constant<value_ints = [0, 0, -1]>()
    y = Reshape(back, whole)"""
)
APART = {
    "tagger": TAGGER,
    "scaled": SCALED,
    "enlarged": ENLARGED,
    "masked": MASKED,
    "two inputs": TWO_INPUTS,
    "windows": WINDOWS,
    "joined windows": JOINED_WINDOWS,
}
MEETING = {
    "mean over rows": model_of(
        "zero = Constant<value_ints = [0]>()  m = ReduceMean<keepdims = 1>(x, zero)"
        "  d = Sub(x, m)  y = MatMul(d, w)"
    ),
    "number of rows": model_of(
        "s = Shape<start = 0, end = 1>(x)  f = Cast<to = 1>(s)  d = Div(x, f)  y = MatMul(d, w)"
    ),
    "number of a row": model_of(
        """zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()
        s = Shape(x)  n = Gather(s, zero)  r = Range(zero, n, one)  f = Cast<to = 1>(r)
        far = Constant<value_ints = [1, 2]>()  c = Unsqueeze(f, far)
        d = Add(x, c)  y = MatMul(d, w)"""
    ),
    "number of a row, of few rows none": model_of(
        """zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()
        four = Constant<value_int = 4>()  s = Shape(x)  n = Gather(s, zero)
        r = Range(zero, n, one)  late = Greater(r, four)  f = Cast<to = 1>(late)
        far = Constant<value_ints = [1, 2]>()  c = Unsqueeze(f, far)  h = MatMul(x, w)
        y = Add(h, c)"""
    ),
    "number of rows, counted": model_of(
        """s = Shape<start = 0, end = 1>(x)  one = ConstantOfShape(s)  e = Exp(one)
        n = ReduceSum<keepdims = 0>(e)  d = Div(x, n)  y = MatMul(d, w)"""
    ),
    "a column of all rows": model_of(
        """columns = Constant<value_ints = [6, -1]>()  c = Reshape(x, columns)
        share = Softmax<axis = -1>(c)  back = Constant<value_ints = [-1, 5, 6]>()
        r = Reshape(share, back)  y = MatMul(r, w)""",
        "float[n, 5, 6] x",
    ),
    "a mask of all rows": model_of(
        """n = Shape<start = 0, end = 1>(x)  six = Constant<value_ints = [6]>()
        many = Concat<axis = 0>(n, six)  one = ConstantOfShape(many)  e = Exp(one)
        zero = Constant<value_int = 0>()  counted = CumSum(e, zero)
        last = Constant<value_ints = [1]>()  rows = Unsqueeze(counted, last)
        a = Add(x, rows)  y = MatMul(a, w)"""
    ),
    "rows of two dims": model_of(
        "flat = Constant<value_ints = [-1, 6]>()  r = Reshape(x, flat)  y = MatMul(r, w)",
        outputs="float[m, 8] y",
    ),
}


def strided(last: int = 99) -> str:
    """A strided view as torch exports it, in which rows after so many are the first one again."""
    return model_of(
        f"""n = Shape<start = 0, end = 1>(x)  zero = Constant<value_int = 0>()
        one = Constant<value_int = 1>()  rows = Squeeze(n)  r = Range(zero, rows, one)
        last = Constant<value_int = {last}>()  late = Greater(r, last)  k = Where(late, zero, r)
        size = Constant<value_int = 30>()  far = Mul(k, size)  at = Constant<value_ints = [1, 2]>()
        begin = Unsqueeze(far, at)  c = Range(zero, size, one)
        parts = Constant<value_ints = [1, 5, 6]>()  places = Reshape(c, parts)
        indices = Add(begin, places)  all = Constant<value_ints = [-1]>()  flat = Reshape(x, all)
        view = Gather(flat, indices)  y = MatMul(view, w)""",
        "float[n, 5, 6] x",
    )


def given(session: InferenceSession, rows: int, length: int = 5) -> dict[str, Array]:
    known = {"n": rows, "t": length}
    shapes = {
        field.name: [known.get(str(dim), dim) for dim in field.shape] for field in session.inputs
    }
    return {
        name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


@contextmanager
def counted(
    model: str | Model | OnnxModel, **options: object
) -> Iterator[tuple[InferenceSession, list[int]]]:
    """A session, and the numbers of rows that it binds graphs for."""
    with InferenceSession(model, threads=1, **options) as session:  # type: ignore[arg-type]
        session.serial.binder.packed.warmup.close()  # see test_shape_warmup.py
        numbers: list[int] = []
        bind = Binder.bind

        def told(
            binder: Binder,
            engine: Session,
            values: dict[str, Array],
            known: Known,
            in_turn: bool = False,
        ) -> Bound:
            if binder is session.serial.binder:
                graph = known.graph
                numbers.append(graph.tensors[graph.inputs(Role.INPUT)[0]].shape[0])
            return bind(binder, engine, values, known, in_turn)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Binder, "bind", told)
            yield session, numbers


def equal_fresh(model: str, session: InferenceSession, feeds: dict[str, Array]) -> None:
    expected = fresh_answers(model, feeds)
    found = session.run(feeds)
    session.serial.bounds._background.wait()
    for name, array in found.items():
        assert array.shape == expected[name].shape and array.dtype == expected[name].dtype
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", APART)
def test_new_numbers_are_run_in_steps_and_bound_after_so_many(name: str) -> None:
    with counted(APART[name]) as (session, numbers):
        for rows in (2, 5, 3, 1, 9, 4, 12):
            equal_fresh(APART[name], session, given(session, rows))
        assert numbers == [2]  # the graph for 5 shows that rows are apart
        for rows in (3, 9, 3, 9, 3):  # in steps of 2 and 2; 9 would take ten
            equal_fresh(APART[name], session, given(session, rows))
        assert numbers == [2, 9]
        for rows in (9, 3, 3):
            equal_fresh(APART[name], session, given(session, rows))
        assert numbers == [2, 9, 3]


def test_a_view_of_all_elements_in_order_keeps_rows_apart() -> None:
    with counted(strided()) as (session, numbers):
        for rows in (2, 3, 5, 7):
            equal_fresh(strided(), session, given(session, rows))
        assert numbers == [2]


def test_a_number_of_which_contents_say_something_else_is_bound() -> None:
    with counted(strided(4)) as (session, numbers):
        for rows in (2, 3, 5, 7, 4, 6):
            equal_fresh(strided(4), session, given(session, rows))
        assert numbers == [2, 7, 4, 6]


@pytest.mark.parametrize("model,expected", [(strided(), True), (strided(4), False)])
def test_rows_are_told_apart_where_contents_say_the_same_of_all_that_may_come(
    model: str, expected: bool
) -> None:
    with counted(model) as (session, _):
        rows = session.serial.bounds.rows
        for number in (1, 2, 3):
            assert not rows.apart(given(session, 1))
            session.run(given(session, number))
        assert rows.apart(given(session, 1)) is expected


def test_who_knows_that_rows_are_apart_waits_for_no_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another process has found serves while a thread finds it again."""
    begun, go, told = threading.Event(), threading.Event(), in_rows.rows_apart

    def slow(*of: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return told(*of)

    with counted(TAGGER) as (session, numbers):
        session.run(given(session, 2))
        monkeypatch.setattr(in_rows, "rows_apart", slow)
        rows, three = session.serial.bounds.rows, given(session, 3)
        rows.note_apart(given(session, 2))
        known, _ = session.serial.binder.known(three)
        comparing = threading.Thread(target=rows.note, args=(three, known))
        comparing.start()
        assert begun.wait(60)
        asked = threading.Thread(target=session.run, args=(three,), daemon=True)
        asked.start()
        asked.join(60)
        waits = asked.is_alive()
        go.set()
        comparing.join(60)
        asked.join(60)
        assert not waits and numbers == [2]
        equal_fresh(TAGGER, session, three)


def test_a_number_whose_graph_was_derived_is_a_step_of_others() -> None:
    """What passes found of contents is known of a derived graph as of those it was derived from."""
    with InferenceSession(strided(), threads=1) as session:
        bounds = session.serial.bounds
        for rows in (2, *[5] * (MOST_STEPS // 3 + 1), 5):
            equal_fresh(strided(), session, given(session, rows))
            bounds.wait()
        assert {shape[0] for ((shape,), _) in bounds.held} == {2, 5}
        (kind,) = bounds.rows._kinds.values()
        assert kind.apart and kind.numbers >= {2, 5}
        equal_fresh(strided(), session, given(session, 7))  # in steps of 5 and 2
        assert len(bounds.held) == 2
        family = session.serial.binder.packed.families
        derived = family.at({"x": (9, 5, 6)})
        assert derived.given is None and derived.choices[0].made.tensors["indices"].shape[0] == 9
        assert session.meeting_samples(given(session, 9)) and not session.meeting_samples(
            given(session, 9), [2, 16]
        )


def test_one_row_serves_as_a_step_where_its_graph_has_other_operators() -> None:
    model = model_of(
        """n = Shape<start = 0, end = 1>(x)  both = Constant<value_ints = [6, 8]>()
        first = Constant<value_ints = [0]>()  one = Unsqueeze(w, first)
        many = Concat<axis = 0>(n, both)  masks = Expand(one, many)
        flat = Constant<value_ints = [-1, 8]>()  mask = Reshape(masks, flat)
        windows = Constant<value_ints = [-1, 6]>()  r = Reshape(x, windows)  h = MatMul(r, w)
        m = Add(h, mask)  back = Constant<value_ints = [-1, 6, 8]>()  y = Reshape(m, back)""",
        "float[n, 6, 6] x",
    )
    with counted(model) as (session, numbers):
        for rows in (1, 3, 2, 5):
            equal_fresh(model, session, given(session, rows))
        assert numbers == [1, 3]
        (kind,) = session.serial.bounds.rows._kinds.values()
        assert kind.numbers == {1, 2, 3}


def test_a_graph_that_shows_that_rows_meet_is_made_once() -> None:
    model = from_onnx(MEETING["mean over rows"])
    asked: list[int] = []
    noted_for = model.noted_for

    def told(arrays: Mapping[str, Array], **options: bool) -> object:
        asked.append(len(arrays["x"]))
        return noted_for(arrays, **options)

    model.noted_for = told  # type: ignore[method-assign, assignment]
    with counted(model) as (session, numbers):
        for rows in (2, 3, 5, 3):
            session.run(given(session, rows))
        assert asked == numbers == [2, 3, 5]


@pytest.mark.parametrize("name", MEETING)
def test_where_rows_meet_or_are_counted_every_number_is_bound(name: str) -> None:
    with counted(MEETING[name]) as (session, numbers):
        for rows in (2, 3, 5, 1, 4):
            equal_fresh(MEETING[name], session, given(session, rows))
        assert numbers == [2, 3, 5, 1, 4]


@pytest.mark.parametrize("name", [*APART, *MEETING])
def test_random_shapes_are_answered_as_by_a_session_of_their_own(name: str) -> None:
    model = {**APART, **MEETING}[name]
    random = np.random.default_rng(1)
    with counted(model, bound_shapes=3) as (session, numbers):
        for _ in range(24):
            rows, length = (int(extent) for extent in random.integers(1, (9, 4)))
            equal_fresh(model, session, given(session, rows, length))
            assert len(session.serial.bounds.held) <= 3
        assert (len(numbers) < 24) or name in MEETING


def test_other_shapes_of_rows_and_many_steps_are_bound() -> None:
    with counted(TAGGER) as (session, numbers):
        for rows in (1, 2, 3):
            session.run(given(session, rows))
        session.run(given(session, 3, length=4))
        session.run(given(session, 3 * MOST_STEPS + 1))
        assert numbers[-1] == 3 * MOST_STEPS + 1


def test_results_are_written_where_they_are_wanted() -> None:
    with counted(TAGGER) as (session, _):
        for rows in (2, 3):
            session.run(given(session, rows))
        feeds = given(session, 7)
        with pytest.raises(DataError, match=r"out 'y': float32\[6, 5, 8\] found"):
            session.run(feeds, out={"y": np.empty((6, 5, 8), np.float32)})
        mine = np.empty((7, 5, 8), np.float32)
        assert session.run(feeds, out={"y": mine})["y"] is mine
        with InferenceSession(TAGGER, threads=1) as fresh:
            np.testing.assert_allclose(mine, fresh.run(feeds)["y"], rtol=2e-5, atol=2e-5)


def test_without_records_every_number_is_bound_and_gives_the_same_bits() -> None:
    with counted(TAGGER, tune=False) as (session, numbers):
        for rows in (2, 3, 4):
            feeds = given(session, rows)
            first = session.run(feeds)["y"]
            assert first.tobytes() == session.run(feeds)["y"].tobytes()
        assert numbers == [2, 3, 4]


def test_layers_are_run_in_steps() -> None:
    model = Model("net")
    x = model.input("image", (2, 3, 8, 8))
    model.output(model.dense(model.flatten(model.relu(model.conv2d(x, 4, kernel=3))), 10))
    with counted(model) as (session, numbers):
        whole = RANDOM.standard_normal((7, 3, 8, 8)).astype(np.float32)
        parts = [session.run(whole[:rows])[session.outputs[0]] for rows in (1, 2, 4, 7)]
        assert numbers == [1]
        for part in parts:
            np.testing.assert_allclose(part, parts[-1][: len(part)], rtol=2e-5, atol=2e-5)
