"""The offline checker (the role of Legion Spy): did a logged run do what its program says?

From the launches alone (regions, tiles, privileges), tile by tile and without the runtime's own
analysis, it works out what every point should read and which operations must be ordered, and
compares that with what ran: whether every point ran once, on its own tile; whether every conflict
is ordered by the dependences that were found, and in time; whether every read found the last value
written, through copies, messages, fills, folds and reused memory. Logs of several ranks are judged
together (`ranks`), and tasks that launch tasks with what they launched (`scopes`).

Source: Lee et al., "Legion Spy", in Bauer, "Legion: programming distributed heterogeneous
architectures with logical regions", Stanford, 2014; the log here also holds storages, so that
values are followed through memory, which Legion Spy does not do for reused bytes.
"""

from __future__ import annotations

import os

from soapstone.runtime.observe.checker.check import check
from soapstone.runtime.observe.checker.reader import load, parse
from soapstone.runtime.observe.checker.records import Records
from soapstone.runtime.observe.checker.report import Report, Violation


def check_log(path: str | os.PathLike[str]) -> Report:
    """What the checker says of a log file; of several ranks, of their files together.

    Raises: ProfileError for a file that is no log, is cut short, has records of unknown kinds, or
    is one of several that are not there; OSError.
    """
    return check(*load(path))


__all__ = ["Records", "Report", "Violation", "check", "check_log", "load", "parse"]
