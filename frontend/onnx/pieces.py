"""Runs ONNX models whose shapes depend on computed values, in pieces.

A piece is an ordinary graph. The importer translates all nodes that it can, and leaves those that
need contents which are not known yet, with all that depends on them; the session binds and runs the
translated ones, and then the contents are known. Operators whose results have data-dependent shapes
(`NonZero`, `NonMaxSuppression`, `Loop` and such) run between pieces, by the same rules that fold
constants elsewhere. The next piece is made of the nodes that are left. What was computed becomes
its inputs, or its constants where shapes depend on them. Bodies of loops, branches and functions
that contain such operators are run in pieces, too. Pieces are kept by the shapes they are for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.blocks import (
    Block,
    Body,
    Env,
    Held,
    Known,
    Piece,
    Step,
    array_in,
    as_held,
    as_slot,
    filled,
    held_in,
    key_of,
    names_in,
    number_in,
    outputs_of,
    recipe_of,
    stacked,
)
from soapstone.frontend.onnx.build import MOST_DEPTH, Importer
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnboundError
from soapstone.frontend.onnx.file.read import Declared, Source
from soapstone.frontend.onnx.file.tensors import array_of
from soapstone.frontend.onnx.model import MOST_CONTENTS
from soapstone.frontend.onnx.nodes import placed, single_shape
from soapstone.frontend.onnx.texts import described
from soapstone.frontend.onnx.values import ABSENT, Absent, Scope, Value, domain_of
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

if TYPE_CHECKING:
    from soapstone.frontend.inference.serial_session import SerialSession

MOST_PIECES = 512  # of a run, for which room is left
MOST_TRIPS = 1 << 20  # of a loop
_WITH_BODIES = {("", name) for name in ("If", "Loop", "Scan", "SequenceMap")}


class Pieces:
    """Runs a model in pieces, each bound and run by the session.

    Args:
        source: the ONNX file.
        session: binds the pieces, and keeps them among the shapes that it has bound.
    """

    def __init__(self, source: Source, session: SerialSession | None) -> None:
        self._source = source
        self._session = session
        self._blocks: dict[Hashable, Block] = {}
        self._bodies: dict[Hashable, Body] = {}  # by their paths
        self._pieces: OrderedDict[Hashable, Piece] = OrderedDict()
        self._numbers = count()
        self._generators: dict[Hashable, dict[Hashable, np.random.RandomState]] = {}  # by paths
        self._ran = self._longest = 0  # pieces of this run, of the longest
        self._variants: dict[str, str] | None = None
        weights = ((n, a) for n, a in source.weights.items())
        self._weights: dict[str, Held] = {
            n: Known.of(Value(described(a), n, None, a, True)) for n, a in weights
        }
        names = (declared.name for declared in source.outputs)
        self._main = Block.of((), source.graph.node, names)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name: arrays, lists of them, or None of an optional without one.

        inputs: an array for each input, of sequences a tuple of arrays, or None.

        Raises:
            OnnxError: a node is not legal or not supported; names it.
        """
        self._ran = 0
        env = self._env(inputs)
        self._run(self._main, env)
        found = {}
        for declared in self._source.outputs:
            held = env.find(declared.name)
            if held is None:
                raise OnnxError(f"output {declared.name!r} is made by no node")
            found[declared.name] = _handed_on(held, declared, declared.holds)
        return found

    def variants(self, inputs: Mapping[str, Array]) -> dict[str, str]:
        """Return which kernel variant serves each launch of a run; inputs: as of `run`."""
        self._variants = {}
        try:
            self.run(inputs)
            return self._variants
        finally:
            self._variants = None

    def cuts(self, inputs: Mapping[str, Array]) -> list[str]:
        """Return the nodes before which the model is cut first; inputs: of which only shapes count.

        Raises:
            OnnxError: as `run`.
        """
        piece = self._make(self._main, self._env(inputs))
        left = (*piece.steps, *(piece.rest.steps if piece.rest else ()))
        made = {name for step in left for name in step.made}
        first = (step for step in left if not step.reads & made)
        return [str(step) for step in sorted(first, key=lambda step: step.position)]

    def _env(self, inputs: Mapping[str, Any]) -> Env:
        scope = Scope(opsets=self._source.opsets)
        values = {name: ABSENT if each is None else each for name, each in inputs.items()}
        return Env(scope, values, Env(scope, self._weights))

    # Blocks

    def _run(self, start: Block, env: Env) -> None:
        """Run a block; what it makes stands in its environment afterwards."""
        if env.scope.depth > MOST_DEPTH:
            raise OnnxError(f"functions and subgraphs {env.scope.depth} deep found")
        block: Block | None = start
        while block is not None:
            piece = self._piece(block, env)
            values = self._computed(piece, env)
            for name, recipe in piece.made.items():
                env.values[name] = filled(recipe, values)
            for step in piece.steps:
                with placed(step.node, step.position, env.scope.prefix):
                    self._step(step, (*block.path, step.position), env)
            block = piece.rest

    def _piece(self, block: Block, env: Env) -> Piece:
        self._ran += 1
        self._longest = max(self._longest, min(self._ran, MOST_PIECES))
        key = key_of(block, env)
        piece = self._pieces.get(key)
        if piece is None:
            assert self._session is not None
            if len(self._pieces) >= self._longest * self._session.bounds.most:
                self._pieces.popitem(last=False)
            piece = self._make(block, env)
            key = key_of(block, env)  # it is known now what it depends on
            self._pieces[key] = piece
        self._pieces.move_to_end(key)
        return piece

    def _computed(self, piece: Piece, env: Env) -> dict[str, Array]:
        """Return the inputs and outputs of a piece's graph by its names, computed."""
        values: dict[str, Array] = {}
        for name, (outside, place) in piece.feeds.items():
            held = env.find(outside)
            values[name] = array_in(held[place] if isinstance(held, tuple) else held)
        graph = piece.graph
        if graph is None:
            return values
        assert self._session is not None
        bound = self._session.bound_as(
            ("piece", piece.number), lambda: graph, piece.constants, self._longest
        )
        for name, feed in bound.feeds.items():
            np.copyto(feed, values[name])
        self._session.run_bound(bound)
        if self._variants is not None:
            self._variants.update(bound.variants)
        values.update((name, array.copy()) for name, array in bound.results.items())
        return values

    # Making pieces

    def _importer(
        self, generators: dict[Hashable, np.random.RandomState] | None = None
    ) -> tuple[Importer, dict[str, Array]]:
        """Return an importer, and the constants of its graph, which it fills."""
        constants: dict[str, Array] = {}

        def keep(label: str, array: Array, taken: Callable[[str], bool]) -> str:
            name = importer.emitter.builder.unique(label)
            while name in constants or taken(name):
                name = importer.emitter.builder.unique(f"{name}.constant")
            constants[name] = array
            return name

        importer = Importer(self._source, {}, {}, keep, generators=generators)
        return importer, constants

    def _make(self, block: Block, env: Env) -> Piece:
        """Return the first piece of a block: all that can be translated with what is known."""
        while True:
            importer, constants = self._importer()
            outside = replace(env.scope, values={}, outer=None)
            feeds = self._offered(importer, block, env, outside)
            scope = replace(env.scope, values={}, outer=outside)
            before = len(block.needed_contents)
            pending, steps = self._translate(importer, block, env, scope, feeds)
            if len(block.needed_contents) == before:
                break
        rest = tuple(step for step in pending if step not in steps)
        wanted = set(block.outputs).union(*(step.reads for step in pending))
        made = {n: recipe_of(s) for n, s in scope.values.items() if n in wanted}
        names = dict.fromkeys(n for recipe in made.values() for n in names_in(recipe))
        results = [name for name in names if name not in feeds]
        graph = importer.emitter.piece(results) if results else None
        needed = {*names, *(graph.roles if graph else ())}
        return Piece(
            next(self._numbers),
            graph,
            {n: a for n, a in constants.items() if n in needed},
            {name: place for name, place in feeds.items() if name in needed},
            made,
            tuple(steps),
            self._rest(block, rest),
        )

    def _rest(self, block: Block, steps: tuple[Step, ...]) -> Block | None:
        if not steps:
            return None
        made = Block(block.path, steps, block.outputs)
        return self._blocks.setdefault(made.key, made)

    def _offered(
        self, importer: Importer, block: Block, env: Env, scope: Scope
    ) -> dict[str, tuple[str, int]]:
        """Put the values that a block reads into a scope; return which inputs stand for which."""
        feeds: dict[str, tuple[str, int]] = {}
        emitter = importer.emitter

        def offer(name: str, place: int, held: Held) -> Value:
            if isinstance(held, Known):
                return held.value
            array = array_in(held)
            if name in block.needed_contents:
                return emitter.known(array, name)
            base = f"{name}.in" if name in self._source.weights else name
            made = emitter.offered(described(array), name, emitter.builder.unique(base))
            assert made.name is not None
            feeds[made.name] = (name, place)
            return made

        reads = set(block.outputs).union(*(step.reads for step in block.steps))
        for name in sorted(reads):
            held = env.find(name)
            if isinstance(held, tuple):
                scope.values[name] = tuple(offer(name, at, part) for at, part in enumerate(held))
            elif isinstance(held, Absent):
                scope.values[name] = held
            elif held is not None:
                scope.values[name] = offer(name, 0, held)
        return feeds

    def _translate(
        self,
        importer: Importer,
        block: Block,
        env: Env,
        scope: Scope,
        feeds: Mapping[str, tuple[str, int]],
    ) -> tuple[list[Step], list[Step]]:
        """Translate what can be; return the steps that are left, and those of them to take next.

        Where contents are needed that are at hand, `block.needed_contents` says so afterwards.
        """
        pending: list[Step] = []
        failures: list[tuple[Step, UnboundError]] = []
        late: set[str] = set()
        for step in block.steps:
            if late & step.reads:
                pending.append(step)
                late.update(step.made)
                continue
            block.used.update(name for name in step.reads if env.find(name) is not None)
            try:
                importer.step(step.node, step.position, scope)
            except UnboundError as error:
                if not error.apart and self._tell(block, env, [error.value], feeds):
                    return [], []
                failures.append((step, error.with_traceback(None)))  # which has this frame
                pending.append(step)
                late.update(step.made)
        steps = [step for step, error in failures if error.apart]
        if failures and len(pending) == len(block.steps) and not steps:
            steps = [step for step, _ in failures if self._has_inside(step)]
            if not steps and not self._tell(block, env, failures[0][1].inputs, feeds):
                raise failures[0][1]
        return pending, steps

    def _tell(
        self,
        block: Block,
        env: Env,
        names: Iterable[str | None],
        feeds: Mapping[str, tuple[str, int]],
    ) -> bool:
        """Let a block's piece be for certain contents of inputs; return whether it can be."""
        found = {feeds[name][0] for name in names if name is not None and name in feeds}
        for name in found:
            held = env.find(name)
            if isinstance(held, tuple | Absent | None) or array_in(held).size > MOST_CONTENTS:
                return False
        block.needed_contents |= found
        return bool(found)

    def _has_inside(self, step: Step) -> bool:
        return step.key in _WITH_BODIES or step.key in self._source.functions

    # Between pieces

    def _step(self, step: Step, path: tuple[Hashable, ...], env: Env) -> None:
        """Carry out a node whose inputs are at hand."""
        if step.key == ("", "If"):
            made = self._branch(step, path, env)
        elif step.key == ("", "Loop"):
            made = self._loop(step, path, env)
        elif step.key in self._source.functions:
            made = self._function(step, path, env)
        else:
            made = self._rule(step, path, env)
        env.values.update((n, held) for n, held in zip(step.node.output, made) if n)

    def _rule(self, step: Step, path: tuple[Hashable, ...], env: Env) -> list[Held]:
        """Return what the rule of an operator makes of known inputs."""
        importer, _ = self._importer(self._generators.setdefault(path, {}))
        values = {n: as_slot(n, held) for n in step.reads if (held := env.find(n)) is not None}
        scope = replace(env.scope, values={}, outer=replace(env.scope, values=values, outer=None))
        importer.step(step.node, step.position, scope)
        return [as_held(scope.values[n]) if n else () for n in step.node.output]

    def _branch(self, step: Step, path: tuple[Hashable, ...], env: Env) -> list[Held]:
        name = "then" if number_in(env, step.node.input[0]) else "else"
        body = self._body(f"{name}_branch", step, path, env)
        inner = env.inside(name, dict(body.initials))
        self._run(body.block, inner)
        return outputs_of(body.block, inner)

    def _loop(self, step: Step, path: tuple[Hashable, ...], env: Env) -> list[Held]:
        """Run a loop's body for each trip; what it collects is stacked."""
        given = [*step.node.input, "", ""]
        trips = number_in(env, given[0]) if given[0] else MOST_TRIPS + 1
        going: Held = held_in(env, given[1]) if given[1] else np.asarray(True)
        states: list[Held] = [held_in(env, name) for name in step.node.input[2:]]
        body = self._body("body", step, path, env)
        if len(body.inputs) != len(states) + 2:
            raise OnnxError(f"body: {len(states) + 2} inputs given, {len(body.inputs)} needed")
        parts: list[list[Array]] = [[] for _ in range(len(body.outputs) - 1 - len(states))]
        trip = nbytes = 0
        while trip < trips and bool(array_in(going).reshape(())):
            if trip >= MOST_TRIPS:
                raise OnnxError(f"more than {MOST_TRIPS} trips are not supported")
            number: Held = np.asarray(trip, np.int64).reshape(body.singles[0])
            going = array_in(going).reshape(body.singles[1])
            entering = dict(zip(body.inputs, (number, going, *states)))
            inner = env.inside("body", {**body.initials, **entering})
            self._run(body.block, inner)
            going, *made = outputs_of(body.block, inner)
            states = made[: len(states)]
            for part, held in zip(parts, made[len(states) :]):
                part.append(array_in(held))
                nbytes += part[-1].nbytes
            check_bytes(nbytes, "what the trips collect", OnnxError)
            trip += 1
        declared = body.outputs[1 + len(states) :]
        return [*states, *(stacked(part, value) for part, value in zip(parts, declared))]

    def _function(self, step: Step, path: tuple[Hashable, ...], env: Env) -> list[Held]:
        """Run the body of one of the model's functions."""
        function = self._source.functions[step.key]
        given = [env.find(name) if name else None for name in step.node.input]
        opsets = {domain_of(o.domain): int(o.version) for o in function.opset_import}
        nodes, scope = self._importer()[0].entered(
            function, step.node, given, env.scope, opsets or env.scope.opsets
        )
        if path not in self._bodies:
            block = Block.of(path, nodes, function.output)
            self._bodies[path] = Body(block, tuple(function.input), (), (), {})
        block = self._bodies[path].block
        inner = Env(scope, {n: held for n, held in zip(function.input, given) if held is not None})
        self._run(block, inner)
        return outputs_of(block, inner)

    def _body(self, name: str, step: Step, path: tuple[Hashable, ...], env: Env) -> Body:
        """Return a subgraph of a node."""
        inside = (*path, name)
        if inside not in self._bodies:
            importer, _ = self._importer()
            graph = Call(importer, step.node, (), env.scope, 0).attribute(name)
            block = Block.of(inside, graph.node, (value.name for value in graph.output))
            known = importer.emitter.known
            constants = {t.name: known(array_of(t), t.name) for t in graph.initializer}
            self._bodies[inside] = Body(
                block,
                tuple(value.name for value in graph.input),
                tuple(map(single_shape, graph.input[:2])),
                tuple(graph.output),
                {name: Known.of(value) for name, value in constants.items()},
            )
        return self._bodies[inside]


def _handed_on(held: Held, declared: Declared, holds: tuple[str, ...]) -> Any:
    """Return an output as runs give it. holds: what it is declared as, from the outside in."""
    where = f"output {declared.name!r}"
    if holds[:1] == ("optional",):
        return None if isinstance(held, Absent) else _handed_on(held, declared, holds[1:])
    if holds[:1] == ("sequence",):
        if not isinstance(held, tuple):
            raise OnnxError(f"{where}: a tensor found, a sequence declared")
        return [_handed_on(each, declared, holds[1:]) for each in held]
    try:
        array = array_in(held)
    except OnnxError as error:
        raise OnnxError(f"{where}: {error}") from None
    if (dtype := described(array).dtype) != declared.dtype:
        raise OnnxError(f"{where}: {dtype} found, {declared.dtype} declared")
    return array.copy()
