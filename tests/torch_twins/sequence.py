"""The sequence apps in plain torch: the same layers, made in the same order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Multi-head attention of x (n, t, hidden) to itself, or to a memory."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        hide: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        memory = x if memory is None else memory
        query, key, value = (
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for part in (self.query(x), self.key(memory), self.value(memory))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, hide, is_causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Attention and two dense layers, each normalised with its input."""

    def __init__(
        self, hidden: int, heads: int, inner: int, activation: Activation, epsilon: float = 1e-5
    ) -> None:
        super().__init__()
        self.activation = activation
        self.attention = Attention(hidden, heads)
        self.norm1 = nn.LayerNorm(hidden, epsilon)
        self.inner = nn.Linear(hidden, inner)
        self.outer = nn.Linear(inner, hidden)
        self.norm2 = nn.LayerNorm(hidden, epsilon)

    def forward(self, x: Tensor, hide: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, hide=hide))
        return self.norm2(x + self.outer(self.activation(self.inner(x))))


class Bert(nn.Module):
    """Ids and types (n, t), or hidden states (n, t, hidden), and perhaps a mask (n, t).

    Returns logits (n, classes), or hidden states where `classes` is None.
    """

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        inner: int | None = None,
        vocabulary: int | None = 30_522,
        positions: int = 512,
        classes: int | None = 2,
    ) -> None:
        super().__init__()
        self.vocabulary, self.classes = vocabulary, classes
        if vocabulary is not None:
            self.words = nn.Embedding(vocabulary, hidden)
            self.positions = nn.Embedding(positions, hidden)
            self.types = nn.Embedding(2, hidden)
            self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.blocks = nn.ModuleList(
            EncoderBlock(hidden, heads, inner or 4 * hidden, functional.gelu, 1e-12)
            for _ in range(layers)
        )
        if classes is not None:
            self.pooler = nn.Linear(hidden, hidden)
            self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        rest = list(more)
        if self.vocabulary is not None:
            place = self.positions.weight[: x.shape[1]]
            x = self.norm(self.words(x) + place + self.types(rest.pop(0)))
        hide = (rest[0][:, None, None, :] - 1.0) * 10_000.0 if rest else None
        for block in self.blocks:
            x = block(x, hide)
        if self.classes is None:
            return x
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class DecoderBlock(nn.Module):
    """Attention to the words before, attention to the memory, and two dense layers."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.norm1 = nn.LayerNorm(hidden)
        self.memory = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, inner)
        self.outer = nn.Linear(inner, hidden)
        self.norm3 = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, causal=True))
        x = self.norm2(x + self.memory(x, memory))
        return self.norm3(x + self.outer(torch.relu(self.inner(x))))


class Transformer(nn.Module):
    """Source and target ids (n, t), the target moved one place on: logits (n, t, vocabulary)."""

    def __init__(
        self,
        layers: int = 6,
        hidden: int = 512,
        heads: int = 8,
        inner: int = 2048,
        vocabulary: int = 37_000,
        length: int = 64,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        sizes = (hidden, heads, inner)
        self.encoder = nn.ModuleList(EncoderBlock(*sizes, torch.relu) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(*sizes) for _ in range(layers))

    def embedded(self, ids: Tensor) -> Tensor:
        scale = self.words.embedding_dim**0.5
        return self.words(ids) * scale + self.positions.weight[: ids.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embedded(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embedded(target)
        for block in self.decoder:
            x = block(x, memory)
        return functional.linear(x, self.words.weight)
