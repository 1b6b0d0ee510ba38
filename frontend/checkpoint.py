"""Checkpoint files: arrays by name and JSON metadata, replaced whole or not at all.

A checkpoint is written beside the old one and renamed over it once it is on disk, so a writer that
is killed leaves the old one as it was.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array

FORMAT = "soapstone-checkpoint"
VERSION = 1
SUFFIXES = (".safetensors", ".npz")
_KEY = "soapstone"  # where a file keeps its metadata; no array may have this name

Metadata = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; names the file or field and what was needed."""


def save(path: str | Path, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing an old one of that name in one step.

    Args:
        path: a name that ends in .safetensors or .npz.
        arrays: arrays of numbers by name, of any shape.
        metadata: anything that JSON can say.

    Raises:
        CheckpointError: another suffix, an array that is not numeric, or metadata JSON cannot say.
        OSError: the folder is absent or full; the old checkpoint is as it was.
    """
    path = check_path(path)
    label = f"checkpoint {str(path)!r}"
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{label}: there is no folder {str(path.parent)!r}")
    for name, array in arrays.items():
        if name == _KEY or np.asarray(array).dtype.kind not in "biuf":
            raise CheckpointError(
                f"{label}: array {name!r} of {np.asarray(array).dtype} found, numbers under another"
                f" name than {_KEY!r} needed"
            )
    header = {"format": FORMAT, "version": VERSION, "metadata": dict(metadata)}
    try:
        text = json.dumps(header, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{label}: metadata: {error}") from None
    # "C" order keeps rank 0, which np.ascontiguousarray would raise to rank 1.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _WRITERS[path.suffix](partial, dense, text)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def load(path: str | Path) -> tuple[dict[str, Array], Metadata]:
    """Return the arrays and the metadata of a checkpoint.

    Raises:
        CheckpointError: absent, truncated, of another program or of another version.
    """
    path = check_path(path)
    label = f"checkpoint {str(path)!r}"
    if not path.is_file():
        raise CheckpointError(f"{label}: no such file")
    text, arrays = _READERS[path.suffix](path, label)
    if text is None:
        raise CheckpointError(f"{label}: metadata is missing; a file made by soapstone needed")
    try:
        header = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{label}: metadata is not JSON: {error}") from None
    found = header.get("format") if isinstance(header, dict) else header
    if found != FORMAT:
        raise CheckpointError(f"{label}: format {found!r} found, {FORMAT!r} needed")
    if header.get("version") != VERSION:
        raise CheckpointError(f"{label}: version {header.get('version')!r} found, {VERSION} needed")
    metadata = header.get("metadata")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{label}: metadata {metadata!r} found, an object needed")
    return arrays, metadata


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


def check(arrays: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Check that a checkpoint has exactly the expected arrays: name -> (shape, element type).

    Raises:
        CheckpointError: a missing or unknown array, or another shape or type; names all of a kind.
    """
    missing = sorted(expected.keys() - arrays.keys())
    if missing:
        raise CheckpointError(f"checkpoint: {_listed(missing)} missing; is it of another model?")
    unknown = sorted(arrays.keys() - expected.keys())
    if unknown:
        raise CheckpointError(f"checkpoint: {_listed(unknown)} found, but not in this model")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype.name != dtype:
            raise CheckpointError(
                f"checkpoint: array {name!r}: {array.dtype.name}{list(array.shape)} found,"
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


def _write_safetensors(path: Path, arrays: Mapping[str, Array], text: str) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, {_KEY: text})
    except SafetensorError as error:
        raise OSError(f"{str(path)!r}: {error}") from None


def _write_npz(path: Path, arrays: Mapping[str, Array], text: str) -> None:
    with path.open("wb") as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
        for name, array in {_KEY: np.array(text), **arrays}.items():
            # Written member by member: np.savez takes names as keywords and so refuses "file".
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_safetensors(path: Path, label: str) -> tuple[str | None, dict[str, Array]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = file.keys()
            return text, {name: file.get_tensor(name) for name in names} if text else {}
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{label}: truncated or no safetensors file: {error}") from None


def _read_npz(path: Path, label: str) -> tuple[str | None, dict[str, Array]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            if _KEY not in archive.files:
                return None, {}
            text = str(archive[_KEY])
            return text, {name: archive[name] for name in archive.files if name != _KEY}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{label}: truncated or no npz file: {error}") from None


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself durable, where the system allows folders to be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_WRITERS: dict[str, Callable[[Path, Mapping[str, Array], str], None]] = {
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}
_READERS: dict[str, Callable[[Path, str], tuple[str | None, dict[str, Array]]]] = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
}
