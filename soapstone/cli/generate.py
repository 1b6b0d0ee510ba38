"""`soapstone generate`: the tokens that a decoder continues a prompt with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Json, Precision, print_json


def generate(
    model: Annotated[str, typer.Argument(help="A decoder: an .onnx file, or an app's name.")],
    prompt: Annotated[list[int], typer.Argument(help="The prompt's tokens, as numbers.")],
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=0, help="The largest number of new tokens.")
    ] = 128,
    stop: Annotated[
        list[int] | None, typer.Option(help="A token after which no more follow; repeat.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits; 0 takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw from the fewest likeliest tokens with this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="The weights of an app.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.")] = None,
    precision: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Print the tokens with which a decoder continues a prompt, each as soon as it is known."""
    from soapstone.frontend.inference.predict import source_of
    from soapstone.frontend.inference.session import InferenceSession

    source = source_of(model, checkpoint)
    with InferenceSession(source, threads=threads, precision=precision) as session:
        tokens = session.stream(
            *(prompt, max_new_tokens),
            stop=stop or (),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        if as_json:
            print_json({"tokens": list(map(int, tokens))})
            return
        for number, token in enumerate(tokens):
            typer.echo(f"{' ' if number else ''}{token}", nl=False)
        typer.echo()
