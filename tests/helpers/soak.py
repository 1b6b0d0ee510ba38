"""Requests of many threads to sessions that they share, each answer held against ONNX Runtime's.

A *service* is a model and how requests to it are drawn: few shapes are frequent and many are rare,
so that sessions bind and forget all the time. Threads ask through every way in; some requests are
mistakes, and must be refused as such without harm to those beside them.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
from helpers.decoders import SMALL
from onnx import numpy_helper

from soapstone import Batcher, DataError, InferenceSession, from_onnx, quantize
from soapstone.ir.tensor import Array, spec_of
from soapstone.runtime import TaskError
from soapstone.system import resident_bytes

Feeds = dict[str, Array]

_BOUND = 8  # shapes of a session, so that requests have many more
_VISION = """vision (float[n, 3, h, w] x) => (float[n, 5] y)
{ c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w1, b1)  r = Relu(c)
  d = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(r, w2)  s = Add(d, r)  q = Relu(s)
  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(q)  g = GlobalAveragePool(p)
  f = Flatten(g)  z = Gemm(f, w3, b3)  y = Softmax(z) }"""
_TEXT = """text (int64[n, length] ids) => (float[n, length, 11] y)
{ e = Gather(words, ids)  q = MatMul(e, wq)  k = MatMul(e, wk)  v = MatMul(e, wv)
  t = Transpose<perm = [0, 2, 1]>(k)  a = MatMul(q, t)  m = Softmax(a)  u = MatMul(m, v)
  o = Add(e, u)  l = LayerNormalization(o, scale, bias)  y = MatMul(l, head) }"""
_POINTS = """points (float[n, 3] x) => (int64[2, k] places, float[k] values)
{ h = Relu(x)  places = NonZero(h)  rows = Transpose(places)  some = GatherND(h, rows)
  values = Exp(some) }"""


def _file(text: str, weights: dict[str, Array]) -> bytes:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    found: bytes = model.SerializeToString()
    return found


def _reals(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def _seldom(random: np.random.Generator, most: int) -> int:
    """Return a number from 1 to `most`: small ones often, all of them now and then."""
    return int(min(random.zipf(1.6), random.integers(1, most + 1)))


@dataclass
class Service:
    """A model that is served, and what tells whether an answer is right.

    Attributes:
        session: that all threads share. ask: draws what is asked. answer: returns what is right.
        tolerance: by which an answer may differ. batcher: that joins requests, where there is one.
    """

    name: str
    session: InferenceSession
    ask: Callable[[np.random.Generator], Feeds]
    answer: Callable[[Feeds], dict[str, Array]]
    tolerance: float
    batcher: Batcher | None = None

    def close(self) -> None:
        """Close what serves."""
        if self.batcher is not None:
            self.batcher.close()
        self.session.close()


def _theirs(model: bytes) -> Callable[[Feeds], dict[str, Array]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # It would keep something of each shape, in the memory that is looked at.
    options.enable_mem_pattern = options.enable_cpu_mem_arena = False
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, feeds)))


def services() -> Iterator[Service]:
    """Yield a network of images, one of texts, one of bytes, one in pieces, and a decoder."""
    made = np.random.default_rng(0)

    def images(random: np.random.Generator) -> Feeds:
        shape = _seldom(random, 6), 3, 6 + _seldom(random, 14), 6 + _seldom(random, 14)
        return {"x": _reals(random, *shape)}

    vision = _file(
        _VISION,
        {
            "w1": _reals(made, 16, 3, 3, 3) / 5,
            "b1": _reals(made, 16),
            "w2": _reals(made, 16, 16, 3, 3) / 12,
            "w3": _reals(made, 16, 5),
            "b3": _reals(made, 5),
        },
    )
    session = InferenceSession(from_onnx(vision), threads=2, bound_shapes=_BOUND)
    yield Service("images", session, images, _theirs(vision), 1e-4, Batcher(session, most=8))

    def texts(random: np.random.Generator) -> Feeds:
        return {"ids": random.integers(0, 50, (_seldom(random, 6), _seldom(random, 40)))}

    text = _file(
        _TEXT,
        {
            "words": _reals(made, 50, 16),
            **{name: _reals(made, 16, 16) / 4 for name in ("wq", "wk", "wv")},
            "scale": np.ones(16, np.float32),
            "bias": np.zeros(16, np.float32),
            "head": _reals(made, 16, 11),
        },
    )
    session = InferenceSession(from_onnx(text), threads=2, bound_shapes=_BOUND)
    yield Service("texts", session, texts, _theirs(text), 1e-4, Batcher(session, most=4, pad=False))

    small = quantize(vision, _reals(made, 8, 3, 16, 16), seconds=0).model
    session = InferenceSession(from_onnx(small), threads=1, bound_shapes=_BOUND)
    yield Service("bytes", session, images, _theirs(small), 5e-2)

    points = _file(_POINTS, {})
    session = InferenceSession(from_onnx(points), threads=1, bound_shapes=_BOUND)
    yield Service(
        "points",
        session,
        lambda random: {"x": _reals(random, _seldom(random, 300), 3)},
        _theirs(points),
        1e-5,
    )

    session = InferenceSession(from_onnx(SMALL.model()), threads=2, bound_shapes=_BOUND)
    yield Service("decoder", session, _prompt, _likeliest(SMALL.model()), 0)


def _prompt(random: np.random.Generator) -> Feeds:
    return {"ids": random.integers(0, SMALL.words, _seldom(random, 40))}


_TOKENS = 6


def _likeliest(model: onnx.ModelProto) -> Callable[[Feeds], dict[str, Array]]:
    """Return what continues a prompt by the likeliest tokens, all computed anew at each."""
    run = _theirs(model.SerializeToString())
    none = np.zeros((1, SMALL.kv_heads, 0, SMALL.width // SMALL.heads), np.float32)
    pasts = [each.name for each in model.graph.input if each.name.startswith("past")]

    def answer(feeds: Feeds) -> dict[str, Array]:
        ids = [int(token) for token in feeds["ids"]]
        for _ in range(_TOKENS):
            given = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), int)}
            given["position_ids"] = np.arange(len(ids))[None]
            found = run(given | dict.fromkeys(pasts, none))
            ids.append(int(found["logits"][0, -1].argmax()))
        return {"ids": np.array(ids[-_TOKENS:])}

    return answer


@dataclass
class Report:
    """What came of requests.

    Attributes:
        done: how many were answered, by service and way in. wrong: what was wrong, in words.
        resident: bytes in memory after each share of them, all threads at rest. objects: those that
            the collector of garbage knows then. threads: of the process then. shapes: how many
            different ones were asked for.
    """

    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    shapes: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)


def serve(served: list[Service], requests: int, callers: int, seed: int, shares: int = 4) -> Report:
    """Ask services from many threads at once, and compare.

    Args:
        served: whom to ask.
        requests: how many are asked. callers: threads that ask. seed: of what is drawn.
        shares: after how many equal shares of the requests all threads rest, to look at memory.
    """
    report = Report()
    for share in range(shares):
        numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(requests * share // shares, requests * (share + 1) // shares):
            numbers.put(number)
        threads = [
            threading.Thread(target=_ask_all, args=(served, numbers, seed, report))
            for _ in range(callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        report.resident.append(resident_bytes())
        report.objects.append(len(gc.get_objects()))
        report.threads.append(threading.active_count())
    return report


def _ask_all(
    served: list[Service], numbers: queue.SimpleQueue[int], seed: int, report: Report
) -> None:
    while True:
        try:
            number = numbers.get_nowait()
        except queue.Empty:
            return
        random = np.random.default_rng((seed, number))
        service = served[random.integers(len(served))]
        try:
            way, fault = _ask(service, random, report)
        except Exception as error:  # whatever it is, it is wrong and must be told
            way, fault = "error", f"{type(error).__name__}: {error}"
        report.done[service.name, way] += 1
        if fault:
            report.wrong.append(f"request {number}, {service.name}, {way}: {fault}")


def _ask(service: Service, random: np.random.Generator, report: Report) -> tuple[str, str]:
    """Return the way in that one request took, and what is wrong with its answer."""
    feeds = service.ask(random)
    report.shapes.add((service.name, next(iter(feeds.values())).shape))
    if random.random() < 0.1:
        return "mistake", _mistaken(service, feeds, random)
    expected, session = service.answer(feeds), service.session
    if service.name == "decoder":
        return "generate", _compared(
            {"ids": np.array(session.generate(feeds["ids"], _TOKENS))}, expected, 0
        )
    ways: dict[str, Callable[[], Any]] = {
        "run": lambda: session.run(feeds),
        "run_async": lambda: session.run_async(feeds).result(600),
        "out": lambda: session.run(feeds, out={n: np.empty_like(a) for n, a in expected.items()}),
    }
    batcher = service.batcher
    if batcher is not None:
        ways["batcher"] = lambda: batcher.run_async(feeds).result(600)
    way = str(random.choice(list(ways)))
    return way, _compared(ways[way](), expected, service.tolerance)


def _mistaken(service: Service, feeds: Feeds, random: np.random.Generator) -> str:
    name, array = next(iter(feeds.items()))
    wrong: list[Any] = [
        {},
        {name: array[..., None]},
        {name: array.astype(np.int8)},
        {"other": array},
    ]
    asked = wrong[random.integers(len(wrong))]
    try:
        if service.name == "decoder":
            service.session.generate(array + SMALL.words, 3)
        else:
            service.session.run(asked)
    except (DataError, TaskError):
        return ""
    return "a mistake was taken"


def _compared(found: dict[str, Array], expected: dict[str, Array], tolerance: float) -> str:
    for name, right in expected.items():
        if spec_of(found[name]) != spec_of(right):
            return f"{name}: {spec_of(found[name])} found, {spec_of(right)} needed"
        if right.size and not np.allclose(found[name], right, rtol=tolerance, atol=tolerance):
            return f"{name}: differs by {np.abs(found[name] - right).max()}"
    return ""
