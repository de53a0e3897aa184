"""A cohort as a matrix: stacked, multiplied with itself and mixed, by blocks of columns that stay in the cache.

Shapes: S clients of the cohort, D numbers of each, B columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab.aggregators.base import manifest_in, read_into

BLOCK = 4_096  # columns of a product in float32: a cosine is then within 2e-7, measured for S from 2 to 50
EXACT = 65_536  # fewer columns than these are multiplied in float64: their few blocks would not average the error out


def stack(updates: Sequence[PartUpdate], names: Sequence[str]) -> torch.Tensor:
    """These tensors of every client, flattened and concatenated: (S, D), at least float32."""
    first, dtype = manifest_in(updates[0].tensors), torch.float32
    for name in names:
        dtype = torch.promote_types(dtype, DTYPES[first[name].dtype])
    sizes = {name: math.prod(first[name].shape) for name in names}
    X_SD = torch.empty(len(updates), sum(sizes.values()), dtype=dtype)
    for row_D, update in zip(X_SD, updates, strict=True):
        offset = 0
        for name in names:
            read_into(update.tensors, name, row_D[offset : offset + sizes[name]])
            offset += sizes[name]
    return X_SD


def gram(X_SD: torch.Tensor, exact: bool = False, from_first: bool = False) -> torch.Tensor:
    """All inner products, (S, S) in float64; with `from_first`, of the differences from the first row.

    Blocks are multiplied in float32 and summed in float64; where `exact`, of few columns or of float64, in float64
    throughout. Distances are the same from any origin, and exact only from one that is near: hence `from_first`.
    """
    S, D = X_SD.shape
    G_SS = torch.zeros(S, S, dtype=torch.float64, device=X_SD.device)
    exact = exact or D < EXACT or X_SD.dtype == torch.float64
    product_SS = torch.empty(S, S, dtype=torch.float64 if exact else torch.float32, device=X_SD.device)
    for X_SB in torch.split(X_SD, BLOCK, dim=1):
        block_SB = X_SB - X_SB.narrow(0, 0, 1) if from_first else X_SB
        block_SB = block_SB.to(product_SS.dtype)
        torch.mm(block_SB, block_SB.T, out=product_SS)
        G_SS += product_SS
    return G_SS


def mix_(X_SD: torch.Tensor, A_SS: torch.Tensor) -> None:
    """X <- A X in place, block of columns by block: each is copied into the cache and multiplied back to its place."""
    A_SS = A_SS.to(X_SD)
    copy_SB = X_SD.new_empty(len(X_SD), min(BLOCK, X_SD.shape[1]))
    for X_SB in torch.split(X_SD, BLOCK, dim=1):
        block_SB = copy_SB.narrow(1, 0, X_SB.shape[1])
        torch.mul(X_SB, 1, out=block_SB)  # a copy that, unlike copy_, does not cross from one processor to another unseen
        torch.mm(A_SS, block_SB, out=X_SB)
