"""Vectors for categories in a table (Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016).

B samples, F features, P of them plain numbers, D width of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

MOST_WIDTH = 50


def width_for(values: int) -> int:
    """Return the width of the vectors for a category: 1.6 n^0.56, at most 50 (the rule of the library fastai)."""
    return min(MOST_WIDTH, round(1.6 * math.pow(values, 0.56)))


class ColumnEmbeddings(nn.Module):
    """Layer that keeps the numbers of a table and looks the indices up: (B, F) -> (B, P + widths of the vectors).

    Args:
        features: F.
        embedded: Number of values of each feature that is an index, by its place as text (`ModelSpec.embedded`).
        width: Width of all vectors; 0: each as `width_for` says.
    """

    def __init__(self, features: int, embedded: Mapping[str, int], width: int = 0) -> None:
        super().__init__()
        self.places = [int(place) for place in embedded]
        self.plain = [place for place in range(features) if place not in self.places]
        tables = [nn.Embedding(values, width or width_for(values)) for values in embedded.values()]
        for table in tables:
            nn.init.normal_(table.weight, std=float(table.embedding_dim) ** -0.5)
        self.tables = nn.ModuleList(tables)
        self.most = [table.num_embeddings - 1 for table in tables]
        self.width = len(self.plain) + sum(table.embedding_dim for table in tables)

    def vectors(self, x_BF: Tensor) -> list[Tensor]:
        """Return the vectors of each index, (B, width). An index outside its table counts as the last value, `missing`."""
        return [
            table(x_BF[:, place].long().clamp(0, most))
            for place, table, most in zip(self.places, self.tables, self.most, strict=True)
        ]

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.cat([x_BF[:, self.plain], *self.vectors(x_BF)], dim=1)
