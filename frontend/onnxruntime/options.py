"""Options of sessions and runs, by ONNX Runtime's names; each says what it means here.

An option that means nothing here is kept, with a warning when it is set to something else than its
default; one that would promise what is not done is refused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from soapstone.errors import hint, warn
from soapstone.frontend.onnxruntime.errors import InvalidArgument


class GraphOptimizationLevel(IntEnum):
    """How much a graph is changed: nothing, or all; the levels between are as all."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Whether operators follow each other; they do, each on all threads, in either mode."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class _Options:
    """Fields with defaults. `_ignored` and `_refused` say why, of those that mean nothing here."""

    _fields: ClassVar[dict[str, Any]] = {}
    _ignored: ClassVar[dict[str, str]] = {}
    _same: ClassVar[dict[str, Any]] = {}  # values that say what is done anyway
    _refused: ClassVar[dict[str, str]] = {}
    _methods: ClassVar[dict[str, str]] = {}  # of ONNX Runtime, which are not here

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}
        for name, default in self._fields.items():
            object.__setattr__(self, name, default)

    def __setattr__(self, name: str, value: Any) -> None:
        label = f"{type(self).__name__}.{name}"
        if name == "_entries" or name == "_dims":
            object.__setattr__(self, name, value)
            return
        if name not in self._fields:
            raise AttributeError(f"{label}: no such option{hint(name, self._fields)}")
        default = self._fields[name]
        if not isinstance(value, int if isinstance(default, (bool, int)) else type(default)):
            kind = type(default).__name__
            raise TypeError(f"{label}: {type(value).__name__} {value!r} found, {kind} needed")
        if value != default and name in self._refused:
            why = self._why(name)
            raise InvalidArgument(f"{label}: {value!r} found, {default!r} needed: {why}")
        if value not in (default, self._same.get(name, default)) and name in self._ignored:
            warn(f"{label} = {value!r} changes nothing: {self._why(name)}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        why = f": {self._methods[name]}" if name in self._methods else hint(name, self._fields)
        raise AttributeError(f"{type(self).__name__}.{name} is not supported{why}")

    def _why(self, name: str) -> str:
        return {**self._ignored, **self._refused}[name]

    def _add(self, key: str, value: str) -> None:
        self._entries[str(key)] = str(value)
        warn(
            f"{type(self).__name__}: entry {key!r} is kept and changes nothing: entries speak to"
            " ONNX Runtime's own parts"
        )

    def _entry(self, key: str) -> str:
        if key not in self._entries:
            have = ", ".join(self._entries) or "none"
            raise InvalidArgument(f"{type(self).__name__}: no entry {key!r}; entries are {have}")
        return self._entries[key]


_OF_ONE = "operators follow each other, each on all threads of the session"


class SessionOptions(_Options):
    """Options of a session.

    Attributes:
        intra_op_num_threads: how many threads compute; 0 for all cores.
        graph_optimization_level: ORT_DISABLE_ALL runs one kernel an operator (`plain`).
        use_deterministic_compute: True chooses kernels by what is expected of them alone, so that
            every session gives the same bits (`tune=False`).
        enable_profiling: True times all runs; `InferenceSession.end_profiling` writes the file,
            whose name begins with profile_file_prefix.
        log_severity_level, log_verbosity_level, logid: kept; nothing is logged.
        enable_cpu_mem_arena, enable_mem_pattern, enable_mem_reuse: memory is planned when a shape
            is bound, always; False is ignored with a warning.
        inter_op_num_threads, execution_mode, use_per_session_threads: operators follow each other,
            so that other values are ignored with a warning.
        optimized_model_filepath: refused; `soapstone optimize` writes models.
    """

    intra_op_num_threads: int
    inter_op_num_threads: int
    graph_optimization_level: GraphOptimizationLevel
    execution_mode: ExecutionMode
    use_deterministic_compute: bool
    enable_profiling: bool
    profile_file_prefix: str
    log_severity_level: int
    log_verbosity_level: int
    logid: str
    enable_cpu_mem_arena: bool
    enable_mem_pattern: bool
    enable_mem_reuse: bool
    use_per_session_threads: bool
    optimized_model_filepath: str

    _fields: ClassVar[dict[str, Any]] = {
        "intra_op_num_threads": 0,
        "inter_op_num_threads": 0,
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
        "use_deterministic_compute": False,
        "enable_profiling": False,
        "profile_file_prefix": "onnxruntime_profile_",
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "enable_cpu_mem_arena": True,
        "enable_mem_pattern": True,
        "enable_mem_reuse": True,
        "use_per_session_threads": True,
        "optimized_model_filepath": "",
    }
    _ignored: ClassVar[dict[str, str]] = {
        "inter_op_num_threads": _OF_ONE,
        "execution_mode": _OF_ONE,
        "use_per_session_threads": "a session has threads of its own",
        **dict.fromkeys(
            ("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse"),
            "memory is planned when a shape is bound",
        ),
    }
    _same: ClassVar[dict[str, Any]] = {"inter_op_num_threads": 1}
    _refused: ClassVar[dict[str, str]] = {
        "optimized_model_filepath": "`soapstone optimize` writes models"
    }
    _methods: ClassVar[dict[str, str]] = {
        "register_custom_ops_library": "operators come from plugins (CONTRIBUTING.md)",
        **dict.fromkeys(
            ("add_initializer", "add_external_initializers"), "weights come from the model's file"
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._dims: dict[str, int] = {}

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Give a symbolic dim an extent. dim_name: of it. dim_value: the extent.

        Raises:
            InvalidArgument: a negative extent.
        """
        if int(dim_value) < 0:
            raise InvalidArgument(f"dim {dim_name!r}: extent {dim_value} found, 0 or more needed")
        self._dims[dim_name] = int(dim_value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keep an entry, with a warning: key and value mean nothing here."""
        self._add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """Return the value of an entry. key: of it."""
        return self._entry(key)

    def has_providers(self) -> bool:
        """Return False: providers are given to sessions."""
        return False


class RunOptions(_Options):
    """Options of a run.

    Attributes:
        log_severity_level, log_verbosity_level, logid: kept; nothing is logged.
        only_execute_path_to_fetches: a bound shape computes all outputs; True is ignored with a
            warning.
        terminate: refused; a run that has begun ends.
    """

    log_severity_level: int
    log_verbosity_level: int
    logid: str
    only_execute_path_to_fetches: bool
    terminate: bool

    _fields: ClassVar[dict[str, Any]] = {
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "only_execute_path_to_fetches": False,
        "terminate": False,
    }
    _ignored: ClassVar[dict[str, str]] = {
        "only_execute_path_to_fetches": "a bound shape computes all outputs"
    }
    _refused: ClassVar[dict[str, str]] = {"terminate": "a run that has begun ends"}

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Keep an entry, with a warning: key and value mean nothing here."""
        self._add(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """Return the value of an entry. key: of it."""
        return self._entry(key)
