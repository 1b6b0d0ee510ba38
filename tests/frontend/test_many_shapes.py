"""What a session keeps of ever more shapes of inputs, and what sessions leave that are closed."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers.soak import Service, services

from soapstone import locks

SHAPES = 80  # more than any of a session's own bounds


def _ask(service: Service, first: int) -> None:
    """Ask for as many shapes as are nobody's before; threads that bind some end."""
    for number in range(first, first + SHAPES):
        random = np.random.default_rng(number)
        if service.name == "texts":
            feeds = {"ids": random.integers(0, 50, (1 + number * number % 7, 1 + number))}
        else:
            shape = (1 + number % 5, 3, 8 + number // 4, 9 + number % 100)
            feeds = {"x": random.random(shape, np.float32)}
        service.session.run(feeds)
    locks.wait_for_all()


@contextmanager
def _all_objects() -> Iterator[None]:
    """Let all live objects be found, those too that the collector has been told to leave alone."""
    gc.unfreeze()
    gc.collect()
    try:
        yield
    finally:
        gc.freeze()


def _forget() -> None:
    """Let go of the primitives that nobody uses, those of other tests too."""
    from soapstone.kernels.cpu.onednn import descriptors

    with _all_objects():
        for kept in gc.get_objects():
            if issubclass(type(kept), descriptors.Kept):  # not that of a proxy, which may be stale
                kept.forget()


def _left() -> tuple[Counter[str], dict[str, int]]:
    """What there is besides bounded caches: objects by type, and entries of other caches."""
    from soapstone.kernels.cpu.onednn import descriptors

    with _all_objects():
        caches: list[Any] = [
            each
            for each in gc.get_objects()
            if isinstance(each, functools._lru_cache_wrapper)
            and str(getattr(each, "__module__", "")).startswith("soapstone")
        ]
    for each in caches:
        if each.cache_info().maxsize is not None:
            each.cache_clear()
    descriptors._KNOWN.clear()  # a bounded one that is compared in
    _forget()
    with _all_objects():
        types = (type(each) for each in gc.get_objects())
        own = (each for each in types if str(each.__module__).startswith("soapstone"))
        objects = Counter(each.__qualname__ for each in own)
    endless = (each for each in caches if each.cache_info().maxsize is None)
    return objects, {each.__qualname__: each.cache_info().currsize for each in endless}


@pytest.mark.long
@pytest.mark.parametrize("name", ["images", "texts", "bytes"])
def test_more_shapes_leave_nothing_more(name: str) -> None:
    pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    service = next(each for each in services() if each.name == name)
    rounds = 2 if name == "texts" else 1  # of short ones passes make other graphs than of long
    for number in range(rounds):
        _ask(service, 1 + number * SHAPES)
    objects, entries = _left()
    _ask(service, 1 + rounds * SHAPES)
    more, entries_more = _left()
    assert entries_more == entries
    # Graphs of other extents share other parts of what they say of their values.
    few = 4 * service.session.serial.bounds.most
    grown = {what: (objects[what], n) for what, n in more.items() if n > 1.1 * objects[what] + few}
    assert not grown
    service.close()


@pytest.mark.onednn
@pytest.mark.parametrize("name", ["images", "texts", "bytes"])
def test_machine_code_is_kept_of_the_last_shapes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primitive of oneDNN takes up to 100 KB, so they are counted before any is let go."""
    pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    from soapstone.kernels.cpu.onednn import descriptors

    _forget()
    monkeypatch.setattr(descriptors, "_RECENT", 4)
    service = next(each for each in services() if each.name == name)
    _ask(service, 1)
    with _all_objects():
        kinds_of = Counter(map(type, gc.get_objects()))
    found, kinds = kinds_of[descriptors.Primitive], kinds_of[descriptors.Kept]
    bound = service.session.serial.bounds.most * 8  # of one shape: fewer
    service.close()
    assert 0 < found <= 4 * kinds + bound


@pytest.mark.parametrize("name", ["images", "texts", "bytes", "points", "decoder"])
def test_sessions_that_are_closed_leave_nothing(name: str) -> None:
    """A circle that passes through an array's memory would, since no collector follows it."""
    pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")

    def serve() -> None:
        for service in services():
            if service.name == name:
                for number in range(6):
                    feeds = service.ask(np.random.default_rng(number))
                    if name == "decoder":
                        service.session.generate(feeds["ids"], 3)
                    else:
                        service.session.run(feeds)
                service.session.settle()
            service.close()

    serve()
    objects, _ = _left()
    sessions = 3
    for _ in range(sessions):
        serve()
    grown = {what: n for what, n in (_left()[0] - objects).items() if n >= sessions}
    assert not grown
