"""Least squares that take one measurement at a time, with weights of at least 0.

Features of a graph may be multiples of each other: lines of rows are of neighbours where a row
fills whole lines, and with shuffled ids no neighbours are consecutive. Then many weights predict
the same, some of them huge and of both signs, which predict anything of another graph. Weights of
at least 0 cannot cancel, and a small ridge settles what is left open. They also let costs only
grow with each vertex, so that cuts can be found by binary search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soapstone.ir.tensor import Array

_RIDGE = 1e-6  # of the squares of a feature, added to them
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Regression:
    """Sums over all measurements so far, from which weights follow.

    A measurement counts by how far it is from its prediction as a share of it, so that large graphs
    do not outweigh small ones.

    Attributes:
        squares: (features, features), of features over what was measured.
        products: (features), of the same with 1.
        count: how many measurements there were.
    """

    squares: Array
    products: Array
    count: int = 0

    @classmethod
    def of(cls, features: int) -> Regression:
        """Return one that has not seen anything."""
        return cls(np.zeros((features, features)), np.zeros(features))

    def seen(self, features: Array, ns: float) -> Regression:
        """Return it with one more measurement; one of no time says nothing.

        features: (features), of what was run. ns: what it took, nanoseconds.
        """
        if not ns > 0:
            return self
        shares = features / ns
        squares = self.squares + np.outer(shares, shares)
        return Regression(squares, self.products + shares, self.count + 1)

    @property
    def weights(self) -> Array:
        """Nanoseconds for one of each feature, (features), 0 or more."""
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
