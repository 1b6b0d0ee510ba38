"""Deadlines: one clock, parts, and what is begun after them."""

from __future__ import annotations

import math

import pytest
from helpers.clock import Clock

from soapstone.deadline import Deadline, TimeUpError


def test_a_deadline_is_over_when_its_seconds_are() -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    assert deadline.left == 10.0 and not deadline.over
    deadline.check()
    clock.now += 10.0
    assert deadline.left == 0.0 and deadline.over and not deadline.stopped
    with pytest.raises(TimeUpError):
        deadline.check()


def test_none_never_ends_but_can_be_stopped() -> None:
    deadline = Deadline(clock=Clock())
    assert math.isinf(deadline.left) and math.isinf(deadline.part(0.5).left)
    deadline.stop()
    assert deadline.over and deadline.stopped


def test_parts_end_with_the_whole_and_stop_it() -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    half, short, long = deadline.part(0.5), deadline.within(2.0), deadline.within(50.0)
    assert (half.left, short.left, long.left) == (5.0, 2.0, 10.0)
    clock.now += 5.0
    assert half.over and short.over and not deadline.over
    long.stop()
    assert deadline.stopped and half.stopped


def test_what_comes_after_a_search_has_a_deadline_of_its_own() -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    search = deadline.keeping(4.0)
    assert search.left == 6.0
    search.stop()  # an interrupt ends the search, and what it found is still checked
    assert search.over and deadline.left == 10.0
