"""The recommender apps in plain torch: the same layers, made in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def perceptron(widths: Sequence[int], last: bool) -> nn.Sequential:
    """Return linear layers of the widths, input first; rectifiers between, after if `last`."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*(layers if last else layers[:-1]))


class Dlrm(nn.Module):
    """Dense features (n, dense) and ids (n, tables): a logit (n, 1)."""

    def __init__(
        self,
        vocabularies: Sequence[int],
        width: int = 64,
        bottom: Sequence[int] = (512, 512, 64),
        top: Sequence[int] = (1024, 1024, 1024, 1),
        dense: int = 13,
        interaction: str = "dot",
    ) -> None:
        super().__init__()
        count = len(vocabularies) + 1
        self.dot = interaction == "dot"
        joined = width + count * (count - 1) // 2 if self.dot else count * width
        self.bottom = perceptron((dense, *bottom[:-1], width), last=True)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in vocabularies)
        self.top = perceptron((joined, *top), last=False)
        rows, columns = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", rows * count + columns, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        features = torch.stack([x, *rows], dim=1)
        if not self.dot:
            return self.top(features.flatten(1))
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([x, products.flatten(1)[:, self.pairs]], dim=1))


class CandleUno(nn.Module):
    """Inputs (n, width), in the order of the widths: a response (n, 1)."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        bottom: Sequence[int] = (1000, 1000, 1000),
        top: Sequence[int] = (1000, 1000, 1000, 1),
    ) -> None:
        super().__init__()
        self.bottom = nn.ModuleList(
            perceptron((width, *bottom), last=True) for width in inputs.values()
        )
        self.top = perceptron((len(inputs) * bottom[-1], *top), last=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        encoded = [layers(x) for layers, x in zip(self.bottom, inputs)]
        return self.top(torch.cat(encoded, dim=1))


class Xdl(nn.Module):
    """Ids (n, tables * bag): a logit (n, 1)."""

    def __init__(
        self,
        vocabularies: Sequence[int],
        bag: int = 1,
        width: int = 64,
        top: Sequence[int] = (256, 256, 256, 1),
    ) -> None:
        super().__init__()
        self.bag = bag
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for rows in vocabularies
        )
        self.top = perceptron((len(vocabularies) * width, *top), last=False)

    def forward(self, ids: Tensor) -> Tensor:
        bags = ids.split(self.bag, dim=1)
        return self.top(torch.cat([table(x) for table, x in zip(self.tables, bags)], dim=1))
