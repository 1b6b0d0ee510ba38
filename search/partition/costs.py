"""What ranges of vertices cost in each layer of a model: learned, saved, and used on other graphs.

A layer's time on some vertices is linear in their features (equations 4.4 to 4.6 of Jia 2020), and
has weights of its own, so that a model learns from each layer of each part in each iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soapstone.ir.files import json_fields
from soapstone.ir.tensor import Array
from soapstone.search.partition.cuts import PartitionError
from soapstone.search.partition.features import FEATURES, Features
from soapstone.search.partition.regression import Regression

FORMAT, VERSION = "soapstone-partition-costs", 1


@dataclass(frozen=True)
class Costs:
    """The learned cost model of a graph network: for each layer a regression of time on features.

    Source: equations 4.4 to 4.6 of Jia (2020).
    """

    layers: tuple[Regression, ...]

    @classmethod
    def of(cls, layers: int) -> Costs:
        """Return the cost model of so many layers before any measurement, which predicts 0."""
        return cls((Regression.of(len(FEATURES)),) * layers)

    @property
    def count(self) -> int:
        """The number of measurements, summed over layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def weights(self) -> Array:
        """The coefficients: (layers, features), in nanoseconds for one unit of the feature."""
        return np.stack([layer.weights for layer in self.layers])

    def check(self, layers: int) -> None:
        """Refuse a model of another number of layers.

        Raises:
            PartitionError: names both numbers.
        """
        if len(self.layers) != layers:
            raise PartitionError(
                f"partition costs: those of {len(self.layers)} layers found, of {layers} needed"
            )

    def seen(self, features: Array, ns: Array) -> Costs:
        """Return the cost model fitted to these measurements too.

        features: (layers, parts, features). ns: (layers, parts), the time of each layer on each
        part; those that are not positive are left out.
        """
        layers = list(self.layers)
        for number, layer in enumerate(layers):
            for each, spent in zip(features[number], ns[number]):
                layer = layer.seen(each, float(spent))
            layers[number] = layer
        return Costs(tuple(layers))

    def ns(self, features: Array) -> Array:
        """Return what layers are predicted to take on parts: (layers, parts) nanoseconds.

        features: (layers, parts, features).
        """
        found: Array = np.matmul(features, self.weights[:, :, np.newaxis])[..., 0]
        return found

    def own(self, features: Array) -> Array:
        """Return the constant part of `ns`, which no vertex has a share of: (layers, parts).

        It is the cost of being a part, and of being a processor's first one (`FEATURES`).
        """
        found: Array = np.matmul(features[:, :, -2:], self.weights[:, -2:, np.newaxis])[..., 0]
        return found

    def sums(self, features: Features) -> Array:
        """Return prefix sums of predicted nanoseconds over vertices: (layers, vertices + 1).

        They never decrease, as `cuts.least_largest` needs.
        """
        each = [sums @ weights for sums, weights in zip(features.sums, self.weights)]
        return np.maximum.accumulate(each, axis=1)  # rounding may let them fall

    # Files

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON; a file that exists is replaced whole or not at all."""
        layers = [
            {
                "count": layer.count,
                "squares": layer.squares.tolist(),
                "products": layer.products.tolist(),
            }
            for layer in self.layers
        ]
        data = {"format": FORMAT, "version": VERSION, "features": FEATURES, "layers": layers}
        json_fields.save(path, json_fields.dump(data, PartitionError))

    @staticmethod
    def load(path: str | Path) -> Costs:
        """Return the costs of a file.

        Raises:
            PartitionError: it cannot be read, was damaged, or a field is wrong; names it.
        """
        reader = json_fields.Fields(
            json_fields.read(path, PartitionError), f"file {str(path)!r}", PartitionError
        )
        reader.header(FORMAT, VERSION)
        if reader.texts("features") != FEATURES:
            raise reader.fail("features", reader.texts("features"), f"{', '.join(FEATURES)}")
        layers = [
            _layer(json_fields.Fields(item, f"{reader.where}: layers[{i}]", PartitionError))
            for i, item in enumerate(reader.items("layers"))
        ]
        reader.finish()
        if not layers:
            raise reader.fail("layers", [], "1 or more")
        return Costs(tuple(layers))


def _layer(reader: json_fields.Fields) -> Regression:
    count, size = reader.integer("count"), len(FEATURES)
    squares = _numbers(reader, "squares", (size, size))
    products = _numbers(reader, "products", (size,))
    reader.finish()
    if not np.array_equal(squares, squares.T) or np.diag(squares).min() < 0:
        raise reader.fail("squares", "another one", "a symmetric matrix of sums of squares")
    return Regression(squares, products, count)


def _numbers(reader: json_fields.Fields, name: str, shape: Sequence[int]) -> Array:
    """Return a field of nested lists of finite numbers of a shape."""
    given = reader.items(name)
    try:
        found = np.array(given, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != tuple(shape) or not np.isfinite(found).all():
        needed = " by ".join(map(str, shape))
        raise reader.fail(name, f"shape {found.shape}", f"{needed} finite numbers")
    return found
