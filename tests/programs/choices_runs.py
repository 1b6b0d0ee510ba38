"""Trains a few steps and prints a hash of all parameters; run in processes of their own.

choices_runs.py train|turned REPEATED|- WRITTEN   with the choices of a file, writing those made;
                                                 turned: after others have become the fastest
choices_runs.py save|resume REPEATED|- CHECKPOINT one half, or the other half with its checkpoint
choices_runs.py ranks FOLDER                      under mpiexec, each rank with a store of its own
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from contextlib import closing

import numpy as np
from helpers.processes import say

import soapstone
from soapstone.cache.changes import default_path
from soapstone.cache.places import root
from soapstone.frontend.app import load_app
from soapstone.frontend.model import Model
from soapstone.kernels.measure import store


def _compiled(executor: str = "local", choices: str | None = None) -> Model:
    model = load_app("digits").build(32)
    model.compile("sgd", executor=executor, cpus=2 if executor == "local" else 1, choices=choices)
    return model


def _fit(model: Model, epochs: int = 2, resume: str | None = None) -> str:
    data = soapstone.digits()
    x, y = data.train_x[:96], data.train_y[:96]
    model.fit(x, y, epochs=epochs, resume=resume, progress=False)
    return _hash(model)


def _hash(model: Model) -> str:
    whole = hashlib.sha256()
    for name, array in sorted(model.trainer.session.state().items()):
        whole.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def _turn_over() -> None:
    """Make this process's store say that of several variants the last is much the fastest."""
    with closing(sqlite3.connect(default_path())) as file:
        for key, text in file.execute("SELECT key, value FROM records").fetchall():
            times = json.loads(text)
            if len(times) > 1:
                times[list(times)[-1]] = min(times.values()) / 100
                file.execute("UPDATE records SET value = ? WHERE key = ?", (json.dumps(times), key))
        file.commit()
    store.cache_clear()


def _ranks(folder: str) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    os.environ["NUMBA_CACHE_DIR"] = str(root())  # compiled code, which is valid anywhere
    os.environ["SOAPSTONE_CACHE"] = os.path.join(folder, str(rank))
    with _compiled("mpi") as model:
        first = _fit(model)
    if rank == 1:
        _turn_over()
    with _compiled("mpi") as model:
        again = _fit(model)
        made = model.trainer.choices.made
    everyone = MPI.COMM_WORLD.allgather(dict(made))
    same = sum(everyone[0][form] == everyone[1][form] for form in everyone[0].keys() & made.keys())
    assert same == len(everyone[0].keys() & everyone[1].keys()) > 0
    assert first == again, "rank 0 has the choices it had before, and so have all"
    say(f"{len(everyone)} ranks agree")


def main(how: str, *files: str) -> None:
    if how == "ranks":
        _ranks(*files)
        return
    repeated, path = files
    given = None if repeated == "-" else repeated
    if how == "turned":
        with _compiled() as model:
            _fit(model)
        _turn_over()
    with _compiled(choices=given) as model:
        resume = path if how == "resume" else None
        found = _fit(model, 1 if how == "save" else 2, resume)
        if how == "save":
            model.save_checkpoint(path)
        elif how != "resume":
            model.save_choices(path)
        print(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
