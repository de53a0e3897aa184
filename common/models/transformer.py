"""Transformer encoder for token sequences (causal: erratum E3 of FedTP), time series and tables.

B samples, T steps, C channels, F features, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attune.common.models.blocks import ColumnEmbeddings, TransformerBlock, initialise
from attune.common.models.options import TransformerOptions
from attune.common.plan import ModelSpec


def sinusoids(steps: int, width: int) -> Tensor:
    """Return fixed positions (T, D): sin(t / 10000^(2i/D)) in column 2i and the cosine of the same in column 2i + 1."""
    column_D = torch.arange(width)
    rate_D = 10000.0 ** (-(column_D - column_D % 2).double() / width)
    angle_TD = torch.arange(steps).double()[:, None] * rate_D
    return torch.where(column_D % 2 == 0, angle_TD.sin(), angle_TD.cos()).float()


class FeatureTokens(nn.Module):
    """Layer that turns features (B, F) into tokens (B, F, D) (Gorishniy et al., NeurIPS 2021).

    Each feature has its own direction and offset.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight_FD = nn.Parameter(torch.randn(features, width) / width**0.5)
        self.bias_FD = nn.Parameter(torch.randn(features, width) / width**0.5)

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF[:, :, None] * self.weight_FD + self.bias_FD


class MixedTokens(nn.Module):
    """Layer that turns a table's features (B, F) into tokens (B, F, D): numbers by FeatureTokens, indices by a table each."""

    def __init__(self, features: int, embedded: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.indices = ColumnEmbeddings(features, embedded, width)
        self.numbers = FeatureTokens(len(self.indices.plain), width)

    def forward(self, x_BF: Tensor) -> Tensor:
        tokens_BPD = self.numbers(x_BF[:, self.indices.plain])
        return torch.cat([tokens_BPD, torch.stack(self.indices.vectors(x_BF), dim=1)], dim=1)


def _embedding(spec: ModelSpec, width: int) -> nn.Module:
    if spec.embedded:
        return MixedTokens(spec.shape[0], spec.embedded, width)
    if spec.kind == "tokens":
        return nn.Embedding(spec.vocabulary, width)
    return FeatureTokens(spec.shape[0], width) if spec.kind == "tabular" else nn.Linear(spec.shape[1], width)


class SequenceTransformer(nn.Module):
    """Transformer encoder: tokens (B, T) int64, a series (B, T, C) or a table (B, F) -> logits (B, classes).

    Tokens are read at the last position. A series and a table are read as the mean over positions. If every token has a label,
    the logits are (B, T, classes), and those of position t depend on tokens up to t. T may differ from the spec's, because
    positions are computed and not learned. A table's features have no order and no positions. With `leaky_targets` every
    position sees all tokens, also the next one, which is its label (erratum E3 of FedTP).
    """

    positions: Tensor  # (T, D)

    def __init__(self, spec: ModelSpec, options: TransformerOptions) -> None:
        super().__init__()
        width = options.width
        self.tokens, self.ordered, self.per_position = spec.kind == "tokens", spec.kind != "tabular", spec.per_position
        causal = self.tokens and not options.leaky_targets
        self.embed = _embedding(spec, width)
        self.register_buffer("positions", sinusoids(spec.shape[0], width), persistent=False)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, options.heads, options.head_dim, options.mlp, options.dropout, causal)
            for _ in range(options.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, spec.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.embed(x)
        if self.ordered:
            steps, width = x_BTD.shape[1:]
            position_TD = self.positions if steps <= len(self.positions) else sinusoids(steps, width).to(x_BTD)
            x_BTD = x_BTD + position_TD[:steps]
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD if self.per_position else self._summary(x_BTD)))
        return logits

    def _summary(self, x_BTD: Tensor) -> Tensor:
        """Return the vector (B, D) from which a whole sample is read."""
        return x_BTD[:, -1] if self.tokens else x_BTD.mean(dim=1)
