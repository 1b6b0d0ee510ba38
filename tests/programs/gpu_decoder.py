"""A decoder of an ONNX file, whose attention is written out, on a simulated GPU beside the CPU.

Heads share keys. Prints, by output, the largest difference, and the variants that served.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

from helpers.decoders import SMALL

from soapstone import InferenceSession, from_onnx


def main() -> None:
    sizes, random = replace(SMALL, layers=1), np.random.default_rng(0)
    model, samples, tokens = from_onnx(sizes.model()), 2, 20
    places = np.tile(np.arange(tokens), (samples, 1))
    given = {
        "input_ids": random.integers(0, sizes.words, places.shape),
        "attention_mask": np.ones_like(places),
        "position_ids": places,
    }
    for each in model.inputs:
        if each.name not in given:
            head = sizes.width // sizes.heads
            given[each.name] = np.zeros((samples, sizes.kv_heads, 0, head), np.float32)
    given = {each.name: given[each.name] for each in model.inputs}
    with InferenceSession(model) as here, InferenceSession(model, gpus=1) as there:
        wanted, found = here.run(given), there.run(given)
        variants = sorted(set(there.variants(given).values()))
    off = {name: float(np.abs(wanted[name] - found[name]).max()) for name in wanted}
    print(json.dumps([off, variants]))


if __name__ == "__main__":
    main()
