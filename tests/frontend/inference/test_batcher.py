"""Requests that are joined are answered as those that are not, each to whom it is due."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from soapstone import Batcher, InferenceSession, Model
from soapstone.errors import DataError
from soapstone.runtime import StoppedError

FLOAT = TensorProto.FLOAT
Make = Callable[..., InferenceSession]


def session_of(
    nodes: list[Any], weights: Any = (), shape: Any = ("batch", "length", 4), **options: Any
) -> InferenceSession:
    held = [numpy_helper.from_array(array, name) for name, array in dict(weights).items()]
    inputs = [helper.make_tensor_value_info("x", FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "net", inputs, outputs, held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return InferenceSession(proto_bytes(proto), threads=1, **options)


def proto_bytes(proto: onnx.ModelProto) -> Any:
    return proto.SerializeToString()


def tagger(**options: Any) -> InferenceSession:
    w = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Softmax", ["t"], ["y"], axis=1),
    ]
    return session_of(nodes, {"w": w}, **options)


@pytest.fixture(scope="module")
def session() -> Iterator[InferenceSession]:
    with tagger(bound_shapes=64) as session:
        yield session


@pytest.fixture(scope="module")
def several() -> Iterator[InferenceSession]:
    with tagger(bound_shapes=64, requests=3) as session:
        yield session


@pytest.mark.parametrize("which", ["session", "several"])
def test_many_threads_of_random_shapes(which: str, request: pytest.FixtureRequest) -> None:
    session: InferenceSession = request.getfixturevalue(which)
    _check_many_threads(session)


def _check_many_threads(session: InferenceSession) -> None:
    random = np.random.default_rng(1)
    asked = [
        [
            random.standard_normal((random.integers(0, 6), random.integers(1, 5), 4), np.float32)
            for _ in range(6)
        ]
        for _ in range(64)
    ]
    needed = [[session.run(x)["y"] for x in of_one] for of_one in asked]
    found: list[list[Any]] = [[] for _ in asked]
    done: list[tuple[int, int]] = []
    with Batcher(session, most=16, delay_ms=5) as batcher:

        def ask(caller: int) -> None:
            futures = []
            for number, x in enumerate(asked[caller]):
                future = batcher.run_async({"x": x})
                future.add_done_callback(lambda _, n=number: done.append((caller, n)))
                futures.append(future)
            found[caller] = [future.result(timeout=120)["y"] for future in futures]

        threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, other in zip(found, needed):
        for array, expected in zip(one, other, strict=True):
            assert array.shape == expected.shape
            np.testing.assert_allclose(array, expected, atol=1e-6)
    assert batcher.apart == ()
    told = batcher.statistics
    assert told.requests == 64 * 6 and told.runs < told.requests
    assert told.samples == sum(x.shape[0] for of_one in asked for x in of_one)
    for caller in range(64):
        assert [n for who, n in done if who == caller] == [*range(6)], "in the order of asking"


def test_requests_that_wait_together_are_one_run(session: InferenceSession) -> None:
    x = np.random.default_rng(2).standard_normal((7, 3, 4), np.float32)
    with Batcher(session, most=7, delay_ms=60_000) as batcher:
        futures = [batcher.run_async(x[n : n + 1]) for n in range(7)]  # full: nobody waits longer
        rows = [future.result(timeout=60)["y"] for future in futures]
        assert batcher.statistics.runs == 1
        rows[0][:] = 0  # each has its own
        np.testing.assert_allclose(np.concatenate(rows[1:]), session.run(x)["y"][1:], atol=1e-6)
        big = batcher.run_async(np.repeat(x, 3, axis=0))
        assert big.result(timeout=60)["y"].shape[0] == 21


def test_padding_adds_nothing_to_answers(session: InferenceSession) -> None:
    x = np.random.default_rng(3).standard_normal((3, 2, 4), np.float32)
    for pad, padding in ((True, 1), (False, 0)):
        with Batcher(session, most=8, delay_ms=0, pad=pad) as batcher:
            np.testing.assert_allclose(batcher.run(x)["y"], session.run(x)["y"], atol=1e-6)
            assert batcher.statistics.padding == padding


def test_closing_answers_what_waits_and_refuses_more(session: InferenceSession) -> None:
    batcher = Batcher(session, most=100, delay_ms=60_000)
    futures = [batcher.run_async(np.ones((1, 2, 4), np.float32)) for _ in range(5)]
    batcher.close()
    assert all(future.result(timeout=0)["y"].shape == (1, 2, 6) for future in futures)
    with pytest.raises(StoppedError, match="batcher of model 'net': it was closed"):
        batcher.run(np.ones((1, 2, 4), np.float32))
    batcher.close()
    assert session.run(np.ones((1, 2, 4), np.float32))["y"].shape == (1, 2, 6), "it stays open"


def test_a_request_that_is_given_up_is_not_run(session: InferenceSession) -> None:
    with Batcher(session, most=100, delay_ms=60_000) as batcher:
        futures = [batcher.run_async(np.ones((1, 2, 4), np.float32)) for _ in range(3)]
        assert futures[1].cancel()
    assert [future.cancelled() for future in futures] == [False, True, False]
    assert batcher.statistics.samples == 2


def test_an_error_goes_to_the_request_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with tagger() as session, Batcher(session, most=8, delay_ms=60_000) as batcher:
        run = session.run

        def refusing(inputs: Any) -> Any:
            if np.isnan(inputs["x"]).any():
                raise ArithmeticError("not a number")
            return run(inputs)

        monkeypatch.setattr(session, "run", refusing)
        x = np.ones((8, 2, 4), np.float32)
        x[5] = np.nan
        futures = [batcher.run_async(x[n : n + 1]) for n in range(8)]
        errors = [future.exception(timeout=60) for future in futures]
        assert [error is not None for error in errors] == [n == 5 for n in range(8)]
        assert isinstance(errors[5], ArithmeticError)
        with pytest.raises(DataError, match=r"float32\[1, 2, 5\] found"):
            batcher.run_async(np.ones((1, 2, 5), np.float32))


def test_a_batcher_that_nobody_has_answers_what_waits_and_ends(session: InferenceSession) -> None:
    x, threads = np.ones((1, 2, 4), np.float32), threading.active_count()
    asked = [Batcher(session, delay_ms=60_000).run_async(x) for _ in range(3)]
    gc.collect()
    assert all(each.result(60).keys() == {"y"} for each in asked)
    deadline = time.monotonic() + 60
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("joined", [False, True])
def test_a_callback_that_would_end_its_thread_is_reported(
    joined: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tagger() as session, Batcher(session) as batcher:
        ask = batcher.run_async if joined else session.run_async
        goes, later = threading.Event(), threading.Event()
        run = session.run
        monkeypatch.setattr(session, "run", lambda inputs: goes.wait(60) and run(inputs))
        x = np.ones((1, 2, 4), np.float32)
        first = ask(x)
        first.add_done_callback(lambda _: sys.exit("enough"))
        first.add_done_callback(lambda _: later.set())
        goes.set()
        assert later.wait(60)
        assert "a callback raised SystemExit" in caplog.text
        assert ask(x).result(60).keys() == {"y"}


def test_samples_that_meet_are_not_joined() -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    x = np.random.default_rng(4).standard_normal((4, 2, 4), np.float32)
    with session_of(nodes) as session, Batcher(session, most=4, delay_ms=60_000) as batcher:
        futures = [batcher.run_async(x[n : n + 1]) for n in range(4)]
        for future in futures:
            np.testing.assert_allclose(future.result(timeout=60)["y"], 1)
        assert len(batcher.apart) == 1 and "softmax" in batcher.apart[0]
        assert batcher.statistics.runs == 4


@pytest.mark.parametrize(("last", "apart"), [(99, ()), (8, ()), (6, ("contents",))])
def test_requests_are_joined_up_to_as_many_as_contents_allow(
    last: int, apart: tuple[str, ...]
) -> None:
    """The model reads its rows by places that it counts; rows behind the last are the first."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Squeeze", ["n"], ["rows"]),
        helper.make_node("Range", ["zero", "rows", "one"], ["row"]),
        helper.make_node("Greater", ["row", "last"], ["late"]),
        helper.make_node("Where", ["late", "zero", "row"], ["kept"]),
        helper.make_node("Mul", ["kept", "size"], ["far"]),
        helper.make_node("Unsqueeze", ["far", "axis"], ["begin"]),
        helper.make_node("Add", ["begin", "places"], ["indices"]),
        helper.make_node("Reshape", ["x", "flat"], ["all"]),
        helper.make_node("Gather", ["all", "indices"], ["y"]),
    ]
    numbers = {"zero": 0, "one": 1, "last": last, "size": 6, "axis": [1], "flat": [-1]}
    weights = {name: np.array(number) for name, number in numbers.items()}
    weights["places"] = np.arange(6)
    x = np.random.default_rng(6).standard_normal((8, 6), np.float32)
    needed = np.where(np.arange(8)[:, None] > last, x[:1], x)
    with session_of(nodes, weights, ("batch", 6)) as session:
        np.testing.assert_array_equal(session.run(x)["y"], needed)
        with Batcher(session, most=8, delay_ms=60_000) as batcher:
            futures = [batcher.run_async(x[n : n + 1]) for n in range(8)]
            found = np.concatenate([future.result(timeout=60)["y"] for future in futures])
            np.testing.assert_array_equal(found, x)
            assert [each.split()[2] for each in batcher.apart] == list(apart)
            assert batcher.statistics.runs == (8 if apart else 1)


@pytest.mark.parametrize("ended", ["", "raise ValueError"])
def test_requests_that_wait_when_a_process_ends_are_answered_or_cancelled(ended: str) -> None:
    program = f"""
import numpy, soapstone
model = soapstone.Model("net")
model.output(model.dense(model.input("x", (1, 4)), 3))
batcher = soapstone.Batcher(model.inference(threads=1), most=100, delay_ms=60_000)
futures = [batcher.run_async(numpy.ones((1, 4), numpy.float32)) for _ in range(2)]
for future in futures:
    future.add_done_callback(lambda each: print(each.cancelled() or len(each.result()["dense"])))
{ended}
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == (["True"] * 2 if ended else ["1"] * 2), run.stderr
    assert run.returncode == bool(ended) and run.stderr.count("Error") == bool(ended)


@pytest.mark.parametrize(
    ("nodes", "weights", "where"),
    [
        ([("Relu", ["x"], {})], {}, ""),
        ([("Add", ["x", "w"], {})], {"w": np.ones((1, 1, 4), np.float32)}, ""),
        ([("Add", ["x", "w"], {})], {"w": np.ones((2, 1, 4), np.float32)}, "one row more"),
        ([("Add", ["x", "w"], {})], {"w": np.eye(2, 4, dtype=np.float32)[:, None]},
         "one row more"),
        ([("Reshape", ["x", "other"], {}), ("Softmax", ["0"], {"axis": 1}),
          ("Reshape", ["1", "back"], {})],
         {"other": np.array([12, -1]), "back": np.array([-1, 3, 4])}, "reshape"),
        ([("Shape", ["x"], {"start": 0, "end": 1}), ("ConstantOfShape", ["0"], {}),
          ("Exp", ["1"], {}), ("ReduceSum", ["2"], {"keepdims": 0}), ("Div", ["x", "3"], {})],
         {}, "sum"),
        ([("ReduceMean", ["x"], {"axes": [0], "keepdims": 1})], {}, "reduce_mean"),
        ([("ReduceSum", ["x"], {"keepdims": 0})], {}, "sum"),
        ([("CumSum", ["x", "zero"], {})], {"zero": np.array(0)}, "cum"),
        ([("CumSum", ["x", "one"], {})], {"one": np.array(1)}, ""),
        ([("Transpose", ["x"], {"perm": [1, 0, 2]})], {}, "output"),
        ([("Transpose", ["x"], {"perm": [1, 0, 2]}), ("Transpose", ["0"], {"perm": [1, 0, 2]})],
         {}, ""),
        ([("Reshape", ["x", "flat"], {}), ("Relu", ["0"], {}), ("Reshape", ["1", "back"], {})],
         {"flat": np.array([-1, 4]), "back": np.array([-1, 3, 4])}, ""),
        ([("Reshape", ["x", "flat"], {}), ("Softmax", ["0"], {"axis": 0})],
         {"flat": np.array([-1, 4])}, "softmax"),
        ([("Concat", ["x", "x"], {"axis": 0})], {}, "concat"),
        ([("Concat", ["x", "x"], {"axis": 2})], {}, ""),
        ([("Gather", ["x", "zero"], {"axis": 0})], {"zero": np.array([0, 0])}, "gather"),
    ],
)  # fmt: skip
def test_where_samples_meet(nodes: Any, weights: Any, where: str) -> None:
    last = len(nodes) - 1
    made = []
    for n, (kind, inputs, attributes) in enumerate(nodes):
        given = dict(attributes)
        if "axes" in given:
            weights = {**weights, "axes": np.array(given.pop("axes"))}
            inputs = [*inputs, "axes"]
        made.append(helper.make_node(kind, inputs, ["y" if n == last else str(n)], **given))
    with session_of(made, weights) as session:
        found = session.meeting_samples(np.ones((2, 3, 4), np.float32))
    assert (where in found) if where else found == ""


def test_layers_keep_samples_apart() -> None:
    model = Model("net", seed=0)
    x = model.input("image", (1, 3, 8, 8))
    x = model.max_pool2d(model.relu(model.batch_norm(model.conv2d(x, 8, kernel=3))), 2)
    x = model.transpose(model.reshape(x, (-1, 8, 9)), (0, 2, 1))
    x = model.layer_norm(x + model.multi_head_attention(x, x, x, 2))
    y, _ = model.lstm(x, 8)[:2]
    model.output(model.softmax(model.dense(model.flatten(y), 5)))
    with model.inference(threads=1) as session:
        assert session.meeting_samples(np.ones((2, 3, 8, 8), np.float32)) == ""


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 3, 4), {}, "a symbolic first dim needed, to join requests along it"),
        (("batch", 4), {"most": 0}, "most: 0 found; a number of samples"),
        (("batch", 4), {"delay_ms": -1}, "delay_ms: -1 found; 0 or more needed"),
    ],
)
def test_what_cannot_be_joined_is_refused(shape: Any, options: Any, message: str) -> None:
    with (
        session_of([helper.make_node("Relu", ["x"], ["y"])], shape=shape) as session,
        pytest.raises(DataError, match=message),
    ):
        Batcher(session, **options)


def test_a_session_answers_by_future_in_order(session: InferenceSession) -> None:
    x = np.random.default_rng(5).standard_normal((9, 2, 4), np.float32)
    done: list[int] = []
    futures = [session.run_async(x[n : n + 1]) for n in range(9)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, n=number: done.append(n))
    found = np.concatenate([future.result(timeout=60)["y"] for future in futures])
    np.testing.assert_allclose(found, session.run(x)["y"], atol=1e-6)
    with tagger() as other:
        last = other.run_async(x)
    assert last.done() and last.result()["y"].shape == (9, 2, 6)
    with pytest.raises(StoppedError, match="it was closed"):
        other.run_async(x)


def test_an_interrupt_inside_a_batcher_cancels_what_waits(session: InferenceSession) -> None:
    x = np.ones((1, 2, 4), np.float32)
    with pytest.raises(KeyboardInterrupt), Batcher(session, most=9, delay_ms=60_000) as batcher:
        futures = [batcher.run_async(x) for _ in range(5)]
        raise KeyboardInterrupt
    assert all(future.cancelled() for future in futures)
    assert session.run(x)["y"].shape == (1, 2, 6)
