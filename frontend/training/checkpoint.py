"""Checkpoint files: arrays by name and JSON metadata, replaced whole or not at all.

A checkpoint is written beside the old one and renamed over it once it is on disk, so a writer that
is killed leaves the old one as it was.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from soapstone import files
from soapstone.dtypes import BITS, kind_of, name_of
from soapstone.errors import warn
from soapstone.frontend.data import npz
from soapstone.ir.files import storage
from soapstone.ir.tensor import Array

FORMAT = "soapstone-checkpoint"
VERSION = 1
SUFFIXES = (".safetensors", ".npz")
KEY = "soapstone"  # where a file keeps its metadata; no array may have this name
_BESIDE = f"{KEY}.metadata."  # and with a number, what arrays in the metadata are called

Metadata = dict[str, Any]
Writer = Callable[[IO[bytes]], object]
_Write = Callable[[Mapping[str, Array], str], Writer]
_Read = Callable[[Path, str], tuple[str | None, dict[str, Array]]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; names the file or field and what was needed."""


def save(path: str | Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing an old one of that name in one step.

    Args:
        path: a name that ends in .safetensors or .npz.
        arrays: arrays of numbers by name, of any shape.
        metadata: anything that JSON can say, and arrays of numbers.

    Raises:
        CheckpointError: another suffix, an array that is not numeric, or metadata JSON cannot say.
        OSError: the folder is absent or full; the old checkpoint is as it was.
    """
    path = check_path(path)
    label = f"checkpoint {str(path)!r}"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{label}: there is no folder {str(path.parent)!r}")
    beside: dict[str, Array] = {}
    metadata = {name: _apart(value, beside) for name, value in metadata.items()}
    arrays = {**arrays, **beside}
    for name, array in arrays.items():
        if name == KEY or kind_of(np.asarray(array).dtype) not in "biuf":
            raise CheckpointError(
                f"{label}: array {name!r} of {np.asarray(array).dtype} found, numbers under another"
                f" name than {KEY!r} needed"
            )
        dtype = name_of(np.asarray(array).dtype)
        if (path.suffix == ".npz" and dtype in BITS) or not storage.holds(dtype):
            raise CheckpointError(
                f"{label}: array {name!r} of {dtype} found, which files of this kind do not have"
                + ("; a name that ends in .safetensors needed" if storage.holds(dtype) else "")
            )
    # "C" order keeps rank 0, which np.ascontiguousarray would raise to rank 1.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": metadata,
        "checksums": {name: storage.digest(array) for name, array in dense.items()},
    }
    try:
        text = storage.sealed(json.dumps(header, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{label}: metadata: {error}") from None
    files.write(path, _FORMATS[path.suffix][0](dense, text))


def load(path: str | Path) -> tuple[dict[str, Array], Metadata]:
    """Return the arrays and the metadata of a checkpoint.

    Raises:
        CheckpointError: absent, truncated, of another program or of another version.
    """
    path = check_exists(path)
    label = f"checkpoint {str(path)!r}"
    text, arrays = _FORMATS[path.suffix][1](path, label)
    if text is None:
        raise CheckpointError(f"{label}: metadata is missing; a file made by soapstone needed")
    seal = storage.seal_of(text)
    if seal is False:
        raise CheckpointError(f"{label}: the checksum of its metadata differs; it was damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: metadata is not JSON: {error}") from None
    found = header.get("format") if isinstance(header, dict) else header
    if found != FORMAT:
        raise CheckpointError(f"{label}: format {found!r} found, {FORMAT!r} needed")
    if header.get("version") != VERSION:
        raise CheckpointError(f"{label}: version {header.get('version')!r} found, {VERSION} needed")
    metadata = header.get("metadata")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{label}: metadata {metadata!r} found, an object needed")
    if seal is None and "checksums" in header:
        raise CheckpointError(f"{label}: the checksum of its metadata is gone; it was damaged")
    if seal is None:
        warn(f"{label} has no checksums; it is taken as it is")
        return _together(arrays, metadata)
    sums = header["checksums"]
    if sums.keys() != arrays.keys():
        raise CheckpointError(
            f"{label}: {_listed(sorted(sums.keys() ^ arrays.keys()))} is missing or unknown;"
            " the file was damaged"
        )
    for name, array in arrays.items():
        if sums[name] != storage.digest(array):
            raise CheckpointError(f"{label}: array {name!r}: its checksum differs; it was damaged")
    return _together(arrays, metadata)


def _apart(value: Any, beside: dict[str, Array]) -> Any:
    """Return metadata as JSON can say it: arrays go to `beside`, and their names stay."""
    if isinstance(value, np.ndarray):
        name = f"{_BESIDE}{len(beside)}"
        beside[name] = value
        return {_BESIDE: name}
    if isinstance(value, Mapping):
        return {name: _apart(each, beside) for name, each in value.items()}
    return [_apart(each, beside) for each in value] if isinstance(value, list | tuple) else value


def _together(arrays: Mapping[str, Array], metadata: Metadata) -> tuple[dict[str, Array], Metadata]:
    """Return the arrays of a checkpoint, and its metadata with those that are a part of it."""
    beside = {name: array for name, array in arrays.items() if name.startswith(_BESIDE)}

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(each) for each in value]
        if not isinstance(value, dict):
            return value
        name = value.get(_BESIDE)
        if name is None:
            return {name: whole(each) for name, each in value.items()}
        if not isinstance(name, str) or name not in beside:
            raise CheckpointError(f"checkpoint: array {name!r} of its metadata is missing")
        return beside[name]

    rest = {name: array for name, array in arrays.items() if name not in beside}
    return rest, {name: whole(value) for name, value in metadata.items()}


def check_path(path: str | Path) -> Path:
    """Return the path of a checkpoint.

    Raises:
        CheckpointError: its suffix names no format.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"checkpoint {str(path)!r}: suffix {path.suffix!r} found,"
            f" {' or '.join(SUFFIXES)} needed"
        )
    return path


def check_exists(path: str | Path) -> Path:
    """Return the path of a checkpoint that is there.

    Raises:
        CheckpointError: it is not, or its suffix names no format.
    """
    path = check_path(path)
    files.check_file(path, f"checkpoint {str(path)!r}", CheckpointError)
    return path


def check(
    arrays: Mapping[str, Array],
    expected: Mapping[str, tuple[tuple[int, ...], str]],
    label: str = "checkpoint",
) -> None:
    """Check that a checkpoint has exactly the expected arrays: name -> (shape, element type).

    label: what it is, as errors name it.

    Raises:
        CheckpointError: a missing or unknown array, or another shape or type; names all of a kind.
    """
    missing = sorted(expected.keys() - arrays.keys())
    if missing:
        raise CheckpointError(f"{label}: {_listed(missing)} missing; is it of another model?")
    unknown = sorted(arrays.keys() - expected.keys())
    if unknown:
        raise CheckpointError(f"{label}: {_listed(unknown)} found, but not in this model")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype.name != dtype:
            raise CheckpointError(
                f"{label}: array {name!r}: {array.dtype.name}{list(array.shape)} found,"
                f" {dtype}{list(shape)} needed"
            )


def fields(metadata: Mapping[str, Any], name: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object `name` of the metadata, which has the keys and the types of `like`.

    Raises:
        CheckpointError: a missing or unknown key, or a value of another type.
    """
    found = metadata.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint: field {name!r}: {found!r} found, an object needed")
    for key in found.keys() ^ like.keys():
        what = "is missing" if key in like else "is unknown"
        raise CheckpointError(f"checkpoint: field {name}.{key} {what}")
    result = {}
    for key, example in like.items():
        value, kind = found[key], type(example)
        number = kind is float and type(value) is int
        if type(value) is not kind and not number:
            raise CheckpointError(
                f"checkpoint: field {name}.{key}: {value!r} found, {kind.__name__} needed"
            )
        result[key] = kind(value)
    return result


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"array{'s' if len(names) > 1 else ''} {shown}{more}"


def _safetensors_writer(arrays: Mapping[str, Array], text: str) -> Writer:
    return storage.safetensors_writer(arrays, {KEY: text})


def _npz_writer(arrays: Mapping[str, Array], text: str) -> Writer:
    def write_to(stream: IO[bytes]) -> None:
        with zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
            for name, array in {KEY: np.array(text), **arrays}.items():
                # Written member by member: np.savez takes names as keywords and so refuses "file".
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return write_to


def _read_safetensors(path: Path, label: str) -> tuple[str | None, dict[str, Array]]:
    metadata, arrays = storage.read_safetensors(path, label, CheckpointError)
    return metadata.get(KEY), arrays


def _read_npz(path: Path, label: str) -> tuple[str | None, dict[str, Array]]:
    arrays = npz.read(path, f"{label}: truncated or no npz file", CheckpointError, texts=(KEY,))
    text = arrays.pop(KEY, None)
    return None if text is None else str(text), arrays


_FORMATS: dict[str, tuple[_Write, _Read]] = {
    ".safetensors": (_safetensors_writer, _read_safetensors),
    ".npz": (_npz_writer, _read_npz),
}
