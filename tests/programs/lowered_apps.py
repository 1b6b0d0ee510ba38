"""Prints what each app's training step is launched as, a hash each: `lowered_apps.py`."""

from __future__ import annotations

import hashlib
from typing import Any

from soapstone.engine.prepare import prepare
from soapstone.frontend.app import app_names, load_app
from soapstone.frontend.strategies.finding import graph_of
from soapstone.mappers import load
from soapstone.runtime import Machine

SMALL: dict[str, dict[str, Any]] = {  # less deep than they are
    "bert": {"layers": 2},
    "densenet": {"blocks": (2, 2)},
    "nasnet": {"cells": 1},
    "resnext": {"blocks": (1, 1, 1, 1)},
    "transformer": {"layers": 1},
    "wide_resnet": {"blocks": (1, 1, 1, 1)},
}


def main() -> None:
    for name in app_names():
        if load_app(name).program is not None:
            continue  # it has no graph of its own
        graph = graph_of(name, 2, sizes=SMALL.get(name))
        prepared = prepare(graph, load("data_parallel").strategy(graph, Machine.local(cpus=2)))
        launches = (f"{launch.node} {launch.configuration}" for launch in prepared.launches)
        text = "\n".join((str(prepared.graph), *launches))
        print(name, hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main()
