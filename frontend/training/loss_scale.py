"""The scale of a loss whose gradients are halves, which would else be too small for these.

It is a state of the step: a step in which a gradient is not finite changes nothing but halves it,
and a number of steps without one doubles it.

Source: Micikevicius et al., Mixed precision training, ICLR 2018, section 3.2; dynamic scaling as
of PyTorch's `GradScaler`.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.errors import hint
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Role
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.entry import TF32

MIXED = "mixed_float16"
SCALE, GOOD = STATES = "loss_scale", "loss_scale.good_steps"
FIRST, GROWS_AFTER = 2.0**15, 2000  # of Keras' LossScaleOptimizer
_LEAST, _MOST = 1.0, 2.0**32


def mixes(precision: object) -> bool:
    """Return whether a precision that `Model.compile` is given is mixed.

    Raises:
        GraphError: it is none that there is.
    """
    if precision not in (SINGLE, MIXED, TF32):
        near = "; there is no type bfloat16 here" if "bfloat16" in str(precision) else ""
        raise GraphError(
            f"compile: precision {precision!r} found, {SINGLE!r}, {MIXED!r} or {TF32!r} needed"
            f"{near or hint(precision, (SINGLE, MIXED, TF32))}"
        )
    return precision == MIXED


def scale(builder: GraphBuilder) -> str:
    """Declare the scale and how many steps in a row were good, and return the scale."""
    builder.input(SCALE, (), role=Role.STATE, initial=Initial("constant", FIRST))
    builder.input(GOOD, (), role=Role.STATE, initial=Initial("constant", 0.0))
    return SCALE


def unscaled(builder: GraphBuilder, grads: Mapping[str, str]) -> dict[str, str]:
    """Return gradients, by parameter, of the loss itself."""
    (inverse,) = builder.apply("reciprocal", SCALE, name=f"{SCALE}.inverse")
    return {
        name: builder.apply("mul", grad, inverse, name=f"{name}.unscaled")[0]
        for name, grad in grads.items()
    }


def adapted(builder: GraphBuilder, loss: str, grads: Mapping[str, str]) -> str:
    """Add the next scale, and return the flag: whether the loss and all gradients are finite."""
    sums = [
        builder.apply(
            "reduce_sum", grad, name=f"{name}.sum", axes=tuple(range(builder.spec(grad).rank))
        )[0]
        for name, grad in grads.items()
    ]
    (every,) = builder.apply("accumulate", loss, *sums, name=f"{SCALE}.sum")
    (flag,) = builder.apply("is_finite", every, name=f"{SCALE}.finite")

    def number(name: str, value: float) -> str:
        return builder.apply("full", name=f"{SCALE}.{name}", shape=(), value=value)[0]

    def chosen(name: str, condition: str, yes: str, no: str) -> str:
        return builder.apply("where", condition, yes, no, name=f"{SCALE}.{name}")[0]

    (good,) = builder.apply("affine", GOOD, name=f"{SCALE}.counted", shift=1.0)
    (grows,) = builder.apply(
        "less", number("patience", GROWS_AFTER - 0.5), good, name=f"{SCALE}.grows"
    )
    (double,) = builder.apply("affine", SCALE, name=f"{SCALE}.double", scale=2.0)
    (half,) = builder.apply("affine", SCALE, name=f"{SCALE}.half", scale=0.5)
    following = chosen("kept", flag, chosen("grown", grows, double, SCALE), half)
    (following,) = builder.apply("clip", following, name=f"{SCALE}.next", low=_LEAST, high=_MOST)
    zero = number("zero", 0.0)
    builder.update(SCALE, following)
    builder.update(GOOD, chosen("row", flag, chosen("again", grows, zero, good), zero))
    return flag
