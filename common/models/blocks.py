"""Self-attention and the pre-norm Transformer block that the ViT and the sequence Transformer share; networks of Linear layers.

B samples, T positions, D model width, H heads, E head dimension, F = 3*H*E.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attune.common.models.options import DnnOptions, MlrOptions
from attune.common.plan import ModelSpec


def initialise(model: nn.Module) -> None:
    """Set Glorot weights and zero biases in every Linear layer.

    With them plain SGD learns a small shard in 5 epochs. With torch's own initial values it has not learned it after 60.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class SelfAttention(nn.Module):
    """Multi-head self-attention with scale 1/sqrt(E).

    `to_qkv` holds [W_Q; W_K; W_V] of shape (3*H*E, D) without a bias. FedTP's hypernetwork generates this matrix for each
    block.
    """

    def __init__(self, width: int, heads: int, head_dim: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, head_dim, causal
        self.to_qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, steps, _ = x_BTD.shape
        q_BHTE, k_BHTE, v_BHTE = self._split(self.to_qkv(x_BTD))
        mixed_BHTE = self._weights(q_BHTE, k_BHTE) @ v_BHTE
        out_BTD: Tensor = self.dropout(self.to_out(mixed_BHTE.transpose(1, 2).reshape(batch, steps, -1)))
        return out_BTD

    def weights(self, qkv_BTF: Tensor) -> Tensor:
        """Return the attention weights (B, H, T, T) of an output of `to_qkv`. Rows sum to one."""
        q_BHTE, k_BHTE, _ = self._split(qkv_BTF)
        return self._weights(q_BHTE, k_BHTE)

    def _split(self, qkv_BTF: Tensor) -> tuple[Tensor, ...]:
        batch, steps, _ = qkv_BTF.shape
        return qkv_BTF.view(batch, steps, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)

    def _weights(self, q_BHTE: Tensor, k_BHTE: Tensor) -> Tensor:
        # Not scaled_dot_product_attention: it chooses another kernel on each machine, and has no second derivatives.
        score_BHTT = (q_BHTE * self.head_dim**-0.5) @ k_BHTE.transpose(-2, -1)
        if self.causal:
            steps = score_BHTT.shape[-1]
            later_TT = torch.ones(steps, steps, dtype=torch.bool, device=score_BHTT.device).triu(1)
            score_BHTT = score_BHTT.masked_fill(later_TT, -torch.inf)
        weights_BHTT: Tensor = score_BHTT.softmax(dim=-1)
        return weights_BHTT


class TransformerBlock(nn.Module):
    """Pre-norm Transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, head_dim: int, mlp: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, head_dim, dropout, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, width), nn.Dropout(dropout)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        out_BTD: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return out_BTD


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


def make_dnn(spec: ModelSpec, options: DnnOptions) -> nn.Sequential:
    """Return a network (B, any shape) -> logits (B, classes) with the layers hidden0, hidden1, ... and head.

    Features of a table that are indices are embedded first, by the layer `embed`.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(spec.shape)
    if spec.embedded:
        embed = layers["embed"] = ColumnEmbeddings(width, spec.embedded)
        width = embed.width
    for position, hidden in enumerate(options.hidden):
        layers[f"hidden{position}"] = nn.Linear(width, hidden)
        layers[f"relu{position}"] = nn.ReLU()
        width = hidden
    layers["head"] = nn.Linear(width, spec.classes)
    return nn.Sequential(layers)


def make_mlr(spec: ModelSpec, options: MlrOptions) -> nn.Sequential:
    """Return multinomial logistic regression (B, any shape) -> logits (B, classes) with one linear layer, `head`."""
    return make_dnn(spec, DnnOptions(hidden=[]))
