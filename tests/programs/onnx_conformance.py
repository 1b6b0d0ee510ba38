"""ONNX's own backend tests, run by the importer: what passes, and why the rest does not.

`python tests/programs/onnx_conformance.py` prints the table; with `--write` it writes
the expected outcomes, `tests/programs/onnx_conformance.json`, and the table in `docs/onnx.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from soapstone.dtypes import WIDE, kind_of, name_of
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.onnx import OnnxError, UnboundError, from_onnx
from soapstone.ir.interpret import interpret

KINDS = ("node", "pytorch-converted", "pytorch-operator", "simple")
EXPECTED = Path(__file__).with_name("onnx_conformance.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "onnx.md"
PASSES, BOUND = "passes", "passes, with inputs that shapes depend on fixed at import"
PIECES = "passes, by a session, in pieces"
WRONG = (
    "other numbers than ONNX's (of the inverse DFT: rounding noise, by less than 2e-7; of aligned"
    " corners by scales: those of ONNX Runtime)"
)

# What draws random numbers, of which ONNX's tests have others; types and shapes are compared.
DRAWING = {"Bernoulli", "RandomUniformLike"}
HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # how far results of each may be off


@dataclass(frozen=True)
class Case:
    """One backend test: a model, and inputs with the outputs they should give."""

    kind: str
    name: str
    model: onnx.ModelProto
    data: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float


@cache
def cases(kind: str) -> tuple[Case, ...]:
    """Return the backend tests of a kind."""
    return tuple(_cases(kind))


def _cases(kind: str) -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, while ONNX makes the node tests
        found = load_model_tests(kind=kind)
    for test in found:
        if test.model is not None:
            data = tuple(
                ([_array(a) for a in inputs], [_array(a) for a in outputs])
                for inputs, outputs in test.data_sets
            )
            yield Case(kind, test.name, test.model, data, test.rtol, test.atol)
        else:
            folder = Path(test.model_dir)
            model = onnx.load(folder / "model.onnx")
            data = tuple(
                (_stored(part, "input", model), _stored(part, "output", model))
                for part in sorted(folder.glob("test_data_set_*"))
            )
            yield Case(kind, test.name, model, data, test.rtol, test.atol)


def _array(value: Any) -> Any:
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    if not isinstance(value, onnx.TensorProto):
        return value
    try:
        return numpy_helper.to_array(value)
    except (TypeError, ValueError, AttributeError):  # of a type that NumPy does not have
        return None


def _stored(folder: Path, what: str, model: onnx.ModelProto) -> list[Any]:
    arrays = []
    for number in range(len(list(folder.glob(f"{what}_*.pb")))):
        kind = getattr(model.graph, what)[number].type.WhichOneof("value")
        tensor = onnx.TensorProto()
        if kind == "tensor_type":
            tensor.ParseFromString((folder / f"{what}_{number}.pb").read_bytes())
        arrays.append(_array(tensor) if kind == "tensor_type" else None)
    return arrays


def outcome(case: Case, wrong: list[str] | None = None) -> str:
    """Return what becomes of a test: that it passes, or why not.

    wrong: if given, the runtime runs the graph as well, as `soapstone predict` does, and the test's
    name is added where it does not give the numbers that the references give.
    """
    try:
        return _run(case, wrong)
    except UnboundError:
        return "shapes that depend on the contents of large or computed inputs"
    except OnnxError as error:
        return _reason(str(error))
    except AssertionError:
        return WRONG


def _run(case: Case, wrong: list[str] | None) -> str:
    model = from_onnx(case.model.SerializeToString())
    result = PASSES
    for inputs, outputs in case.data:
        names = [value.name for value in case.model.graph.input]
        declared = {value.name for value in model.inputs}
        plain = {value.name for value in model.inputs if not value.holds}
        feeds = {
            n: np.asarray(a) if n in plain else a for n, a in zip(names, inputs) if n in declared
        }
        try:
            graph, contents = model.graph_for(feeds)
        except UnboundError:
            with InferenceSession(model, threads=1) as session:
                _judge(session.run(feeds), outputs, case)
            result = PIECES
            continue
        if contents:
            result = BOUND
        weights = model.weights
        values = {n: feeds[n] if n in feeds else weights[n] for n in graph.roles}
        with np.errstate(all="ignore"):
            _judge(interpret(graph, values), outputs, case)
            if wrong is not None:
                try:
                    with InferenceSession(graph, weights, threads=1) as session:
                        _judge(session.run(feeds), outputs, case)
                except (AssertionError, ValueError, RuntimeError):  # the runtime's own errors too
                    wrong.append(case.name)
    return result


def _judge(results: Mapping[str, Any], outputs: list[Any], case: Case) -> None:
    for value, expected in zip(case.model.graph.output, outputs):
        found = results[value.name]
        if isinstance(found, list) or expected is None:
            assert len(found or ()) == len(expected or ()), f"{found}, {expected}"
            for one, other in zip(found or (), expected or ()):
                _compare(one, np.asarray(other), case)
        else:
            _compare(found, np.asarray(expected), case)


def _compare(found: Any, expected: Any, case: Case) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise AssertionError(f"{found.dtype}{found.shape}, {expected.dtype}{expected.shape}")
    if DRAWING.intersection(node.op_type for node in case.model.graph.node):
        return
    if kind_of(expected.dtype) == "f":
        dtype = name_of(expected.dtype)
        if dtype.startswith(("float8", "float4")):
            found, expected = found.astype(np.float32), expected.astype(np.float32)
            np.testing.assert_array_equal(found, expected)
            return
        # ONNX's halves are rounded at every step inside an operator, ours once.
        tolerance = HALVES.get(dtype, 0.0)
        np.testing.assert_allclose(
            *(array.astype(WIDE.get(dtype, dtype)) for array in (found, expected)),
            rtol=max(case.rtol, tolerance),
            atol=max(case.atol, tolerance),
        )
    else:
        np.testing.assert_array_equal(found, expected)


def _reason(text: str) -> str:
    """Return the reason in an error, without the names of the test's nodes and values."""
    found = re.search(r"type (\w+) is not supported", text)
    if found:
        return f"type {found[1]}"
    found = re.search(r"(\w+) found, a tensor needed", text)
    if found:
        return f"an input or output that is no tensor: {found[1]}"
    found = re.search(r"\((\w+)\): this operator is not supported", text)
    if found:
        return f"operator {found[1]}"
    found = re.search(r"node .*\((\w+)\): (.*)", text)
    return f"{found[1]}: {found[2]}" if found else text


def outcomes(kind: str, wrong: list[str] | None = None) -> dict[str, str]:
    """Return what becomes of every test of a kind; wrong: as of `outcome`."""
    return {case.name: outcome(case, wrong) for case in cases(kind)}


def expected() -> dict[str, dict[str, str]]:
    """Return the outcomes on record of the tests that do not simply pass, by kind."""
    data: dict[str, dict[str, str]] = json.loads(EXPECTED.read_text())
    return data


def failures(found: Mapping[str, str]) -> dict[str, str]:
    """Return the tests that do not pass, or that pass only with inputs fixed."""
    return {name: reason for name, reason in sorted(found.items()) if reason != PASSES}


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the tables of `docs/onnx.md`."""
    lines = [
        "| tests | all | pass | of these with contents fixed | in pieces | fail |",
        "|---|---|---|---|---|---|",
    ]
    for kind, results in found.items():
        counts = Counter(results.values())
        good = counts[PASSES] + counts[BOUND] + counts[PIECES]
        lines.append(
            f"| `{kind}` | {len(results)} | {good} | {counts[BOUND]} | {counts[PIECES]}"
            f" | {len(results) - good} |"
        )
    reasons: dict[str, list[str]] = {}
    for results in found.values():
        for name, reason in results.items():
            if reason not in (PASSES, BOUND, PIECES):
                reasons.setdefault(reason, []).append(name)
    lines += ["", "| tests | reason | example |", "|---|---|---|"]
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {len(names)} | {reason.replace('|', ' ')} | `{sorted(names)[0]}` |")
    return "\n".join(lines)


_BEGIN, _END = "<!-- conformance: begin -->", "<!-- conformance: end -->"


def main() -> None:
    """Print the table, or write it and the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the outcomes and the document")
    arguments = parser.parse_args()
    found = {kind: outcomes(kind) for kind in KINDS}
    made = table(found)
    print(made)
    if arguments.write:
        record = {kind: failures(results) for kind, results in found.items()}
        EXPECTED.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
        after = rest.partition(_END)[2]
        DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{made}\n\n{_END}{after}")


if __name__ == "__main__":
    main()
