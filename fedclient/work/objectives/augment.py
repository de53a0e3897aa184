"""Augmentation of images in training: what a batch of them becomes, drawn anew for each batch.

B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

SHIFT = 8  # images are shifted by up to an eighth of their side
NOISE = 0.05
RANK = 4  # axes of a batch of images


def augmented(x: Tensor, names: Sequence[str]) -> Tensor:
    """Return x (B, C, H, W) with each of these changes in their order; torch's default generator draws."""
    for name in names:
        x = _WAYS[name](x)
    return x


def _flip(x: Tensor) -> Tensor:
    """Mirror half of the images left to right."""
    turned = torch.rand(len(x), device=x.device) < 0.5
    return torch.where(turned.view(-1, 1, 1, 1), x.flip(-1), x)


def _crop(x: Tensor) -> Tensor:
    """Shift each image by up to a SHIFT-th part of height and width; the freed border is zero."""
    height, width = x.shape[-2:]
    most_h, most_w = max(1, height // SHIFT), max(1, width // SHIFT)
    wide = pad(x, (most_w, most_w, most_h, most_h))
    top_B, left_B = (torch.randint(0, 2 * most + 1, (len(x),)).tolist() for most in (most_h, most_w))
    return torch.stack(
        [image[:, top : top + height, left : left + width] for image, top, left in zip(wide, top_B, left_B, strict=True)]
    )


def _noise(x: Tensor) -> Tensor:
    return x + NOISE * torch.randn_like(x)


def _erase(x: Tensor) -> Tensor:
    """Set a random square of a quarter of the area of each image to zero."""
    height, width = x.shape[-2:]
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    top_B, left_B = (torch.randint(0, side, (len(x), 1), device=x.device) for side in (height, width))
    in_rows = (rows >= top_B - height // 4) & (rows < top_B + height // 4)
    in_columns = (columns >= left_B - width // 4) & (columns < left_B + width // 4)
    return x * ~(in_rows[:, None, :, None] & in_columns[:, None, None, :])


_WAYS: dict[str, Callable[[Tensor], Tensor]] = {"flip": _flip, "crop": _crop, "noise": _noise, "erase": _erase}
