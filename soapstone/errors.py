"""The error of data that come from users, warnings to them, and what both say of unknown words."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable


def fault(error: BaseException) -> str:
    """Return an exception that nobody expected as one line: its type, its text and its place."""
    import traceback  # which few need

    said = traceback.extract_tb(error.__traceback__)
    place = f" ({said[-1].filename}, line {said[-1].lineno})" if said else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn users at the line of theirs that called: the innermost one outside this package.

    Lines of the standard library, such as those of `contextlib` and `threading`, are nobody's.
    """
    frame = sys._getframe(1)
    others = {__package__, *sys.stdlib_module_names}
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in others:
        frame = frame.f_back
    kept = frame.f_globals.setdefault("__warningregistry__", {})  # what was said there before
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    warnings.warn_explicit(message, category, *where, kept)


def hint(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'adam'?" of the known word that is nearest, nothing where none is."""
    from difflib import get_close_matches  # which few need

    by_form = {_form(each): each for each in known}
    near = get_close_matches(_form(str(word)), by_form, 1, 0.7)
    return f"; did you mean {by_form[near[0]]!r}?" if near else ""


def _form(word: str) -> str:
    """A word without what other libraries write otherwise: capitals, dashes, underscores."""
    return re.sub(r"[\W_]", "", word.lower()) or word


class DataError(ValueError):
    """Data that cannot be used; names the file or field, what was found and what was needed."""
