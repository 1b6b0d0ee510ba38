"""Strategies: how every operator of a graph is split and placed, and where every value stays.

A strategy holds the configurations of a whole graph, the reshards between operators (TensorOpt),
what becomes of values between their uses, layouts, and kernel variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from soapstone.ir.dims import Signature
from soapstone.ir.errors import StrategyError
from soapstone.ir.files import json_fields
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import (
    Configuration,
    Keep,
    Reshard,
    check_configuration,
    check_replicated,
    inherited,
    once,
    resolved,
)
from soapstone.ir.strategy.recomputation import check_recomputation
from soapstone.ir.strategy.reshards import check_reshard, reshards_from_json, reshards_to_json
from soapstone.records import dataclass

FORMAT, VERSION = "soapstone-strategy", 1
DEFAULT = "*"  # the entry that configures every operator without one of its own


@dataclass(frozen=True, repr=False)
class Strategy:
    """How a graph runs on a machine.

    Attributes:
        configurations: by node name. A node without one follows its origin's, else the entry `*`,
            else it is one point task.
        reshards: by (value, consuming node); of gradients too, whose way is their own.
        tensors: by value; values left out are kept.
        layouts: axis order by value, outermost first; values left out are in C order.
        variants: kernel variant by node name.
        model: name of the graph; model_hash: its structural hash, empty for any graph.
        machine: the description of the machine it was made for, empty for any machine.
        inputs: the shapes of that graph's inputs, by name; empty where they are not told.
        provenance: how it was found.
    """

    configurations: Mapping[str, Configuration] = field(default_factory=dict)
    reshards: Mapping[tuple[str, str], Reshard] = field(default_factory=dict)
    tensors: Mapping[str, Keep] = field(default_factory=dict)
    layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    model_hash: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict, metadata={"optional": True})
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in ("layouts", "inputs"):
            made = {name: tuple(numbers) for name, numbers in getattr(self, each).items()}
            object.__setattr__(self, each, made)
        for name in (
            "configurations",
            "reshards",
            "tensors",
            "layouts",
            "variants",
            "machine",
            "inputs",
            "provenance",
        ):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @cached_property
    def _whole(self) -> bool:
        """Whether operators without a configuration of their own are one point task anywhere."""
        return self.configurations.get(DEFAULT) == Configuration()

    @property
    def plain(self) -> bool:
        """Whether it says nothing of operators, and of values no more than layouts."""
        more = self.reshards or self.tensors or self.variants
        return self._whole and len(self.configurations) == 1 and not more

    @cached_property
    def _resolved(self) -> dict[str, tuple[tuple[object, ...], Configuration]]:
        """What each node's configuration was worked out from, and what it is."""
        return {}

    # What a node's configuration is

    def configuration(self, graph: Graph, node: Node) -> Configuration:
        """Return the configuration of a node: its own, its origin's by dim name, `*`, or whole.

        node: one of the graph's.
        A configuration taken over drops the dims that the node does not have or may not split.
        Every degree is capped to the extent, and cuts of another extent (a last, smaller batch)
        become equal tiles; the points that remain keep their processors. What is left of a run is
        not there in copies (`once`). It is worked out once for
        a node of one shape: the passes of lowering, which ask for the same again, share it.

        Raises:
            StrategyError: the node's own configuration is not legal; names the operator and dim.
        """
        source = self.configurations.get(node.name)
        if source is None and len(self.configurations) == 1 and self._whole:
            return self.configurations[DEFAULT]
        signature = graph.signature(node)
        first = graph.by_name.get(node.origin) if source is None and node.origin else None
        origin = None if first is None else graph.signature(first)
        alone = source is not None and bool(source.replicated and once(graph, node))
        about = signature, origin, node.operator, node.origin, node.rename, alone
        known = self._resolved.get(node.name)
        if known is None or known[0] != about:
            known = self._resolved[node.name] = about, self._resolve(node, signature, origin, alone)
        return known[1]

    def _resolve(
        self, node: Node, signature: Signature, origin: Signature | None, alone: bool
    ) -> Configuration:
        source = self.configurations.get(node.name)
        if source is not None:
            try:
                for name in source.degrees.keys() | source.cuts.keys():
                    signature.check({name: 1})
                capped = {
                    name: min(degree, max(signature.by_name[name].extent, 1))
                    for name, degree in source.degrees.items()
                }
                signature.check(capped, node.spec.lower is not None)
            except StrategyError as error:
                raise StrategyError(f"{node.label}: {error}") from None
            found = resolved(node, signature, source, capped, {}, list(signature.by_name))
            kept = tuple(name for name in source.replicated if name in found.degrees)
            return replace(found, replicated=kept) if kept and not alone else found
        order: list[str] | None = None
        if node.origin is not None and node.origin in self.configurations:
            source = self.configurations[node.origin]
            order = None if origin is None else list(origin.by_name)
        else:
            source = self.configurations.get(DEFAULT)
        if source is None:
            return Configuration()
        rename = dict(node.rename)
        taken = inherited(node, signature, source.degrees, rename)
        return resolved(node, signature, source, taken, rename, order or list(source.degrees))

    def fitted(self, made_for: Graph, graph: Graph) -> Strategy:
        """Return the strategy for a graph of the same operators at other extents: a smaller batch.

        Where an operator names its dims by their extents, as `reshape` does, they are found again
        by the axes that they index. What may not be split there any more is whole.

        made_for: the graph whose dims the configurations name. graph: the one to run.

        Raises:
            StrategyError: devices do not fit the degrees; names the operator.
        """
        items = dict(self.configurations)
        for node in graph.nodes:
            source, before = items.get(node.name), made_for.by_name.get(node.name)
            if source is None or before is None:
                continue
            old, new = made_for.signature(before), graph.signature(node)
            if old.indexed == new.indexed:
                continue
            at = {axes: name for name, axes in old.indexed.items()}
            rename = {name: at.get(axes, name) for name, axes in new.indexed.items()}
            taken = inherited(node, new, source.degrees, rename)
            items[node.name] = resolved(node, new, source, taken, rename, list(old.by_name))
        return replace(self, configurations=items)

    def copies(self, graph: Graph) -> dict[str, int]:
        """Return how many copies of a value there are, where its operator computes several.

        graph: whose values are named.
        """
        if not any(item.replicated for item in self.configurations.values()):
            return {}
        counts = ((node, self.configuration(graph, node).copies) for node in graph.nodes)
        return {name: n for node, n in counts if n > 1 for name in node.outputs}

    # Whether it is legal

    def check(self, graph: Graph, machine: Mapping[str, Any] | None = None) -> None:
        """Raise StrategyError unless the strategy fits the graph and the machine.

        Args:
            machine: the machine's description (`Machine.describe()`); None leaves it out.
        """
        if self.model_hash and self.model_hash != graph.structural_hash:
            raise StrategyError(
                f"strategy is for graph {self.model!r} with hash {self.model_hash};"
                f" {graph.name!r} has hash {graph.structural_hash}: batch size, layers, loss,"
                " precision and optimizer need to be those that it was made for"
            )
        processors = None
        if machine is not None:
            _check_machine(self.machine, machine)
            processors = len(machine["processors"])
        self._check_complete(graph)
        for name, configuration in self.configurations.items():
            if name != DEFAULT:
                node = _node(graph, name, "configurations")
                try:
                    check_configuration(node, graph.signature(node), configuration)
                    check_replicated(graph, node, configuration)
                except StrategyError as error:
                    raise StrategyError(f"{node.label}: {error}") from None
            _check_devices(name, configuration, processors)
        self._check_values(graph)

    def _check_complete(self, graph: Graph) -> None:
        if DEFAULT in self.configurations:
            return
        missing = [
            node.label
            for node in graph.nodes
            if node.origin is None
            and not node.spec.updates
            and node.name not in self.configurations
        ]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise StrategyError(
                f"operators without a configuration: {', '.join(missing[:3])}{more};"
                f" one each, or an entry {DEFAULT!r} for the rest, needed"
            )

    def _check_values(self, graph: Graph) -> None:
        for (value, consumer), reshard in self.reshards.items():
            _check_value(graph, value, "reshards")
            node = _node(graph, consumer, "reshards")
            check_reshard(graph, value, node, reshard, self.configuration(graph, node))
        for value, keep in self.tensors.items():
            _check_value(graph, value, "tensors")
            check_recomputation(graph, value, keep)
        for value, order in self.layouts.items():
            _check_value(graph, value, "layouts")
            rank = graph.tensors[value].rank
            if sorted(order) != list(range(rank)):
                raise StrategyError(
                    f"layouts: {value!r}: axis order {order} found,"
                    f" each axis below {rank} once needed"
                )
        for name in self.variants:
            _node(graph, name, "variants")

    # Files

    def to_json(self) -> dict[str, Any]:
        """Return the strategy as JSON-ready data."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        data |= dict.fromkeys(("model", "model_hash", "machine"))  # come first
        data |= json_fields.as_data(replace(self, reshards={}))
        return data | {"reshards": reshards_to_json(self.reshards)}

    @staticmethod
    def from_json(data: Any) -> Strategy:
        """Return the strategy that JSON data describes.

        Raises:
            StrategyError: a field is unknown, missing or of the wrong type; names it.
        """
        reader = json_fields.Fields(data, "strategy", StrategyError)
        reader.header(FORMAT, VERSION)
        return reader.record(Strategy, reshards=reshards_from_json(reader.items("reshards")))

    def save(self, path: str | Path) -> None:
        """Write the strategy as JSON; a file that exists is replaced whole or not at all."""
        json_fields.save(path, json_fields.dump(self.to_json(), StrategyError))

    @staticmethod
    def load(path: str | Path) -> Strategy:
        """Return the strategy of a file.

        Raises:
            StrategyError: it cannot be read, or a field is wrong; names it.
        """
        return json_fields.load(path, StrategyError, Strategy.from_json)

    def __repr__(self) -> str:
        return f"Strategy({self.model or 'any model'!r}: {len(self.configurations)} configurations)"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        """The strategy as a table, one operator a line."""
        from soapstone.text_table import lines_of

        rows = [("operator", "degrees", "devices", "cuts", "variant")]
        for name, item in self.configurations.items():
            cuts = " ".join(f"{dim}:{','.join(map(str, cut))}" for dim, cut in item.cuts.items())
            devices = _runs(item.devices) or "blocked"
            rows.append((name, str(item), devices, cuts, self.variants.get(name, "")))
        where = self.machine.get("name", "any machine")
        lines = [f"strategy for {self.model or 'any model'} on {where}", *lines_of(rows)]
        lines += [
            f"reshard {value} -> {consumer}: {', '.join(map(str, item.path)) or 'none'};"
            f" {item.kept} kept"
            for (value, consumer), item in self.reshards.items()
        ]
        lines += [f"{keep} {value}" for value, keep in self.tensors.items() if keep != Keep.KEEP]
        lines += [f"layout {value}: {order}" for value, order in self.layouts.items()]
        return "\n".join(lines)


def _runs(devices: Sequence[int]) -> str:
    """Return processor indices with consecutive ones as a range: 0-3 8."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _node(graph: Graph, name: str, where: str) -> Node:
    node = graph.by_name.get(name)
    if node is None:
        raise StrategyError(f"{where}: operator {name!r} does not exist in graph {graph.name!r}")
    return node


def _check_value(graph: Graph, name: str, where: str) -> None:
    if name not in graph.tensors:
        raise StrategyError(f"{where}: value {name!r} does not exist in graph {graph.name!r}")


def _check_devices(name: str, item: Configuration, processors: int | None) -> None:
    if name == DEFAULT and item.replicated:
        found = ", ".join(item.replicated)
        raise StrategyError(f"operator {name!r}: replicated {found} found, of one operator needed")
    if item.devices and len(item.devices) != item.points:
        raise StrategyError(
            f"operator {name!r}: {len(item.devices)} devices found, {item.points} needed,"
            " one a point"
        )
    for device in item.devices:
        if processors is not None and not 0 <= device < processors:
            raise StrategyError(
                f"operator {name!r}: device {device} found, 0 to {processors - 1} needed"
            )


def _check_machine(made_for: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Check that two descriptions are of one machine: its name, processors and their memories."""
    if not made_for:
        return
    if made_for.get("name") != machine.get("name"):
        raise StrategyError(
            f"strategy is for machine {made_for.get('name')!r}; {machine.get('name')!r} found"
        )

    def processors(description: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        found = description.get("processors", [])
        keys = ("name", "kind", "threads", "memory")
        return [tuple(item.get(key) for key in keys) for item in found]

    ours, theirs = processors(made_for), processors(machine)
    if len(ours) != len(theirs):
        raise StrategyError(
            f"strategy is for machine {made_for.get('name')!r} with {len(ours)} processors;"
            f" {len(theirs)} found"
        )
    for a, b in zip(ours, theirs):
        if a != b:
            raise StrategyError(
                f"strategy is for machine {made_for.get('name')!r} with processor {a}; {b} found"
            )
