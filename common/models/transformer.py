"""Transformer encoder for token sequences (causal: errata E3 of FedTP) and for time series.

B samples, T steps, C channels, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.models.blocks import Block, initialise
from common.models.options import TransformerOptions
from common.plan import ModelSpec


def sinusoids(steps: int, width: int) -> Tensor:
    """(T, D) fixed positions: sin(t / 10000^(2i/D)) in column 2i and the cosine of the same in column 2i + 1."""
    column_D = torch.arange(width)
    rate_D = 10000.0 ** (-(column_D - column_D % 2).double() / width)
    angle_TD = torch.arange(steps).double()[:, None] * rate_D
    return torch.where(column_D % 2 == 0, angle_TD.sin(), angle_TD.cos()).float()


class SequenceTransformer(nn.Module):
    """Logits (B, classes) of tokens (B, T) int64, read at the last position, or of a series (B, T, C), read as the mean.

    T may differ from the spec's: positions are computed, not learned.
    """

    positions: Tensor  # (T, D)

    def __init__(self, spec: ModelSpec, options: TransformerOptions) -> None:
        super().__init__()
        width = options.width
        self.causal = spec.kind == "tokens"
        self.embed = nn.Embedding(spec.vocabulary, width) if self.causal else nn.Linear(spec.shape[1], width)
        self.register_buffer("positions", sinusoids(spec.shape[0], width), persistent=False)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            Block(width, options.heads, options.head_dim, options.mlp, options.dropout, self.causal)
            for _ in range(options.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, spec.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.embed(x)
        steps, width = x_BTD.shape[1:]
        position_TD = self.positions if steps <= len(self.positions) else sinusoids(steps, width).to(x_BTD)
        x_BTD = self.dropout(x_BTD + position_TD[:steps])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        read_BD = x_BTD[:, -1] if self.causal else x_BTD.mean(dim=1)
        logits: Tensor = self.head(self.norm(read_BD))
        return logits
