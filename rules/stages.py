"""What is finished of a long computation, on disk, from which an interrupted one goes on.

Each stage is one JSON file in a folder beside the result, which is removed when that is written. A
folder of another computation (other laws, spaces or limits) is not used. Of a computation that
writes no file, results are kept in the caches where it is interrupted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from soapstone import files
from soapstone.cache.environment import digest, folder
from soapstone.ir.errors import GraphError

T = TypeVar("T")
_KEY = "of.json"


@contextmanager
def resuming(*computation: str) -> Iterator[list[Any]]:
    """Yield the results that a computation had when it was interrupted, to which it adds others.

    An interrupt of the block keeps what they have become, if any, and says so. They are JSON.
    """
    path = folder() / "rules" / f"{digest(*computation)}.json"
    results: list[Any] = []
    with suppress(OSError, ValueError):  # none, or cut short
        results = json.loads(path.read_bytes())
    try:
        yield results
    except KeyboardInterrupt as error:
        if results:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, json.dumps(results).encode())
                error.args = (f"; {len(results):,} results are kept, the same command goes on",)
        raise
    path.unlink(missing_ok=True)


class Stages:
    """The stages of a computation, and the seconds that each took.

    Args:
        folder: where they are kept; None keeps nothing.
        key: what the computation is of; stages kept under another key are removed.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self._folder = folder
        self.seconds: dict[str, float] = {}
        self.resumed: list[str] = []
        if folder is None:
            return
        if self._read(_KEY) != key:
            self.clear()
            folder.mkdir(parents=True)
            files.write(folder / _KEY, json.dumps(key).encode())

    def run(
        self,
        name: str,
        compute: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        """Return what a stage computes, from its file if it was finished before."""
        kept = self._read(f"{name}.json")
        if isinstance(kept, dict) and set(kept) == {"seconds", "result"}:
            self.resumed.append(name)
            self.seconds[name] = float(kept["seconds"])
            return decode(kept["result"])
        start = time.perf_counter()
        result = compute()
        self.seconds[name] = time.perf_counter() - start
        if self._folder is not None:
            data = {"seconds": self.seconds[name], "result": encode(result)}
            files.write(self._folder / f"{name}.json", json.dumps(data).encode())
        return result

    def clear(self) -> None:
        """Remove what is kept."""
        if self._folder is not None and self._folder.exists():
            if not (self._folder / _KEY).is_file() and any(self._folder.iterdir()):
                raise GraphError(
                    f"folder {str(self._folder)!r}: other files found; it is needed for stages"
                )
            shutil.rmtree(self._folder)

    def _read(self, name: str) -> Any:
        """Return a file's contents; None where it is not there or not whole."""
        if self._folder is None or not (self._folder / name).is_file():
            return None
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
