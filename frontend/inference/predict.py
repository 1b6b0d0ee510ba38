"""`soapstone predict`: a model's outputs for the arrays of an npz file."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.errors import DataError
from soapstone.files import check_file
from soapstone.frontend.app import load_app
from soapstone.frontend.data import npz
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.onnx.texts import described, is_text
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


@dataclass(frozen=True)
class Prediction:
    """The result of `predict`, and its times.

    `seconds` is the median run, without the first of several. `bind_seconds` is what came before:
    reading the model, compiling new kernels, and measuring if that is asked for. `moved_bytes` are
    the bytes that a run copies between memories, as planned and as compiled.
    """

    model: str
    outputs: Mapping[str, Array]
    seconds: float
    bind_seconds: float
    runs: int
    launches: int
    variants: Mapping[str, str]
    moved_bytes: tuple[int, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON: arrays as element type and shape."""
        return {
            "model": self.model,
            "outputs": {
                name: {"dtype": described(array).dtype, "shape": list(array.shape)}
                for name, array in stored(self.outputs).items()
            },
            "run_ms": self.seconds * 1e3,
            "bind_ms": self.bind_seconds * 1e3,
            "runs": self.runs,
            "launches": self.launches,
            "variants": dict(Counter(self.variants.values())),
            **dict(zip(("planned_bytes", "copied_bytes"), self.moved_bytes or ())),
        }

    def __str__(self) -> str:
        lines = [f"{name}: {shown(value)}" for name, value in self.outputs.items()]
        timing = f"{self.seconds * 1e3:.2f} ms a run, {self.launches} launches"
        lines.append(f"{timing}, {self.bind_seconds * 1e3:.0f} ms to bind")
        if self.moved_bytes is not None:
            planned, copied = self.moved_bytes
            lines.append(f"{planned:,} bytes planned to be copied a run, {copied:,} copied")
        return "\n".join(lines)


UNNAMED = "arr_0"  # as `np.savez` calls the only array


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz file.

    Raises:
        DataError: no npz file, or one of objects; names the file and field.
    """
    label = f"file {str(path)!r}"
    check_file(path, label, DataError)
    return npz.read(path, label, DataError, texts=None)


def stored(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return outputs as an npz file holds them: the tensors of a sequence get numbers.

    outputs: of a run, by name.
    """
    found: dict[str, Array] = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            found.update(stored({f"{name}.{place}": each for place, each in enumerate(value)}))
        elif value is not None:
            found[name] = value.astype(str) if is_text(value) else value
    return found


def given(session: InferenceSession, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return the arrays of a file as inputs of a session; the inverse of `stored`.

    A sequence `x` is `x.0`, `x.1`, …; an optional value that is missing is None. A model with one
    input takes an array without a name.
    """
    fields, left = session.inputs, dict[str, Any](arrays)
    if len(fields) == 1 and list(left) == [UNNAMED]:
        return {fields[0].name: left[UNNAMED]}
    for field in fields:
        parts: list[Array] = []
        while "sequence" in field.holds and (name := f"{field.name}.{len(parts)}") in left:
            parts.append(left.pop(name))
        if parts or (field.holds[:1] == ("optional",) and field.name not in left):
            left[field.name] = parts or None
    return left


def shown(value: Any) -> str:
    """Return the types and shapes of an input or output of a run."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return "None" if value is None else str(described(value))


def predict(
    model: str,
    arrays: Mapping[str, Array],
    *,
    checkpoint: Path | None = None,
    runs: int = 1,
    **options: Any,
) -> Prediction:
    """Return the outputs of an ONNX file, or of an app with the weights of a checkpoint.

    Args:
        model: the path of an `.onnx` file, or an app's name.
        arrays: the inputs by name, as `given` takes them.
        runs: the number of runs for the time; outputs are those of the last.
        options: see `InferenceSession`.

    Raises:
        DataError, GraphError: a model or arrays that do not fit.
    """
    started = time.perf_counter()
    source = source_of(model, checkpoint)
    with InferenceSession(source, **options) as session:
        inputs = given(session, arrays)
        variants = session.variants(inputs)
        bound = time.perf_counter()
        times = []
        for _ in range(max(1, runs) + (runs > 1)):
            start = time.perf_counter()
            outputs = session.run(inputs)
            times.append(time.perf_counter() - start)
        middle = statistics.median(times[1:] or times)
        moved = session.moved_bytes(inputs)
        return Prediction(
            model, outputs, middle, bound - started, max(1, runs), len(variants), variants, moved
        )


def check_model(model: str) -> None:
    """Refuse what is neither an ONNX file nor an app or script, as its name says.

    Raises:
        DataError: names what was found, and what is needed.
    """
    path = Path(model)
    kind = path.suffix.lower()
    if kind not in ("", ".onnx", ".py") or path.is_dir():
        arrays = "; arrays are what --input takes" if kind in (".npz", ".npy") else ""
        raise DataError(
            f"model {model!r} found; an .onnx file, a .py script or an app (`soapstone apps` lists"
            f" them) needed{arrays}"
        )


def source_of(model: str, checkpoint: Path | None, *, initial: bool = False) -> Model | Path:
    """Return an ONNX file, or an app with the weights of a checkpoint, or its initial ones.

    Raises:
        DataError: a model that is none; a checkpoint given with a file, or none for an app unless
            `initial`.
    """
    check_model(model)
    if model.lower().endswith(".onnx"):
        if checkpoint is not None:
            raise DataError(f"model {model!r}: an ONNX file has its own weights; no checkpoint")
        return Path(model)
    app = load_app(model)
    if checkpoint is None and not initial:
        raise DataError(f"app {model!r}: no weights; give --checkpoint")
    built = app.build(1)
    if checkpoint is not None:
        built.load_checkpoint(checkpoint)
    return built
