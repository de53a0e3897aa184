"""Self-attention and the pre-norm Transformer block that the ViT and the sequence Transformer share.

B samples, T positions, D model width, H heads, E head dimension, F = 3*H*E.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
