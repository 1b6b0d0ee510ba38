"""`InferenceSession` and `IOBinding` with ONNX Runtime's signatures, over soapstone's session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of, learn
from soapstone.errors import warn
from soapstone.frontend.inference import session as serving
from soapstone.frontend.onnx import OnnxModel, from_onnx
from soapstone.frontend.onnx.texts import TEXT
from soapstone.frontend.onnxruntime.errors import InvalidArgument, as_invalid
from soapstone.frontend.onnxruntime.options import (
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from soapstone.frontend.onnxruntime.providers import CPU, GPU, Provider, chosen_providers
from soapstone.frontend.onnxruntime.values import (
    ModelMetadata,
    NodeArg,
    OrtValue,
    check_device,
    element,
    labels_of,
)
from soapstone.frontend.precision import check_precision
from soapstone.ir.tensor import Array
from soapstone.ir.training.precision import SINGLE
from soapstone.native.arrays import array_at


def set_default_logger_severity(severity: int) -> None:
    """Do nothing: nothing is logged. severity: of what would be."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Do nothing: nothing is logged. verbosity: of what would be."""


def disable_telemetry_events() -> None:
    """Do nothing: nobody is told of what runs."""


class InferenceSession:
    """A model that is run as with `onnxruntime.InferenceSession`.

    Runs may be asked for from several threads; they follow each other.

    Args:
        path_or_bytes: a file, or its bytes. sess_options: see `SessionOptions`.
        providers: in order of preference, names or pairs of name and options; the CPU's is the
            default, "CUDAExecutionProvider" takes a GPU where there is one. Others are left out,
            with a warning. provider_options: those of each. `precision` of the CPU's is that
            of `soapstone.InferenceSession`; others change nothing, which is said.
        kwargs: enable_fallback and disabled_optimizers, which change nothing either.

    Raises:
        InvalidArgument: options that do not fit. OnnxError: the file is malformed, or needs what is
            not supported. OSError: it cannot be read.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            kind = type(path_or_bytes).__name__
            raise TypeError(f"InferenceSession: {kind} found, a path or bytes needed")
        options = SessionOptions() if sess_options is None else sess_options
        if not isinstance(options, SessionOptions):
            kind = f"{type(options).__module__}.{type(options).__name__}"
            raise TypeError(f"sess_options: {kind} found, soapstone's SessionOptions needed")
        for name in kwargs:
            if name not in ("enable_fallback", "disabled_optimizers"):
                raise TypeError(f"InferenceSession: unknown argument {name!r}")
            if name == "disabled_optimizers":
                warn(f"InferenceSession: {name} changes nothing")
        named = isinstance(path_or_bytes, str | os.PathLike)
        model = from_onnx(
            Path(path_or_bytes) if named else path_or_bytes,  # type: ignore[arg-type]
        )
        dims = {name: n for name, n in options._dims.items() if name in model.symbolic}
        if dims:
            model = OnnxModel(model.source, dims)
        for name in options._dims.keys() - dims.keys():
            warn(f"{name!r} is no symbolic dim of the model's inputs")
        self._options = options
        chosen = chosen_providers(providers, provider_options)
        self._providers = list(chosen)
        precision = chosen[CPU].get("precision", SINGLE)
        with as_invalid():
            check_precision(precision, "cpu", streamed=False)
        self._metadata = model.source.metadata
        graph, known = model.source.graph, {each.name for each in model.inputs}
        self._inputs = [NodeArg.of(value, dims) for value in graph.input if value.name in known]
        self._outputs = [NodeArg.of(value, dims) for value in graph.output]
        self._labels = labels_of(graph)
        level = options.graph_optimization_level
        self._session = serving.InferenceSession(
            model,
            threads=options.intra_op_num_threads or None,
            gpus=int(self._providers[0] == GPU),
            plain=level == GraphOptimizationLevel.ORT_DISABLE_ALL,
            tune=not options.use_deterministic_compute,
            precision=precision,
        )
        self._profiling = ExitStack()
        self._profile = ""
        self._began_ns = time.time_ns()
        if options.enable_profiling:
            stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(self._began_ns / 1e9))
            self._profile = f"{options.profile_file_prefix}_{stamp}.json"
            self._profiling.enter_context(self._session.profile(self._profile))

    def __reduce__(self) -> Any:
        return self._session.__reduce__()

    @property
    def session(self) -> serving.InferenceSession:
        """The session that runs: all of soapstone's own options and methods."""
        return self._session

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs as the file declares them."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs as the file declares them."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return nothing: inputs that the file gives a value are weights."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """Return what the file says of itself."""
        said = self._metadata
        return ModelMetadata(
            producer_name=said.producer,
            domain=said.domain,
            description=said.description,
            graph_name=said.graph,
            graph_description=said.graph_description,
            version=said.version,
            custom_metadata_map=dict(said.entries),
        )

    def get_session_options(self) -> SessionOptions:
        """Return the options that the session was made with."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return where the session runs."""
        return list(self._providers)

    def set_providers(
        self,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check that the session runs where it is asked to. Its arguments are those of a session.

        Raises:
            InvalidArgument: it runs elsewhere.
        """
        asked = list(chosen_providers(providers, provider_options))
        if asked[0] != self._providers[0]:
            raise InvalidArgument(
                f"set_providers: {asked[0]} found, {self._providers[0]} needed: a session stays"
                " where it was made"
            )

    def disable_fallback(self) -> None:
        """Do nothing: a session never goes over to another provider."""

    def enable_fallback(self) -> None:
        """Do nothing: a session never goes over to another provider."""

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return no options for each provider."""
        return {name: {} for name in self._providers}

    def get_profiling_start_time_ns(self) -> int:
        """Return when the session was made, in ns since 1970."""
        return self._began_ns

    def end_profiling(self) -> str:
        """Write the timeline of all runs so far, and return its file; "" where none is taken."""
        self._profiling.close()
        found, self._profile = self._profile, ""
        return found

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """Return the outputs of a run: arrays, or a list of dictionaries of scores by their labels.

        Args:
            output_names: which, in order; None or none for all.
            input_feed: an array, an `OrtValue`, or what has `__dlpack__`, for each input.
            run_options: see `RunOptions`.

        Raises:
            InvalidArgument: an unknown name, or an input that is missing, or does not fit.
        """
        wanted = self._wanted(output_names, run_options)
        with as_invalid():
            found = self._session.run(self._fed(input_feed))
        return self._handed_on(found, wanted)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run, and call back from another thread.

        Args:
            output_names, input_feed, run_options: as of `run`.
            callback: is given the outputs, user_data, and "" or what went wrong.
            user_data: for the callback.

        Raises:
            InvalidArgument: as `run`, at once.
        """
        wanted = self._wanted(output_names, run_options)
        with as_invalid():
            future = self._session.run_async(self._fed(input_feed))

        def done(future: Future[dict[str, Array]]) -> None:
            error = future.exception()
            found = {} if error else future.result()
            handed = self._handed_on(found, [name for name in wanted if name in found])
            callback(handed, user_data, str(error or ""))

        future.add_done_callback(done)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Return the outputs of a run as `OrtValue`s.

        output_names, input_dict_ort_values, run_options: as of `run`.
        """
        wanted = self._wanted(output_names, run_options)
        with as_invalid():
            found = self._session.run(self._fed(input_dict_ort_values))
        lists = [name for name in wanted if not isinstance(found[name], np.ndarray)]
        if lists:
            raise InvalidArgument(
                f"output {lists[0]!r} is no tensor, as `OrtValue`s are; see `run`"
            )
        return [OrtValue(found[name]) for name in wanted]

    def io_binding(self) -> IOBinding:
        """Return bindings of inputs and outputs for `run_with_iobinding`."""
        return IOBinding(self)

    def run_with_iobinding(
        self, iobinding: IOBinding, run_options: RunOptions | None = None
    ) -> None:
        """Run on bound inputs, into bound outputs.

        iobinding: made by this session. run_options: as of `run`.

        Raises:
            InvalidArgument: as `run`, or a binding of another session.
        """
        self._wanted(None, run_options)
        iobinding.run(self)

    def _fed(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs with lists of numbers as arrays of the declared types, absent ones None."""
        if not isinstance(feed, Mapping):
            kind = type(feed).__name__
            raise InvalidArgument(f"input_feed: {kind} found, a dict of arrays by name needed")
        given = dict(feed)
        for field in self._session.inputs:
            value = given.get(field.name)
            if field.holds[:1] == ("optional",):
                given.setdefault(field.name, None)
            elif isinstance(value, list | tuple) and not field.holds and field.dtype != TEXT:
                with suppress(ValueError, TypeError, OverflowError):  # what does not fit is refused
                    given[field.name] = _listed(value, field.dtype)
        return given

    def _handed_on(self, found: Mapping[str, Array], wanted: Sequence[str]) -> list[Any]:
        """Return outputs as ONNX Runtime has them: scores with labels are dictionaries."""
        return [
            [dict(zip(self._labels[name], row)) for row in found[name].tolist()]
            if name in self._labels
            else found[name]
            for name in wanted
        ]

    def _wanted(self, names: Sequence[str] | None, run_options: RunOptions | None) -> Sequence[str]:
        if run_options is not None and not isinstance(run_options, RunOptions):
            kind = f"{type(run_options).__module__}.{type(run_options).__name__}"
            raise TypeError(f"run_options: {kind} found, soapstone's RunOptions needed")
        known = self._session.outputs
        if isinstance(names, str):
            raise InvalidArgument(f"output_names: {names!r} found, a list of names needed")
        if not names:
            return known
        for name in names:
            if name not in known:
                raise InvalidArgument(
                    f"model {self._session.name!r}: unknown output {name!r}; outputs are"
                    f" {', '.join(known)}"
                )
        return names


class IOBinding:
    """Inputs and outputs of runs, bound by name to memory that is read or written in each run.

    Args:
        session: whose they are.
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Array | None] = {}
        self._made: dict[str, Array] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Bind an input to an array, which is read in each run. name: of it. arr_on_cpu: that."""
        self._bind_input(name, arr_on_cpu)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a value. name: of it. ortvalue: that."""
        self._bind_input(name, ortvalue.array)

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Bind an input to memory, such as that of a tensor of torch.

        Args:
            name: of the input. device_type: "cpu". device_id: 0.
            element_type, shape: of what is there, in C order. buffer_ptr: its address.

        Raises:
            InvalidArgument: another device, or an unknown input or type.
        """
        where = f"bind_input {name!r}"
        check_device(where, device_type, device_id)
        self._bind_input(name, array_at(buffer_ptr, tuple(shape), element(where, element_type)))

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory, or without an address to an array that each run makes.

        Args:
            name: of the output. device_type: "cpu". device_id: 0.
            element_type, shape: of what is there, in C order. buffer_ptr: its address.

        Raises:
            InvalidArgument: another device, an unknown output or type, or an address alone.
        """
        where = f"bind_output {name!r}"
        check_device(where, device_type, device_id)
        if buffer_ptr is None:
            self._bind_output(name, None)
            return
        if element_type is None or shape is None:
            raise InvalidArgument(f"{where}: an address found, element_type and shape needed too")
        self._bind_output(name, array_at(buffer_ptr, tuple(shape), element(where, element_type)))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an output to a value, which is written in each run. name: of it. ortvalue: that."""
        self._bind_output(name, ortvalue.array)

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._outputs.clear()
        self._made.clear()

    def synchronize_inputs(self) -> None:
        """Do nothing: memory of the CPU is as it was written."""

    def synchronize_outputs(self) -> None:
        """Do nothing: a run has ended when it returns."""

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order in which they were bound."""
        return [OrtValue(self._made[name]) for name in self._outputs if name in self._made]

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return copies of the outputs of the last run, in the order in which they were bound."""
        return [value.numpy() for value in self.get_outputs()]

    def run(self, session: InferenceSession) -> None:
        """Run a session on what is bound; see `InferenceSession.run_with_iobinding`.

        session: that which made the binding.
        """
        if session is not self._session:
            raise InvalidArgument(
                "run_with_iobinding: a binding of another session found; one that this session's"
                " io_binding() made needed"
            )
        if not self._outputs:
            raise InvalidArgument("run_with_iobinding: no outputs bound, one or more needed")
        fixed = {name: array for name, array in self._outputs.items() if array is not None}
        with as_invalid():
            found = session.session.run(session._fed(self._inputs), out=fixed)
        self._made = {name: found[name] for name in self._outputs}

    def _bind_input(self, name: str, value: Any) -> None:
        known = [each.name for each in self._session.get_inputs()]
        if name not in known:
            raise InvalidArgument(f"binding: unknown input {name!r}; inputs are {', '.join(known)}")
        self._inputs[name] = value

    def _bind_output(self, name: str, array: Array | None) -> None:
        self._session._wanted([name], None)
        self._outputs[name] = array


def _listed(values: Sequence[Any], dtype: str) -> Array:
    """Return a list of numbers as an array of a type, if it holds them: reals hold whole ones."""
    found, kind = np.asarray(values), kind_of(dtype)
    whole = found.dtype.kind in "iu" and kind in "iuf"
    fits = whole or found.dtype.kind == kind or not found.size
    return np.asarray(values, learn(dtype)) if fits else found
