"""Lifting proofs to parameters, axes and groups, and sampling what a rule applies to."""

from __future__ import annotations

import numpy as np
from helpers.rules_proofs import GROUPED, LAWS, R4, step, terms

from soapstone.ir.term import Term, variables
from soapstone.rules.proving.check import replay
from soapstone.rules.proving.lift import lift
from soapstone.search.rules.infer import with_parameters
from soapstone.search.rules.proof import Step
from soapstone.search.rules.sample import applies, sample_types
from soapstone.search.rules.shapes import infer, tensor_type


def test_extents_that_are_one_by_chance_are_not_broadcast() -> None:
    rule = (terms("add(x, y)"), terms("add(y, x)"), {"x": 2, "y": 2})
    row = {Term("x"): tensor_type((3, 4)), Term("y"): tensor_type((1, 4))}
    same = {Term("x"): tensor_type((1, 4)), Term("y"): tensor_type((1, 4))}
    assert not applies(*rule, (), {}, row) and applies(*rule, (), {}, same)
    assert applies(*rule, ("dim(y,-2) = 1",), {}, row)


def test_a_kernel_size_of_one_by_chance_is_not_broadcast() -> None:
    rule = (terms("add(enlarge[k](x), y)"), terms("add(y, enlarge[k](x))"), {"x": 4, "y": 4})
    point = tensor_type((2, 2, 1, 1))
    assert not applies(
        *rule, (), {"k": "1x1"}, {Term("x"): point, Term("y"): tensor_type((2, 2, 3, 3))}
    )
    assert applies(*rule, (), {"k": "1x1"}, {Term("x"): point, Term("y"): point})
    assert applies(
        *rule, (), {"k": "3x3"}, {Term("x"): point, Term("y"): tensor_type((2, 2, 3, 3))}
    )


def lifted(source: str, target: str, types: dict[str, tuple[int, ...]], *chains: tuple[Step, ...]):  # type: ignore[no-untyped-def]
    ranks = {name: len(shape) for name, shape in types.items()}
    found = lift(terms(source), terms(target), chains, ranks, types=types, laws=LAWS)
    replay(found.source, found.target, found.ranks, found.guard, found.proof, laws=LAWS)
    return "; ".join(map(str, found.source)), "; ".join(map(str, found.target)), found.guard


def test_the_merge_of_two_convolutions_is_lifted() -> None:
    one, two = "conv2d[1,1,same,none](x, y)", "conv2d[1,1,same,none](x, z)"
    merged = "conv2d[1,1,same,none](x, concat[-4](y, z))"
    types = {"x": (1, 4, 6, 5), "y": (2, 4, 3, 3), "z": (3, 4, 3, 3)}
    proof = (
        (step("split0-concat", back=True, a=-3, y=two), step("conv-kernels", 0)),
        (step("split1-concat", back=True, a=-3, x=one), step("conv-kernels", 0)),
    )
    source, target, guard = lifted(
        f"{one}; {two}", f"split0[-3]({merged}); split1[-3]({merged})", types, *proof
    )
    assert source == "conv2d[1,s,p,c](x, y); conv2d[1,s,p,c](x, z)"
    merged = "conv2d[1,s,p,c](x, concat[-4](y, z))"
    assert target == f"split0[-3]({merged}); split1[-3]({merged})"
    assert guard == ()


def test_groups_add_up_when_lifted() -> None:
    types = {"x": (1, 4, 6, 5), "y": (3, 4, 3, 3), "z": (1, 4, 6, 5), "w": (3, 4, 3, 3)}
    found = lifted(
        "concat[-3](conv2d[1,1,same,none](x, y), conv2d[1,1,same,none](z, w))",
        "conv2d[2,1,same,none](concat[-3](x, z), concat[-4](y, w))",
        types,
        (step("conv-groups", g=1, h=1),),
    )
    assert found == (*GROUPED, ("dim(y,-4)*h = dim(w,-4)*g",))


def test_kernel_sizes_paddings_and_depthwise_are_lifted() -> None:
    x = (1, 4, 6, 5)
    assert lifted(
        "conv2d[1,1,same,none](x, y)",
        "conv2d[1,1,same,none](x, enlarge[3x3](y))",
        {"x": x, "y": (3, 4, 1, 1)},
        (step("conv-enlarge", k="3x3"),),
    ) == ("conv2d[g,s,same,c](x, y)", "conv2d[g,s,same,c](x, enlarge[k](y))", ())
    assert lifted(
        "avg_pool2d[3x3,1,same,all](x)",
        "conv2d[depthwise,1,same,none](x, pool_kernel[3x3])",
        {"x": x, "pool_kernel[3x3]": (4, 1, 3, 3)},
        (step("conv-pool", back=True),),
    ) == ("avg_pool2d[k,s,p,all](x)", "conv2d[depthwise,s,p,none](x, pool_kernel[k])", ())
    sum_of = "add(conv2d[{0},none](x, y), conv2d[{0},none](x, z))"
    assert lifted(
        "conv2d[depthwise,1,same,none](x, add(y, z))",
        sum_of.format("depthwise,1,same"),
        {"x": x, "y": (4, 1, 3, 3), "z": (4, 1, 3, 3)},
        (step("conv-linear"),),
    ) == ("conv2d[g,s,p,none](x, add(y, z))", sum_of.format("g,s,p"), ())


def test_an_axis_stays_where_others_need_a_guard() -> None:
    types = {"x": (2, 3), "y": (2, 4), "z": (2, 5)}
    source, _, guard = lifted(
        "concat[-1](x, concat[-1](y, z))",
        "concat[-1](concat[-1](x, y), z)",
        types,
        (step("concat-associative"),),
    )
    assert (source, guard) == ("concat[a](x, concat[a](y, z))", ())
    axis_bound = lifted(
        "x",
        "x",
        {"x": (3, 3)},
        (step("split0-concat", back=True, a=-1, y="transpose(x)"), step("split0-concat")),
    )
    assert axis_bound == ("x", "x", ("dim(x,-2) = dim(x,-1)",))


def test_what_laws_say_of_axes_is_lifted() -> None:
    types = {"x": (2, 3), "y": (4, 3), "z": (2, 5), "w": (4, 5)}
    chain = (step("concat-geometry"),)
    assert lifted(
        "concat[-1](concat[-2](x, y), concat[-2](z, w))",
        "concat[-2](concat[-1](x, z), concat[-1](y, w))",
        types,
        chain,
    ) == (
        "concat[b](concat[a](x, y), concat[a](z, w))",
        "concat[a](concat[b](x, z), concat[b](y, w))",
        ("b >= a+1",),
    )


def test_variables_come_apart_where_the_proof_allows() -> None:
    found = lifted(
        "add(add(x, x), x)", "add(x, add(x, x))", {"x": (2, 3)}, (step("add-commutative"),)
    )
    assert found == ("add(add(x, y), z)", "add(z, add(x, y))", ())
    shared = (step("split0-concat", back=True, a=-1, y="relu(x)"),)
    source, target, _ = lifted(
        "add(x, x)", "split0[-1](concat[-1](add(x, x), relu(x)))", {"x": (2, 3)}, shared
    )
    assert set(variables(terms(target))) <= set(variables(terms(source)))


def test_broadcast_operands_are_said_in_the_guard() -> None:
    types = {"x": (2, 3), "y": (1, 3), "z": (2, 4), "w": (1, 4)}
    source, _, guard = lifted(
        "concat[-1](add(x, y), add(z, w))",
        "add(concat[-1](x, z), concat[-1](y, w))",
        types,
        (step("concat-add"),),
    )
    assert guard == ("dim(y,-2) = 1", "dim(w,-2) = 1") and source.startswith("concat[a]")


def test_samples_fit_and_vary() -> None:
    source, target = map(terms, GROUPED)
    guard = ("dim(y,-4)*h = dim(w,-4)*g",)
    drawn = list(sample_types(source, target, R4, guard, np.random.default_rng(0), 60))
    assert len(drawn) == 60
    unequal = 0
    for values, types in drawn:
        one, other = (
            infer(with_parameters(term, values), types) for term in (source[0], target[0])
        )
        assert one is not None and other is not None and one.shape == other.shape
        y, w = types[Term("y")].shape[0], types[Term("w")].shape[0]
        assert y * values["h"] == w * values["g"]
        assert applies(source, target, R4, guard, values, types)
        unequal += values["g"] != values["h"] and y != w
    assert unequal > 10
    for name, wanted in {"s": {1, 2}, "p": {"same", "valid"}, "c": {"none", "relu"}}.items():
        assert {values[name] for values, _ in drawn} == wanted
    assert not list(
        sample_types(
            terms("matmul(x, y)"), terms("x"), {"x": 2, "y": 3}, (), np.random.default_rng(0), 3
        )
    )
