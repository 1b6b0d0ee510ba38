"""Transformer blocks over hidden states (n, t, hidden), as BERT and the Transformer use them."""

from __future__ import annotations

from dataclasses import dataclass

from soapstone import Model, Tensor


@dataclass(frozen=True)
class Blocks:
    """How all blocks of a model are made.

    Attributes:
        inner: width between the two dense layers; activation: a layer's name, relu or gelu.
        dropout: rate on what is added to a block's input; epsilon: of the layer norms.
    """

    model: Model
    heads: int
    inner: int
    activation: str = "relu"
    dropout: float = 0.1
    epsilon: float = 1e-5

    def encoder(self, x: Tensor, name: str, hide: Tensor | None = None) -> Tensor:
        """Return x after attention to itself, with `hide` added to the scores, and dense layers."""
        x = self.added(x, self.attention(x, x, f"{name}.attention", hide), f"{name}.norm1")
        return self.added(x, self.dense(x, name), f"{name}.norm2")

    def decoder(self, x: Tensor, memory: Tensor, name: str) -> Tensor:
        """Return x after attention to what precedes, then to the memory, and dense layers."""
        y = self.attention(x, x, f"{name}.attention", causal=True)
        x = self.added(x, y, f"{name}.norm1")
        x = self.added(x, self.attention(x, memory, f"{name}.memory"), f"{name}.norm2")
        return self.added(x, self.dense(x, name), f"{name}.norm3")

    def added(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """Return the layer norm of x and what a part of a block made of it."""
        y = self.model.dropout(y, self.dropout)
        return self.model.layer_norm(x + y, epsilon=self.epsilon, name=name)

    def dense(self, x: Tensor, name: str) -> Tensor:
        """Return the two dense layers of x."""
        model = self.model
        y = model.dense(x, self.inner, activation=self.activation, name=f"{name}.inner")
        return model.dense(y, x.shape[-1], name=f"{name}.outer")

    def attention(
        self,
        x: Tensor,
        memory: Tensor,
        name: str,
        hide: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Return multi-head attention of x to the memory."""
        model = self.model
        hidden = x.shape[-1]

        def project(value: Tensor, part: str) -> Tensor:
            y = model.dense(value, hidden, name=f"{name}.{part}")
            return model.reshape(y, (-1, value.shape[1], self.heads, hidden // self.heads))

        operands = [project(x, "query"), project(memory, "key"), project(memory, "value")]
        operands += [hide] if hide is not None else []
        mixed = model.apply_all("attention", *operands, name=name, causal=causal)[0]
        return model.dense(model.reshape(mixed, (-1, *x.shape[1:])), hidden, name=f"{name}.output")
