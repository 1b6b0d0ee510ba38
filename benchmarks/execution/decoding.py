"""A decoder's time a token: soapstone and ONNX Runtime continue a prompt from the same files.

    python benchmarks/execution/decoding.py [--models "float32;4bit"] [--rounds 5] [--threads 2]

The model is Llama-like, of 125 million parameters (tests/helpers/decoders.py): written as exporters
of torch do, with ONNX Runtime's own attention ("fused"), and made of layers, which have the float32
file's weights ("int4": rounded by the session), beside ONNX Runtime on files of as many bits. ONNX
Runtime has its outputs bound, and gets them back as inputs without a copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import in_turns, median, ratio, serve, show, write
from helpers.decoders import Decoder

from soapstone.system import usable_cores

MODELS = {
    "float32": Decoder(),
    "float32, fused": Decoder(fused=True),
    "4bit": Decoder(bits=4),
    "4bit, fused": Decoder(bits=4, fused=True),
    "bfloat16": Decoder(stored="bfloat16"),
}
LAYERS = {"layers": "float32", "layers, int4": "int4"}  # models made of layers, by precision
PROMPT, TOKENS = 100, 32


def file_of(name: str) -> str:
    """Return the model whose file ONNX Runtime runs beside one."""
    if name not in LAYERS:
        return name
    return "4bit" if LAYERS[name] == "int4" else "float32"


def export(name: str, folder: Path) -> Path:
    """Return the model's file, which is written if it is not there."""
    path = folder / f"decoder_{name.replace(', ', '_')}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(MODELS[name].model(), path)
    return path


def by_soapstone(model: Any, precision: str, threads: int, prompt: list[int]) -> Any:
    """Return what continues the prompt with a token at a time. model: a file, or made of layers."""
    from soapstone import InferenceSession

    session = InferenceSession(model, threads=threads, precision=precision)
    return lambda: session.stream(prompt, max_new_tokens=TOKENS)


def by_onnxruntime(path: Path, threads: int, prompt: list[int]) -> Any:
    """Return what continues the prompt with a token at a time."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    outputs = [each.name for each in session.get_outputs()]
    pasts = [each for each in session.get_inputs() if each.name.startswith("past")]

    def run() -> Iterator[int]:
        empty = (np.zeros((1, p.shape[1], 0, p.shape[3]), np.float32) for p in pasts)
        held = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in empty]
        new, total = list(prompt), len(prompt)
        for _ in range(TOKENS):
            binding = session.io_binding()
            binding.bind_cpu_input("input_ids", np.array([new]))
            binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
            binding.bind_cpu_input("position_ids", np.arange(total - len(new), total)[None])
            for past, value in zip(pasts, held):
                binding.bind_ortvalue_input(past.name, value)
            for name in outputs:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            logits, *held = binding.get_outputs()
            new = [int(logits.numpy()[0, -1].argmax())]
            total += 1
            yield new[0]

    return run


def peer(library: str, name: str, folder: Path, threads: int) -> None:
    """Be one library on one model."""
    prompt = np.random.default_rng(1).integers(0, Decoder().words, PROMPT).tolist()
    ours, layers = library == "soapstone", LAYERS.get(name)
    model: Any = export("float32" if ours and layers else file_of(name), folder)
    if ours and layers:
        model = Decoder().network(PROMPT + TOKENS, onnx.load(model))
    start = time.perf_counter()
    if ours:
        run = by_soapstone(model, layers or "float32", threads, prompt)
    else:
        run = by_onnxruntime(model, threads, prompt)
    made = [next(iter(run()))]
    first_s = time.perf_counter() - start
    list(run())

    def round_() -> dict[str, Any]:
        times, made[:] = [], []
        start = time.perf_counter()
        for token in run():
            made.append(token)
            times.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
        ms = statistics.median(times[1:])
        return {"ms": ms, "prompt_ms": times[0], "first_s": first_s, "tokens": list(made)}

    serve(round_)


def main() -> None:
    parser = common(__doc__, rounds=5, threads=usable_cores(), folder=FOLDER)
    parser.add_argument(
        "--models", default=";".join([*MODELS, *LAYERS]), help="names, with ; between them"
    )
    parser.add_argument("--peer", help="be this library on the one model")
    options = parser.parse_args()
    names = options.models.split(";")
    if options.peer:
        peer(options.peer, names[0], options.folder, options.threads)
        return
    rows = []
    for name in names:
        for each in {file_of(name), "float32"}:
            export(each, options.folder)
        command = [sys.executable, __file__, "--folder", str(options.folder)]
        command += ["--threads", str(options.threads), "--models", name]
        commands = {p: [*command, "--peer", p] for p in ("soapstone", "onnxruntime")}
        # Weights of a float32 model of ONNX Runtime are what few bits are compared with too.
        if name != "float32":
            commands["float32"] = [*command[:-1], "float32", "--peer", "onnxruntime"]
        found = in_turns(commands, options.rounds)
        one, other = found["soapstone"], found["onnxruntime"]
        row: dict[str, Any] = {"model": name}
        for library, measured in (("soapstone", one), ("onnxruntime", other)):
            row[f"{library} ms"] = median(measured, "ms")
        row["/ onnxruntime"] = ratio(one, other)
        row["/ onnxruntime float32"] = ratio(one, found.get("float32", other))
        row["prompt / onnxruntime"] = ratio(one, other, "prompt_ms")
        row["soapstone first s"] = median(one, "first_s")
        row["onnxruntime first s"] = median(other, "first_s")
        same = one[0]["tokens"] == other[0]["tokens"]
        row["same tokens"] = same if name != "layers, int4" else "other weights"
        rows.append(row)
        show(row)
    if not options.no_write:
        title = "A decoder's time a token, 125 million parameters, prompts of 100 tokens"
        write(*("decoding", title, "python benchmarks/execution/decoding.py"), list(rows[0]), rows)


if __name__ == "__main__":
    main()
