"""GPUs as processors: in Numba's simulator, on a device where there is one, and none at all."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import python

from soapstone.runtime import MachineError
from soapstone.runtime.machines.machine import COPIER, CUDA, Machine, Memory, Processor
from soapstone.runtime.machines.start import machine_of

CHECKS = (
    *("random", "folds", "errors", "kernels", "memory", "training", "mappers", "inference"),
    "narrow",
)
installed = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="no numba-cuda here")


def checked(simulated: bool) -> dict[str, str | None]:
    """Return the error of each check, or None."""
    done = python(["-m", "programs.gpu_checks", *CHECKS], simulated)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@installed
@pytest.mark.parametrize(
    "simulated",
    [pytest.param(True, marks=pytest.mark.simulator), pytest.param(False, marks=pytest.mark.gpu)],
)
def test_processors_that_are_gpus(simulated: bool) -> None:
    for check, error in checked(simulated).items():
        assert error is None, f"{check}: {error}"


def test_whoever_uses_no_gpu_imports_nothing_for_it() -> None:
    program = (
        "import sys; from helpers.training_runs import compare, mlp\n"
        "with mlp() as model:\n"
        "    model.compile('sgd', cpus=1); compare(model, steps=1)\n"
        "print([name for name in sys.modules if 'cuda' in name and 'soapstone' in name])"
    )
    done = python(["-c", program], False)
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "no NVIDIA GPU found"),
        ("sys.modules['numba.cuda'] = None", "pip install 'soapstone[cuda]'"),
    ],
)
@pytest.mark.parametrize("executor", ["local", "legate"])
def test_a_gpu_that_is_not_there_is_one_clear_error(before: str, said: str, executor: str) -> None:
    program = (
        f"import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'; {before}\n"
        "from soapstone.__main__ import main\n"
        "sys.argv = ['soapstone', 'train', 'digits', '--gpus', '1', '--executor', "
        f"'{executor}']; main()"
    )
    done = python(["-c", program], False)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "gpus: 1 asked for" in done.stderr and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_machines_of_gpus_say_what_they_lack() -> None:
    processors = (
        Processor("gpu", CUDA, memory="b"),
        *(Processor(c, COPIER, memory="b") for c in "io"),
    )
    memories = (Memory("a", 1 << 20), Memory("b", 1 << 20))
    assert Machine("m", processors, memories).devices == {1: 0}
    with pytest.raises(MachineError, match="'b' is the host's and a GPU's"):
        Machine("m", processors, memories[::-1])
    with pytest.raises(MachineError, match="executor 'legate': 2 gpus found beside 1 cpus"):
        machine_of("legate", cpus=1, gpus=2)
    with pytest.raises(MachineError, match="1 gpus found beside cpus"):
        Machine.local(cpus=2, gpus=1)


@installed
@pytest.mark.simulator
def test_an_app_trains_on_simulated_gpus(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        "import numpy as np\n"
        "from soapstone import Model, SGD\n"
        "from soapstone.frontend.data.sets import Splits\n"
        "OPTIONS = dict(optimizer=SGD(0.1), loss='cross_entropy', metrics=['accuracy'], epochs=1,\n"
        "               batch_size=6)\n"
        "def build(batch_size=6):\n"
        "    model = Model('tiny')\n"
        "    x = model.dense(model.input('x', (batch_size, 4)), 5, activation='tanh')\n"
        "    model.output(model.dense(x, 3))\n"
        "    return model\n"
        "def data():\n"
        "    x = np.random.default_rng(0).standard_normal((12, 4)).astype('f4')\n"
        "    y = (x[:, :3].argmax(1)).astype('i4')\n"
        "    return Splits(x, y, x, y, 'tiny')\n"
    )
    losses = []
    for extra in (["--gpus", "1"], ["--cpus", "1"]):
        done = python(["-m", "soapstone", "train", str(script), "--json", *extra])
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
