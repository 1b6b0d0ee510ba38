"""Inference in eight bits at batch 1: soapstone, ONNX Runtime and OpenVINO on the same files.

    python benchmarks/execution/quantized.py [--models resnet50,bert_12] [--rounds 7] [--threads 2]
    python benchmarks/execution/quantized.py --formats bfloat16

Files are those of `soapstone.quantize` ("ours"), and of ONNX Runtime's `quantize_static` as QDQ
("static") and `quantize_dynamic` ("dynamic"). Each library works in its own process, in turns with
soapstone on the float32 file. Ratios are of soapstone's time in eight bits. The format "bfloat16",
measured alone, is the float32 file with products in that type, which ONNX Runtime does not have.
Needs `pip install -e ".[bench]"`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import geometric_means, in_turns, median, show, write
from inference import peer
from models import arrays, export

from soapstone.system import usable_cores

FORMATS = ("ours", "static", "dynamic")
BFLOAT16 = "bfloat16"
PEERS = ("onnxruntime", "openvino")


def samples(name: str) -> dict[str, np.ndarray]:
    """Return calibration samples of a model: its inputs, at four sizes where they are real."""
    sizes = (0.5, 0.8, 1.0, 1.2)
    return {
        field: np.concatenate(
            [array * size if array.dtype.kind == "f" else array for size in sizes]
        ).astype(array.dtype)
        for field, array in arrays(name).items()
    }


def quantised(name: str, kind: str, folder: Path) -> Path:
    """Return the ONNX file of a model in a format, made unless it is there."""
    source, path = export(name, folder), folder / f"{name}.{kind}.onnx"
    if kind == BFLOAT16:
        return source
    if path.exists():
        return path
    if kind == "ours":
        import soapstone

        print(soapstone.quantize(source, samples(name), path))
        return path
    from onnxruntime import quantization as theirs
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(theirs.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            given = samples(name)
            self.left = [{n: array[i : i + 1] for n, array in given.items()} for i in range(4)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    prepared = folder / f"{name}.prepared.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        if kind == "dynamic":
            weights = theirs.QuantType.QInt8
            theirs.quantize_dynamic(str(prepared), str(path), weight_type=weights)
        else:
            theirs.quantize_static(str(prepared), str(path), Reader(), per_channel=True)
    return path


def main() -> None:
    parser = common(
        __doc__,
        models="resnet50,bert_12",
        rounds=7,
        threads=usable_cores(),
        folder=FOLDER,
        peers=PEERS,
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--peer", nargs=2, help="be this library on this file of the one model")
    options = parser.parse_args()
    names = options.models.split(",")
    if options.peer:
        library, path = options.peer
        peer(library, names[0], Path(path), options.threads)
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        for kind in options.formats.split(","):
            path = quantised(name, kind, options.folder)
            command = [sys.executable, __file__, "--models", name]
            command += ["--threads", str(options.threads), "--peer"]
            whole = [*command, "soapstone", str(export(name, options.folder))]
            commands = {"float32": whole}
            for each in ("soapstone", *options.peers.split(",")):
                if kind != BFLOAT16:
                    commands[each] = [*command, each, str(path)]
                elif each != "onnxruntime":
                    commands[each] = [*command, f"{each}.{kind}", str(path)]
            measured = in_turns(commands, options.rounds)
            ms = {each: median(found, "ms") for each, found in measured.items()}
            row: dict[str, Any] = {"model": name, "file": kind}
            row |= {f"{each} ms": value for each, value in ms.items()}
            row |= {f"/ {each}": ms["soapstone"] / ms[each] for each in ms if each != "soapstone"}
            row["MB"] = path.stat().st_size / 1e6
            rows.append(row)
            show(row)
    compared = [key for key in rows[0] if key.startswith("/ ")]
    rows.append({"model": "geometric mean", **geometric_means(rows, compared)})
    show(rows[-1])
    if not options.no_write:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        script, section, how = "python benchmarks/execution/quantized.py", "quantized", "eight bits"
        if options.formats == BFLOAT16:
            script, section, how = f"{script} --formats {BFLOAT16}", BFLOAT16, BFLOAT16
        write(section, f"Inference in {how}, batch 1", script, columns, rows)


if __name__ == "__main__":
    main()
