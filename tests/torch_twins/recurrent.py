"""The recurrent apps in plain torch: the same layers, made in the same order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class Lstm(nn.LSTM):
    """One LSTM layer over x (n, t, k) with one bias; torch has two, of which the second is zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden, batch_first=True)
        with torch.no_grad():
            self.bias_hh_l0.zero_()
        self.bias_hh_l0.requires_grad_(False)


def lstm_layers(width: int, hidden: int, layers: int) -> nn.ModuleList:
    """Return LSTM layers, each on top of the one before."""
    return nn.ModuleList(Lstm(hidden if layer else width, hidden) for layer in range(layers))


class Sru(nn.Module):
    """One SRU layer over x (n, t, h), step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.ParameterList([torch.zeros(2 * width)])  # a module, so that it comes second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        candidate, forget, reset = self.projection(x).chunk(3, dim=-1)
        bias_f, bias_r = self.bias[0].chunk(2)
        forget, reset = torch.sigmoid(forget + bias_f), torch.sigmoid(reset + bias_r)
        cell = torch.zeros_like(x[:, 0])
        steps = []
        for t in range(x.shape[1]):
            cell = forget[:, t] * cell + (1 - forget[:, t]) * candidate[:, t]
            steps.append(reset[:, t] * cell + (1 - reset[:, t]) * x[:, t])
        return torch.stack(steps, dim=1), cell


class Rnntc(nn.Module):
    """Ids (n, t): logits (n, classes) of the last step."""

    def __init__(
        self,
        layers: int = 4,
        hidden: int = 1024,
        vocabulary: int = 18_765,
        classes: int = 2,
        cell: str = "lstm",
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = (
            lstm_layers(hidden, hidden, layers)
            if cell == "lstm"
            else nn.ModuleList(Sru(hidden) for _ in range(layers))
        )
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.classifier(x[:, -1])


class Rnnlm(nn.Module):
    """Ids (n, t): logits (n, t, vocabulary)."""

    def __init__(self, layers: int = 2, hidden: int = 2048, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = lstm_layers(hidden, hidden, layers)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.output(x)


class NmtDecoder(nn.Module):
    """The decoder: words, LSTM layers, attention over the encoder's states, and logits."""

    def __init__(self, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = lstm_layers(hidden, hidden, layers)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(
        self, ids: Tensor, states: list[State], memory: Tensor
    ) -> tuple[Tensor, list[State]]:
        x = self.words(ids)
        after = []
        for layer, (h, c) in zip(self.layers, states):
            x, (h, c) = layer(x, (h[None], c[None]))
            after.append((h[0], c[0]))
        weights = torch.softmax(self.query(x) @ memory.transpose(1, 2), dim=-1)
        mixed = torch.tanh(self.mix(torch.cat([weights @ memory, x], dim=-1)))
        return self.output(mixed), after


class Nmt(nn.Module):
    """Source and target ids (n, t), the target moved one place on: logits (n, t, vocabulary)."""

    def __init__(self, layers: int = 2, hidden: int = 1024, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = lstm_layers(hidden, hidden, layers)
        self.decoder = NmtDecoder(layers, hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.words(source)
        states = []
        for layer in self.layers:
            x, (h, c) = layer(x)
            states.append((h[0], c[0]))
        return self.decoder(target, states, x)[0]


class NmtStep(nn.Module):
    """One decoding step: ids (n), the memory (n, t, hidden), and h and c (n, hidden) by layer.

    Returns logits (n, vocabulary), then the new h and c of each layer in turn.
    """

    def __init__(self, layers: int = 2, hidden: int = 1024, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.decoder = NmtDecoder(layers, hidden, vocabulary)

    def forward(self, ids: Tensor, memory: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        pairs = list(zip(states[::2], states[1::2]))
        logits, after = self.decoder(ids[:, None], pairs, memory)
        return (logits[:, 0], *(value for pair in after for value in pair))


class NasCell(nn.Module):
    """A cell of eight gates, each with a product of the input and one of the state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(
            nn.Linear(size, hidden, bias=False) for _ in range(8) for size in (width, hidden)
        )

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        t = [a(x) + b(h) for a, b in zip(self.gates[::2], self.gates[1::2])]
        first = torch.relu(t[0]) + torch.sigmoid(t[3])
        second = torch.sigmoid(t[1]) + torch.tanh(t[2])
        third = torch.sigmoid(t[4]) * torch.tanh(t[5])
        fourth = torch.sigmoid(t[6]) * torch.relu(t[7])
        left = torch.tanh(torch.sigmoid(second) + torch.tanh(third))
        right = torch.tanh(torch.tanh(first) * torch.tanh(fourth))
        return torch.tanh(left * right)


class NasRnn(nn.Module):
    """Inputs x (n, t, hidden): the last state (n, hidden)."""

    def __init__(self, hidden: int = 512, length: int = 5, shared: bool = False) -> None:
        super().__init__()
        self.length = length
        self.state = nn.Parameter(torch.zeros(1, hidden))
        self.cells = nn.ModuleList(NasCell(hidden, hidden) for _ in range(1 if shared else length))

    def forward(self, x: Tensor) -> Tensor:
        h = self.state
        for t in range(self.length):
            h = self.cells[t % len(self.cells)](x[:, t], h)
        return h
