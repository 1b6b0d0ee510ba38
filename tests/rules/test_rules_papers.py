"""The worked substitutions of the papers are in the shipped rules; known unsound ones are not.

Jia et al., TASO (sections 2.2 to 2.8), and MetaFlow ("Optimizing DNN Computation with Relaxed Graph
Substitutions"), Figures 1 and 4.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from soapstone.ir.term import parse, subterms
from soapstone.rules.algebra import evaluate
from soapstone.rules.algebra.canonical import identity
from soapstone.rules.candidates import decide
from soapstone.rules.file_checks import check_file
from soapstone.rules.foreign import ForeignRule, rules_from_json
from soapstone.rules.foreign_verdicts import Judge
from soapstone.search.rules import language, rulefile, shapes
from soapstone.search.rules.proof import Candidate
from soapstone.search.rules.rule import Rejected, RuleError, RuleFile


@pytest.fixture(scope="module")
def shipped() -> RuleFile:
    return rulefile.load()


@pytest.fixture(scope="module")
def judge(shipped: RuleFile) -> Judge:
    return Judge(shipped)


def stated(text: str, name: str = "", **ranks: int) -> ForeignRule:
    """Return a rule from text; a rank of 4 for x means images, and the same for all others."""
    left, _, rest = text.partition(" = ")
    right, _, where = rest.partition(" where ")
    source, target = (tuple(map(parse, side.split("; "))) for side in (left, right))
    leaves = [term for term in subterms(source + target) if not term.operands]
    given = {str(term): ranks.get(term.symbol, ranks["x"]) for term in leaves}
    conditions = tuple(where.split(" and ")) if where else ()
    return ForeignRule(name or text, source, target, given, conditions)


def pooled(kind: str) -> str:
    return f"avg_pool2d[3x3,1,same,{kind}]"


DW = "conv2d[depthwise,1,same,none]"
CONV = "conv2d[1,1,same,none]"
SPLIT = "{0}(concat[-3](y, z)); {1}(concat[-3](y, z))"

WORKED = {
    "Figure 2.2a, associative matmul": ["matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)"],
    "Figures 2.2b and 2.3, matmuls that share an operand": [
        "matmul(x, y); matmul(x, z) = split0[-1](matmul(x, concat[-1](y, z)));"
        " split1[-1](matmul(x, concat[-1](y, z)))"
    ],
    "Figure 2.5, a transposed matmul": [
        "matmul(x, y) = transpose(matmul(transpose(y), transpose(x)))"
    ],
    "Figure 2.8b, average pools to a depthwise convolution": [
        f"{pooled('all')}(x) = {DW}(x, pool_kernel[3x3])",
        f"add({DW}(x, y), {DW}(x, z)) = {DW}(x, add(y, z)) where dim(y,-2) = dim(z,-2)"
        " and dim(y,-1) = dim(z,-1)",
        f"add({pooled('all')}(x), {pooled('all')}(x))"
        f" = {DW}(x, add(pool_kernel[3x3], pool_kernel[3x3]))",
        f"add({pooled('all')}(x), {pooled('all')}(y)) = {DW}(add(x, y), pool_kernel[3x3])",
    ],
    "Figure 2.8c, two depthwise and two ordinary convolutions to one of each": [
        f"{DW}(x, y) = {DW}(x, enlarge[5x5](y))",
        f"concat[-3]({DW}(x, y), {DW}(z, w)) = {DW}(concat[-3](x, z), concat[-4](y, w))",
        f"add({CONV}(x, y), {CONV}(z, w)) = {CONV}(concat[-3](x, z), concat[-3](y, w))",
        f"add({CONV}({DW}(x, y), u), {CONV}({DW}(z, w), v))"
        f" = {CONV}({DW}(concat[-3](x, z), concat[-4](enlarge[5x5](y), w)), concat[-3](u, v))",
    ],
    "MetaFlow Figure 1, enlarge a kernel; fuse a relu": [
        "conv2d[1,1,same,relu](x, y) = conv2d[1,1,same,relu](x, enlarge[3x3](y))",
        f"relu({CONV}(x, y)) = conv2d[1,1,same,relu](x, y)",
    ],
    "MetaFlow Figure 4a, convolutions that share an image": [
        f"{CONV}(x, y); {CONV}(x, z) = split0[-3]({CONV}(x, concat[-4](y, z)));"
        f" split1[-3]({CONV}(x, concat[-4](y, z)))",
        "conv2d[1,1,same,relu](x, y); conv2d[1,1,same,relu](x, z)"
        " = split0[-3](conv2d[1,1,same,relu](x, concat[-4](y, z)));"
        " split1[-3](conv2d[1,1,same,relu](x, concat[-4](y, z)))",
    ],
    "MetaFlow Figure 4b, a convolution and an addition": [
        f"add({CONV}(x, y), z) = {CONV}(concat[-3](x, z), concat[-3](y, identity_kernel[3x3]))",
    ],
    "SRU, gates with one product less": [
        "add(mul(x, y), mul(sub(ones, x), z)) = add(mul(x, sub(y, z)), z)"
    ],
    "ResNeXt, convolutions of channels to a grouped one": [
        "concat[-3](conv2d[1,s,p,c](x, y), conv2d[1,s,p,c](z, w))"
        " = conv2d[2,s,p,c](concat[-3](x, z), concat[-4](y, w)) where dim(y,-4) = dim(w,-4)",
        "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))"
        " = conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))"
        " where dim(y,-4)*h = dim(w,-4)*g",
    ],
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_substitutions_are_in_the_set_or_derived_from_it(name: str, judge: Judge) -> None:
    for text in WORKED[name]:
        found = judge.match(stated(text, x=4 if "-3" in text or "2d" in text else 2))
        assert found.verdict in ("in the set", "derivable"), found
        assert not found.guard, found


@pytest.mark.long
def test_proofs_of_the_shipped_file_replay(shipped: RuleFile) -> None:
    some = replace(shipped, rules=shipped.rules[::40])  # `soapstone rules check` replays all
    report = check_file(some)
    assert report.failed == {} and report.proofs >= len(some.rules)
    assert report.laws_unchanged
    assert all(rule.directions for rule in shipped.rules)


# Soundness traps


G = "conv2d[g,s,p,{}]"
PUBLISHED = {  # rules of the published generator that are wrong with groups
    f"{form}, {c}": text.format(G.format(c))
    for c in ("none", "relu")
    for form, text in {
        "kernels joined": "concat[-3]({0}(x, y), {0}(x, z)) = {0}(x, concat[-4](y, z))",
        "kernels joined and split": "{0}(x, y); {0}(x, z) = split0[-3]({0}(x, concat[-4](y, z)));"
        " split1[-3]({0}(x, concat[-4](y, z)))",
        "channels joined": "add({0}(x, y), {0}(z, w)) = {0}(concat[-3](x, z), concat[-3](y, w))",
    }.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rules_that_break_with_groups_are_refuted(name: str, judge: Judge) -> None:
    found = judge.match(stated(PUBLISHED[name], x=4))
    assert found.verdict == "refuted", found
    assert "output 0" in found.reason


@pytest.mark.parametrize("c", ["none", "relu"])
@pytest.mark.parametrize("split", [False, True])
def test_joined_groups_need_equal_channels_for_each_group(
    split: bool, c: str, judge: Judge
) -> None:
    first, second = f"conv2d[g,s,p,{c}](x, y)", f"conv2d[h,s,p,{c}](z, w)"
    joined = f"conv2d[g+h,s,p,{c}](concat[-3](x, z), concat[-4](y, w))"
    text = f"concat[-3]({first}, {second}) = {joined}"
    if split:
        text = f"{first}; {second} = split0[-3]({joined}); split1[-3]({joined})"
    found = judge.match(stated(text, x=4))
    assert found.verdict == "refuted"
    if not split:
        assert found.rules and "dim(" in " ".join(found.guard)  # the shipped rule says when


def test_equal_extents_would_let_a_wrong_rule_through(judge: Judge) -> None:
    text = (
        "concat[-3](conv2d[1,1,same,none](x, y), conv2d[1,1,same,none](z, w))"
        " = conv2d[2,1,same,none](concat[-3](x, z), concat[-4](y, w))"
    )
    rule = stated(text, x=4)
    types = {
        parse(name): shapes.tensor_type(shape)
        for name, shape in (
            ("x", (1, 2, 3, 3)),
            ("z", (1, 2, 3, 3)),
            ("y", (2, 2, 3, 3)),
            ("w", (2, 2, 3, 3)),
        )
    }
    assert evaluate.compare(rule.source, rule.target, types) is None
    assert judge.match(rule).verdict == "refuted"


def test_a_fingerprint_hit_is_compared_tensor_by_tensor() -> None:
    hit = Candidate(
        (parse("relu(add(x, y))"),), (parse("add(relu(x), relu(y))"),), {"x": (2,), "y": (2,)}, "s"
    )
    found = decide(hit)
    assert isinstance(found, Rejected)
    assert found.reason.startswith("refuted: output 0 at")


def test_outputs_are_a_multiset() -> None:
    a, b, c, d = map(parse, ("relu(x)", "exp(x)", "relu(relu(x))", "exp(relu(x))"))
    assert identity((a, b), (c, d)) == identity((b, a), (d, c))
    assert identity((a, b), (c, d)) != identity((a, b), (d, c))


@pytest.mark.parametrize(
    "text", ["relu(relu(x)) = relu(x)", "relu(transpose(x)) = transpose(relu(x))"]
)
def test_relu_has_its_own_identities(text: str, judge: Judge) -> None:
    assert judge.match(stated(text, x=2)).verdict == "in the set"


def test_a_split_cuts_where_its_operand_was_joined() -> None:
    def type_of(text: str, *extents: int) -> object:
        types = {parse(n): shapes.tensor_type((2, e)) for n, e in zip("xyzw", extents)}
        return shapes.infer(parse(text), types)

    joined = "split0[-1](add(concat[-1](x, y), concat[-1](z, w)))"
    assert type_of(joined, 3, 4, 3, 4) == shapes.tensor_type((2, 3))
    assert type_of(joined, 3, 4, 4, 3) is None  # two histories: no split point
    assert type_of("split0[-1](x)", 4) is None


def test_averages_without_padding_are_no_convolution_at_the_border(judge: Judge) -> None:
    kernel = "conv2d[depthwise,{0},{1},none](x, pool_kernel[3x3])"
    inside = f"avg_pool2d[3x3,1,same,inside](x) = {kernel.format(1, 'same')}"
    assert judge.match(stated(inside, x=4)).verdict == "refuted"
    every = f"avg_pool2d[3x3,1,same,all](x) = {kernel.format(1, 'same')}"
    assert judge.match(stated(every, x=4)).verdict == "in the set"
    valid = f"avg_pool2d[3x3,2,valid,inside](x) = {kernel.format(2, 'valid')}"
    assert judge.match(stated(valid, x=4)).verdict in ("in the set", "derivable")


def test_enlarging_needs_odd_differences_and_same_padding(judge: Judge) -> None:
    def enlarged(height: int) -> object:
        return shapes.concrete("enlarge", ("3x3",), (shapes.tensor_type((4, 2, height, 3)),))

    assert enlarged(1) == shapes.tensor_type((4, 2, 3, 3))
    assert enlarged(2) is None  # an odd border has no centre
    valid = "conv2d[1,1,valid,none](x, y) = conv2d[1,1,valid,none](x, enlarge[3x3](y))"
    loose = stated(f"{valid} where dim(y,-1) = 1", x=4)
    assert judge.match(loose).verdict == "unknown"  # the sizes differ: never typed


def test_groups_are_never_inferred() -> None:
    data = {
        "format": "soapstone-foreign-rules",
        "version": 1,
        "rules": [
            {
                "name": "inferred",
                "inputs": {"x": 4, "y": 4},
                "source": [
                    {
                        "name": "a",
                        "operator": "conv2d",
                        "parameters": [1, "same", "none"],
                        "inputs": ["x", "y"],
                    }
                ],
                "target": [],
                "outputs": [["a", "x"]],
            }
        ],
    }
    with pytest.raises(RuleError, match="4 of them needed"):
        rules_from_json(data, "file")
    image, kernel = shapes.tensor_type((1, 4, 5, 5)), shapes.tensor_type((4, 2, 3, 3))
    assert shapes.concrete("conv2d", (1, 1, "same", "none"), (image, kernel)) is None
    assert shapes.concrete("conv2d", (2, 1, "same", "none"), (image, kernel)) is not None


@pytest.mark.parametrize(
    "text, rank",
    [
        ("transpose(transpose(x)) = x", 2),
        ("matmul(x, identity_matrix) = x", 2),
        ("mul(x, ones) = x", 2),
        ("conv2d[1,1,same,none](x, identity_kernel[3x3]) = x", 4),
    ],
)
def test_rules_that_collapse_to_an_input_are_there(text: str, rank: int, judge: Judge) -> None:
    assert judge.match(stated(text, x=rank)).verdict == "in the set"


def test_commutative_operands_match_both_ways_and_rules_in_both_directions(
    judge: Judge,
    shipped: RuleFile,
) -> None:
    text = "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))"
    swapped = "add(matmul(x, z), matmul(x, y)) = matmul(x, add(y, z))"
    found = [judge.match(stated(one, x=2)) for one in (text, swapped)]
    assert [one.verdict for one in found] == ["in the set"] * 2
    assert found[0].rules == found[1].rules
    assert len(shipped.by_identity[found[0].rules[0]].directions) == 2


@pytest.mark.parametrize(
    "text",
    [
        "conv2d[1,1,same,relu](add(x, y), z)"
        " = add(conv2d[1,1,same,relu](x, z), conv2d[1,1,same,relu](y, z))",
        "concat[-4](concat[-3](x, y), z) = concat[-3](x, concat[-4](y, z))",
        "max_pool2d[3x3,1,same](add(x, y))"
        " = add(max_pool2d[3x3,1,same](x), max_pool2d[3x3,1,same](y))",
        "smul(relu(x), y) = relu(smul(x, y))",
        "transpose(matmul(x, y)) = matmul(transpose(x), transpose(y))",
    ],
)
def test_wrong_equations_are_never_in_the_set(text: str, judge: Judge) -> None:
    ranks = {"y": 0} if text.startswith("smul") else {}
    found = judge.match(stated(text, x=4, **ranks))
    assert found.verdict == "refuted" or "no shapes" in found.reason, found


def test_no_unproved_candidate_is_unexplained(shipped: RuleFile) -> None:
    spoken = {t.symbol for law in language.laws() for side in law.sides for t in side.subterms()}
    for item in shipped.unproved:
        assert item.reason
        if item.reason.startswith("no law mentions"):
            assert not spoken & set(item.reason.removeprefix("no law mentions ").split(", "))
    # Proved, and true of real numbers; in floating point exp(x) absorbs what is added to it.
    absorbed = [item for item in shipped.refuted if "although" in item.reason]
    for item in absorbed:
        assert "exp" in {term.symbol for term in subterms(item.source + item.target)}, item
