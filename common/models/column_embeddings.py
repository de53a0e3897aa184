"""Vectors for categories in a table (Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016).

B samples, F features, P of them plain numbers, D width of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

MOST_WIDTH = 50


def width_for(values: int) -> int:
    """Return the width of the vectors for a category: 1.6 n^0.56, at most 50 (the rule of the library fastai)."""
    return min(MOST_WIDTH, round(1.6 * values**0.56))


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
        self.tables = nn.ModuleList(nn.Embedding(values, width or width_for(values)) for values in embedded.values())
        for table in self.tables:
            nn.init.normal_(table.weight, std=table.weight.shape[1] ** -0.5)
        self.width = len(self.plain) + sum(table.weight.shape[1] for table in self.tables)

    def vectors(self, x_BF: Tensor) -> list[Tensor]:
        """Return the vectors of each index, (B, width). An index outside its table counts as the last value, `missing`."""
        return [
            table(x_BF[:, place].long().clamp(0, table.weight.shape[0] - 1))
            for place, table in zip(self.places, self.tables, strict=True)
        ]

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.cat([x_BF[:, self.plain], *self.vectors(x_BF)], dim=1)
