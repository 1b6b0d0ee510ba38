"""Element-wise layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Initial

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class ElementwiseLayers(LayerBase):
    """Arithmetic and activations, element by element."""

    def add(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x + y, broadcasting as NumPy does."""
        return self.apply("add", x, y, name=name)

    def sub(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x - y, broadcasting as NumPy does."""
        return self.apply("sub", x, y, name=name)

    def mul(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x * y, broadcasting as NumPy does."""
        return self.apply("mul", x, y, name=name)

    def div(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x / y, broadcasting as NumPy does."""
        return self.apply("div", x, y, name=name)

    def affine(
        self, x: Tensor, scale: float = 1.0, shift: float = 0.0, *, name: str | None = None
    ) -> Tensor:
        """Return x * scale + shift for two numbers."""
        return self.apply("affine", x, name=name, scale=scale, shift=shift)

    def power(self, x: Tensor, exponent: float, *, name: str | None = None) -> Tensor:
        """Return x to a constant power."""
        return self.apply("power", x, name=name, exponent=exponent)

    def relu(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return max(x, 0)."""
        return self.apply("relu", x, name=name)

    def leaky_relu(self, x: Tensor, alpha: float = 0.01, *, name: str | None = None) -> Tensor:
        """Return x where positive, alpha x elsewhere."""
        return self.apply("leaky_relu", x, name=name, alpha=alpha)

    def gelu(self, x: Tensor, approximate: str = "none", *, name: str | None = None) -> Tensor:
        """Return x times the normal distribution function of x."""
        return self.apply("gelu", x, name=name, approximate=approximate)

    def sigmoid(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return 1 / (1 + exp(-x))."""
        return self.apply("sigmoid", x, name=name)

    def tanh(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the hyperbolic tangent."""
        return self.apply("tanh", x, name=name)

    def exp(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return e to the power x."""
        return self.apply("exp", x, name=name)

    def log(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the natural logarithm."""
        return self.apply("log", x, name=name)

    def sqrt(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the square root."""
        return self.apply("sqrt", x, name=name)

    def neg(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return -x."""
        return self.apply("neg", x, name=name)

    def silu(self, x: Tensor, alpha: float = 1.0, *, name: str | None = None) -> Tensor:
        """Return x times the logistic function of alpha x."""
        return self.apply("silu", x, name=name, alpha=alpha)

    def elu(self, x: Tensor, alpha: float = 1.0, *, name: str | None = None) -> Tensor:
        """Return x where positive, alpha (exp(x) - 1) elsewhere."""
        return self.apply("elu", x, name=name, alpha=alpha)

    def celu(self, x: Tensor, alpha: float = 1.0, *, name: str | None = None) -> Tensor:
        """Return x where positive, alpha (exp(x / alpha) - 1) elsewhere."""
        return self.apply("celu", x, name=name, alpha=alpha)

    def hard_sigmoid(
        self, x: Tensor, alpha: float = 1 / 6, beta: float = 0.5, *, name: str | None = None
    ) -> Tensor:
        """Return alpha x + beta, cut to 0..1."""
        return self.apply("hard_sigmoid", x, name=name, alpha=alpha, beta=beta)

    def clip(
        self,
        x: Tensor,
        low: float | None = None,
        high: float | None = None,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x cut to low..high; None is no bound."""
        return self.apply("clip", x, name=name, low=low, high=high)

    def prelu(self, x: Tensor, initial: float = 0.25, *, name: str | None = None) -> Tensor:
        """Return x where positive, elsewhere x times a trained slope by channel. x: (n, c, …)."""
        node = self._name("prelu", name)
        if len(x.shape) < 2:
            raise ShapeError(f"prelu {node!r}: x has shape {x.shape}; n c … needed")
        shape = (x.shape[1], *(1,) * (len(x.shape) - 2))
        return self._layer("prelu", x, {"slope": (shape, Initial("constant", initial))}, node)

    def erf(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the error function."""
        return self.apply("erf", x, name=name)

    def hard_swish(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x times its hard sigmoid."""
        return self.apply("hard_swish", x, name=name)

    def softplus(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return log(1 + exp(x))."""
        return self.apply("softplus", x, name=name)

    def softsign(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x / (1 + abs(x))."""
        return self.apply("softsign", x, name=name)

    def mish(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x tanh(log(1 + exp(x)))."""
        return self.apply("mish", x, name=name)

    def selu(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x scaled where positive, a scaled exponential less 1 elsewhere."""
        return self.apply("selu", x, name=name)

    def abs(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the magnitude."""
        return self.apply("abs", x, name=name)

    def sign(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return -1, 0 or 1."""
        return self.apply("sign", x, name=name)

    def floor(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the integer at or below."""
        return self.apply("floor", x, name=name)

    def ceil(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the integer at or above."""
        return self.apply("ceil", x, name=name)

    def round(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the nearest integer, halves to even."""
        return self.apply("round", x, name=name)

    def reciprocal(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return 1 / x."""
        return self.apply("reciprocal", x, name=name)

    def sin(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the sine."""
        return self.apply("sin", x, name=name)

    def cos(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the cosine."""
        return self.apply("cos", x, name=name)
