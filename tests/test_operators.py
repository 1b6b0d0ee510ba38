"""Every declared operator, on every one of its cases, against what its declaration promises."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
from operator_checks import (
    box,
    localized,
    mutations,
    registry_cases,
    run_split,
    sampled_gradients,
    subject,
    tiles,
    uneven_cuts,
)
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.spec import Case, OpSpec, operators
from soapstone.ir.tensor import spec_of

CASES = list(registry_cases())
every_case = pytest.mark.parametrize(
    ("spec", "case"), [item[1:] for item in CASES], ids=[item[0] for item in CASES]
)
SPLIT = {"rtol": 1e-9, "atol": 1e-11}  # float64: only the order of additions differs
NATIVE = {"rtol": 1e-4, "atol": 1e-5}  # float32 kernels


def test_every_operator_has_cases() -> None:
    assert not [spec.name for spec in operators() if not spec.cases]


@every_case
def test_outputs_have_the_declared_shapes_and_types(spec: OpSpec, case: Case) -> None:
    for real in ("float32", "float64"):
        item = subject(spec, case, real)
        outputs = item.run()
        assert len(outputs) == len(item.signature.outputs)
        assert tuple(spec_of(output) for output in outputs) == item.signature.output_specs


@every_case
def test_every_split_equals_the_whole(spec: OpSpec, case: Case) -> None:
    item = subject(spec, case)
    whole = item.run()
    plans = [(degrees, None) for degrees in item.signature.configurations(4)]
    for degrees, cuts in [*plans, *uneven_cuts(item.signature)]:
        made = run_split(spec, item.attributes, item.arrays, degrees, cuts)
        for output, expected in zip(made, whole, strict=True):
            np.testing.assert_allclose(output, expected, **SPLIT, err_msg=f"{degrees} {cuts}")


@every_case
def test_gradients_equal_finite_differences(spec: OpSpec, case: Case) -> None:
    if spec.gradient is None:
        return
    item = subject(spec, case)
    generator = np.random.default_rng(zlib.crc32(spec.name.encode()))
    for output, made in enumerate(item.signature.output_specs):
        if not made.is_float:
            continue
        try:
            pairs = list(sampled_gradients(item, output, generator))
        except GraphError as error:
            # An auxiliary output (a saved statistic) has no gradient of its own, and says so.
            assert output > 0, error
            assert "output" in str(error)
            continue
        for position, exact, estimate in pairs:
            np.testing.assert_allclose(
                exact, estimate, rtol=2e-5, atol=2e-7, err_msg=f"output {output}, input {position}"
            )


@every_case
def test_misfits_are_shape_errors_that_name_the_dim(spec: OpSpec, case: Case) -> None:
    item = subject(spec, case)
    specs = [spec_of(array) for array in item.arrays]
    for kind, changed in mutations(specs):
        try:
            signature = spec.bind(changed, item.attributes)
        except ShapeError as error:
            named = re.findall(r"\bdim (\w+)", str(error))
            told = bool(named) or bool(re.search(r"\brank\b|\belements\b|\bshape\b", str(error)))
            assert told, f"{kind}: {error}"
            continue
        assert all(output.size >= 0 for output in signature.output_specs)
    required = [name for name in spec.inputs if name[-1] != "?"]
    if required:
        with pytest.raises(ShapeError, match="inputs found"):
            spec.bind(specs[: len(required) - 1], item.attributes)


@every_case
def test_kernels_equal_the_reference(spec: OpSpec, case: Case) -> None:
    native = pytest.importorskip("soapstone.kernels.cpu.native")
    from soapstone.kernels.entry import Call
    from soapstone.kernels.registry import variants

    item = subject(spec, case, "float32")
    plans = [degrees for degrees in item.signature.configurations(2, lowers=False)]
    for variant in variants(spec.name):
        for degrees in plans:
            for tile in tiles(item.signature, degrees):
                attributes = localized(spec, item.attributes, tile)
                inputs = tuple(a[box(*b)] for a, b in zip(item.arrays, tile.inputs))
                expected = spec.run(attributes, *inputs)
                outputs = tuple(np.full(e.shape, 77, e.dtype) for e in expected)
                entry = variant.bind(Call(spec.name, attributes, inputs, outputs))
                if entry is None:
                    continue
                where = f"{variant.name} {degrees} {dict(tile.intervals)}"
                assert native.run(entry) == 0, where
                for output, value in zip(outputs, expected):
                    np.testing.assert_allclose(output, value, **NATIVE, err_msg=where)
