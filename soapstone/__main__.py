"""What the command `soapstone` and `python -m soapstone` begin with: nothing is imported before.

So an interrupt while Python still imports the command line ends as a later one does.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from soapstone.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)  # 128 + SIGINT, as shells report it


if __name__ == "__main__":
    main()
