"""Prices graphs for described devices by their roofline: an estimate, not a measurement.

A launch takes its overhead, and then as long as its arithmetic or its memory traffic, whichever is
longer (Williams, Waterman and Patterson 2009). Small results do not fill a wide device, so the rate
of arithmetic falls with the number of results: that is why the best graph differs from device to
device (MetaFlow, Figure 7). Launches are those of soapstone's own lowering: of GPUs that say how
many multiprocessors they have, the CUDA kernels that would be launched there, by their blocks
(`gpus.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from soapstone import json_text
from soapstone.dtypes import HALVES
from soapstone.engine.prepare import Prepared
from soapstone.files import read_text, reason
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Arrays
from soapstone.runtime.machines.machine import CUDA
from soapstone.search.cost.cost import NO_LAYOUTS, Cost, CostModel
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.gpu_resources import FUSED, resources
from soapstone.search.cost.gpus import HOST, Gpu, Host, Priced, priced
from soapstone.search.cost.launches import Key, keys, peak_bytes, work

FORMAT, VERSION = "soapstone-device", 1
_RATED = ("float32", "float64", "float16")  # what rates are of; all else counts as float32
_SHIPPED = Path(__file__).with_name("devices")


def libraries_installed() -> bool:
    """Return whether NVIDIA's libraries are; who uses no GPU imports nothing for it."""
    from soapstone.native.cuda import device

    return device.libraries_installed()


class DeviceError(GraphError):
    """A description of a device that is not legal, or says too little for a graph."""


def roofline(
    flops: float, rate: float, results: float, full: float, nbytes: float, memory_rate: float
) -> float:
    """Return the time of arithmetic or of memory traffic, whichever is longer.

    Searches compile it. `full`: as many results let arithmetic be at its full rate.
    """
    return max(flops / (rate * min(1.0, results / full)), nbytes / memory_rate)


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know of a device.

    Attributes:
        flops_per_s: peak rate of arithmetic for each floating-point type, `float32` at least; other
            types count at that of `float32`.
        bytes_per_s: peak rate of its memory; memory_bytes: how much of it there is.
        launch_us: overhead of a launch in microseconds.
        full_rate_results: how many results a launch computes for arithmetic to be at its full rate.
        compute_share, memory_share: shares of the peaks that kernels reach, above 0 and at most 1.
        source: where the numbers are from.
        gpu: what more is known of a GPU, whose launches are those of CUDA kernels then; `launch_us`
            is that of a node of a CUDA graph.

    Raises:
        DeviceError: a number out of its range; names the field.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    launch_us: float
    full_rate_results: int = 1
    compute_share: float = 1.0
    memory_share: float = 1.0
    source: str = field(default="", compare=False)
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))
        for dtype, rate in self.flops_per_s.items():
            if dtype not in _RATED:
                raise self._fault("flops_per_s", repr(dtype), f"one of {', '.join(_RATED)}")
            if not rate > 0:
                raise self._fault(f"flops_per_s.{dtype}", rate, "a number above 0")
        if "float32" not in self.flops_per_s:
            raise self._fault("flops_per_s", list(self.flops_per_s), "a rate for 'float32'")
        for name in ("bytes_per_s", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise self._fault(name, getattr(self, name), "a number above 0")
        if not self.launch_us >= 0:
            raise self._fault("launch_us", self.launch_us, "a number from 0")
        if self.full_rate_results < 1:
            raise self._fault("full_rate_results", self.full_rate_results, "an integer from 1")
        for name in ("compute_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise self._fault(name, getattr(self, name), "a number above 0, at most 1")
        for record, where in ((self.gpu, "gpu"), (self.gpu and self.gpu.host, "gpu.host")):
            for each in fields(record) if record is not None else ():
                value = getattr(record, each.name)
                if not isinstance(value, Host) and not value > 0:
                    raise self._fault(f"{where}.{each.name}", value, "a number above 0")

    def _fault(self, name: str, found: object, needed: str) -> DeviceError:
        return DeviceError(f"device {self.name!r}: field {name!r}: {found} found, {needed} needed")

    def us(self, flops: float, nbytes: float, results: int, dtype: str = "float32") -> float:
        """Return the time of a launch in microseconds.

        Raises:
            DeviceError: the device has no rate for the type.
        """
        return self.launch_us + 1e6 * roofline(
            *(flops, self.rate(dtype), max(results, 1), self.full_rate_results),
            *(nbytes, self.memory_rate),
        )

    @property
    def memory_rate(self) -> float:
        """Bytes a second that kernels reach."""
        return self.bytes_per_s * self.memory_share

    @property
    def host_link(self) -> tuple[float, float]:
        """What a copy to or from a GPU's host takes, in seconds, and bytes a second of a long one.

        Raises:
            DeviceError: no GPU is said of the device.
        """
        if self.gpu is None:
            raise DeviceError(
                f"device {self.name!r}: no field 'gpu' found, which says how its host is reached;"
                " needed for a plan of what is copied there"
            )
        return self.gpu.host.latency_us * 1e-6, self.gpu.host.bytes_per_s

    def rate(self, dtype: str, kernel: str = "") -> float:
        """Return the operations a second that kernels reach on operands of a type.

        kernel: of a GPU, the name of a kernel of soapstone's own, which may be bound by the
        instructions that it issues, or "" of a library's product, whose halves are multiplied by
        tensor cores. Both reach `compute_share` of what bounds them.

        Raises:
            DeviceError: the device has no rate for the type.
        """
        kind = dtype if dtype in _RATED else "float32"
        if self.gpu is not None and dtype in HALVES:
            kind = "float16" if "float16" in self.flops_per_s else "float32"
        if kind not in self.flops_per_s:
            raise DeviceError(
                f"device {self.name!r}: arithmetic in {kind} found;"
                f" rates are for {', '.join(self.flops_per_s)}"
            )
        peak = self.flops_per_s[kind]
        if self.gpu is not None and kernel:
            issued = resources(kernel).issued
            if issued is not None:  # a multiprocessor issues as often as it adds single numbers
                peak = min(peak, self.flops_per_s["float32"] * issued / FUSED)
        return peak * self.compute_share

    def product_rate(self, dtype: str) -> float:
        """Return the rate of products: of a GPU's by NVIDIA's libraries if these are installed.

        Raises:
            DeviceError: the device has no rate for the type.
        """
        if self.gpu is None or libraries_installed():
            return self.rate(dtype)
        return self.rate(dtype, "staged" if dtype in HALVES else "product_large")

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON-ready data."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found["flops_per_s"] = dict(self.flops_per_s)
        found["gpu"] = json_fields.as_data(self.gpu)
        if self.gpu is None:
            del found["gpu"]
        return {"format": FORMAT, "version": VERSION, **found}

    @staticmethod
    def from_json(data: object, where: str = "device") -> Device:
        """Return the device that parsed JSON describes.

        Raises:
            DeviceError: a missing, unknown or illegal field; names it.
        """
        found = json_fields.Fields(data, where, DeviceError)
        found.header(FORMAT, VERSION)
        rates = json_fields.Fields(
            found.mapping("flops_per_s"), f"{where}: flops_per_s", DeviceError
        )
        named = found.mapping("flops_per_s")
        device = Device(
            name=found.text("name"),
            flops_per_s={name: rates.real(name) for name in named},
            bytes_per_s=found.real("bytes_per_s"),
            memory_bytes=found.integer("memory_bytes", 1),
            launch_us=found.real("launch_us"),
            full_rate_results=found.integer("full_rate_results", 1),
            compute_share=found.real("compute_share"),
            memory_share=found.real("memory_share"),
            source=found.text("source"),
            gpu=Device._gpu(found, data, where),
        )
        found.finish()
        return device

    @staticmethod
    def _gpu(found: json_fields.Fields, data: Any, where: str) -> Gpu | None:
        if "gpu" not in data:
            return None
        inner = json_fields.Fields(found.mapping("gpu"), f"{where}: gpu", DeviceError)
        return inner.record(Gpu)

    @staticmethod
    def load(device: str | Path) -> Device:
        """Return the device of a name in `shipped()`, or of a JSON file.

        Raises:
            DeviceError: there is no such name or file, or it is not a description.
        """
        shipped = _SHIPPED / f"{str(device).lower()}.json"
        path = shipped if str(device).lower() in Device.shipped() else Path(device)
        where = f"device file {str(path)!r}"
        try:
            text = read_text(path, where, DeviceError)
        except OSError as error:
            names = ", ".join(Device.shipped())
            raise DeviceError(
                f"device {str(device)!r}: {reason(error)}; one of {names} or a JSON file needed"
            ) from None
        return Device.from_json(json_text.parse(text, where, DeviceError), where)

    @staticmethod
    def shipped() -> tuple[str, ...]:
        """Return the names of the devices that are described already."""
        return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


class RooflineCost(CostModel):
    """The cost model of a described device; every cost of it is marked as estimated.

    Args:
        device: a description, the name of a shipped one, or a JSON file.
        training: whether graphs are training graphs, without constants.
        libraries: whether a GPU has NVIDIA's libraries, which are asked for products first; None:
            if they are installed here (the extra `cuda-libs`).
    """

    def __init__(
        self,
        device: Device | str | Path,
        *,
        training: bool = False,
        libraries: bool | None = None,
    ) -> None:
        self.device = device if isinstance(device, Device) else Device.load(device)
        self.target = self.device.name
        processor = "cpu" if self.device.gpu is None else CUDA
        self._libraries = libraries
        self._lowering = ExecutorCost(1, training=training, processor=processor)
        self._known: dict[Key, tuple[Priced, ...]] = {}

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return what one execution of the graph costs by the roofline; see `CostModel`.

        What does not fit into the device's memory, constants included, takes for ever.

        Raises:
            DeviceError: the device has no rate for a type of the graph.
        """
        prepared = self._lowering.prepared(graph, constants, layouts)
        found = [each for launches in self._priced(prepared, constants) for each in launches]
        time_us = sum(self._times(found))
        peak = peak_bytes(prepared)
        held = sum(graph.tensors[name].nbytes for name in graph.roles if name in constants)
        if peak + held > self.device.memory_bytes:
            time_us = math.inf
        flops, nbytes = (sum(getattr(each, name) for each in found) for name in ("flops", "nbytes"))
        return Cost(time_us, flops, nbytes, len(found), peak, estimated=True)

    def launches(
        self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS
    ) -> list[tuple[str, float, Priced]]:
        """Return what `cost` is the sum of: each launch's node, its time in us, and why it is so.

        Raises:
            DeviceError: the device has no rate for a type of the graph.
        """
        prepared = self._lowering.prepared(graph, constants, layouts)
        by_node = zip(prepared.nodes, self._priced(prepared, constants))
        found = [(node.name, each) for node, launches in by_node for each in launches]
        times = self._times([each for _, each in found])
        return [(name, us, each) for (name, each), us in zip(found, times)]

    def launch_us(self, prepared: Prepared, constants: Arrays) -> Mapping[str, float]:
        """Return the microseconds of each launched node, overheads included.

        Raises:
            DeviceError: the device has no rate for a type of the graph.
        """
        by_node = self._priced(prepared, constants)
        times = iter(self._times([each for launches in by_node for each in launches]))
        return {
            node.name: sum(next(times) for _ in launches)
            for node, launches in zip(prepared.nodes, by_node)
        }

    def _times(self, found: Sequence[Priced]) -> list[float]:
        """Return what launches take, overheads included.

        Where the host runs one of a GPU's, it enqueues each of them by itself: a launch takes that
        long then, if it is not longer.
        """
        times = [self.device.launch_us + each.busy_us for each in found]
        gpu = self.device.gpu
        if gpu is not None and any(each.kernel == HOST for each in found):
            return [max(gpu.untraced_us, us) for us in times]
        return times

    def _priced(self, prepared: Prepared, constants: Arrays) -> list[tuple[Priced, ...]]:
        """Return the launches of each node, with their prices."""
        known, wanted = self._known, keys(prepared)
        missing = {key: node for key, node in zip(wanted, prepared.nodes) if key not in known}
        gpu = self.device.gpu
        if gpu is None:
            known |= {key: (self._plain(prepared.graph, node),) for key, node in missing.items()}
        elif missing:
            by_name = {launch.node.name: launch for launch in prepared.launches}
            libraries = libraries_installed() if self._libraries is None else self._libraries
            given = gpu, self.device.rate, self.device.memory_rate, libraries, prepared
            for key, node in missing.items():
                known[key] = priced(*given, by_name[node.name], constants)
        return [known[key] for key in wanted]

    def _plain(self, graph: Graph, node: Node) -> Priced:
        """Return a launch of a device of which no more is known than its rates."""
        flops, nbytes = work(graph, node)
        made = [graph.tensors[name] for name in node.outputs]
        results = max((spec.size for spec in made), default=1)
        busy = self.device.us(flops, nbytes, results, made[0].dtype) - self.device.launch_us
        moving = 1e6 * nbytes / self.device.memory_rate
        bound = "memory" if busy <= moving else "arithmetic"
        return Priced(node.operator, "", node.operator, (), (), flops, nbytes, busy, bound)
