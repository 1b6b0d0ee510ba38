"""Rule files and foreign rules: written the same every time, read strictly, checked by replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.ir.errors import GraphError
from soapstone.ir.files.storage import sealed
from soapstone.ir.term import parse
from soapstone.rules import file_checks, foreign, workers
from soapstone.rules.algebra.canonical import identity
from soapstone.rules.foreign_verdicts import Judge
from soapstone.rules.generate import chosen_spaces, generate
from soapstone.rules.laws import domain
from soapstone.rules.stages import Stages
from soapstone.search.rules import rulefile
from soapstone.search.rules.proof import Step
from soapstone.search.rules.rule import (
    Rejected,
    Rule,
    RuleError,
    RuleFile,
    StatedSpace,
    laws_digest,
)

RUNNER = CliRunner()


def rule(
    source: str,
    target: str,
    steps: list[list[Step]],
    ranks: dict[str, int],
    guard: tuple[str, ...] = (),
) -> Rule:
    one = tuple(map(parse, source.split("; ")))
    other = tuple(map(parse, target.split("; ")))
    proof = tuple(map(tuple, steps))
    shown = domain.of_proof(one, proof)
    return Rule(
        identity(one, other), one, other, (ranks,), guard, proof, shown, 2, False, ("small",)
    )


def associative() -> Rule:
    steps = [[Step("matmul-associative", True, ())]]
    sides = ("matmul(x, matmul(y, z))", "matmul(matmul(x, y), z)")
    return rule(*sides, steps, {"x": 2, "y": 2, "z": 2})


def grouped() -> Rule:
    source = "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))"
    target = "conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))"
    made = rule(
        *(source, target, [[Step("conv2d-groups", True, ())]], dict.fromkeys("xyzw", 4)),
        ("dim(y,-4)*h = dim(w,-4)*g",),
    )
    return Rule(**{**vars(made), "size": 3})


def squashed() -> Rule:
    steps = [[Step("relu-idempotent", False, ()), Step("relu-idempotent", True, ())]]
    steps[0].append(Step("transpose-inverse", False, (0,)))
    return rule("relu(x)", "relu(transpose(transpose(x)))", steps, {"x": 2})


@pytest.fixture
def rules() -> RuleFile:
    long = squashed()
    third = Rule(**{**vars(long), "size": 3})
    return RuleFile(
        laws=laws_digest(),
        max_operators=3,
        spaces=(
            StatedSpace(
                "small", 3, (("x", "matrix", (2, 3)),), (("matmul", "matrix matrix -> matrix"),)
            ),
        ),
        counts={"small": {"graphs": 10, "candidates": 3}},
        rules=(associative(), grouped(), third),
        unproved=(
            Rejected((parse("sigmoid(x)"),), (parse("tanh(x)"),), "no law mentions it", ("small",)),
        ),
    )


def test_a_file_is_read_as_it_was_written(rules: RuleFile, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    rulefile.save(rules, path)
    again = rulefile.load(path)
    assert again == rules
    assert sealed(rulefile.dumps(again)).encode() == path.read_bytes()
    lines = [line for line in path.read_text().splitlines() if line.startswith('{"id"')]
    assert len(lines) == len(rules.rules)


def test_a_binding_of_a_tensor_is_not_one_of_a_parameter() -> None:
    step = Step("split0-concat", False, (1, 0), {"a": -1, "y": parse("relu(x)"), "p": "same"})
    data = rulefile.step_json(step)
    assert data == ["split0-concat", "<-", [1, 0], {"[a]": -1, "[p]": "same", "y": "relu(x)"}]
    assert rulefile.proof_from_json([[data]], "rule") == ((step,),)


def change(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        if value is None:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return apply


R = ["rules", 0]
WRONG = {
    "format": (change(["format"], "other"), "field 'format'"),
    "version": (change(["version"], 1), "field 'version'"),
    "missing": (change(["laws"], None), "field 'laws' is missing"),
    "unknown": (change(["extra"], 1), "unknown field 'extra'"),
    "counts": (change(["counts", "small", "graphs"], -1), "field 'graphs'"),
    "space": (change(["spaces", 0, "inputs", 0], ["x", "matrix", [0]]), "space 0: field 'inputs'"),
    "rule field": (change([*R, "guard"], None), "field 'guard' is missing"),
    "rule unknown": (change([*R, "cost"], 3), "unknown field 'cost'"),
    "term": (change([*R, "source"], ["matmul(x"]), "field 'source'"),
    "outputs": (change([*R, "target"], ["x", "y"]), "field 'target'"),
    "ranks": (change([*R, "ranks"], [{"x": 2}]), "field 'ranks'"),
    "no ranks": (change([*R, "ranks"], []), "field 'ranks'"),
    "no domain": (change([*R, "domain"], None), "field 'domain' is missing"),
    "size": (change([*R, "size"], 7), "field 'size'"),
    "derivable": (change([*R, "derivable"], 1), "field 'derivable'"),
    "of no space": (change([*R, "spaces"], ["big"]), "field 'spaces': 'big' found"),
    "chains": (change([*R, "proof"], []), "field 'proof'"),
    "step": (change([*R, "proof"], [["matmul-associative"]]), "proof of output 0, step 0"),
    "direction": (change([*R, "proof", 0, 0, 1], "="), "-> or <- needed"),
    "path": (change([*R, "proof", 0, 0, 2], [-1]), "a list of operand positions needed"),
    "other variables": (change([*R, "target"], ["relu(q)"]), "field 'ranks'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_an_error_that_names_rule_and_field(name: str, rules: RuleFile) -> None:
    data = json.loads(rulefile.dumps(rules))
    edit, message = WRONG[name]
    edit(data)
    with pytest.raises(RuleError) as error:
        rulefile.file_from_json(data, "rule file")
    assert message in str(error.value)
    if "rules" in str(edit.__closure__[0].cell_contents if edit.__closure__ else ""):
        assert rules.rules[0].identity in str(error.value)


def test_a_rule_prints_as_mathematics_with_its_guard() -> None:
    text = str(grouped())
    assert "conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))" in text
    assert "where dim(y,-4)*h = dim(w,-4)*g" in text
    assert "x, y, z, w of rank 4" in text


def test_directions_need_the_variables_of_the_right_side() -> None:
    absorbing = rule("add(sub(x, y), y)", "x", [[]], {"x": 2, "y": 2})
    assert absorbing.directions == ((absorbing.source, absorbing.target),)
    assert len(associative().directions) == 2


def test_check_replays_every_proof(rules: RuleFile) -> None:
    report = file_checks.check_file(rules)
    assert report.failed == {} and report.rules == 3 and report.steps == 5
    text = file_checks.derivation(rules.rules[2])
    assert "relu(relu(x))  by reverse of relu-idempotent at root" in text
    assert text.splitlines()[-1].startswith("  = relu(transpose(transpose(x)))")


@pytest.mark.parametrize(
    "edit, message",
    [
        (change([*R, "proof", 0, 0, 0], "add-associative"), "step 0"),
        (change([*R, "proof", 0, 0, 2], [1]), "step 0"),
        (change([*R, "proof", 0], []), "matmul(matmul(x, y), z) needed"),
        (change([*R, "ranks"], [{"x": 1, "y": 1, "z": 1}]), ""),
        (change(["rules", 1, "guard"], []), "step 0"),
        (change(["rules", 2, "proof", 0, 1, 0], "relu-square"), "step 1"),
        (change([*R, "target"], ["matmul(matmul(x, z), y)"]), "identity"),
        (change([*R, "domain"], ["integers", "infinities ->"]), "domain reals, integers, inf"),
        (change([*R, "domain"], ["words"]), "domain reals, words found"),
    ],
)
def test_a_file_edited_by_hand_fails_check_by_rule_and_step(
    edit: Callable[[dict[str, Any]], None], message: str, rules: RuleFile, tmp_path: Path
) -> None:
    data = json.loads(rulefile.dumps(rules))
    edit(data)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    (changed,) = file_checks.check_file(rulefile.load(path)).failed.items()
    assert changed[0] in rules.by_identity
    assert message in changed[1]
    done = RUNNER.invoke(app, ["rules", "check", str(path)])
    assert done.exit_code == 1
    assert f"rule {changed[0]}" in done.stdout


def test_a_rule_with_a_false_guard_is_refuted_by_verify() -> None:
    unguarded = Rule(**{**vars(grouped()), "guard": ()})
    verdict, why = file_checks.verify_rule(unguarded, 1, 5.0)
    assert verdict in ("refuted", "unknown") and why
    assert file_checks.verify_rule(grouped(), 3, 5.0)[0] == "proved"


def test_commands_print_json(rules: RuleFile, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    rulefile.save(rules, path)
    stats = RUNNER.invoke(app, ["rules", "stats", str(path), "--json"])
    assert json.loads(stats.stdout)["by_size"] == {"2": 1, "3": 2}
    checked = RUNNER.invoke(app, ["rules", "check", str(path), "--json"])
    assert json.loads(checked.stdout)["rules"] == 3
    one = rules.rules[1].identity
    shown = RUNNER.invoke(app, ["rules", "show", one[:6], "--file", str(path), "--json"])
    assert json.loads(shown.stdout)["guard"] == ["dim(y,-4)*h = dim(w,-4)*g"]
    missing = RUNNER.invoke(app, ["rules", "show", "zz", "--file", str(path)])
    assert missing.exit_code == 1 and "0 rules found, one needed" in missing.stderr


def test_finished_stages_are_kept_under_their_key(tmp_path: Path) -> None:
    runs: list[str] = []

    def stage(stages: Stages, name: str) -> list[int]:
        def compute() -> list[int]:
            runs.append(name)
            return [1, 2]

        return stages.run(name, compute, list, list)

    folder = tmp_path / "rules.json.partial"
    assert stage(Stages(folder, "a"), "one") == [1, 2]
    again = Stages(folder, "a")
    assert stage(again, "one") == stage(again, "two") == [1, 2]
    assert runs == ["one", "two"] and again.resumed == ["one"]
    stage(Stages(folder, "b"), "one")
    assert runs == ["one", "two", "one"]
    other = tmp_path / "other.partial"
    other.mkdir()
    (other / "mine.txt").write_text("kept")
    with pytest.raises(GraphError, match="other files found"):
        Stages(other, "a")
    assert (other / "mine.txt").read_text() == "kept"


@pytest.mark.long
def test_generation_resumes_and_writes_the_same_bytes(tmp_path: Path) -> None:
    spaces = chosen_spaces(["matrices"], ["matmul", "concat", "split0"], 3)
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    _, report = generate(spaces, whole)
    assert report.rules == len(rulefile.load(whole).rules) > 5
    assert report.graphs > report.candidates >= report.after_renaming
    assert report.after_renaming >= report.after_common_subgraph > 0

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "prove":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(spaces, cut, progress=interrupt)
    assert not cut.exists() and (tmp_path / "cut.json.partial").is_dir()
    _, resumed = generate(spaces, cut)
    assert "candidates-matrices" in resumed.resumed
    assert cut.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "cut.json.partial").exists()
    assert file_checks.check_file(rulefile.load(cut)).failed == {}


@pytest.mark.parametrize("call", [file_checks.check_file, file_checks.verify])
def test_an_interrupted_check_goes_on_where_it_was(
    call: Callable[..., Any], rules: RuleFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path))
    monkeypatch.setattr(workers, "_TOLD", 1)
    broken = replace(associative(), proof=((),))
    file = replace(rules, rules=(broken, *rules.rules[1:]))

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if done == ended:
            raise KeyboardInterrupt

    ended = 0
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        call(file, progress=interrupt)
    ended = 2
    with pytest.raises(KeyboardInterrupt, match="; 2 results are kept, the same command goes on"):
        call(file, progress=interrupt)
    counts: list[int] = []
    resumed = call(file, progress=lambda stage, done, total: counts.append(done))
    assert counts == list(range(2, len(file.rules)))
    again = call(file, progress=lambda stage, done, total: counts.append(done))
    assert counts[-len(file.rules) :] == list(range(len(file.rules)))
    assert replace(resumed, seconds=again.seconds) == again
    assert broken.identity in str(resumed)


def test_unknown_spaces_and_operators_are_errors() -> None:
    with pytest.raises(RuleError, match="space 'small' found"):
        chosen_spaces(["small"])
    with pytest.raises(GraphError, match="'matmull'"):
        chosen_spaces(None, ["matmull"])


FOREIGN: dict[str, Any] = {
    "format": "soapstone-foreign-rules",
    "version": 1,
    "rules": [
        {
            "name": "merged products",
            "inputs": {"x": 2, "left weight": 2, "y": 2},
            "source": [
                {"name": "a", "operator": "matmul", "parameters": [], "inputs": ["x", "y"]},
                {
                    "name": "b",
                    "operator": "matmul",
                    "parameters": [],
                    "inputs": ["x", "left weight"],
                },
            ],
            "target": [
                {
                    "name": "c",
                    "operator": "concat",
                    "parameters": [-1],
                    "inputs": ["y", "left weight"],
                },
                {"name": "d", "operator": "matmul", "parameters": [], "inputs": ["x", "c"]},
                {"name": "e", "operator": "split", "parameters": [-1], "inputs": ["d"]},
            ],
            "outputs": [["b", "e.1"], ["a", "e.0"]],
        }
    ],
}


def test_foreign_rules_are_read_as_terms_and_written_back() -> None:
    (read,) = foreign.rules_from_json(FOREIGN, "file")
    assert read.ranks.keys() >= {"x", "y"} and len(read.ranks) == 3
    assert str(read.target[1].symbol) == "split0"
    again = {**FOREIGN, "rules": [foreign.to_json(read)]}
    assert foreign.rules_from_json(again, "file") == (read,)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["rules", 0, "inputs", "x"], -1, "rule 'merged products': inputs: field 'x'"),
        (["rules", 0, "source", 0, "operator"], "gemm", "source operator 0: field 'operator'"),
        (["rules", 0, "source", 0, "inputs"], ["x"], "field 'inputs'"),
        (["rules", 0, "source", 1, "inputs"], ["x", "q"], "field 'inputs': \"q\" found"),
        (["rules", 0, "source", 1, "name"], "a", "a name that no other tensor has"),
        (["rules", 0, "target", 0, "parameters"], [], "field 'parameters'"),
        (["rules", 0, "target", 0, "parameters"], ["1("], "field 'parameters'"),
        (["rules", 0, "outputs"], [["a", "e"]], "field 'outputs'"),
        (["rules", 0, "outputs"], [], "at least one pair"),
        (["rules", 0, "extra"], 1, "unknown field 'extra'"),
    ],
)
def test_a_wrong_foreign_rule_names_operator_and_field(
    path: list[Any], value: Any, message: str
) -> None:
    data = json.loads(json.dumps(FOREIGN))
    change(path, value)(data)
    with pytest.raises(RuleError) as error:
        foreign.rules_from_json(data, "file")
    assert message in str(error.value)


def test_an_instance_of_a_rule_is_in_the_set(rules: RuleFile) -> None:
    longer = foreign.ForeignRule(
        *("nested", (parse("matmul(relu(u), matmul(v, transpose(u)))"),)),
        (parse("matmul(matmul(relu(u), v), transpose(u))"),),
        {"u": 2, "v": 2},
    )
    found = Judge(rules).match(longer)
    assert found.verdict == "in the set" and found.rules == (rules.rules[0].identity,)
    other = foreign.ForeignRule("law", (parse("relu(relu(x))"),), (parse("relu(x)"),), {"x": 3})
    assert Judge(rules).match(other).verdict == "derivable"
    wrong = foreign.ForeignRule(
        "wrong", (parse("matmul(x, y)"),), (parse("matmul(y, x)"),), {"x": 2, "y": 2}
    )
    assert Judge(rules).match(wrong).verdict == "refuted"
