"""The worker threads of a runtime, one a processor: each runs what it is given, in order.

A thread waits in a queue, sets its OpenMP thread count once, and is a daemon: a crash exits.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from soapstone import system
from soapstone.native.threads.openmp import set_threads
from soapstone.runtime.machines.machine import Machine

Function = Callable[[], None]
Inbox = queue.SimpleQueue[Function | None]


class Threads:
    """The threads of some processors, started when they are first needed.

    They end when nobody has this any more. queues: by the number of a processor, where its thread
    takes functions from; None ends it. identifiers: of the threads, as `threading.get_ident`
    says them.
    """

    def __init__(self, machine: Machine) -> None:
        self.queues: dict[int, Inbox] = {}
        self.identifiers: set[int] = set()
        self._machine = machine
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self.queues).atexit = False

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, processors: Sequence[int]) -> None:
        """Start the threads of processors that have none."""
        cores = _cores(self._machine)
        for number in processors:
            if number in self.queues:
                continue  # an interrupt came between this one and the next
            processor = self._machine.processors[number]
            inbox: Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox, processor.threads, cores[number] if cores else None),
                daemon=True,
                name=f"soapstone-{processor.name}-{number}",
            )
            thread.start()
            self.identifiers.add(thread.ident or 0)
            self.queues[number] = inbox
            self._threads.append(thread)

    def run_all(self, jobs: Mapping[int, Function], interrupt: Function) -> None:
        """Run one function on each of some processors' threads, and wait for all of them.

        On an interrupt (KeyboardInterrupt, or whatever a handler of a signal raises) `interrupt` is
        called, the threads are waited for, and it is raised.

        Raises: what the function of the first processor that failed raised.
        """
        round_ = _Round(len(jobs))
        try:
            for processor, function in jobs.items():
                self.queues[processor].put(partial(round_.run, processor, function))
            if jobs:
                round_.done.get()
        except BaseException:
            interrupt()
            self._drain(list(jobs))
            raise
        if round_.errors:
            raise round_.errors[min(round_.errors)]

    def _drain(self, processors: Sequence[int]) -> None:
        """Wait until some threads have run everything they were given, whatever interrupts."""
        ended: set[int] = set()
        for processor in processors:
            self.queues[processor].put(partial(ended.add, processor))
        while len(ended) < len(processors):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.001)

    def join(self) -> None:
        """End the threads after what they have been given."""
        _end(self.queues)
        for thread in self._threads:
            thread.join()


class _Round:
    """Functions running on several threads; the last to end says so."""

    __slots__ = ("_tokens", "done", "errors")

    def __init__(self, count: int) -> None:
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.errors: dict[int, BaseException] = {}
        self._tokens = [None] * (count - 1)

    def run(self, processor: int, function: Callable[[], None]) -> None:
        """Run one function in the calling thread, and keep what it raises."""
        try:
            function()
        except BaseException as error:
            self.errors[processor] = error
        try:
            self._tokens.pop()  # atomic: only the last finds the list empty
        except IndexError:
            self.done.put(None)


def _cores(machine: Machine) -> list[int] | None:
    """The core of each worker when single-threaded workers fill this computer exactly, or None.

    Two workers that wait for each other on one core, while another is idle, are 30 times slower,
    and the operating system may leave them there. With fewer workers than cores nothing is
    pinned: another process may be using the first ones.
    """
    cores = system.core_numbers()
    if cores is None:
        return None
    single = all(processor.threads == 1 for processor in machine.processors)
    fits = len(cores) == len(machine.processors) > 1
    return cores if fits and single else None


def _end(queues: Mapping[int, Inbox]) -> None:
    """Let the threads of some queues end after what they have been given."""
    for inbox in queues.values():
        inbox.put(None)


def do_nothing() -> None:
    """Do nothing."""


def _serve(inbox: Inbox, threads: int, core: int | None) -> None:
    """A worker thread: run what arrives until None does."""
    if core is not None:
        system.pin(core)
    set_threads(threads)
    while (item := inbox.get()) is not None:
        item()
        del item  # an idle thread keeps nothing alive
