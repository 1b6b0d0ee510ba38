"""Costs for targets other than the executor: ONNX Runtime, measured, and described devices."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import onnx
import onnxruntime
import pytest

from soapstone.cache.store import Store
from soapstone.frontend.onnx import UnsupportedError
from soapstone.frontend.optimization.runners import exported as export
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Role
from soapstone.search.cost import Weights, ort_profile
from soapstone.search.cost.machine import Device, DeviceError, RooflineCost
from soapstone.search.cost.onnxruntime import OnnxRuntimeCost
from soapstone.search.cost.ort_groups import determined, groups


class Net:
    """A graph under construction, with random weights."""

    def __init__(self):
        self.builder = GraphBuilder("net")
        self.weights = {}
        self.random = np.random.default_rng(3)

    def input(self, *shape, dtype="float32"):
        return self.builder.input(self.builder.unique("x"), shape, dtype)

    def weight(self, *shape, value=None):
        name = self.builder.input(self.builder.unique("w"), shape, role=Role.PARAMETER)
        random = self.random.random(shape, np.float32) + 0.1
        self.weights[name] = random if value is None else np.full(shape, value, np.float32)
        return name

    def __call__(self, operator, *inputs, **attributes):
        return self.builder.apply(operator, *inputs, **attributes)[0]

    def conv(self, x, channels, kernel=1, **attributes):
        """A convolution that keeps the extents, and its relu."""
        groups = attributes.get("groups", 1)
        inward = self.builder.spec(x).shape[1] // groups
        weight = self.weight(channels, inward, kernel, kernel)
        pad = (kernel // 2,) * 4
        made = self("conv2d", x, weight, self.weight(channels), padding=pad, **attributes)
        return self("relu", made)

    def graph(self, *outputs):
        self.builder.output(*outputs)
        return self.builder.build(), self.weights


def fire():
    """Two convolutions on one input, concatenated, and pooled: all in the blocked layout."""
    net = Net()
    x = net.conv(net.input(1, 3, 16, 16), 32, 3)
    x = net("concat", net.conv(x, 16), net.conv(x, 32, 3), axis=1)
    x = net("max_pool2d", x, kernel=(2, 2), stride=(2, 2))
    return net.graph(net.conv(x, 16))


def residual():
    """Batch norm and a shortcut after convolutions, whose relu has two readers."""
    net = Net()
    x = net.conv(net.input(1, 16, 10, 10), 32)
    y = net("conv2d", x, net.weight(32, 32, 3, 3), padding=(1, 1, 1, 1), bias=False)
    y = net("batch_norm_inference", y, *(net.weight(32) for _ in range(4)))
    y = net("relu", net("add", y, x))
    return net.graph(net("add", net.conv(y, 32), y))


def mixed():
    """A plain operator between two that want the blocked layout."""
    net = Net()
    x = net.conv(net.input(1, 16, 8, 8), 32)
    x = net("softmax", x, axis=3)
    return net.graph(net.conv(x, 48))


def gelu():
    """GELU spelled out after a matrix product with a bias."""
    net = Net()
    x = net("matmul", net.input(6, 16), net.weight(16, 24))
    x = net("add", x, net.weight(24))
    y = net("erf", net("div", x, net.weight(value=math.sqrt(2))))
    y = net("add", y, net.weight(value=1.0))
    return net.graph(net("mul", net("mul", x, y), net.weight(value=0.5)))


def norm():
    """Layer norm spelled out, on a sum."""
    net = Net()
    x = net("add", net.input(4, 8, 32), net.input(4, 8, 32))
    centred = net("sub", x, net("reduce_mean", x, axes=(2,), keepdims=True))
    square = net("power", centred, exponent=2.0)
    mean = net("reduce_mean", square, axes=(2,), keepdims=True)
    root = net("sqrt", net("add", mean, net.weight(value=1e-5)))
    y = net("mul", net("div", centred, root), net.weight(32))
    return net.graph(net("add", y, net.weight(32)))


def folded():
    """A product whose weights are computed from others."""
    net = Net()
    wide = net("concat", net.weight(16, 8), net.weight(16, 8), axis=1)
    x = net("matmul", net.input(4, 16), net("relu", wide))
    return net.graph(net("softmax", net("transpose", x, permutation=(1, 0)), axis=-1))


def crossing():
    """Values that leave a group and come back into the sums behind it."""
    net = Net()
    a = net.conv(net.input(1, 16, 6, 6), 16)
    b = net.conv(a, 16)
    c = net("add", net("sigmoid", a), b)
    d = net("add", net.conv(c, 16), net("mul", a, c))
    return net.graph(net("relu", d), b)


NETS = [fire, residual, mixed, gelu, norm, folded, crossing]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return Store("cost", tmp_path_factory.mktemp("costs") / "costs.sqlite")


@pytest.fixture(autouse=True)
def no_further_attempts(monkeypatch):
    """Times are of no account here, so busy runs count too."""
    monkeypatch.setattr(ort_profile, "_SLOW", math.inf)


@pytest.fixture(scope="module")
def model(database):
    return OnnxRuntimeCost(export, 1, database=database, weights=Weights.CACHED)


def optimised_nodes(graph, weights, path):
    """How many operators ONNX Runtime runs for the whole graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(
        export(graph, weights), options, providers=["CPUExecutionProvider"]
    )
    return len(onnx.load(str(path)).graph.node)


# ONNX Runtime


@pytest.mark.parametrize("net", NETS)
def test_groups_compute_the_graph(net):
    graph, weights = net()
    known = determined(graph, weights.keys())
    found = groups(graph, known)
    members = [node.name for group in found for node in group.nodes]
    assert sorted(members) == sorted(n.name for n in graph.nodes if n.outputs[0] not in known)
    random = np.random.default_rng(0)
    values = dict(weights)
    for name in graph.inputs(Role.INPUT):
        values[name] = random.random(graph.tensors[name].shape, np.float32)
    wanted = interpret(graph, values)
    for node in graph.nodes:
        if node.outputs[0] in known:
            outputs = node.spec.run(node.attributes, *(values[name] for name in node.inputs))
            values |= zip(node.outputs, outputs)
    pending = list(found)
    while pending:
        ready = next(g for g in pending if values.keys() >= {*g.inputs, *g.fixed})
        pending.remove(ready)
        inner = dict(values)
        for node in ready.nodes:
            outputs = node.spec.run(node.attributes, *(inner[name] for name in node.inputs))
            inner |= zip(node.outputs, outputs)
        values |= {name: inner[name] for name in ready.outputs}  # what others may read
    for name in graph.outputs:
        np.testing.assert_array_equal(values[name], wanted[name])


@pytest.mark.parametrize("net", NETS)
def test_launches_are_those_of_onnx_runtime(net, model, tmp_path):
    graph, weights = net()
    cost = model.cost(graph, weights)
    assert cost.launches == optimised_nodes(graph, weights, tmp_path / "optimised.onnx")
    assert 0 < cost.time_us < math.inf
    assert not cost.estimated


def test_a_graph_is_the_sum_of_its_groups(model):
    graph, weights = residual()
    lines = model.explain(graph, weights)
    overhead = model.cost(graph, weights).time_us - sum(us for _, us in lines)
    assert 0 <= overhead < 0.2 * sum(us for _, us in lines) + 50
    joined = {text for text, _ in lines}
    assert "conv2d + batch_norm_inference + add + relu" in joined


def test_times_are_measured_once(database, model):
    graph, weights = fire()
    first = model.cost(graph, weights)
    again = OnnxRuntimeCost(
        export, 1, database=Store("cost", database.path), weights=Weights.CACHED
    )
    assert again.cost(graph, weights) == first
    assert again.measured == 0
    other = OnnxRuntimeCost(export, 2, database=database, weights=Weights.CACHED)
    other.cost(*gelu())
    assert other.measured > 0  # other threads, other times


def test_names_and_contents_of_weights_do_not_matter(model):
    graph, weights = gelu()
    model.cost(graph, weights)
    before = model.measured
    names = {name: f"other.{name}" for name in graph.tensors}
    nodes = tuple(
        dataclasses.replace(
            node,
            inputs=tuple(names[i] for i in node.inputs),
            outputs=tuple(names[o] for o in node.outputs),
        )
        for node in graph.nodes
    )
    renamed = dataclasses.replace(
        graph,
        tensors={names[n]: s for n, s in graph.tensors.items()},
        roles={names[n]: r for n, r in graph.roles.items()},
        nodes=nodes,
        outputs=tuple(names[o] for o in graph.outputs),
    )
    changed = {names[n]: a + 1 if a.size > 1 else a for n, a in weights.items()}
    assert model.cost(renamed, changed) == model.cost(graph, weights)
    assert model.measured == before


def test_scalars_decide_fusions(model):
    graph, weights = gelu()
    fused = model.cost(graph, weights).launches
    other = {n: a * 3 if a.shape == () else a for n, a in weights.items()}
    assert model.cost(graph, other).launches > fused  # no GELU any more


def test_what_weights_determine_is_free(model):
    graph, weights = folded()
    assert [text for text, _ in model.explain(graph, weights)] == ["matmul", "transpose", "softmax"]


def test_conversions_at_the_boundary_follow_layouts(model):
    graph, weights = mixed()
    x, y = graph.inputs(Role.INPUT)[0], graph.outputs[0]
    plain = model.cost(graph, weights)
    blocked = {x: (0, 2, 3, 1), y: (0, 2, 3, 1)}
    inside = model.cost(graph, weights, blocked)
    assert plain.launches - inside.launches == 2
    texts = [text for text, _ in model.explain(graph, weights, blocked)]
    assert [text.partition(" float")[0] for text in texts[-2:]].count("to blocked") == 1


def test_flops_bytes_and_memory(model):
    net = Net()
    x = net.input(8, 32)
    y = net("matmul", x, net.weight(32, 16))
    graph, weights = net.graph(net("softmax", y, axis=-1))
    cost = model.cost(graph, weights)
    softmax = graph.flops(graph.nodes[1])
    assert cost.flops == 2 * 8 * 32 * 16 + softmax
    assert cost.bytes == 4 * ((8 * 32 + 32 * 16 + 8 * 16) + 2 * 8 * 16)
    assert cost.peak_bytes == 4 * (8 * 32 + 8 * 16)  # then x is dead, and the result is as large


def test_more_work_costs_more(model):
    def product(k):
        net = Net()
        return net.graph(net("matmul", net.input(256, k), net.weight(k, 256)))

    assert model.cost(*product(2048)).time_us > 2 * model.cost(*product(64)).time_us


def test_integers_are_indices_or_divisors(model):
    net = Net()
    x = net("gather", net.weight(1, 8), net.input(4, dtype="int64"), axis=0)
    y = net("div", net.input(4, dtype="int32"), net.input(4, dtype="int32"))
    graph, weights = net.graph(x, y)
    assert 0 < model.cost(graph, weights).time_us < math.inf


def test_operators_without_counterpart_are_refused(model):
    net = Net()
    graph, weights = net.graph(net("relu_grad", net.input(4, 4), net.input(4, 4)))
    with pytest.raises(UnsupportedError, match="relu_grad"):
        model.cost(graph, weights)


# Described devices

DEVICE = Device(
    name="toy",
    flops_per_s={"float32": 1e12},
    bytes_per_s=1e11,
    memory_bytes=1 << 30,
    launch_us=3.0,
    full_rate_results=1024,
    compute_share=0.5,
    memory_share=0.8,
)


def product(m, k, n):
    net = Net()
    return net.graph(net("matmul", net.input(m, k), net.input(k, n)))


def test_roofline_of_arithmetic_and_of_memory():
    m, k, n = 64, 4096, 64
    full = RooflineCost(DEVICE).cost(*product(m, k, n))
    assert full.estimated
    assert full.flops == 2 * m * k * n
    assert full.time_us == pytest.approx(3 + 1e6 * full.flops / 0.5e12)
    small = RooflineCost(DEVICE).cost(*product(8, k, 8))  # 64 of 1024 results: a sixteenth
    assert small.time_us == pytest.approx(3 + 1e6 * small.flops * 16 / 0.5e12)
    net = Net()
    moved = RooflineCost(DEVICE).cost(*net.graph(net("relu", net.input(1000, 1000))))
    assert moved.time_us == pytest.approx(3 + 1e6 * 8e6 / 0.8e11)
    assert moved.bytes == 8e6


def test_devices_of_the_paper():
    graph, weights = fire()
    costs = {name: RooflineCost(name).cost(graph, weights) for name in ("P100", "v100")}
    assert costs["P100"].flops == costs["v100"].flops
    assert costs["P100"].launches == costs["v100"].launches
    big, none = product(2048, 2048, 2048)
    p100, v100 = (RooflineCost(name).cost(big, none).time_us for name in ("P100", "V100"))
    assert 1.2 < p100 / v100 < 1.6  # the ratio of their peaks is 1.48
    assert set(Device.shipped()) >= {"p100", "v100"}


def test_a_wide_device_gains_more_from_merging():
    """MetaFlow, Figure 7: one graph is not the best on all devices."""

    def convolutions(merged):
        net = Net()
        x = net.input(1, 192, 60, 60)
        if merged:
            return net.graph(net.conv(x, 128, 3))
        return net.graph(net.conv(x, 64, 3), net.conv(x, 64, 3))

    def gain(name):
        model = RooflineCost(name)
        apart, merged = (model.cost(*convolutions(each)).time_us for each in (False, True))
        return apart / merged

    assert gain("V100") > 1.2 > gain("P100") > 1
    narrow = dataclasses.replace(DEVICE, full_rate_results=1, launch_us=0.0)
    assert gain(narrow) == pytest.approx(1)


def test_what_does_not_fit_takes_for_ever():
    tiny = dataclasses.replace(DEVICE, memory_bytes=3 * 4 * 64 * 64 - 1)
    assert RooflineCost(tiny).cost(*product(64, 64, 64)).time_us == math.inf
    fits = dataclasses.replace(DEVICE, memory_bytes=3 * 4 * 64 * 64)
    assert RooflineCost(fits).cost(*product(64, 64, 64)).time_us < math.inf


def test_a_type_without_a_rate_is_refused():
    net = Net()
    graph, _ = net.graph(net("relu", net.input(4, 4, dtype="float64")))
    with pytest.raises(DeviceError, match=r"'toy'.*float64 found.*float32"):
        RooflineCost(DEVICE).cost(graph, {})
    net = Net()
    graph, _ = net.graph(net("add", *(net.input(4, dtype="int32") for _ in range(2))))
    assert RooflineCost(DEVICE).cost(graph, {}).time_us >= 3


def test_a_device_file_is_read_back(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(DEVICE.to_json()))
    assert Device.load(path) == DEVICE
    assert RooflineCost(path).device == DEVICE
    for name in Device.shipped():
        assert Device.from_json(Device.load(name).to_json()) == Device.load(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch_us": -1.0}, "'launch_us': -1.0 found, a number from 0 needed"),
        ({"bytes_per_s": 0}, "'bytes_per_s'"),
        ({"bytes_per_s": "fast"}, "'bytes_per_s'.*fast.*a finite number needed"),
        ({"memory_share": 1.5}, "'memory_share': 1.5 found, a number above 0, at most 1"),
        ({"flops_per_s": {"float64": 1e12}}, "a rate for 'float32' needed"),
        ({"flops_per_s": {"float32": 1e12, "int8": 1e13}}, "'int8' found, one of float32"),
        ({"flops_per_s": {"float32": None}}, "flops_per_s.*'float32'.*a finite number"),
        ({"full_rate_results": 0.5}, "'full_rate_results'.*an integer from 1"),
        ({"tensor_cores": True}, "unknown field 'tensor_cores'"),
        ({"launch_us": ...}, "'launch_us' is missing"),
        ({"version": 2}, "'version'"),
    ],
)
def test_faults_of_a_device_file(change, message, tmp_path):
    data = {**DEVICE.to_json(), **change}
    data = {name: value for name, value in data.items() if value is not ...}
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DeviceError, match=message):
        Device.load(path)


def test_no_such_device():
    with pytest.raises(DeviceError, match=r"'k40'.*p100, v100"):
        Device.load("k40")


def test_costs_of_training_graphs():
    net = Net()
    x, w = net.input(4, 8), net.builder.input("w", (8, 2), role=Role.PARAMETER)
    y = net("matmul", x, w)
    graph, _ = net.graph(y)
    assert isinstance(graph, Graph)
    assert RooflineCost(DEVICE, training=True).cost(graph, {}).launches == 1
