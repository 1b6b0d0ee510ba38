"""Incremental least squares with non-negative weights.

On one graph, features may be collinear: cache lines of rows are a multiple of neighbours where each
row fills whole lines, and blocks equal neighbours where ids are shuffled. Unconstrained weights are
then not unique, and large ones of opposite signs that fit this graph predict nonsense for another.
Non-negative weights cannot cancel, and a small ridge makes them unique. They also make prefix sums
of costs monotone, so that cuts can be found by binary search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soapstone.ir.tensor import Array

_RIDGE = 1e-6  # added to the diagonal of the normal equations, scaled to have ones there
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Regression:
    """The normal equations of all measurements so far.

    The loss of a measurement is its squared relative error, (w . x / ns - 1)^2, so that large
    graphs do not outweigh small ones. With z = x / ns, the weights solve `squares` w = `products`.

    Attributes:
        squares: (features, features), the sum of z z'.
        products: (features), the sum of z.
        count: the number of measurements.
    """

    squares: Array
    products: Array
    count: int = 0

    @classmethod
    def of(cls, features: int) -> Regression:
        """Return the regression on so many features without measurements."""
        return cls(np.zeros((features, features)), np.zeros(features))

    def seen(self, features: Array, ns: float) -> Regression:
        """Return the regression with one more measurement, unless its time is not positive.

        features: (features), of what was run. ns: what it took, nanoseconds.
        """
        if not ns > 0:
            return self
        shares = features / ns
        squares = self.squares + np.outer(shares, shares)
        return Regression(squares, self.products + shares, self.count + 1)

    @property
    def weights(self) -> Array:
        """The fitted coefficients, (features), 0 or more: nanoseconds for one of a feature."""
        scale = np.sqrt(np.diag(self.squares))
        scale = np.where(scale > 0, scale, 1.0)
        scaled = self.squares / np.outer(scale, scale) + _RIDGE * np.eye(len(scale))
        return nonnegative(scaled, self.products / scale) / scale


def nonnegative(squares: Array, products: Array) -> Array:
    """Return the w of at least 0 for which w' squares w / 2 - products' w is least.

    Args:
        squares: (n, n), symmetric and positive definite. products: (n).

    Source: Lawson and Hanson, Solving least squares problems, 1974, chapter 23.
    """
    count = len(products)
    free, w = np.zeros(count, bool), np.zeros(count)
    for _ in range(3 * count * count + 3):
        slope = np.where(free, -np.inf, products - squares @ w)
        if slope.max(initial=-np.inf) <= _TOLERANCE:
            break
        free[int(slope.argmax())] = True
        while True:
            tried = np.zeros(count)
            tried[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
            out = free & (tried <= 0)
            if not out.any():
                break
            steps = w[out] / (w[out] - tried[out])
            w = w + steps.min(initial=1.0) * (tried - w)
            free &= w > _TOLERANCE
            w[~free] = 0.0
        w = tried
    return w
