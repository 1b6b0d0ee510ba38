"""`soapstone.quantize`: an ONNX model in eight bits, with what that costs and gains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from soapstone.dtypes import BYTES, kind_of
from soapstone.errors import DataError
from soapstone.files import check_targets, write
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.inference.sources import Field
from soapstone.frontend.onnx import OnnxModel, from_onnx
from soapstone.frontend.quantization import ranges
from soapstone.frontend.quantization.choice import choose
from soapstone.frontend.quantization.network import Network
from soapstone.frontend.quantization.ranges import Ranges
from soapstone.frontend.quantization.rewrite import rewrite
from soapstone.ir.tensor import Array

METHODS = ("minmax", "percentile", "entropy")
_PERCENTILE = 99.99  # values of 100 that are not clipped, where nothing else is said
_BATCH = 8  # samples of a run where the model takes any number
_WARM, _LEAST = 2, 5  # runs that are not timed, and that are


@dataclass(frozen=True)
class Fidelity:
    """How near an output of the quantised model is to the original's.

    Attributes:
        snr_db: ten times the logarithm of the output's power over the error's, infinite where they
            are equal.
        agreement: the share of samples of which both have the same greatest class; None where the
            output is no row of classes a sample.
    """

    snr_db: float
    agreement: float | None

    def __str__(self) -> str:
        shown = f"signal to noise {self.snr_db:.1f} dB"
        return shown if self.agreement is None else f"{shown}, same class {self.agreement:.1%}"


@dataclass(frozen=True)
class Quantized:
    """A quantised model, and what it costs and gains.

    Attributes:
        model: the ONNX file's bytes.
        outputs: how near each is to the original's on the calibration samples.
        milliseconds: of a run, of the original and of the quantised model, measured in turns.
        nbytes: of their files. products: how many convolutions and matrix products are of bytes.
        values: how many values between operators are bytes. samples: those of the calibration.
    """

    model: bytes
    outputs: Mapping[str, Fidelity]
    milliseconds: tuple[float, float]
    nbytes: tuple[int, int]
    products: int
    values: int
    samples: int

    def save(self, path: str | Path) -> None:
        """Write the model to an ONNX file at the path."""
        write(path, self.model)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, without the model."""
        return {
            "products": self.products,
            "values": self.values,
            "samples": self.samples,
            "outputs": {
                name: {
                    "snr_db": None if each.snr_db == np.inf else each.snr_db,
                    "agreement": each.agreement,
                }
                for name, each in self.outputs.items()
            },
            "run_ms": dict(zip(("original", "quantized"), self.milliseconds)),
            "bytes": dict(zip(("original", "quantized"), self.nbytes)),
        }

    def __str__(self) -> str:
        before, after = self.milliseconds
        large, small = self.nbytes
        made = f"{self.products} products and {self.values} values between operators are bytes"
        return "\n".join(
            [
                f"{made}; {self.samples} calibration samples",
                *(f"output {name!r}: {each}" for name, each in self.outputs.items()),
                f"{before:.2f} ms a run before, {after:.2f} after: {after / before:.2f} of it",
                f"{large:,} bytes before, {small:,} after: {small / large:.2f} of it",
            ]
        )


def quantize(
    model: str | Path | bytes | onnx.ModelProto | OnnxModel,
    calibration: Mapping[str, Any] | Any,
    path: str | Path | None = None,
    *,
    method: Literal["minmax", "percentile", "entropy"] = "minmax",
    percentile: float = _PERCENTILE,
    activations: Literal["uint8", "int8"] = "uint8",
    per_channel: bool = True,
    exclude: Sequence[str] = (),
    batch_size: int | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
) -> Quantized:
    """Return an ONNX model that multiplies by constant weights in eight bits, in QDQ form.

    Weights become signed bytes with a scale of each channel. Values between operators become bytes
    by the range that they have on the calibration samples.

    Args:
        model: the path of an ONNX file, its bytes, a message, or what `from_onnx` made of one.
        calibration: an array of samples for each input, by name; one array serves a single input.
        path: of the ONNX file to write.
        method: "minmax" takes whole ranges, "percentile" clips the rarest values, "entropy" as many
            as keep the bytes' distribution nearest to the values' own.
        percentile: of that method, how many of 100 values are not clipped.
        activations: the type of bytes between operators; "int8" is symmetric.
        per_channel: whether each channel of weights has its scale, or all have one.
        exclude: names of nodes that stay as they are, those of the file (`node.name`), which
            viewers such as Netron show.
        batch_size: samples in a run, where the model takes any number; 8 by default.
        threads: how many threads compute; all cores by default.
        seconds: how long the original and the quantised model are timed, at least five runs each.

    Raises:
        DataError: calibration arrays that do not fit the inputs, a method or name that there is
            not, or a model with nothing to quantise.
        OnnxError: the model is malformed, or needs what is not supported.
    """
    _check(method, percentile, activations)
    if isinstance(exclude, str):
        raise DataError(f"exclude: {exclude!r} found, a list of names needed")
    if batch_size is not None and batch_size < 1:
        raise DataError(f"batch_size: {batch_size} found, 1 or more needed")
    if path is not None:
        check_targets(path, reads=[model] if isinstance(model, str | Path) else ())
    network = Network(model)
    original = network.model.SerializeToString()
    network.fold_norms()
    choice = choose(network, exclude)
    with InferenceSession(from_onnx(original), threads=threads) as whole:
        samples = Samples(whole, calibration, batch_size)
        with _watching(network, choice.values, threads) as session:
            found = Ranges(session, list(choice.values))
            found.observe(samples)
            if method == "percentile":
                found.narrow(samples, partial(ranges.percentile, percent=percentile))
            elif method == "entropy":
                found.narrow(samples, ranges.entropy)
        rewrite(network, choice, found.found, activations, per_channel)
        made = network.model.SerializeToString()
        with InferenceSession(from_onnx(made), threads=threads) as small:
            outputs = _compared(whole, small, samples)
            times = _timed(whole, small, next(iter(samples)), seconds)
    if path is not None:
        write(path, made)
    sizes = len(original), len(made)
    count = len(choice.products)
    return Quantized(made, outputs, times, sizes, count, len(choice.values), samples.count)


def _check(method: str, percentile: float, activations: str) -> None:
    if method not in METHODS:
        raise DataError(f"method: {method!r} found, one of {', '.join(METHODS)} needed")
    if not 50 < percentile <= 100:
        raise DataError(f"percentile: {percentile} found, more than 50 and at most 100 needed")
    if percentile != _PERCENTILE and method != "percentile":
        raise DataError(
            f"percentile: {percentile} found with method {method!r}; it is of method 'percentile'"
        )
    if activations not in BYTES:
        raise DataError(f"activations: {activations!r} found, one of {', '.join(BYTES)} needed")


class Samples:
    """Calibration samples in batches as a model takes them; what fills no batch is left out.

    Args:
        session: of the model. given: arrays by the names of its inputs, or one array.
        batch_size: samples of a batch where the model takes any number.

    Raises:
        DataError: they do not fit the inputs; names the input.
    """

    def __init__(
        self, session: InferenceSession, given: Mapping[str, Any] | Any, batch_size: int | None
    ) -> None:
        fields = session.inputs
        if not isinstance(given, Mapping):
            given = {field.name: given for field in fields[:1]}
        self._arrays = {name: np.asarray(array) for name, array in given.items()}
        have = ", ".join(map(str, fields))
        for name in self._arrays:
            if name not in {field.name for field in fields}:
                raise DataError(f"calibration: no input {name!r} found; inputs are {have}")
        counts: dict[str, int] = {}
        for field in fields:
            array = self._arrays.get(field.name)
            if array is None:
                raise DataError(f"calibration: input {field.name!r} is missing; {field} needed")
            if array.ndim == 0 or array.ndim != len(field.axes(array.ndim)):
                raise DataError(
                    f"calibration: input {field.name!r} has shape {array.shape}; samples of"
                    f" {field} needed"
                )
            counts[field.name] = array.shape[0]
        if len(set(counts.values())) != 1:
            raise DataError(f"calibration: {counts} samples found; as many of each input needed")
        self.batch = self._batch(fields, batch_size, min(counts.values()))
        self.count = min(counts.values()) // self.batch * self.batch
        real = [array for array in self._arrays.values() if kind_of(array.dtype) == "f"]
        if real and not any(array.any() for array in real):
            raise DataError("calibration: zeros alone found; samples as they will come needed")
        session.checked(next(iter(self)))

    @staticmethod
    def _batch(fields: Sequence[Field], wanted: int | None, count: int) -> int:
        fixed = {dim for field in fields for dim in field.shape[:1] if isinstance(dim, int)}
        if len(fixed) > 1:
            raise DataError(f"model: inputs of {sorted(fixed)} samples found; one number needed")
        size = int(next(iter(fixed))) if fixed else min(wanted or _BATCH, max(count, 1))
        if fixed and wanted not in (None, size):
            raise DataError(f"batch_size: {wanted} found, but the model takes {size} samples a run")
        if count < size:
            raise DataError(f"calibration: {count} samples found, {size} or more needed")
        return size

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for first in range(0, self.count, self.batch):
            yield {name: array[first : first + self.batch] for name, array in self._arrays.items()}


def _watching(network: Network, values: Iterable[str], threads: int | None) -> InferenceSession:
    """Return a session of a network that has these values as outputs."""
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    del model.graph.output[:]
    for name in values:
        kind = onnx.TensorProto.FLOAT
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return InferenceSession(from_onnx(model.SerializeToString()), threads=threads)


def _compared(
    whole: InferenceSession, small: InferenceSession, samples: Samples
) -> dict[str, Fidelity]:
    """Return how near the outputs of two sessions are, over all samples."""
    power = dict.fromkeys(whole.outputs, 0.0)
    error, same, rows = dict(power), dict(power), dict(power)
    for batch in samples:
        first, second = whole.run(batch), small.run(batch)
        for name in whole.outputs:
            a, b = (np.asarray(each[name], np.float64) for each in (first, second))
            power[name] += float((a * a).sum())
            error[name] += float(((a - b) ** 2).sum())
            if a.ndim == 2 and a.shape[1] > 1:
                same[name] += int((a.argmax(1) == b.argmax(1)).sum())
                rows[name] += len(a)
    return {
        name: Fidelity(
            _decibels(power[name], error[name]), same[name] / rows[name] if rows[name] else None
        )
        for name in whole.outputs
    }


def _decibels(power: float, error: float) -> float:
    with np.errstate(divide="ignore"):
        return float(10 * (np.log10(power) - np.log10(error))) if error else np.inf


def _timed(
    whole: InferenceSession, small: InferenceSession, batch: Mapping[str, Array], seconds: float
) -> tuple[float, float]:
    """Return the median times of runs of two sessions, in turns, in milliseconds."""
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    turn = 0
    while turn < _WARM + _LEAST or time.perf_counter() < end:
        for session, times in zip((whole, small), taken):
            start = time.perf_counter()
            session.run(batch)
            times.append(time.perf_counter() - start)
        turn += 1
    first, second = (statistics.median(times[_WARM:]) * 1e3 for times in taken)
    return first, second
