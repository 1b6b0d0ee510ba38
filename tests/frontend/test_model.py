"""The model's API: shapes, predictions, checkpoints, machines, and the errors of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from soapstone import (
    SGD,
    Configuration,
    DataError,
    GraphError,
    Machine,
    Model,
    Strategy,
    StrategyError,
)
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy.configuration import Keep
from soapstone.runtime import MemoryExhausted


def small(batch: int = 8, width: int = 16) -> Model:
    model = Model("small", seed=5)
    x = model.input("x", (batch, 6))
    x = model.dense(x, width, activation="relu", name="fc1")
    x = model.dropout(x, 0.25, name="drop")
    model.output(model.dense(x, 3, name="fc2"))
    return model


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0).astype(np.int32)


def test_building_and_describing_allocates_no_weights() -> None:
    model = Model("huge")
    x = model.input("x", (2, 1 << 20))
    model.output(model.dense(x, 1 << 20, name="fc"))
    assert model.parameters() == {"fc.weight": (1 << 20, 1 << 20), "fc.bias": (1 << 20,)}
    assert "fc" in model.summary()
    assert model.graph.flops() > 2**41


def test_a_partial_last_batch_is_another_bound_shape() -> None:
    x, y = samples(21)
    with small() as model:
        model.compile("adam", metrics=["accuracy"], cpus=2)
        result = model.fit(x, y, epochs=2, progress=False)
        assert result.steps == 6
        scores = model.evaluate(x, y)
        logits = model.predict(x)
        assert logits.shape == (21, 3)
        assert scores["accuracy"] == pytest.approx(float((logits.argmax(1) == y).mean()))


def test_predict_equals_the_sequential_run() -> None:
    x, y = samples(8)
    with small() as model:
        model.compile("sgd", cpus=2)
        model.fit(x, y, progress=False)
        found = model.predict(x)
        graph = model.build()
        state = {n: v for n, v in model.weights().items() if n in graph.roles}
        want = interpret(graph, state | {"x": x})[graph.outputs[0]]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_several_inputs_by_name() -> None:
    with Model("two") as model:
        a, b = model.input("a", (4, 3)), model.input("b", (4, 5))
        model.output(model.dense(model.concat([a, b]), 2))
        model.compile("sgd", loss="mse", cpus=1)
        x = {"a": np.ones((4, 3), np.float32), "b": np.ones((4, 5), np.float32)}
        model.fit(x, np.zeros((4, 2), np.float32), progress=False)
        with pytest.raises(DataError, match="'b' is missing"):
            model.fit({"a": x["a"]}, np.zeros((4, 2), np.float32), progress=False)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_resume_equals_an_uninterrupted_run(tmp_path: Path, suffix: str) -> None:
    x, y = samples(40)
    path = tmp_path / f"half.{suffix}"

    def compiled() -> Model:
        model = small()
        model.compile(SGD(0.1, momentum=0.9), metrics=["accuracy"], cpus=2)
        return model

    class Halt(Exception):
        pass

    from soapstone.frontend.training.state import Callback, TrainingState

    class SaveInTheMiddle(Callback):
        def on_step_end(self, state: TrainingState) -> None:
            if state.step == 8:  # the third batch of the second epoch
                assert state.model is not None
                state.model.save_checkpoint(path)
                raise Halt

    with compiled() as model:
        whole = model.fit(x, y, epochs=3, progress=False)
        want = model.weights()
    with compiled() as model, pytest.raises(Halt):
        model.fit(x, y, epochs=3, callbacks=[SaveInTheMiddle()], progress=False)
    with compiled() as model:
        resumed = model.fit(x, y, epochs=3, resume=path, progress=False)
        for name, value in model.weights().items():
            np.testing.assert_array_equal(value, want[name], err_msg=name)
    assert resumed.epochs == whole.epochs[1:]


def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    command = [sys.executable, "-m", "soapstone.cli.main", "train", "mlp", "--epochs", "200"]
    command += ["--checkpoint", str(path), "--cpus", "1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    from soapstone.frontend.training import checkpoint

    arrays, metadata = checkpoint.load(path)
    assert metadata["position"]["step"] > 0
    assert all(np.isfinite(array).all() for array in arrays.values())


# Bad input


def test_compile_refuses_what_it_does_not_know() -> None:
    for arguments, message in (
        ({"loss": "hinges"}, "loss 'hinges' found"),
        ({"optimizer": "lions"}, "optimizer 'lions' found"),
        ({"metrics": ["f2"]}, "metric 'f2' found"),
        ({"mapper": "nobody"}, "mapper 'nobody' found"),
        ({"mapper": "locality", "strategy": Strategy()}, "strategy: found with mapper 'locality'"),
        ({"mapper": "soapstone.ir.graph:Graph"}, "not a subclass of GraphMapper"),
    ):
        with pytest.raises((GraphError, StrategyError), match=message):
            small().compile(**arguments)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="not compiled"):
        small().fit(*samples(8))


def strategy_of(model: Model) -> Strategy:
    model.compile("sgd", cpus=2)
    return model.strategy


def test_strategies_that_are_not_for_this_model_or_machine(tmp_path: Path) -> None:
    good = strategy_of(small())
    path = tmp_path / "strategy.json"
    good.save(path)
    small().compile("sgd", cpus=2, strategy=path)
    split = dict(good.configurations)
    cases = (
        (strategy_of(small(width=17)), "strategy is for graph .* has hash"),
        (replace(good, machine=Machine.local(cpus=5).describe()), "machine"),
        (replace(good, configurations={**split, "fc1": Configuration({"n": 99})}), "fc1.*dim n"),
        (replace(good, configurations={**split, "fc1": Configuration({"q": 2})}), "fc1.*'q'"),
        (
            replace(good, configurations={**split, "fc1": Configuration({"n": 2}, (0, 7))}),
            "fc1.*7",
        ),
        (replace(good, configurations={**split, "fc9": Configuration()}), "fc9"),
        (
            replace(good, configurations={k: v for k, v in split.items() if k not in ("fc1", "*")}),
            "fc1",
        ),
    )
    for strategy, message in cases:
        with pytest.raises(StrategyError, match=message):
            small().compile("sgd", cpus=2, strategy=strategy)
    data = json.loads(path.read_text())
    del data["checksum"]
    data["version"] = 99
    path.write_text(json.dumps(data))
    with pytest.raises(StrategyError, match="version"):
        small().compile("sgd", cpus=2, strategy=path)
    path.write_text("{")
    with pytest.raises(StrategyError, match="JSON"):
        small().compile("sgd", cpus=2, strategy=path)


def test_a_working_set_over_the_memory_names_need_and_limit() -> None:
    x, y = samples(64)
    with small(batch=64, width=4096) as model:
        model.compile("sgd", machine=Machine.local(cpus=2, memory_bytes=1_000_000))
        with pytest.raises(MemoryExhausted, match=r"needs \d+ bytes, \d+ of 1000000.*largest"):
            model.fit(x, y, progress=False)


def test_interrupt_ends_the_step_and_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "soapstone.cli.main", "train", "mlp", "--epochs", "1000"]
    path = tmp_path / "run.safetensors"
    command += ["--cpus", "2", "--checkpoint", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ)
    )
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in output


def test_choices_that_cannot_be_carried_out_are_refused() -> None:
    good = strategy_of(small())
    for value, error in (
        ("x", "'x', an input of the graph"),
        ("fc1.grad.linear_grad_weight", "the backward pass makes"),
        ("fc9", "value 'fc9' does not exist"),
    ):
        with small() as model, pytest.raises(StrategyError, match=error):
            wrong = replace(good, tensors={value: Keep.RECOMPUTE})
            model.compile("sgd", cpus=2, strategy=wrong)


def test_a_saved_strategy_trains_to_the_same_numbers(tmp_path: Path) -> None:
    x, y = samples(16)
    path = tmp_path / "strategy.json"
    weights = []
    for strategy in (None, path):
        with small() as model:
            model.compile("sgd", cpus=2, strategy=strategy)
            model.strategy.save(path)
            model.fit(x, y, progress=False)
            weights.append(model.weights())
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name], err_msg=name)
