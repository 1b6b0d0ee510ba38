"""`soapstone quantize`: an ONNX model in eight bits, with what that costs and gains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Json, answer, tell_written, with_output


def quantize(
    model: Annotated[Path, typer.Argument(help="The ONNX file to read.")],
    calibration: Annotated[
        Path, typer.Option(help="An npz file: an array of samples for each input, by name.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The ONNX file to write.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="minmax, whole ranges; percentile or entropy: rare values are clipped."),
    ] = "minmax",
    percentile: Annotated[
        float, typer.Option(help="Percentage of values that are not clipped.")
    ] = 99.99,
    activations: Annotated[
        str, typer.Option(help="Bytes between operators: uint8, or int8, which is symmetric.")
    ] = "uint8",
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="One scale for all channels of weights.")
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="A node to leave as it is, by its name in the file (Netron shows names); repeat."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a run, where the model takes any.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long the original and the result are timed.")
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Quantise a model to eight bits, show the error and the gain, and write it as a QDQ model."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.inference.predict import read_arrays
    from soapstone.frontend.quantization.quantize import quantize as made_of

    check_targets(output, reads=(model, calibration))
    check_suffix(output, ".onnx")
    result = made_of(
        model,
        read_arrays(calibration),
        output,
        method=method,  # type: ignore[arg-type]  # checked there
        percentile=percentile,
        activations=activations,  # type: ignore[arg-type]  # checked there
        per_channel=not per_tensor,
        exclude=exclude or (),
        batch_size=batch_size,
        threads=threads,
        seconds=seconds,
    )
    shown = with_output(result.as_dict(), output)
    answer(result, shown, as_json)
    tell_written(output, as_json=as_json)
