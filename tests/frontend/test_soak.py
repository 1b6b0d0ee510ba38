"""Sessions that many threads share, asked for many shapes in every way: no answer is wrong."""

from __future__ import annotations

import threading

import pytest
from helpers.soak import serve, services


@pytest.mark.long
def test_no_answer_to_many_threads_is_wrong() -> None:
    pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    before = threading.active_count()
    served = list(services())
    report = serve(served, requests=400, callers=64, seed=1, shares=3)
    assert not report.wrong, report.wrong[0]
    assert {way for _, way in report.done} == {
        *("run", "out", "run_async", "batcher", "generate", "mistake")
    }
    assert report.threads[0] == report.threads[-1]
    for service in served:
        most = 4 * service.session.serial.bounds.most  # a decoder binds several a shape
        assert len(service.session.serial.bounds.held) <= most
        service.close()
    assert threading.active_count() == before
