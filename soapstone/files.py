"""Files that are written whole or not at all, and whose errors name them.

Besides its errors only the standard library is imported: every layer writes its files this way.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from soapstone.errors import DataError

ABSENT = "no such file"
FOLDER = "a folder found, a file needed"
NO_TEXT = "other bytes found, UTF-8 text needed"


def write(path: str | os.PathLike[str], data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: an interrupted write leaves the old contents.

    A link stays one, and a file that is there keeps who may read it. A pipe or a device, such as
    /dev/stdout, is written to as it is.

    Args:
        data: the contents, or a function that writes them to a stream.

    Raises:
        OSError: names `path`, whatever could not be done.
    """
    target = _target(path)
    partial = _partial(target)
    with naming(path):
        try:
            if _is_device(target):
                if callable(data):  # which may seek: some devices take that and stay where they are
                    whole = io.BytesIO()
                    data(whole)
                    data = whole.getvalue()
                with target.open("wb") as stream:
                    stream.write(data)
                return
            with partial.open("xb") as stream:
                if callable(data):
                    data(stream)
                else:
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            with contextlib.suppress(FileNotFoundError):  # a new file
                partial.chmod(target.stat().st_mode & 0o777)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        _sync(target.parent)


def check_targets(
    *paths: str | os.PathLike[str] | None, reads: Iterable[str | os.PathLike[str] | None] = ()
) -> None:
    """Refuse files that cannot be written, before the work whose results they are for; None passes.

    Args:
        reads: files that the same work reads, and that none of the paths may take the place of.

    Raises:
        OSError: a path is a folder, its own folder is not there or takes no file; names both.
        DataError: a path is among `reads`.
    """
    read = {os.path.realpath(each) for each in reads if each is not None}
    for path in paths:
        if path is None:
            continue
        folder, label = Path(path).parent, f"file {str(path)!r}"
        if os.path.realpath(path) in read:
            raise DataError(f"{label}: it is read too; another file to write needed")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{label}: {FOLDER}")
        if not folder.is_dir():
            raise FileNotFoundError(f"{label}: folder {str(folder)!r} does not exist")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{label}: folder {str(folder)!r} may not be written")
        if not _is_device(Path(path)):
            _try(Path(path))


def check_suffix(path: str | os.PathLike[str] | None, *suffixes: str, what: str = "file") -> None:
    """Refuse a name that does not say what is to be in the file; None passes, and so do devices.

    Args:
        suffixes: that it may have, in small letters. what: the file is, as the error calls it.

    Raises:
        DataError: names the file.
    """
    if path is None or Path(path).suffix.lower() in suffixes or _is_device(Path(path)):
        return
    found = f"suffix {Path(path).suffix!r} found"
    raise DataError(f"{what} {os.fspath(path)!r}: {found}, {' or '.join(suffixes)} needed")


def check_file(path: str | os.PathLike[str], where: str, error: type[Exception]) -> None:
    """Refuse to read what is not there, or is a folder. where: what the file is, in the error.

    Raises:
        error: says which of both.
    """
    if Path(path).is_dir():
        raise error(f"{where}: {FOLDER}")
    if not Path(path).exists():
        raise error(f"{where}: {ABSENT}")


def reason(error: OSError) -> str:
    """Return what the system would not do, in a few words."""
    if isinstance(error, IsADirectoryError):
        return FOLDER
    if isinstance(error, FileNotFoundError):
        return ABSENT
    return error.strerror.lower() if error.strerror else str(error)


def _target(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path leads to, by links if it is no device."""
    return Path(path if _is_device(Path(path)) else os.path.realpath(path))


def _try(target: Path) -> None:
    """Make the file that a write begins with, and remove it: not all folders take files."""
    partial = _partial(_target(target))
    try:
        partial.open("xb").close()
    except OSError as error:
        raise type(error)(
            f"file {str(target)!r}: folder {str(target.parent)!r} takes no such file:"
            f" {reason(error)}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Return whether a path is that of a pipe or a device, such as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _partial(target: Path) -> Path:
    """Return a name beside a file for what is written before it takes the file's place."""
    return target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.partial")


def read_text(path: str | os.PathLike[str], where: str, error: type[Exception]) -> str:
    """Return the text of a file. where: what the file is, as errors name it.

    Raises:
        OSError: names `path`.
        error: it is no text in UTF-8.
    """
    try:
        with naming(Path(path)):
            return Path(path).read_text("utf-8")
    except UnicodeDecodeError:
        raise error(f"{where}: {NO_TEXT}") from None


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of the system name a user's file, whichever was in the making for it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def _sync(folder: Path) -> None:
    """Make the renaming itself durable, where the system allows folders to be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
