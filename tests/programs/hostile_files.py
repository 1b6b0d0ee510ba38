"""Reads hostile files in a process with little more address space than it has already.

Prints one JSON object: for each file the class and text of the error that reading it ended in, or
null. Anything that takes memory beyond what a file may ask for ends in a MemoryError here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.data.npz import NpzFile
from soapstone.frontend.inference.predict import read_arrays
from soapstone.frontend.training import checkpoint
from soapstone.limits import VARIABLE

ROOM = 1 << 29  # bytes


def read(path: Path) -> None:
    if path.suffix == ".onnx":
        from_onnx(path).graph()
        InferenceSession(path, threads=1).close()
    elif path.name.startswith("data"):
        NpzFile.open(path).read()
    elif path.name.startswith("arrays"):
        read_arrays(path)
    else:
        checkpoint.load(path)


def outcomes(folder: Path, limit: int = 1 << 28) -> dict[str, list[str] | None]:
    """Return what reading each file of a folder ends in, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, VARIABLE: str(limit)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    result: dict[str, list[str] | None] = json.loads(done.stdout)
    return result


def main(folder: Path) -> None:
    import resource  # where there is none these tests do not run

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    found = {}
    for path in sorted(folder.iterdir()):
        try:
            read(path)
            found[path.name] = None
        except Exception as error:
            found[path.name] = [type(error).__name__, str(error)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
