"""Sessions on several processors, and for several requests: strategies against sequential runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.session_runs import assert_near

from soapstone import InferenceSession, Model
from soapstone.errors import DataError
from soapstone.frontend.strategies.serving import Division, FoldedGraph, Serving, divisions, loaded
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.strategy.transfer import to_original, to_rewritten
from soapstone.ir.tensor import Array
from soapstone.native import shared
from soapstone.runtime import Machine
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import prepare
from soapstone.system import usable_cores


def branches(batch: int = 2) -> Model:
    """Two branches with batch norm, joined; a residual, a product with a matrix, softmax."""
    model = Model("branches")
    x = model.input("image", (batch, 3, 10, 10))
    left = model.relu(model.batch_norm(model.conv2d(x, 16, kernel=3, padding=1, bias=False)))
    right = model.batch_norm(model.conv2d(x, 8, kernel=1))
    x = model.concat([left, model.max_pool2d(right, 3, stride=1, padding=1)], axis=1)
    x = model.batch_norm(x)  # behind a join, so that it stays an operator
    x = model.relu(x + model.conv2d(x, 24, kernel=3, padding=1))
    model.output(model.softmax(model.dense(model.flatten(x), 5)))
    return model


def trained(model: Model) -> dict[str, Array]:
    """Return random weights; what is a vector, as variances are, is positive."""
    random = np.random.default_rng(0)
    return {
        name: random.uniform(*((0.5, 1) if array.ndim < 2 else (-0.1, 0.1)), array.shape).astype(
            array.dtype
        )
        for name, array in model.weights().items()
    }


def images(batch: int, seed: int = 1) -> dict[str, Array]:
    return {"image": np.random.default_rng(seed).standard_normal((batch, 3, 10, 10), np.float32)}


def random_strategy(folded: FoldedGraph, seed: int, machine: Machine) -> Strategy:
    """Return a random strategy of the graph that is served, as one of the model's."""
    model = prepare(folded.graph, described(machine))
    settled = Settled(model)
    settled.set(randomly(model, seed))
    strategy = as_strategy(folded.graph, model, settled.configurations(), {})
    return to_original(
        replace(strategy, machine=machine.describe()), folded.rewritten, folded.original
    )


def described(machine: Machine) -> Machine:
    """Return a machine with rates, which nobody has measured."""
    return replace(
        machine,
        processors=tuple(replace(each, flops=1e11) for each in machine.processors),
        memories=tuple(replace(each, bytes_per_s=1e10) for each in machine.memories),
    )


@pytest.mark.parametrize("seed", range(6))
def test_results_are_those_of_the_sequential_run_under_any_strategy(seed: int) -> None:
    with branches() as model:
        weights, machine = trained(model), Machine.local(cpus=2 + seed % 2)
        folded = FoldedGraph.of(model.graph, weights)
        strategy = random_strategy(folded, seed, machine)
        given = images(2)
        expected = interpret(model.graph, {**weights, **given})
        with InferenceSession(model.graph, weights, machine=machine, strategy=strategy) as session:
            assert session.cpus == 2 + seed % 2
            assert_near(session.run(given), expected, 1e-5)
            assert_near(session.run(given), expected, 1e-5)  # and again, replayed


@pytest.mark.parametrize("seed", range(4))
def test_a_strategy_of_what_is_served_is_found_again_in_one_of_the_model(seed: int) -> None:
    with branches() as model:
        folded = FoldedGraph.of(model.graph, trained(model))
        machine = Machine.local(cpus=2)
        strategy = random_strategy(folded, seed, machine)
        strategy.check(model.graph, machine.describe())
        there = to_rewritten(strategy, folded.original, folded.rewritten)
        back = to_original(there, folded.rewritten, folded.original)
        assert back.configurations == strategy.configurations
        split = [name for name, item in there.configurations.items() if item.points > 1]
        assert {"conv2d", "dense"} & {folded.rewritten.by_name[n].operator for n in split} or split


def test_samples_are_split_over_processors_for_batches_of_any_size() -> None:
    with branches() as model:
        weights = trained(model)
        model.set_weights(weights)
        with InferenceSession(model, cpus=2, threads=1) as session:
            for batch in (4, 1, 5):
                given = images(batch)
                expected = interpret(model.build(batch), {**weights, **given})
                assert_near(session.run(given), expected, 1e-5)
            bound = session.serial.bound_as(("four",), lambda: model.build(4))
            placed = {tuple(launch.grid) for launch in bound.program.launches}
            assert any(2 in grid for grid in placed)


def test_a_strategy_is_fitted_to_other_shapes(tmp_path: Path) -> None:
    with branches() as model:
        weights = trained(model)
        model.set_weights(weights)
        machine, graph = Machine.local(cpus=2), model.build(6)
        folded = FoldedGraph.of(graph, weights)
        strategy = random_strategy(folded, 1, machine)
        assert strategy.inputs == {"image": (6, 3, 10, 10)}
        strategy.save(tmp_path / "six.json")
        with InferenceSession(model, strategy=tmp_path / "six.json") as session:
            assert (session.cpus, session.threads) == (2, 1)  # those of the file's machine
            for batch in (3, 6, 1):
                given = images(batch)
                expected = interpret(model.build(batch), {**weights, **given})
                assert_near(session.run(given), expected, 1e-5)
        untold = replace(strategy, inputs={})
        with InferenceSession(model, strategy=untold) as session:
            with pytest.raises(StrategyError, match="strategy is for graph 'branches'"):
                session.run(images(3))
            session.run(images(6))
            session.run(images(3))  # now it is known what it was made for


def test_strategies_of_other_graphs_and_machines_are_refused() -> None:
    with branches() as model, branches(3) as other:
        weights = trained(model)
        folded = FoldedGraph.of(model.graph, weights)
        strategy = random_strategy(folded, 0, Machine.local(cpus=2))
        with pytest.raises(StrategyError, match="strategy is for graph 'branches' with hash"):
            InferenceSession(other.graph, weights, strategy=strategy)
        with pytest.raises(StrategyError, match="with 2 processors; 3 found"):
            InferenceSession(model.graph, weights, strategy=strategy, cpus=3, threads=1)
        with pytest.raises(StrategyError, match="device 5 found, 0 to 1 needed"):
            far = Strategy({"*": Configuration({}, (5,))})
            InferenceSession(model.graph, weights, strategy=far, cpus=2, threads=1)
        with pytest.raises(GraphError, match="requests: 0 found; 1 or more needed"):
            InferenceSession(model.graph, weights, requests=0)
        with pytest.raises(GraphError, match="machine: found with cpus, threads or gpus"):
            InferenceSession(model.graph, weights, machine=Machine.local(cpus=1), cpus=1)
        with pytest.raises(GraphError, match="requests: 2 found with a fast memory"):
            InferenceSession(model.graph, weights, requests=2, fast_memory=1 << 20)
        many = usable_cores() + 1
        with pytest.warns(UserWarning, match=f"cpus: {many} processors of 1 threads found"):
            InferenceSession(model.graph, weights, cpus=many, threads=1).close()


def test_processors_and_requests_share_what_is_packed() -> None:
    def kept() -> int:
        return sum(ref() is not None for refs in shared._known.values() for ref in refs)

    with branches() as model:
        weights = trained(model)
        model.set_weights(weights)
        with InferenceSession(model, threads=1, tune=False) as one:
            one.run(images(2))
            before = kept()
            with InferenceSession(model, cpus=2, threads=1, requests=2, tune=False) as several:
                several.run(images(4))  # two samples a processor, as before
                assert kept() == before


def test_requests_of_many_threads_get_their_own_answers() -> None:
    with branches() as model:
        weights = trained(model)
        model.set_weights(weights)
        asked = [images(1 + seed % 2, seed) for seed in range(24)]
        expected = [interpret(model.build(len(g["image"])), {**weights, **g}) for g in asked]
        with InferenceSession(model, threads=1, requests=3) as session:
            assert session.requests == 3
            futures = [session.run_async(given) for given in asked]
            found: list[dict[str, Array]] = [{} for _ in asked]

            def ask(first: int) -> None:
                for number in range(first, len(asked), 4):
                    found[number] = session.run(asked[number])

            threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for answer, future, wanted in zip(found, futures, expected):
                assert_near(answer, wanted, 1e-5)
                assert_near(future.result(), wanted, 1e-5)
            with pytest.raises(DataError):
                session.run({})
            assert loaded(session, asked[0], 0.0)[1] > 0  # nobody holds a place for ever


def test_one_request_runs_while_another_does(tmp_path: Path) -> None:
    with branches() as model:
        model.set_weights(trained(model))
        with InferenceSession(model, threads=1, requests=2) as session:
            session.run(images(1))
            with session.serial.lock:  # as if a run were under way
                session.run(images(1))
            with session.profile(tmp_path / "timeline.json") as timeline:
                session.run(images(1))
            assert timeline.events


def test_run_async_waits_for_no_run() -> None:
    with branches() as model:
        model.set_weights(trained(model))
        with InferenceSession(model, threads=1) as session:
            with session.serial.lock:  # as if a run were under way
                future = session.run_async(images(1))
                assert not future.done()
            assert future.result()


@pytest.mark.parametrize("how", ["pass", "raise KeyboardInterrupt"])
def test_a_process_that_an_exception_ends_cancels_what_waits(how: str) -> None:
    program = f"""
import atexit, time
atexit.register(lambda: print(sum(each.cancelled() for each in asked), len(done)))
from soapstone.frontend.inference.thread_pool import ThreadPool
pool, done = ThreadPool(2, "pool"), []
def work(number):
    time.sleep(0.01)
    done.append(number)
asked = [pool.submit(work, number) for number in range(100)]
{how}
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    cancelled, done = map(int, found.stdout.split())
    assert (cancelled + done, found.returncode != 0) == (100, how != "pass")
    assert (cancelled > 0) == (how != "pass")


def test_divisions_share_out_all_cores() -> None:
    assert divisions(1) == [(1, 1, 1)]
    assert sorted(divisions(2)) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert all(requests * cpus * threads == 12 for requests, cpus, threads in divisions(12))
    assert len(divisions(12)) == len(set(divisions(12))) == 18


def test_a_frontier_holds_what_no_other_passes_in_both() -> None:
    def division(ms: float, per_s: float) -> Division:
        return Division(1, 1, 1, Strategy(), ms, ms, per_s)

    rows = [division(*row) for row in ((3, 300), (1, 100), (2, 90), (3, 250), (4, 310))]
    serving = Serving(tuple(rows), "throughput")
    assert [row.latency_ms for row in serving.frontier] == [1, 3, 4]
    assert serving.best is rows[4]
    assert replace(serving, objective="latency").best is rows[1]
