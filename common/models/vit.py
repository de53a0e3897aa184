"""Vision Transformer for images of any size (FedTP's backbone: pre-norm, class token, q,k,v without bias).

B samples, C channels, H height, W width, P patches, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attune.common.models.blocks import TransformerBlock, initialise
from attune.common.models.options import VitOptions
from attune.common.plan import ModelSpec

_PIXEL_MEAN, _PIXEL_DEVIATION = 0.35, 0.25  # of usual images in [0, 1]; the initial embedding standardises with them
# Embedded patches have a size of about 1. With the usual scale of 0.02 the model does not use positions for many epochs.
_TOKEN_SCALE = 0.5


class VisionTransformer(nn.Module):
    """Vision Transformer: images (B, C, H, W) in [0, 1] -> logits (B, classes).

    Images are padded with zeros at the bottom and on the right to whole patches.
    """

    def __init__(self, spec: ModelSpec, options: VitOptions) -> None:
        super().__init__()
        height, width, channels = spec.shape
        self.patch = options.patch
        self.padding = (0, -width % self.patch, 0, -height % self.patch)
        patches = -(-height // self.patch) * -(-width // self.patch)
        self.embed = nn.Linear(channels * self.patch**2, options.width)
        self.class_token = nn.Parameter(_TOKEN_SCALE * torch.randn(1, 1, options.width))
        self.position = nn.Parameter(_TOKEN_SCALE * torch.randn(1, patches + 1, options.width))
        self.dropout = nn.Dropout(options.dropout or 0.0)
        self.blocks = nn.ModuleList(
            TransformerBlock(options.width, options.heads, options.head_dim, options.mlp, options.dropout or 0.0)
            for _ in range(options.depth)
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, spec.classes)
        initialise(self)
        with torch.no_grad():
            self.embed.weight.div_(_PIXEL_DEVIATION)
            self.embed.bias.sub_(_PIXEL_MEAN * self.embed.weight.sum(dim=1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BPD = self.embed(self.patches(x_BCHW))
        x_BPD = torch.cat([self.class_token.expand(x_BPD.shape[0], -1, -1), x_BPD], dim=1)
        x_BPD = self.dropout(x_BPD + self.position)
        for block in self.blocks:
            x_BPD = block(x_BPD)
        logits: Tensor = self.head(self.norm(x_BPD[:, 0]))
        return logits

    def patches(self, x_BCHW: Tensor) -> Tensor:
        """Return the patches of images (B, C, H, W) as (B, P, C * patch * patch), row by row."""
        x_BCHW = functional.pad(x_BCHW, self.padding)
        batch, channels, height, width = x_BCHW.shape
        size = self.patch
        cut = x_BCHW.reshape(batch, channels, height // size, size, width // size, size)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)
