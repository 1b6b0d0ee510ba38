"""Steps of the binary Tree-LSTM on the Stanford Sentiment Treebank: dynamic sessions and torch.

    python benchmarks/execution/dynamic.py [--rounds 7] [--batch 20]

Forward, backward and update (Adam; of word vectors, of the rows that a batch has) of batches of
trees with a label at the root, vectors of 300, 150 units. Torch recursively, node by node, and
batched by hand, level by level; `torch reused` is the former with
`soapstone.torch.reuse`. `found`: reuse all, of a program without cells. `dynet`: DyNet batches by
itself, on one thread; where it is installed (`pip install dyNET38`). With SOAPSTONE_DATA unset,
trees are made up.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import in_turns, median, ratio, serve, show, write

from soapstone.frontend.data.trees import NEUTRAL, Tree, sentiment

WIDTH, HIDDEN, CLASSES = 300, 150, 2
RATE = 1e-3
BUDGET_S, LEAST = 1.5, 5  # of a round, and steps
BATCHES = 40
MODES = ("all", "found", "patterns", "batch", "off")
PEERS = (*MODES, "torch reused", "torch by level", "torch by node")
PEERS += ("dynet",) if find_spec("dynet") else ()


def batches(size: int) -> tuple[list[list[Tree]], dict[str, int]]:
    """Return batches of trees that are not neutral, and the numbers of words."""
    trees = [tree for tree in sentiment().train if tree.label != NEUTRAL]
    words = dict.fromkeys(t.word for tree in trees for t in tree.phrases() if t.word)
    made = [trees[first : first + size] for first in range(0, BATCHES * size, size)]
    return [batch for batch in made if len(batch) == size], {w: i for i, w in enumerate(words)}


def label(tree: Tree) -> int:
    return int(tree.label > NEUTRAL)


def session_step(mode: str, size: int, cpus: int) -> Callable[[], tuple[float, dict[str, float]]]:
    from soapstone import Adam, DynamicSession
    from soapstone.apps.dynamic.treelstm import program

    given, _ = batches(size)
    cells = mode != "found"
    session = DynamicSession("treelstm", Adam(RATE), cpus=cpus, reuse=mode if cells else "all")
    sizes = (WIDTH, HIDDEN)
    outputs = program(session, *sizes, dropout=0.0, labels="root", cells=cells).outputs
    session.__enter__()
    turn = itertools.cycle(given)

    def step() -> tuple[float, dict[str, float]]:
        before, start = dict(session.seconds), time.perf_counter()
        made = [outputs(tree)[0] for tree in next(turn)]
        loss = session.step([session.cross_entropy(*each) for each in made])
        spent = {stage: s - before[stage] for stage, s in session.seconds.items()}
        del spent["recording"]  # which counts what is between steps too
        return loss, {"recording": time.perf_counter() - start - sum(spent.values()), **spent}

    return step


def torch_step(how: str, size: int, cpus: int) -> Callable[[], tuple[float, dict[str, float]]]:
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(cpus)
    given, number = batches(size)
    words = nn.Embedding(len(number), WIDTH, sparse=True)
    nn.init.normal_(words.weight, std=0.1)
    leaf, inner = nn.Linear(WIDTH, 3 * HIDDEN), nn.Linear(2 * HIDDEN, 5 * HIDDEN)
    classes = nn.Linear(HIDDEN, CLASSES)
    dense = [*leaf.parameters(), *inner.parameters(), *classes.parameters()]
    optimizers = [torch.optim.Adam(dense, RATE), torch.optim.SparseAdam(words.parameters(), RATE)]

    def leaves(x: Any) -> tuple[Any, Any]:
        i, o, u = leaf(x).split(HIDDEN, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def compose(lh: Any, lc: Any, rh: Any, rc: Any) -> tuple[Any, Any]:
        i, fl, fr, o, u = inner(torch.cat([lh, rh], 1)).split(HIDDEN, 1)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * lc + fr.sigmoid() * rc
        return o.sigmoid() * c.tanh(), c

    def by_node(batch: list[Tree]) -> Any:
        def of(tree: Tree) -> tuple[Any, Any]:
            if tree.word is not None:
                return leaves(words(torch.tensor([number[tree.word]])))
            return compose(*of(tree.children[0]), *of(tree.children[1]))

        return torch.cat([classes(of(tree)[0]) for tree in batch])

    def by_level(batch: list[Tree]) -> Any:
        ids: list[int] = []
        levels: list[list[tuple[int, int, int]]] = []  # left, right, and the node's own number
        places: dict[int, int] = {}

        def of(tree: Tree) -> tuple[int, int]:
            """The number of a node, leaves first, and its height."""
            if tree.word is not None:
                ids.append(number[tree.word])
                return -len(ids), 0
            (left, low), (right, high) = map(of, tree.children)
            height = max(low, high)
            while len(levels) <= height:
                levels.append([])
            own = len(places)
            places[own] = 0
            levels[height].append((left, right, own))
            return own, height + 1

        roots = [of(tree)[0] for tree in batch]
        h, c = leaves(words(torch.tensor(ids)))
        hs, cs, count = [h], [c], len(ids)

        def place(node: int) -> int:
            return -node - 1 if node < 0 else places[node]

        for level in levels:
            h, c = torch.cat(hs), torch.cat(cs)
            hs, cs = [h], [c]
            left = torch.tensor([place(node) for node, _, _ in level])
            right = torch.tensor([place(node) for _, node, _ in level])
            h, c = compose(h[left], c[left], h[right], c[right])
            hs.append(h)
            cs.append(c)
            for _, _, own in level:
                places[own] = count
                count += 1
        return classes(torch.cat(hs)[torch.tensor([place(root) for root in roots])])

    run: Any = by_level if how == "torch by level" else by_node
    if how == "torch reused":
        import soapstone.torch

        run = soapstone.torch.reuse(by_node)
    turn = itertools.cycle(given)

    def step() -> tuple[float, dict[str, float]]:
        batch = next(turn)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(run(batch), torch.tensor([label(t) for t in batch]))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item(), {}

    return step


def dynet_step(how: str, size: int, cpus: int) -> Callable[[], tuple[float, dict[str, float]]]:
    import dynet_config

    dynet_config.set(autobatch=1, mem=2048)
    import dynet as dy

    given, number = batches(size)
    model = dy.ParameterCollection()
    trainer = dy.AdamTrainer(model, RATE)
    words = model.add_lookup_parameters((len(number), WIDTH))
    shapes = [(3 * HIDDEN, WIDTH), (5 * HIDDEN, 2 * HIDDEN), (CLASSES, HIDDEN)]
    leaf, inner, classes = (
        [model.add_parameters(shape[0]), model.add_parameters(shape)] for shape in shapes
    )

    def split(gates: Any, parts: int) -> list[Any]:
        return [dy.pick_range(gates, k * HIDDEN, (k + 1) * HIDDEN) for k in range(parts)]

    def of(tree: Tree) -> tuple[Any, Any]:
        if tree.word is not None:
            i, o, u = split(dy.affine_transform([*leaf, words[number[tree.word]]]), 3)
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
        else:
            (lh, lc), (rh, rc) = map(of, tree.children)
            gates = dy.affine_transform([*inner, dy.concatenate([lh, rh])])
            i, fl, fr, o, u = split(gates, 5)
            kept = dy.cmult(dy.logistic(fl), lc) + dy.cmult(dy.logistic(fr), rc)
            c = dy.cmult(dy.logistic(i), dy.tanh(u)) + kept
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    def loss_of(tree: Tree) -> Any:
        return dy.pickneglogsoftmax(dy.affine_transform([*classes, of(tree)[0]]), label(tree))

    turn = itertools.cycle(given)

    # The trainer does not keep the model alive.
    def step(_: Any = model) -> tuple[float, dict[str, float]]:
        dy.renew_cg()
        loss = dy.esum([loss_of(tree) for tree in next(turn)]) / size
        value = loss.value()
        loss.backward()
        trainer.update()
        return value, {}

    return step


def peer(name: str, size: int, cpus: int) -> None:
    how = session_step if name in MODES else dynet_step if name == "dynet" else torch_step
    step = how(name, size, cpus)
    for _ in range(3 if name in ("patterns", "batch", "off", "torch by node") else BATCHES):
        step()

    def do_round() -> dict[str, Any]:
        times: list[float] = []
        stages: dict[str, float] = {}
        while len(times) < LEAST or sum(times) < BUDGET_S:
            start = time.perf_counter()
            _, spent = step()
            times.append(time.perf_counter() - start)
            for stage, seconds in spent.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
        stages = {stage: seconds / len(times) * 1e3 for stage, seconds in stages.items()}
        return {"ms": sorted(times)[len(times) // 2] * 1e3, **stages}

    serve(do_round)


def rows(measured: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what each took, beside torch both ways."""
    for name, rounds in measured.items():
        row = {"by": name if name not in MODES else f"reuse {name}", "ms": median(rounds, "ms")}
        for other in ("torch by level", "torch by node", "dynet"):
            if other in measured:
                row[f"of {other}"] = ratio(rounds, measured[other])
        if "off" in measured:
            row["of reuse off"] = ratio(rounds, measured["off"])
        row |= {k: median(rounds, k) for k in rounds[0] if k != "ms"}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--cpus", type=int, default=os.cpu_count())
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--peer")
    given = parser.parse_args()
    for name in given.only.split(","):
        if name not in PEERS:
            parser.error(f"--only: {name!r} found, one of {', '.join(PEERS)} needed")
    if given.peer:
        peer(given.peer, given.batch, given.cpus)
        return
    own = [sys.executable, __file__, "--batch", str(given.batch), "--cpus", str(given.cpus)]
    commands = {name: [*own, "--peer", name] for name in given.only.split(",")}
    found = list(rows(in_turns(commands, given.rounds)))
    for row in found:
        show(row)
    columns = list(dict.fromkeys(key for row in found for key in row))
    title = "Steps of a Tree-LSTM, whose graph changes with each sentence"
    command = f"python benchmarks/execution/dynamic.py --rounds {given.rounds}"
    write("dynamic", title, command, columns, found)


if __name__ == "__main__":
    main()
