"""Programs of the element-wise machine made shorter: activations spelt out, known numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.elementwise_calls import fused
from helpers.kernel_calls import random, reference

from soapstone.kernels.cpu.elementwise.machine import elementwise, fused_elementwise
from soapstone.kernels.cpu.elementwise.programs import compile_program
from soapstone.kernels.entry import Call
from soapstone.native import memory

Array = np.ndarray[Any, Any]


Program = list[tuple[str, tuple[int, ...], dict[str, Any]]]
# A program, the numbers that it is given, the instruction, and the operator that this is.
SPELLINGS: dict[str, tuple[Program, list[float], str, tuple[str, dict[str, Any]]]] = {
    "gelu": (
        [
            ("div", (0, 1), {}),
            ("erf", (4,), {}),
            ("add", (5, 2), {}),
            ("mul", (0, 6), {}),
            ("mul", (7, 3), {}),
        ],
        [math.sqrt(2), 1.0, 0.5],
        "gelu",
        ("gelu", {"approximate": "none"}),
    ),
    "gelu, halved first": (
        [
            ("mul", (0, 1), {}),
            ("erf", (4,), {}),
            ("add", (2, 5), {}),
            ("mul", (3, 0), {}),
            ("mul", (6, 7), {}),
        ],
        [math.sqrt(0.5), 1.0, 0.5],
        "gelu",
        ("gelu", {"approximate": "none"}),
    ),
    "gelu by the tangent": (
        [
            ("power", (0,), {"exponent": 3.0}),
            ("mul", (4, 1), {}),
            ("add", (0, 5), {}),
            ("mul", (6, 2), {}),
            ("tanh", (7,), {}),
            ("affine", (8,), {"scale": 1.0, "shift": 1.0}),
            ("mul", (0, 3), {}),
            ("mul", (10, 9), {}),
        ],
        [0.044715, math.sqrt(2 / math.pi), 0.5],
        "gelu_tanh",
        ("gelu", {"approximate": "tanh"}),
    ),
    "swish": (
        [("mul", (0, 1), {}), ("sigmoid", (4,), {}), ("mul", (5, 0), {})],
        [1.702, 0.0, 0.0],
        "silu",
        ("silu", {"alpha": 1.702}),
    ),
    "hard swish": (
        [
            ("add", (0, 1), {}),
            ("clip", (4,), {"low": 0.0, "high": 6.0}),
            ("mul", (0, 5), {}),
            ("div", (6, 2), {}),
        ],
        [3.0, 6.0, 0.0],
        "hard_swish",
        ("hard_swish", {}),
    ),
    "mish": (
        [("softplus", (0,), {}), ("tanh", (4,), {}), ("mul", (0, 5), {})],
        [0.0, 0.0, 0.0],
        "mish",
        ("mish", {}),
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_activation_spelt_out_is_one_instruction(name: str) -> None:
    program, numbers, instruction, (operator, given) = SPELLINGS[name]
    x = 3 * random(5000)
    scalars = [np.array(number, np.float32) for number in numbers]
    known = {i: float(scalar) for i, scalar in enumerate(scalars, 1)}
    made = compile_program(4, program, (3 + len(program),), None, known)
    assert made is not None
    assert [step.name for step in made.steps] == [instruction]
    (want,) = reference(operator, [x], given)
    for constants in (frozenset({1, 2, 3}), frozenset[int]()):
        y = np.zeros_like(x)
        steps = tuple((o, i, tuple(a.items())) for o, i, a in program)
        attributes = {"program": steps, "results": (3 + len(program),)}
        call = Call("fused_elementwise", attributes, (x, *scalars), (y,), 1, constants)
        entry = fused_elementwise(call)
        assert entry is not None
        assert memory.run(entry) == 0
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


def test_products_and_sums_are_merged_where_nothing_else_reads_them() -> None:
    a, b, c = random(3000), random(3000, seed=1), random(3000, seed=2)
    chain: Program = [("mul", (0, 1), {}), ("add", (2, 3), {}), ("relu", (4,), {})]
    made = compile_program(3, chain, (5,))
    assert made is not None
    assert [step.name for step in made.steps] == ["mul_add_relu"]
    y = np.zeros_like(a)
    fused([a, b, c], [y], chain, (5,))
    np.testing.assert_allclose(y, np.maximum(a * b + c, 0), rtol=1e-6, atol=1e-6)
    product, total = np.zeros_like(a), np.zeros_like(a)
    fused([a, b, c], [product, total], chain, (3, 4))  # the product is a result itself
    np.testing.assert_array_equal(product, a * b)
    np.testing.assert_allclose(total, a * b + c, rtol=1e-6, atol=1e-6)


def test_a_known_number_may_stand_on_either_side() -> None:
    x, two = 1 + np.abs(random(100)), np.array([2.0], np.float32)
    for operator, function in (
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("maximum", np.maximum),
        ("minimum", np.minimum),
        ("pow", np.power),
        ("prelu", lambda a, b: a + 0 * b if a is x else np.full_like(x, 2)),
    ):
        for inputs, constant in (((x, two), 1), ((two, x), 0)):
            y = np.zeros_like(x)
            entry = elementwise(Call(operator, {}, inputs, (y,), 1, frozenset({constant})))
            assert entry is not None
            assert memory.run(entry) == 0
            np.testing.assert_allclose(y, function(*inputs), rtol=1e-6)
