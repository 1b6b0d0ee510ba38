"""Strict reading of JSON objects: each fault is one error naming the field, found and needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from soapstone.errors import warn
from soapstone.files import read_text, reason, write
from soapstone.ir.errors import GraphError
from soapstone.ir.files.storage import seal_of, sealed
from soapstone.json_text import parse, shown, wrong

Record = TypeVar("Record")
T = TypeVar("T")


class Fields:
    """One JSON object while its fields are read; `finish` refuses what nobody asked for.

    Args:
        data: what was parsed.
        where: what the object is, as errors name it.
        error: the class of the errors.
    """

    def __init__(self, data: Any, where: str, error: type[GraphError]) -> None:
        self.where, self.error = where, error
        if not isinstance(data, dict):
            raise error(f"{where}: {shown(data)} found, an object needed")
        self._data: dict[str, Any] = data
        self._taken: set[str] = set()

    def fail(self, name: str, found: Any, needed: str) -> GraphError:
        """Return the error of a field."""
        return self.error(f"{self.where}: field {name!r}: {shown(found)} found, {needed} needed")

    def take(self, name: str, needed: str, accepts: Callable[[Any], bool]) -> Any:
        """Return a field.

        Raises:
            GraphError: it is missing, or not accepted.
        """
        if name not in self._data:
            raise self.error(f"{self.where}: {wrong(self._data, name, needed)}")
        self._taken.add(name)
        value = self._data[name]
        if not accepts(value):
            raise self.fail(name, value, needed)
        return value

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        """Return a string, one of `choices` where there are any."""
        needed = f"one of {', '.join(choices)}" if choices else "a string"
        return str(self.take(name, needed, lambda v: _is_text(v) and (not choices or v in choices)))

    def optional_text(self, name: str) -> str | None:
        """Return a string or null."""
        value: str | None = self.take(name, "a string or null", lambda v: v is None or _is_text(v))
        return value

    def integer(self, name: str, least: int = 0) -> int:
        """Return an integer of at least `least`."""
        return int(self.take(name, f"an integer from {least}", lambda v: _is_int(v) and v >= least))

    def real(self, name: str) -> float:
        """Return a finite number."""
        return float(self.take(name, "a finite number", _is_real))

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 0."""
        needed = "a list of integers from 0"
        return tuple(self.take(name, needed, lambda v: _all(v, lambda i: _is_int(i) and i >= 0)))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(self.take(name, "a list of strings", lambda v: _all(v, _is_text)))

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        return list(self.take(name, "a list", lambda v: isinstance(v, list)))

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object whose fields are names."""
        return dict(self.take(name, "an object", lambda v: isinstance(v, dict)))

    def text_mapping(self, name: str) -> dict[str, str]:
        """Return an object of strings."""
        texts = self.mapping(name)
        for key, value in texts.items():
            if not _is_text(value):
                raise self.fail(f"{name}.{key}", value, "a string")
        return texts

    def integers_mapping(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return an object of lists of integers."""
        result: dict[str, tuple[int, ...]] = self._typed(name, dict[str, tuple[int, ...]], {})
        return result

    def record(self, kind: type[Record], **known: Any) -> Record:
        """Return a dataclass whose fields are those of the object, as their types say.

        Fields that are optional need not be there. known: fields that are read otherwise.
        """
        hints = get_type_hints(kind)
        for field in fields(cast("Any", kind)):
            absent = field.metadata.get("optional") and field.name not in self._data
            if field.name not in known and not absent:
                known[field.name] = self._typed(field.name, hints[field.name], field.metadata)
        self.finish()
        return kind(**known)

    def _typed(self, name: str, hint: Any, about: Mapping[str, Any]) -> Any:
        """Return a field of a type; `least` and `choices` are limits of numbers and strings."""
        if hint is str:
            return self.text(name, about.get("choices", ()))
        if hint is int:
            return self.integer(name, about.get("least", 0))
        if hint is float:
            return self.real(name)
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return hint(self.text(name, tuple(hint)))
        if isinstance(hint, type) and is_dataclass(hint):
            return self._inner(name, self.take(name, "an object", lambda v: True)).record(hint)
        kind, *_ = get_args(hint)
        if get_origin(hint) is tuple:
            if kind in (int, str):
                return self.integers(name) if kind is int else self.texts(name)
            items = enumerate(self.items(name))
            return tuple(self._inner(f"{name}[{i}]", item).record(kind) for i, item in items)
        *_, kind = get_args(hint)
        if kind in (Any, str):
            return self.mapping(name) if kind is Any else self.text_mapping(name)
        inner = self._inner(name, self.mapping(name))
        return {key: inner._typed(key, kind, about) for key in inner._data}

    def _inner(self, name: str, data: Any) -> Fields:
        dot = "." if ": " in self.where else ": "
        return Fields(data, f"{self.where}{dot}{name}", self.error)

    def header(self, form: str, version: int) -> None:
        """Check the fields `format` and `version`."""
        self.take("format", repr(form), lambda v: v == form)
        self.take("version", str(version), lambda v: _is_int(v) and v == version)

    def finish(self) -> None:
        """Raise the error of the first field that was not read."""
        for name in self._data:
            if name not in self._taken:
                have = ", ".join(sorted(self._taken))
                raise self.error(f"{self.where}: unknown field {name!r}; fields are {have}")


def as_data(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses and mappings as objects, tuples as lists.

    It is what `Fields.record` reads. Optional fields are left out where they are empty.
    """
    if is_dataclass(value):
        found = {field: getattr(value, field.name) for field in fields(value)}
        return {
            field.name: as_data(item)
            for field, item in found.items()
            if item or not field.metadata.get("optional")
        }
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_data(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def read(path: str | Path, error: type[GraphError], own: bool = True) -> Any:
    """Return the parsed contents of a JSON file, without its checksum, which was compared.

    own: whether a file without a checksum is worth a warning.
    """
    where = f"file {str(path)!r}"
    try:
        text = read_text(path, where, error)
    except OSError as fault:
        raise error(f"{where}: {reason(fault)}") from None
    same = seal_of(text)
    data = parse(text, where, error) if same is not False else {"checksum": None}
    if not same and isinstance(data, dict) and "checksum" in data:
        raise error(
            f"{where}: its contents are not those of its checksum, so it was damaged or edited;"
            " without the field 'checksum' it is taken as it is"
        )
    if same:
        del data["checksum"]
    elif own and isinstance(data, dict):
        warn(f"{where} has no checksum; it is taken as it is")
    return data


def dump(data: Mapping[str, Any], error: type[GraphError]) -> str:
    """Return indented JSON with short lists on one line, so that files can be compared by line."""
    try:
        return _dump(data, "") + "\n"
    except (TypeError, ValueError) as fault:
        raise error(f"cannot be written as JSON: {fault}") from None


def _dump(value: Any, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if not isinstance(value, dict | list | tuple) or len(indent) + len(flat) <= 100:
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        lines = [
            f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_dump(item, deeper)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _dump(item, deeper) for item in value) + f"\n{indent}]"


def load(path: str | Path, error: type[GraphError], made: Callable[[Any], T]) -> T:
    """Return what is made of the parsed contents of a JSON file; its errors name the file too."""
    data = read(path, error)
    try:
        return made(data)
    except error as fault:
        raise type(fault)(f"file {str(path)!r}: {fault}") from None


def save(path: str | Path, text: str) -> None:
    """Write the text of a JSON object and its checksum, whole or not at all."""
    write(path, sealed(text).encode())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _all(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(accepts(item) for item in value)
