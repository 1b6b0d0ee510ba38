"""The errors of the runtime core: each names who failed, what was found and what was needed."""

from __future__ import annotations


class RuntimeCoreError(Exception):
    """Base of every error the runtime core raises on purpose.

    halfway: whether part of what was launched had been issued when it came, so that nothing may go
    on as if it had not been, or as if all of it had.
    """

    halfway = False


class BoundsError(RuntimeCoreError, ValueError):
    """A tile lies outside its region, or tile arrays have the wrong shape."""


class MachineError(RuntimeCoreError, ValueError):
    """A machine description is wrong: the message names the field."""


class PrivilegeError(RuntimeCoreError, ValueError):
    """Two points of one launch would touch the same elements, and one of them writes."""


class LaunchError(RuntimeCoreError, ValueError):
    """The arguments of a launch do not fit its task: count, kind, grid or dtype."""


class MapperError(RuntimeCoreError, ValueError):
    """A mapper gave an illegal answer: the message names the task and the request."""


class UnwrittenError(RuntimeCoreError, ValueError):
    """A transient region is read in a step before that step has written it."""


class ProfileError(RuntimeCoreError, ValueError):
    """A timeline or a log of a run cannot be read: the message says which part is wrong."""


class MemoryExhausted(RuntimeCoreError, MemoryError):
    """An allocation would exceed the capacity of a memory."""


class StoppedError(RuntimeCoreError, RuntimeError):
    """The runtime is closed, stopped by an earlier error, or busy capturing."""


class PeerError(RuntimeCoreError, RuntimeError):
    """Another process of the run has failed, died or kept silent; the message says which.

    announced: whether that process has said so itself, and reports its error.
    """

    def __init__(self, text: str, announced: bool = False) -> None:
        super().__init__(text)
        self.announced = announced


class ReplicationError(RuntimeCoreError, RuntimeError):
    """Ranks of one run have done different things: the message names the first difference."""


class TaskError(RuntimeCoreError, RuntimeError):
    """A point task failed; `__cause__` is the exception its body raised, if it raised one.

    `task` is the name of the task, `point` its point, `processor` the name of its processor.
    """

    def __init__(self, task: str, point: int, processor: str, reason: str) -> None:
        super().__init__(f"task {task!r}, point {point}, on processor {processor!r}: {reason}")
        self.task = task
        self.point = point
        self.processor = processor


class SubtaskError(RuntimeCoreError, RuntimeError):
    """A task launched by the body of a task failed; `__cause__` is its TaskError."""


class BodyError(RuntimeCoreError, RuntimeError):
    """A body could not run in another process, or failed there; `reason` says it in one line.

    The text ends with the traceback of the other process, where there is one.
    """

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(f"{reason}\n{trace}" if trace else reason)
        self.reason = reason
