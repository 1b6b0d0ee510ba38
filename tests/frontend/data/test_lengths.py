"""Samples of different lengths: what is past a sample's length changes nothing, in any layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from soapstone import SGD, Model, ShapeError
from soapstone.ir.tensor import Array

N, T, K, H = 4, 6, 3, 5
LENGTHS = np.array([6, 1, 3, 5])
MASK = np.arange(T) < LENGTHS[:, None]


def numbers(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def recurrent(kind: str, mask: bool, **settings: Any) -> Model:
    model = Model("m")
    x = model.input("x", (N, T, K))
    lengths = model.input("n", (N, T), "bool") if mask else model.input("n", (N,), "int64")
    y, states = getattr(model, kind)(x, H, lengths=lengths, name="r", **settings)
    model.output(y, *states)
    model.compile(SGD(0.1), loss={y.name: "mse"} | {each.name: "mse" for each in states})
    return model


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_lengths_are_packed_sequences_of_torch(kind: str) -> None:
    mask = kind == "gru"
    model = recurrent(kind, mask, layers=2, bidirectional=True)
    twin = getattr(torch.nn, kind.upper())(K, H, 2, batch_first=True, bidirectional=True)
    parts = {"weight_ih": "weight_ih", "weight_hh": "weight_hh", "bias": "bias_ih"}
    if kind == "gru":
        parts |= {"bias_ih": "bias_ih", "bias_hh": "bias_hh"}
    pairs = {}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        for name, value in model.weights().items():
            part, _, end = name.removeprefix("r.").partition("_l")
            pairs[name] = getattr(twin, f"{parts[part]}_l{end}")
            pairs[name].copy_(torch.from_numpy(np.ascontiguousarray(value.T)))
    x = numbers(N, T, K)
    packed = pack_padded_sequence(
        torch.from_numpy(x), torch.from_numpy(LENGTHS), batch_first=True, enforce_sorted=False
    )
    made, states = twin(packed)
    out = pad_packed_sequence(made, batch_first=True, total_length=T)[0]
    states = states if kind == "lstm" else (states,)
    ends = [state[place] for place in range(4) for state in states]
    given = {"x": x, "n": MASK if mask else LENGTHS}
    labels = [numbers(*each.shape) for each in (out, *ends)]
    for ours, theirs in zip(model.predict(given), (out, *ends), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
    losses = [((a - torch.from_numpy(b)) ** 2).mean() for a, b in zip((out, *ends), labels)]
    torch.stack(losses).sum().backward()
    found = model.gradients(given, dict(zip(model.output_names, labels)))
    for name, parameter in pairs.items():
        np.testing.assert_allclose(found[name].T, parameter.grad.numpy(), rtol=1e-4, atol=1e-6)
    model.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_padded_sample_is_the_sample_alone(reverse: bool) -> None:
    x, first = numbers(1, T, K), numbers(1, H)
    results = []
    for steps in (T, 4):
        model = Model("m", seed=1)
        xs, c = model.input("x", (1, steps, K)), model.input("c", (1, H))
        given = {"x": x[:, :steps], "c": first}
        lengths = None
        if steps == T:
            lengths = model.input("n", (1,), "int32")
            given["n"] = np.array([4], np.int32)
            x[:, 4:] = 100
        y, (last,) = model.sru(xs, H, reverse=reverse, state=(c,), lengths=lengths, name="r")
        model.output(y, last, y.mean(1) if lengths is None else model.mean_over_time(y, lengths))
        model.output(y.max(1) if lengths is None else model.max_over_time(y, lengths))
        model.compile(SGD(0.1), loss={"r": "mse"})
        zeros = np.zeros((1, steps, H), np.float32)
        results.append((model.predict(given), model.gradients(given, {"r": zeros})))
        model.close()
    (padded, slopes), (alone, own) = results
    assert not padded[0][:, 4:].any()
    for ours, theirs in zip((padded[0][:, :4], *padded[1:]), alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for name, value in own.items():  # a mean over 4 steps, not 6
        np.testing.assert_allclose(slopes[name] * T / 4, value, rtol=1e-4, atol=1e-6)


def test_attention_sees_the_keys_that_there_are() -> None:
    model = Model("m", seed=1)
    x, lengths = model.input("x", (N, T, 8)), model.input("n", (N,), "int32")
    mask = model.input("mask", (N, 1, 1, T))
    mixed = model.multi_head_attention(x, x, x, 2, lengths=lengths, name="a")
    heads = x.reshape(N, T, 2, 4)
    model.output(
        mixed,
        model.scaled_dot_product_attention(heads, heads, heads, mask, lengths=lengths),
        model.sequence_mask(lengths, x),
    )
    model.compile(SGD(0.1), loss={"a": "mse"})
    given = {"x": numbers(N, T, 8), "n": LENGTHS, "mask": numbers(N, 1, 1, T)}
    whole, scaled, steps = model.predict(given)
    given["x"][~MASK] = 7.0  # what is behind a sample's last step is never seen
    again = model.predict(given)[0]
    np.testing.assert_allclose(again[MASK], whole[MASK], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(steps, MASK)
    given["n"] = LENGTHS + T  # of samples that are cut, all steps are there
    assert model.predict(given)[2].all()
    q = torch.from_numpy(numbers(N, T, 8).reshape(N, T, 2, 4)).transpose(1, 2)
    hidden = torch.from_numpy(np.where(MASK[:, None, None], given["mask"], -np.inf))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, hidden.float())
    np.testing.assert_allclose(scaled, wanted.transpose(1, 2).numpy(), rtol=1e-4, atol=1e-5)
    model.close()


def test_lengths_that_do_not_fit_are_refused() -> None:
    model = Model("m")
    x = model.input("x", (N, T, K))
    for bad in (model.input("a", (N, 3)), model.input("b", (N,))):
        with pytest.raises(ShapeError, match=r"integers \(4,\), or a mask \(4, 6\), needed"):
            model.lstm(x, H, lengths=bad)
