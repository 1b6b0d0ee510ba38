"""Random recursive programs of a dynamic session, for comparison of its ways to run them."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from soapstone import SGD, DynamicSession
from soapstone.frontend.dynamic.session import REUSE

WIDTHS, WORDS = (3, 5), 7
_POINTWISE = ("tanh", "sigmoid", "softsign", "relu")


class Model:
    """Random cells over a table of words, the same in every session for a seed."""

    def __init__(self, session: DynamicSession, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.session = session
        self.table = session.table("words", WORDS, WIDTHS[0])
        self.weight = session.parameter("scale", (WIDTHS[1],))
        self.cells = [self._cell(random, number) for number in range(int(random.integers(3, 6)))]

    def _cell(self, random: np.random.Generator, number: int) -> tuple[list[int], list[int], Any]:
        """Return the widths of a random cell's operands and results, and the cell."""
        given = [int(random.choice(WIDTHS)) for _ in range(int(random.integers(1, 4)))]
        results = [int(random.choice(WIDTHS)) for _ in range(int(random.integers(1, 3)))]
        seed = int(random.integers(1 << 30))

        def function(m: Any, *operands: Any) -> Any:
            draw = np.random.default_rng(seed)
            pool = list(operands)
            for _ in range(int(draw.integers(1, 6))):
                pool.append(_layer(m, draw, pool))
            joined = m.concat(pool, axis=1) if len(pool) > 1 else pool[0]
            return tuple(
                m.dense(joined, width, activation="tanh", name=f"d{place}")
                for place, width in enumerate(results)
            )

        function.__name__ = f"cell{number}"
        return given, results, self.session.cell(function)

    def losses(self, seed: int) -> list[Any]:
        """Record a random program, and return its losses."""
        random = np.random.default_rng(seed)
        pool: dict[int, list[Any]] = {width: [] for width in WIDTHS}

        def some(width: int) -> Any:
            held = pool[width]
            if not held or random.random() < 0.2:
                if width == WIDTHS[0] and random.random() < 0.8:
                    return self.table[int(random.integers(WORDS))]
                return self.session.value(random.standard_normal(width).astype(np.float32))
            near = max(0, len(held) - int(random.integers(1, 8)))
            return held[near if random.random() < 0.7 else int(random.integers(len(held)))]

        for _ in range(int(random.integers(1, 40))):
            kind = random.random()
            if kind < 0.7:
                given, results, cell = self.cells[int(random.integers(len(self.cells)))]
                made = cell(*map(some, given))
                made = made if isinstance(made, tuple) else (made,)
                for width, value in zip(results, made):
                    pool[width].append(value)
            elif kind < 0.95:
                width = int(random.choice(WIDTHS))
                layer = getattr(self.session, str(random.choice(_POINTWISE)))
                value = layer(some(width)) + some(width) * float(random.integers(1, 3))
                pool[width].append(value * self.weight if width == WIDTHS[1] else value)
            elif pool[WIDTHS[0]]:  # one is looked at, which decides nothing that rounding could
                assert np.isfinite(pool[WIDTHS[0]][-1].numpy()).all()
        ends = [value for held in pool.values() for value in held[-3:]]
        ends = ends or [some(WIDTHS[0])]
        return [self.session.reduce_sum(value * value, axes=(1,)) for value in ends]


def _layer(m: Any, draw: np.random.Generator, pool: list[Any]) -> Any:
    """Record one random layer on values that there are."""
    x = pool[int(draw.integers(len(pool)))]
    kind = draw.random()
    if kind < 0.1:
        return m.dropout(x, 0.3)
    if kind < 0.4:
        return getattr(m, str(draw.choice(_POINTWISE)))(x)
    alike = [y for y in pool if y.shape == x.shape]
    y = alike[int(draw.integers(len(alike)))]
    if kind < 0.6:
        return x * y
    if kind < 0.75:
        return x + y * 0.5
    if kind < 0.9:
        return m.softmax(x, axis=-1)
    return m.split(x, [1, x.shape[1] - 1], axis=1)[1]


def differences(seed: int, programs: int) -> list[str]:
    """Return where the ways to run random programs of one random model differ, in words."""
    wrong: list[str] = []
    with ExitStack() as open_sessions:
        models: dict[str, Model] = {}
        for reuse in REUSE:
            session = DynamicSession(
                *("random", SGD(0.05)),
                seed=seed,
                cpus=2,
                reuse=reuse,
                pattern_depth=4,
                collect_steps=2,
                pattern_frequency=3,
            )
            models[reuse] = Model(open_sessions.enter_context(session), seed)
        for program in range(programs):
            found = {reuse: _ran(model, seed * 1000 + program) for reuse, model in models.items()}
            loss, state = found["off"]
            for reuse, (other, after) in found.items():
                where = f"model {seed}, program {program}, reuse {reuse}"
                if not np.isclose(other, loss, rtol=1e-4, atol=1e-5):
                    wrong.append(f"{where}: loss {other}, {loss} operator by operator")
                for name, value in state.items():
                    if not np.allclose(after[name], value, rtol=1e-4, atol=2e-5):
                        apart = float(np.abs(after[name] - value).max())
                        wrong.append(f"{where}: {name!r} differs by {apart:.2g}")
            for model in models.values():
                model.session.load_state(state)
        for reuse in ("patterns", "all"):
            cells = models[reuse].session.report().cells
            if programs > 4 and not any(cell.name.startswith("pattern") for cell in cells):
                wrong.append(f"model {seed}, reuse {reuse}: no pattern was found")
    return wrong


def _ran(model: Model, seed: int) -> tuple[float, dict[str, Any]]:
    loss = model.session.step(model.losses(seed))
    return loss, model.session.state()
