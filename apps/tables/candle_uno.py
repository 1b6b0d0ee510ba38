"""Candle Uno on synthetic samples: the response of a tumour's cells to a drug.

With SOAPSTONE_DATA set, on the folder `candle_uno` in it: train and test npz files of
`cell_rnaseq`, (n, 942), `drug_descriptors`, (n, 5270), `drug_fingerprints`, (n, 2048), and `y`,
(n, 1), all float32.

Source: CANDLE benchmarks, Pilot 1, Uno; widths as in FlexFlow: Jia, Automated Discovery of Machine
Learning Optimizations, 2020, section 3.7.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone import SGD, Model, run_app
from soapstone.apps._shared.dense import dense_layers
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import responses

OPTIONS = {
    "optimizer": SGD(0.05),
    "loss": "mse",
    "metrics": [],
    "epochs": 3,
    "batch_size": 64,
}
INPUTS = {"cell_rnaseq": 942, "drug_descriptors": 5270, "drug_fingerprints": 2048}


def build(
    batch_size: int = 64,
    inputs: Mapping[str, int] = INPUTS,
    bottom: Sequence[int] = (1000, 1000, 1000),
    top: Sequence[int] = (1000, 1000, 1000, 1),
) -> Model:
    """Return the network for inputs (batch_size, width) of the names and widths given."""
    model = Model("candle_uno")
    encoded = []
    for name, features in inputs.items():
        x = model.input(name, (batch_size, features))
        encoded.append(dense_layers(model, x, bottom, name))
    x = model.concat(encoded, axis=1, name="encoded")
    model.output(dense_layers(model, x, top, "top", last=None))
    return model


def data(inputs: Mapping[str, int] = INPUTS, count: int = 1280) -> Splits:
    """Return 1,024 synthetic samples and 256 held out, or the folder's."""
    return responses("candle_uno", count, inputs)


if __name__ == "__main__":
    run_app(__file__)
