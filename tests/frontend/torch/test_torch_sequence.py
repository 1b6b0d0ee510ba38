"""Sequence layers on the runtime against PyTorch's with the same weights, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from helpers.session_runs import ran
from torch import nn

from soapstone import GraphBuilder, Machine, Model, Tensor
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.autodiff import gradients

N, T, K, H = 6, 5, 12, 20
MACHINES = {"two workers": {"cpus": 2}, "two threads": {"cpus": 1, "threads": 2}}
machines = pytest.mark.parametrize("machine", MACHINES)


def array(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(
    model: Model,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    seeds: Sequence[Array],
    machine: str,
) -> tuple[list[Array], dict[str, Array]]:
    """Return the outputs, and the gradients of the sum of outputs times seeds, by name."""
    forward = model.build(training=True)
    builder = GraphBuilder(base=forward)
    parts = []
    for number, (output, seed) in enumerate(zip(forward.outputs, seeds, strict=True)):
        (scaled,) = builder.apply("mul", output, builder.input(f"seed{number}", seed.shape))
        axes = tuple(range(seed.ndim))
        parts += builder.apply("reduce_sum", scaled, axes=axes, keepdims=False)
    loss = builder.apply("accumulate", *parts)[0]
    wanted = [*weights, *(n for n in inputs if forward.tensors[n].is_float)]
    grads = gradients(builder, loss, wanted)
    builder.output(*grads.values())
    graph = builder.build().pruned()
    fed = {**weights, **inputs, **{f"seed{i}": seed for i, seed in enumerate(seeds)}}
    found, _ = ran(graph, fed, None, Machine.local(**MACHINES[machine]), "data_parallel")
    return [found[name] for name in forward.outputs], {n: found[g] for n, g in grads.items()}


def compare(found: Array, expected: torch.Tensor | None, what: str) -> None:
    assert expected is not None, what
    wanted = expected.detach().numpy()
    scale = max(float(np.abs(wanted).max()), 3e-2)  # a gradient may be zero but for rounding
    np.testing.assert_allclose(found / scale, wanted / scale, atol=1e-4, err_msg=what)


def check(
    model: Model,
    weights: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Array],
    theirs: Callable[..., tuple[torch.Tensor, ...]],
    machine: str,
) -> None:
    """Compare a model with a function of the same inputs, whose weights it takes.

    weights: leaves, or transposes and sums of them, in float64; their gradients are compared.
    """
    given = {name: torch.from_numpy(np.array(x)) for name, x in inputs.items()}
    leaves = {
        name: x.double().requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
    }
    for weight in weights.values():
        weight.retain_grad()
    outputs = theirs(*leaves.values())
    seeds = [array(100 + i, *output.shape) for i, output in enumerate(outputs)]
    sum((y * torch.from_numpy(s)).sum() for y, s in zip(outputs, seeds)).backward()
    assert set(weights) == set(model.graph.inputs(Role.PARAMETER))
    values = {name: w.detach().numpy().astype(np.float32) for name, w in weights.items()}
    found, grads = run(model, values, inputs, seeds, machine)
    for mine, expected in zip(found, outputs, strict=True):
        compare(mine, expected, "output")
    for name, grad in grads.items():
        compare(grad, (weights[name] if name in weights else leaves[name]).grad, name)


class Shared:
    """PyTorch's recurrent layer computed from leaves laid out as ours."""

    def __init__(self, twin: nn.RNNBase, node: str) -> None:
        self.twin, self.node = twin.double(), node
        self.gru = isinstance(twin, nn.GRU)
        self.leaves: dict[str, torch.Tensor] = {}
        for name, value in twin.named_parameters():
            part, _, end = name.partition("_l")
            if part.startswith("weight"):
                self.leaves[f"{node}.{name}"] = value.detach().T.clone()
            elif self.gru:
                self.leaves[f"{node}.{name}"] = value.detach().clone()
            elif part == "bias_ih":
                total = value.detach() + getattr(twin, f"bias_hh_l{end}").detach()
                self.leaves[f"{node}.bias_l{end}"] = total
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def parameters(self) -> dict[str, torch.Tensor]:
        made = {}
        for name, value in self.twin.named_parameters():
            part, _, end = name.partition("_l")
            if part.startswith("weight"):
                made[name] = self.leaves[f"{self.node}.{name}"].T
            elif self.gru:
                made[name] = self.leaves[f"{self.node}.{name}"]
            else:
                bias = self.leaves[f"{self.node}.bias_l{end}"]
                made[name] = bias if part == "bias_ih" else torch.zeros_like(value)
        return made

    def __call__(self, *values: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y, last = torch.func.functional_call(self.twin, self.parameters(), values)
        return y, last if isinstance(last, tuple) else (last,)


KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "rnn relu": (nn.RNN, {"nonlinearity": "relu"}),
}


@machines
@pytest.mark.parametrize(("layers", "both"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers(kind: str, layers: int, both: bool, machine: str) -> None:
    torch.manual_seed(1)
    make, options = KINDS[kind]
    twin = Shared(
        make(K, H, layers, batch_first=True, bidirectional=both, **options), kind.split()[0]
    )
    model = Model("net")
    layer = getattr(model, kind.split()[0])
    extra = {"activation": "relu"} if options else {}
    y, lasts = layer(model.input("x", (N, T, K)), H, layers=layers, bidirectional=both, **extra)
    model.output(y, *lasts)

    def theirs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, last = twin(x)
        return (y, *(part[i] for i in range(len(last[0])) for part in last))

    check(model, twin.leaves, {"x": array(0, N, T, K)}, theirs, machine)


@machines
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers_from_a_state(kind: str, machine: str) -> None:
    torch.manual_seed(2)
    twin = Shared(KINDS[kind][0](K, H), kind)
    model = Model("net")
    x = model.input("x", (N, T, K))
    names = ["h", "c"][: 2 if kind == "lstm" else 1]
    first = [model.input(name, (N, H)) for name in names]
    steps = model.transpose(x, (1, 0, 2))
    y, lasts = getattr(model, kind)(steps, H, time_major=True, state=first)
    model.output(model.transpose(y, (1, 0, 2)), *lasts)

    def theirs(x: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = tuple(value[None] for value in state)
        y, last = twin(x.transpose(0, 1), first if len(first) > 1 else first[0])
        return (y.transpose(0, 1), *(value[0] for value in last))

    inputs = {"x": array(0, N, T, K)} | {name: array(5, N, H) for name in names}
    check(model, twin.leaves, inputs, theirs, machine)


@machines
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cells_share_their_weights_over_steps(kind: str, machine: str) -> None:
    torch.manual_seed(3)
    name = f"{kind}_cell"
    twin = Shared(KINDS[kind][0](K, H, batch_first=True), name)
    model = Model("net")
    x = model.input("x", (N, T, K))
    cell = getattr(model, name)(K, H)
    state: tuple[Tensor, ...] = ()
    for step in range(T):
        state = cell(model.flatten(model.slice(x, 1, step, step + 1)), *state)
    model.output(*state)
    leaves = {n.removesuffix("_l0"): leaf for n, leaf in twin.leaves.items()}
    check(
        model,
        leaves,
        {"x": array(0, N, T, K)},
        lambda x: tuple(value[0] for value in twin(x)[1]),
        machine,
    )


def nas(
    x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, w: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The cell of Zoph and Le, as TensorFlow wires it."""
    a, b = (x @ w[0]).chunk(8, 1), (h @ w[1] + w[2]).chunk(8, 1)
    s, r, t = torch.sigmoid, torch.relu, torch.tanh
    first = t(s(a[0] + b[0]) * r(a[1] + b[1]))
    second = t(s(a[2] + b[2]) + r(a[3] * b[3]))
    third = t(t(a[4] + b[4]) * s(a[5] + b[5]))
    fourth = s(t(a[6] + b[6]) + s(a[7] + b[7]))
    cell = t(first + c) * second
    return t(cell * t(third + fourth)), cell


@machines
def test_nas_cell(machine: str) -> None:
    model = Model("net")
    x = model.input("x", (N, 2, K))
    cell = model.nas_cell(K, H)
    halves = [model.flatten(model.slice(x, 1, i, i + 1)) for i in range(2)]
    model.output(*cell(halves[1], *cell(halves[0])))
    shapes = {"weight_ih": (K, 8 * H), "weight_hh": (H, 8 * H), "bias": (8 * H,)}
    weights = {
        f"nas_cell.{n}": torch.from_numpy(array(i, *s) * 0.3).double().requires_grad_()
        for i, (n, s) in enumerate(shapes.items())
    }

    def theirs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zero = torch.zeros(N, H).double()
        state = nas(x[:, 0], zero, zero, list(weights.values()))
        return nas(x[:, 1], *state, list(weights.values()))

    check(model, weights, {"x": array(9, N, 2, K)}, theirs, machine)


@machines
@pytest.mark.parametrize("width", [K, H])
def test_sru(width: int, machine: str) -> None:
    model = Model("net")
    y, (last,) = model.sru(model.input("x", (N, T, K)), width)
    model.output(y, last)
    columns = 3 if width == K else 4
    shapes = {"weight_l0": (K, columns * width), "bias_l0": (2 * width,)}
    weights = {
        f"sru.{n}": torch.from_numpy(array(i, *s)).double().requires_grad_()
        for i, (n, s) in enumerate(shapes.items())
    }

    def theirs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, b = weights.values()
        new, forget, reset, *rest = (x @ w).chunk(columns, 2)
        highway = rest[0] if rest else x
        forget, reset = torch.sigmoid(forget + b[:width]), torch.sigmoid(reset + b[width:])
        cell, made = torch.zeros(N, width).double(), []
        for step in range(T):
            cell = forget[:, step] * cell + (1 - forget[:, step]) * new[:, step]
            made.append(reset[:, step] * cell + (1 - reset[:, step]) * highway[:, step])
        return torch.stack(made, 1), cell

    check(model, weights, {"x": array(9, N, T, K)}, theirs, machine)


@machines
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention(causal: bool, masked: bool, machine: str) -> None:
    torch.manual_seed(4)
    width, heads = 16, 4
    twin = nn.MultiheadAttention(width, heads, batch_first=True).double()
    nn.init.normal_(twin.in_proj_bias)
    nn.init.normal_(twin.out_proj.bias)
    model = Model("net")
    x, memory = model.input("x", (N, T, width)), model.input("memory", (N, T + 3, width))
    mask = model.input("mask", (N, 1, 1, T + 3)) if masked else None
    name = "multi_head_attention"
    model.output(model.multi_head_attention(x, memory, memory, heads, mask, causal=causal))
    leaves = {}
    for part, w, b in zip(
        ("query", "key", "value"), twin.in_proj_weight.chunk(3), twin.in_proj_bias.chunk(3)
    ):
        leaves[f"{name}.{part}.weight"] = w.detach().T.clone().requires_grad_()
        leaves[f"{name}.{part}.bias"] = b.detach().clone().requires_grad_()
    leaves[f"{name}.output.weight"] = twin.out_proj.weight.detach().T.clone().requires_grad_()
    leaves[f"{name}.output.bias"] = twin.out_proj.bias.detach().clone().requires_grad_()

    def theirs(x: torch.Tensor, memory: torch.Tensor, *mask: torch.Tensor) -> tuple[torch.Tensor]:
        w = list(leaves.values())
        shared = {
            "in_proj_weight": torch.cat([w[0].T, w[2].T, w[4].T]),
            "in_proj_bias": torch.cat([w[1], w[3], w[5]]),
            "out_proj.weight": w[6].T,
            "out_proj.bias": w[7],
        }
        hide = torch.zeros(N, heads, T, T + 3).double()
        if causal:
            later = torch.ones(T, T + 3, dtype=torch.bool).triu(1)
            hide = hide.masked_fill(later, -torch.inf)
        for values in mask:
            hide = hide + values
        arguments = {"attn_mask": hide.flatten(0, 1), "need_weights": False}
        made = torch.func.functional_call(twin, shared, (x, memory, memory), arguments)
        return (made[0],)

    inputs = {"x": array(0, N, T, width), "memory": array(1, N, T + 3, width)}
    if masked:
        inputs["mask"] = array(2, N, 1, 1, T + 3)
    check(model, leaves, inputs, theirs, machine)


@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (70, 517)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_long_sequences(queries: int, keys: int, causal: bool) -> None:
    """Several blocks of queries, the last one shorter; causal ones see fewer keys."""
    model = Model("net")
    q = model.input("q", (1, queries, 2, 24))
    k, v = (model.input(name, (1, keys, 2, 24)) for name in "kv")
    model.output(model.scaled_dot_product_attention(q, k, v, causal=causal))
    shapes = {"q": (1, queries, 2, 24), "k": (1, keys, 2, 24), "v": (1, keys, 2, 24)}
    inputs = {name: array(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    def theirs(*heads: torch.Tensor) -> tuple[torch.Tensor]:
        moved = (x.transpose(1, 2) for x in heads)
        made = nn.functional.scaled_dot_product_attention(*moved, is_causal=causal)
        return (made.transpose(1, 2),)

    check(model, {}, inputs, theirs, "two threads")


@machines
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_embedding_bag(reduction: str, machine: str) -> None:
    table = torch.from_numpy(array(0, 50, 8)).double().requires_grad_()
    model = Model("net")
    ids = model.input("ids", (N, T), "int64")
    model.output(model.embedding_bag(ids, 50, 8, reduction=reduction))
    drawn = np.random.default_rng(1).integers(0, 50, (N, T))
    check(
        model,
        {"embedding_bag.table": table},
        {"ids": drawn},
        lambda ids: (nn.functional.embedding_bag(ids, table, mode=reduction),),
        machine,
    )


def test_learned_positions() -> None:
    table = torch.from_numpy(array(0, T, K)).double().requires_grad_()
    model = Model("net")
    model.output(model.learned_positions(model.input("x", (N, T, K))))
    weights = {"learned_positions.table": table}
    check(model, weights, {"x": array(1, N, T, K)}, lambda x: (x + table,), "two workers")
