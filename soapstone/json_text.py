"""JSON from users: an error says where, what was found and what was needed, in JSON's own words.

`ir/files/json_fields.py` reads whole objects with this; what knows no graph uses it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MOST = 60  # characters of a value that an error shows


def parse(text: str, where: str, error: type[Exception]) -> Any:
    """Return parsed JSON; a repeated field, NaN or an infinity is an error like bad syntax.

    Args:
        where: what the text is, as errors name it.
        error: the class of the errors.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{where}: field {twice!r} appears twice; once needed")
        return result

    def constant(name: str) -> Any:
        raise error(f"{where}: number {name} found, a finite one needed")

    if not text.strip():
        raise error(f"{where}: nothing found, JSON needed")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except error:
        raise
    except (ValueError, RecursionError) as fault:
        raise error(f"{where}: not JSON: {fault}") from None


def wrong(record: Mapping[str, Any], name: str, needed: str) -> str:
    """Return what is wrong with a field of an object: that it is missing, or what it is."""
    if name not in record:
        return f"field {name!r} is missing; {needed} needed"
    return f"field {name!r}: {shown(record[name])} found, {needed} needed"


def shown(value: Any) -> str:
    """Return a value as JSON has it, no longer than an error can be."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
