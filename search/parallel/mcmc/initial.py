"""Initial strategies of a search: data and model parallelism, expert-designed ones, random ones.

Jia, section 3.7.2. Experts parallelize convolutional networks by samples, and their dense layers by
output channels (Krizhevsky, One weird trick, 2014); recurrent networks by samples across computers,
and within one by layers, each on a device (Wu et al., Google's NMT system, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum

import numpy as np

from soapstone.engine.parallelism import legal, split
from soapstone.ir.dims import Kind
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.search.cost.launches import work
from soapstone.search.parallel.problem.operators import Operator
from soapstone.search.parallel.problem.prepare import Model

Configurations = Mapping[str, Configuration]


class Parallel(StrEnum):
    """What splitting a dim of an operator divides (Jia, section 3.3), or leaves to be summed."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    REDUCED = "reduced"


def kinds_of_dims(graph: Graph, node: Node) -> dict[str, Parallel]:
    """Return the kind of each dim of an operator that may be split."""
    signature, sample = graph.signature(node), graph.sample_dims.get(node.name)
    weights = {
        dim
        for name, operand in zip(node.inputs, signature.inputs)
        if graph.roles.get(name) is Role.PARAMETER
        for dim in operand.dims
    }
    made = signature.outputs[0].dims
    kinds = {}
    for dim in signature.dims:
        if dim.kind is Kind.WHOLE:
            continue
        if dim.name == sample:
            kinds[dim.name] = Parallel.SAMPLE
        elif dim.name not in made:
            kinds[dim.name] = Parallel.REDUCED
        elif dim.name in weights:
            kinds[dim.name] = Parallel.PARAMETER
        else:
            kinds[dim.name] = Parallel.ATTRIBUTE
    return kinds


def data_parallel(model: Model) -> Configurations:
    """Return data parallelism as in `engine.parallelism`, one part for each device."""
    return _by_samples(model, list(range(len(model.machine.processors))))


def one_computer(model: Model) -> Configurations:
    """Return the strategy that splits every operator over samples on the first computer alone."""
    return _by_samples(model, computers_of(model.machine)[0])


def computers_of(machine: Machine) -> list[list[int]]:
    """Return the numbers of the processors of each computer."""
    members: dict[str, list[int]] = {}
    for number, processor in enumerate(machine.processors):
        members.setdefault(processor.node, []).append(number)
    return list(members.values())


def _by_samples(model: Model, devices: list[int]) -> Configurations:
    return {item.name: _samples(model, item, devices) for item in _chosen(model)}


def model_parallel(model: Model) -> Configurations:
    """Return the strategy that gives each device consecutive operators of equal total work."""
    devices = len(model.machine.processors)
    chosen = _chosen(model)
    flops = [
        sum(work(model.graph, node)[0] for node in (*item.ahead, *item.back)) for item in chosen
    ]
    total, done, configurations = sum(flops) or 1.0, 0.0, {}
    for item, cost in zip(chosen, flops):
        device = min(devices - 1, int((done + cost / 2) / total * devices))
        configurations[item.name] = Configuration({}, (device,))
        done += cost
    return configurations


def expert(model: Model) -> Configurations:
    """Return the expert-designed strategy for a network of this kind."""
    return _layers(model) if is_recurrent(model) else _one_weird_trick(model)


def is_recurrent(model: Model) -> bool:
    """Return whether several operators share a parameter, as the steps of a recurrent layer do."""
    graph = model.graph
    readers = [
        sum(node.origin is None and not node.overwrites for node in graph.consumers[name])
        for name in graph.inputs(Role.PARAMETER)
    ]
    return max(readers, default=0) > 1


def _one_weird_trick(model: Model) -> Configurations:
    """Return data parallelism, except for dense layers, which are split by output channels."""
    devices = len(model.machine.processors)
    configurations = dict(data_parallel(model))
    for item in _chosen(model):
        signature, column = model.graph.signature(item.node), _column(model, item)
        if column is not None and all(len(operand.axes) <= 3 for operand in signature.inputs):
            configurations[item.name] = _split(model, item, column, range(devices))
    return configurations


def _column(model: Model, item: Operator) -> str | None:
    """Return the dim of a product's output channels; None for other operators."""
    kinds = kinds_of_dims(model.graph, item.node)
    columns = [name for name, kind in kinds.items() if kind is Parallel.PARAMETER]
    return columns[-1] if columns and Parallel.REDUCED in kinds.values() else None


def _layers(model: Model) -> Configurations:
    """Return samples split across computers, and layers distributed over the devices of each."""
    groups = computers_of(model.machine)
    layer_of = _layer_numbers(model)
    configurations = {}
    for item in _chosen(model):
        devices = [group[layer_of[item.name] % len(group)] for group in groups]
        configurations[item.name] = _samples(model, item, devices)
    return configurations


def _layer_numbers(model: Model) -> dict[str, int]:
    """Return the layer of each operator: those with the same parameters, or what they feed."""
    graph = model.graph
    number: dict[tuple[str, ...], int] = {}
    layers: dict[str, int] = {}
    last = 0
    for item in model.operators:
        own = tuple(sorted(n for n in item.node.inputs if graph.roles.get(n) is Role.PARAMETER))
        if own and item.source is None:
            last = number.setdefault(own, len(number))
        else:
            makers = [graph.producers[n].name for n in item.node.inputs if n in graph.producers]
            last = max((layers[name] for name in makers if name in layers), default=last)
        for node in item.ahead:
            layers[node.name] = last
    return layers


def tensor_parallel(model: Model) -> Configurations:
    """Return samples and output channels split together, on a grid of devices.

    The tensor parallelism of Shoeybi et al., Megatron-LM, 2019: by channels within a computer, by
    samples across computers; operators without channels by samples alone.
    """
    samples = model.graph.sample_dims
    computers = computers_of(model.machine)
    inside = len(model.machine.processors) // len(computers)
    configurations = dict(data_parallel(model))
    for item in _chosen(model):
        sample, column = samples.get(item.name), _column(model, item)
        if column is None or sample is None:
            continue
        wanted = {sample: len(computers), column: inside}
        degrees = {
            dim.name: min(wanted[dim.name], dim.extent)
            for dim in model.graph.signature(item.node).dims
            if min(wanted.get(dim.name, 1), dim.extent) > 1
        }
        if list(degrees) == [sample, column] and legal(model.graph, item.node, degrees):
            configurations[item.name] = Configuration(
                degrees, tuple(range(math.prod(degrees.values())))
            )
    return configurations


def randomly(model: Model, seed: int) -> Configurations:
    """Return a strategy in which every operator has random degrees and devices."""
    random = np.random.default_rng(seed)
    devices = len(model.machine.processors)
    configurations = {}
    for item in _chosen(model):
        signature = model.graph.signature(item.node)
        degrees: dict[str, int] = {}
        left = int(random.integers(1, devices + 1))
        for dim in random.permutation(np.array(signature.dims, object)):
            most = min(left, dim.extent)
            choices = [d for d in range(1, most + 1) if left % d == 0]
            if dim.kind is Kind.WHOLE or not choices:
                continue
            degree = int(random.choice(choices))
            if degree > 1 and legal(model.graph, item.node, degrees | {dim.name: degree}):
                degrees[dim.name] = degree
                left //= degree
        ordered = {dim.name: degrees[dim.name] for dim in signature.dims if dim.name in degrees}
        points = math.prod(ordered.values())
        configurations[item.name] = Configuration(
            ordered, tuple(random.permutation(devices)[:points])
        )
    return configurations


def _chosen(model: Model) -> list[Operator]:
    return [item for item in model.operators if item.source is None]


def _samples(model: Model, item: Operator, devices: list[int]) -> Configuration:
    return _split(model, item, model.graph.sample_dims.get(item.name), devices)


def _split(
    model: Model, item: Operator, name: str | None, devices: range | list[int]
) -> Configuration:
    """Return one dim split over devices as far as its extent allows; whole if it allows none."""
    configuration = split(model.graph, item.node, name, devices)
    return Configuration({}, (devices[0],)) if configuration is None else configuration


NAMED: Mapping[str, Callable[[Model], Configurations]] = {
    "data": data_parallel,
    "model": model_parallel,
    "expert": expert,
    "tensor": tensor_parallel,
    "computer": one_computer,
}
