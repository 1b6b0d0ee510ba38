"""The options that many benchmarks have; nothing of what is measured is imported for them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.gettempdir()) / "soapstone"  # where exported models stay between runs
_OPTIONS: dict[str, dict[str, Any]] = {
    "models": {"help": "names, with commas between them"},
    "peers": {"help": "names, with commas between them"},
    "only": {"help": "parts, with commas between them"},
    "rounds": {"type": int, "help": "in which peers take turns"},
    "threads": {"type": int, "help": "by default all cores"},
    "folder": {"type": Path, "help": "where exported models stay between runs"},
    "seed": {"type": int, "help": "of random numbers"},
}


def common(about: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that have a default here, and of `--no-write`.

    about: what the benchmark measures, of which the first line is shown. defaults: of an option
    that takes names, all of them.
    """
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    for name, default in defaults.items():
        if not isinstance(default, str | int | Path | None):
            default = ",".join(default)
        made.add_argument(f"--{name}", default=default, **_OPTIONS[name])
    made.add_argument("--no-write", action="store_true", help="leave results and tables alone")
    return made
