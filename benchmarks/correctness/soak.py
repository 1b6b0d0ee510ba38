"""A day of requests in fast motion: many threads share sessions, and each answer is compared.

    python benchmarks/correctness/soak.py --requests 86400 --callers 64

Requests (tests/helpers/soak.py) follow from the seed. After each tenth of them all threads
rest, and what the process has in memory is looked at: it must not grow. A row has how many answers
were wrong, megabytes after a tenth, half and all, and how many shapes were asked for. Where
megabytes grow and objects do not, it is gaps in the memory that C's `malloc` has from the system.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from harness import write
from helpers.soak import serve, services

SHARES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=86400, help="one a second of a day")
    parser.add_argument("--callers", type=int, default=64, help="threads that ask")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    command = f"--requests {given.requests} --callers {given.callers} --seed {given.seed}"
    served, began = list(services()), time.perf_counter()
    report = serve(served, given.requests, given.callers, given.seed, SHARES)
    seconds = time.perf_counter() - began
    for service in served:
        service.close()
    for text in report.wrong:
        print(text, flush=True)
    megabytes = [nbytes / 2**20 for nbytes in report.resident]
    row = {
        "requests": given.requests,
        "threads": given.callers,
        "shapes": len(report.shapes),
        "wrong": len(report.wrong),
        "MB after a tenth": megabytes[0],
        "MB after half": megabytes[SHARES // 2 - 1],
        "MB at the end": megabytes[-1],
        "objects after half": report.objects[SHARES // 2 - 1],
        "objects at the end": report.objects[-1],
        "threads at rest": f"{report.threads[0]} to {report.threads[-1]}",
        "requests a second": given.requests / seconds,
    }
    write(
        "soak",
        "A day of requests from many threads, answers held against ONNX Runtime's",
        f"python benchmarks/correctness/soak.py {command}",
        list(row),
        [row],
    )
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
