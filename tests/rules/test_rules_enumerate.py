"""The enumeration of spaces: against brute force over sets of terms, with NumPy's numbers."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, Value, instantiate, match, parse
from soapstone.rules.algebra import evaluate
from soapstone.rules.enumeration.compare import values_apart
from soapstone.rules.enumeration.engine import Enumeration, enumerate_space
from soapstone.rules.enumeration.exact import ExactEvaluator, has_exact
from soapstone.rules.enumeration.levels import build
from soapstone.rules.enumeration.real import RealEvaluator
from soapstone.rules.enumeration.space import OperatorUse, Space, inputs, spaces
from soapstone.rules.workers import spawned
from soapstone.search.rules.language import commutative, kinds
from soapstone.search.rules.shapes import infer, tensor_type

Key = tuple[object, ...]  # of a tensor: equal where type and elements are
WORDS = {
    "tiny": ["add", "mul", "smul", "transpose", "matmul", "relu", "concat[-1]", "split[-1]"],
    "tiles": [
        *("add", "smul", "relu", "concat[-3]", "split[-3]", "conv2d[1,1,same,none]"),
        *("conv2d[1,1,same,relu]", "conv2d[2,1,same,none]"),
        *("avg_pool2d[3x3,1,same,all]", "max_pool2d[3x3,1,same]"),
    ],
}
TINY = Space(
    "tiny",
    inputs("x1 x2 matrix 2x3; w matrix 3x4; s scalar; ones matrix 2x3"),
    tuple(OperatorUse(term.symbol, term.parameters) for term in map(parse, WORDS["tiny"])),
    2,
)
SMALL = replace(
    TINY,
    name="small",
    inputs=TINY.inputs[:3],
    operators=tuple(u for u in TINY.operators if u.symbol not in ("mul", "smul")),
    max_operators=3,
)
TILES = Space(
    "tiles",
    inputs("x1 x2 image 2x1x3x4; k kernel 2x1x3x3; pool_kernel[3x3] kernel 1x1x3x3; s scalar"),
    tuple(OperatorUse(term.symbol, term.parameters) for term in map(parse, WORDS["tiles"])),
    2,
)


class Brute:
    """Every set of operators of a space, by recursion, evaluated by the NumPy references."""

    def __init__(self, space: Space, filtered: bool = True) -> None:
        self.space = space
        self.filtered = filtered
        self.types = {each.term: tensor_type(each.shape) for each in space.inputs}
        rng = np.random.default_rng(5)
        self.arrays = [
            {
                each.term: rng.integers(1, 20, each.shape)
                * np.where(rng.random(each.shape) < negative, -1.0, 1.0)
                for each in space.inputs
                if each.term.is_variable
            }
            for negative in (0.5, 0.5, 0.5, 0.5, 0.5, 0.95)
        ]
        self.kinds = {each.term: each.kind for each in space.inputs}
        self.key_of = lru_cache(maxsize=None)(self._key)
        self.input_keys = {self.key_of(each.term) for each in space.inputs}
        self.graphs: dict[frozenset[tuple[Term, ...]], tuple[Term, ...]] = {}
        self.signatures: dict[Key, set[Key]] = defaultdict(set)
        self._seen: set[frozenset[tuple[Term, ...]]] = set()
        self._extend(frozenset())

    def _key(self, term: Term) -> Key:
        type_ = infer(term, self.types)
        values: list[float] = []
        for arrays in self.arrays:
            found = evaluate.evaluate((term,), arrays, self.types)
            assert found is not None
            values += (np.round(found[0], 7) + 0.0).ravel().tolist()  # no negative zeros
        return (type_, self.kinds[term], *values)

    def _nodes(self, tensors: Sequence[Term]) -> Iterable[tuple[Term, ...]]:
        for use in self.space.operators:
            for operands in itertools.product(tensors, repeat=use.operands):
                if len(operands) == 2:
                    if operands[0] == operands[1] and not self.space.repeated:
                        continue
                    if use.symbol in commutative() and str(operands[0]) > str(operands[1]):
                        continue
                shapes = [infer(operand, self.types).shape for operand in operands]  # type: ignore[union-attr]
                kind = use.result([self.kinds[o] for o in operands], shapes)  # type: ignore[arg-type]
                node = tuple(Term(symbol, use.parameters, operands) for symbol in use.outputs)
                if kind is not None and all(infer(term, self.types) for term in node):
                    self.kinds.update((term, kind) for term in node)
                    yield node

    def _extend(self, graph: frozenset[tuple[Term, ...]]) -> None:
        if graph in self._seen:
            return
        self._seen.add(graph)
        tensors = [term for node in graph for term in node]
        leaves = {t for node in graph for t in node[0].subterms() if not t.operands}
        if graph and (not self.filtered or prefix(self.space, leaves)):
            used = {operand for node in graph for operand in node[0].operands}
            self.graphs[graph] = tuple(t for t in tensors if t not in used)
        if len(graph) == self.space.max_operators:
            return
        for node in self._nodes([*(each.term for each in self.space.inputs), *tensors]):
            if node in graph:
                continue
            keys = [self.key_of(term) for term in node]
            if self.filtered:
                if self.input_keys & set(keys) or {self.key_of(t) for t in tensors} & set(keys):
                    continue
                if len(graph) + 1 < self.space.max_operators or prefix(
                    self.space, leaves | {t for t in node[0].subterms() if not t.operands}
                ):
                    self._sign(node)
            self._extend(graph | {node})

    def _sign(self, node: tuple[Term, ...]) -> None:
        operands = [self.key_of(operand) for operand in node[0].operands]
        if node[0].symbol in commutative():
            operands.sort(key=str)
        for term in node:
            self.signatures[self.key_of(term)].add((term.symbol, term.parameters, *operands))

    def groups(self) -> dict[Key, list[frozenset[Term]]]:
        """Return the graphs, as sets of outputs, by what they compute."""
        result: dict[Key, list[frozenset[Term]]] = defaultdict(list)
        for outputs in self.graphs.values():
            keys = [self.key_of(term) for term in outputs]
            if not self.filtered or all(len(self.signatures[key]) > 1 for key in keys):
                result[tuple(sorted(keys, key=str))].append(frozenset(outputs))
        return {key: group for key, group in result.items() if len(group) > 1}


def prefix(space: Space, leaves: set[Term]) -> bool:
    """Return whether of each class of interchangeable variables the first are used."""
    classes: dict[object, list[bool]] = defaultdict(list)
    for each in space.inputs:
        if each.term.is_variable:
            classes[each.kind, each.shape].append(each.term in leaves)
    return all(used == sorted(used, reverse=True) for used in classes.values())


def groups_of(found: Enumeration) -> list[list[frozenset[Term]]]:
    """Return the groups of an enumeration: each graph the set of its outputs."""
    graphs = [
        frozenset(map(found.term, found.outputs(graph))) for graph in range(len(found.graphs))
    ]
    return [graphs[begin:end] for begin, end in itertools.pairwise(found.starts.tolist())]


def canonical(term: Term) -> Term:
    """Return a term with the operands of commutative operators in order of their text."""
    operands = tuple(map(canonical, term.operands))
    if term.symbol in commutative():
        operands = tuple(sorted(operands, key=str))
    return Term(term.symbol, term.parameters, operands)


def as_sets(groups: Iterable[Iterable[frozenset[Term]]]) -> set[frozenset[frozenset[Term]]]:
    return {frozenset(frozenset(map(canonical, g)) for g in group) for group in groups}


DEEP = [
    replace(
        TINY,
        name=f"{words[0]}-{count}",
        inputs=inputs("x1 x2 matrix 2x3"),
        operators=tuple(OperatorUse(term.symbol, term.parameters) for term in map(parse, words)),
        max_operators=count,
    )
    for words, count in (
        (["relu", "add"], 4),
        (["add", "transpose"], 5),
        (["concat[-1]", "split[-1]", "add", "transpose"], 4),
        (["matmul", "transpose"], 4),
    )
]


@pytest.mark.long
@pytest.mark.parametrize("space", [TINY, SMALL, TILES, *DEEP], ids=lambda space: space.name)
def test_every_graph_is_enumerated_once_and_grouped_by_what_it_computes(space: Space) -> None:
    brute = Brute(space)
    found = enumerate_space(space, ExactEvaluator())
    sizes = Counter(map(len, brute.graphs))
    assert found.counts[1:].tolist() == [sizes[n + 1] for n in range(space.max_operators)]
    groups = groups_of(found)
    assert all(len(group) == len(set(group)) > 1 for group in groups)
    assert as_sets(groups) == as_sets(brute.groups().values())


@pytest.mark.long
def test_a_tensor_may_be_both_operands_where_the_space_says_so() -> None:
    space = replace(SMALL, max_operators=2, repeated=True)
    brute = Brute(space)
    found = enumerate_space(space, ExactEvaluator())
    assert found.counts.sum() == len(brute.graphs)
    assert as_sets(groups_of(found)) == as_sets(brute.groups().values())


class Congruence:
    """Terms made equal by equations and by congruence."""

    def __init__(self, nodes: Iterable[tuple[Term, ...]]) -> None:
        self.parent: dict[Term, Term] = {}
        self.nodes = [term for node in nodes for term in node]

    def find(self, term: Term) -> Term:
        while (above := self.parent.get(term, term)) != term:
            term = above
        return term

    def join(self, left: Term, right: Term) -> None:
        if self.find(left) != self.find(right):
            self.parent[self.find(left)] = self.find(right)

    def close(self) -> None:
        """Make terms equal whose operands are, until nothing changes."""
        changed = True
        while changed:
            changed = False
            known: dict[Term, Term] = {}
            for term in self.nodes:
                operands = [self.find(operand) for operand in term.operands]
                if term.symbol in commutative():
                    operands.sort(key=str)
                key = Term(term.symbol, term.parameters, tuple(operands))
                other = known.setdefault(key, term)
                if self.find(other) != self.find(term):
                    self.join(other, term)
                    changed = True


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(TINY, marks=pytest.mark.long, id="tiny"),
        pytest.param(replace(SMALL, max_operators=2), id="small"),
    ],
)
def test_filters_lose_no_equation(space: Space) -> None:
    """What any two unfiltered graphs say follows from the kept ones, renamed, by congruence."""
    brute = Brute(space, filtered=False)
    found = enumerate_space(space, ExactEvaluator())
    terms = {term for graph in brute.graphs for node in graph for term in node}
    closure = Congruence(
        (term,) for term in sorted(terms, key=lambda term: (len(str(term)), str(term)))
    )
    equations = list(found.collapses)
    for group in groups_of(found):
        by_key = [{brute.key_of(t): t for t in map(canonical, graph)} for graph in group]
        equations += [(by_key[0][key], graph[key]) for graph in by_key[1:] for key in graph]
    swapped = {"x1": parse("x2"), "x2": parse("x1")}
    for left, right in equations:
        for pattern in orders(left):
            for term in closure.nodes:
                bindings = match(pattern, term, {})
                if bindings is not None and all(
                    brute.key_of(parse(name))[:2] == brute.key_of(bound)[:2]  # type: ignore[arg-type]
                    for name, bound in bindings.items()
                ):
                    closure.join(term, canonical(instantiate(right, swapped | bindings)))
    closure.close()
    equal: dict[Key, list[Term]] = defaultdict(list)
    for term in (*terms, *(each.term for each in space.inputs)):
        equal[brute.key_of(term)].append(term)
    pairs = 0
    for same in equal.values():
        assert len({closure.find(canonical(term)) for term in same}) == 1, same
        pairs += len(same) - 1
    assert pairs > 10


def orders(term: Term) -> list[Term]:
    """Return a term with the operands of its commutative operators in every order."""
    result = []
    for operands in itertools.product(*map(orders, term.operands)):
        result.append(Term(term.symbol, term.parameters, operands))
        if term.symbol in commutative():
            result.append(Term(term.symbol, term.parameters, operands[::-1]))
    return result


def lifted(space: Space) -> Space:
    """Return the space with every stride and padding of its convolutions and pools."""
    every: dict[str, tuple[Value, ...]] = {"stride": (1, 2), "padding": ("same", "valid")}
    uses: list[OperatorUse] = []
    for use in space.operators:
        values = [every.get(kind, (v,)) for kind, v in zip(kinds(use.symbol), use.parameters)]
        choices = itertools.product(*values) if values else [use.parameters]
        uses += [replace(use, parameters=choice) for choice in choices]
    return replace(space, operators=tuple(dict.fromkeys(uses)))


@pytest.mark.parametrize("name", ["matrices", "images", "published"])
def test_values_are_those_of_the_references(name: str) -> None:
    space = next(space for space in spaces() if space.name == name)
    space = lifted(space).with_max_operators(3 if name == "matrices" else 2)
    exact = ExactEvaluator()
    built = build(space, exact, space.max_operators, store_last=True)
    found = Enumeration(built, np.zeros((0, 4), np.int32), np.zeros(1, np.int64), np.zeros(4))
    rng = np.random.default_rng(3)
    operators = set()
    compared = 0
    types = {each.term: tensor_type(each.shape) for each in space.inputs}
    candidates = rng.permutation(np.arange(found.terms.inputs, len(found.terms.value)))
    rare = [np.nonzero(built.operator == op)[0][:6] for op in range(len(space.operators))]
    chosen = {*candidates[:150].tolist(), *found.terms.first[np.concatenate(rare)].tolist()}
    for tensor in chosen:
        term = found.term(tensor)
        operators.add(built.operator[found.terms.node[tensor]])
        assert built.table.types[found.terms.type[tensor]] == infer(term, types)
        for seed in range(2):
            arrays = {
                each.term: exact.tensor(number)[:, seed].reshape(each.shape).astype(float)
                for number, each in enumerate(space.inputs)
                if each.term.is_variable
            }
            expected = evaluate.evaluate((term,), arrays, types)
            assert expected is not None
            mine = exact.tensor(tensor)[:, seed]
            if abs(expected[0] - np.round(expected[0])).max() > 1e-6:
                continue  # a fraction is another number modulo 2^64
            compared += 1
            np.testing.assert_allclose(mine, np.round(expected[0].ravel()), rtol=1e-9)
    assert len(operators) == len(set(built.operator.tolist()))
    assert compared > len(chosen)


def test_terms_that_are_inputs_or_parts_of_themselves_are_collapses() -> None:
    space = next(space for space in spaces() if space.name == "matrices").with_max_operators(2)
    found = {(str(a), str(b)) for a, b in enumerate_space(space, ExactEvaluator()).collapses}
    assert ("transpose(transpose(x1))", "x1") in found
    assert ("matmul(x1, identity_matrix)", "x1") in found
    assert ("mul(x1, ones)", "x1") in found or ("mul(ones, x1)", "x1") in found
    assert ("relu(relu(x1))", "relu(x1)") in found
    assert ("split0[-2](concat[-2](x1, x2))", "x1") in found
    assert ("split1[-2](concat[-2](x1, x2))", "x2") in found
    assert not any(a == "matmul(x2, identity_matrix)" for a, _ in found)  # x1 before x2
    images = next(space for space in spaces() if space.name == "images").with_max_operators(1)
    found = {(str(a), str(b)) for a, b in enumerate_space(images, ExactEvaluator()).collapses}
    assert ("conv2d[1,1,same,none](x1, identity_kernel[3x3])", "x1") in found


def test_known_rules_share_a_group() -> None:
    space = next(space for space in spaces() if space.name == "matrices").with_max_operators(3)
    wanted = ["add", "matmul", "transpose", "concat", "split", "mul"]
    groups = as_sets(groups_of(enumerate_space(space.with_operators(wanted), ExactEvaluator())))

    def together(*sides: str) -> bool:
        graphs = {frozenset(canonical(parse(term)) for term in side.split("; ")) for side in sides}
        return any(graphs <= group for group in groups)

    assert together("matmul(matmul(x1, w1), v)", "matmul(x1, matmul(w1, v))")
    product = "matmul(x1, concat[-1](w1, w2))"
    assert together(
        "matmul(x1, w1); matmul(x1, w2)", f"split0[-1]({product}); split1[-1]({product})"
    )
    assert together("transpose(matmul(x1, w1))", "matmul(transpose(w1), transpose(x1))")
    assert not together("matmul(x1, w1)", "matmul(x1, w2)")


def test_ids_shared_by_accident_are_told_apart() -> None:
    """With ids of a few bits only, tensors are still told apart, element by element."""
    space = replace(SMALL, max_operators=2)

    class Coarse(ExactEvaluator):
        def begin(self, *given: Any) -> NDArray[np.uint64]:
            return super().begin(*given) % np.uint64(97) + np.uint64(1000)

        def values(self, *rows: NDArray[np.int32]) -> NDArray[np.uint64]:  # type: ignore[override]
            return super().values(*rows) % np.uint64(97) + np.uint64(1000)

    coarse = Coarse()
    built = build(space, coarse, 2)
    assert values_apart(built.terms, built.handle, coarse) > 10
    exact = build(space, ExactEvaluator(), 2)
    names = dict(zip(exact.terms.value.tolist(), built.terms.value.tolist()))
    assert len(exact.terms.value) == len(built.terms.value)
    assert len(set(names.values())) == len(names) == len(set(exact.terms.value.tolist()))


def test_an_interrupt_surfaces_from_every_stage() -> None:
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        stages.append(stage)
        if stage == stop[-1]:
            raise KeyboardInterrupt

    stop = [""]
    enumerate_space(SMALL, ExactEvaluator(), progress)
    assert len(set(stages)) >= 4
    for stage in sorted(set(stages)):
        stop.append(stage)
        with pytest.raises(KeyboardInterrupt):
            enumerate_space(SMALL, ExactEvaluator(), progress)


def test_real_numbers_give_the_same_groups() -> None:
    exact = groups_of(enumerate_space(SMALL, ExactEvaluator()))
    real = groups_of(enumerate_space(SMALL, RealEvaluator()))
    assert as_sets(exact) == as_sets(real)


def test_an_operator_without_structure_needs_real_numbers() -> None:
    space = replace(TINY, max_operators=2).with_operators(["sigmoid", "transpose"])
    assert not has_exact(space)
    with pytest.raises(GraphError, match="sigmoid has no exact evaluation"):
        enumerate_space(space, ExactEvaluator())
    groups = as_sets(groups_of(enumerate_space(space, RealEvaluator())))
    both = {"sigmoid(transpose(x1))", "transpose(sigmoid(x1))"}
    assert any({frozenset([parse(term)]) for term in both} <= group for group in groups)


def test_spaces_are_checked() -> None:
    with pytest.raises(GraphError, match="operator 'sigmoidd' has no form"):
        TINY.with_operators(["sigmoidd"])
    with pytest.raises(GraphError, match="at most 0"):
        enumerate_space(replace(TINY, max_operators=0), ExactEvaluator())
    many = inputs("; ".join(f"x{n} matrix 2x3" for n in range(70)))
    with pytest.raises(GraphError, match="70 inputs found, at most 62 needed"):
        enumerate_space(replace(TINY, inputs=many), ExactEvaluator())


def test_work_in_other_processes_ends_where_its_program_is_interrupted() -> None:
    """In mid-work, and not when it is done, which here is never."""
    with pytest.raises(KeyboardInterrupt), spawned(2) as pool:
        endless = [pool.submit(time.sleep, 100_000) for _ in range(3)]
        while not all(each.running() for each in endless[:2]):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert all(each.done() for each in endless)
