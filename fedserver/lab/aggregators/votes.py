"""A cohort as a matrix, and robust rules over it, with which a minority cannot move a shared value far.

Shapes: S clients of the cohort, N numbers of a tensor, D numbers of each client, B columns of a block that stays in the cache.
Weights (samples) do not count in votes, because an attacker chooses its own. absent: how many more of the cohort have no vote;
they are some of the attackers that a rule reckons with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab.aggregators.base import manifest_in, read_into


def median(X_SN: torch.Tensor) -> torch.Tensor:
    """Return the coordinate-wise median (Yin, Chen, Ramchandran, Bartlett, ICML 2018, definition 1).

    For an even S it is the mean of the two in the middle.
    """
    low = X_SN.kthvalue((len(X_SN) + 1) // 2, dim=0).values
    return low if len(X_SN) % 2 else low + (X_SN.kthvalue(len(X_SN) // 2 + 1, dim=0).values - low) / 2


def trimmed_mean(X_SN: torch.Tensor, share: float, absent: int = 0) -> torch.Tensor:
    """Return the coordinate-wise mean without the `share` of S largest and smallest (Yin et al., definition 2), rounded up."""
    cut = trimmed(len(X_SN), share, absent)
    return X_SN.sort(dim=0).values[cut : len(X_SN) - cut].mean(dim=0)


def trimmed(size: int, share: float, absent: int = 0) -> int:
    """Return how many numbers of a cohort are removed at each end: `share` of them rounded up; at least one number stays."""
    return min(_attackers(size, share, absent), (size - 1) // 2)


def multi_krum(G_SS: torch.Tensor, share: float, absent: int = 0) -> list[int]:
    """Return the clients whose mean is taken, in order: Multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017).

    It takes inner products about any origin, (S, S) float64. With f attackers, `share` of S rounded up, a client's score is the
    sum of its S - f - 2 smallest squared distances to others; the S - f with the lowest scores stay. The proof needs S > 2 f +
    2: for a smaller cohort f is the largest number for which this holds. If that is 0, all stay.
    """
    size = len(G_SS)
    attackers = min(_attackers(size, share, absent), max(0, (size - 3) // 2))
    if not attackers:
        return list(range(size))
    square_S = G_SS.diagonal()
    distance_SS = (square_S[:, None] + square_S - 2 * G_SS).clamp(min=0).fill_diagonal_(torch.inf)
    score_S = distance_SS.sort(dim=1).values[:, : size - attackers - 2].sum(dim=1)
    return sorted(score_S.argsort(stable=True)[: size - attackers].tolist())


def _attackers(size: int, share: float, absent: int) -> int:
    """Return `share` of a cohort, rounded up, without the absent. Rounding errors of a product such as 0.2 * 5 do not count."""
    return max(0, -int(-(share * (size + absent) - 1e-9) // 1) - absent) if share else 0


def limited(A_SS: torch.Tensor, cap: float, floor: float) -> torch.Tensor:
    """Limit mixing weights: none on another client above `cap`, none on oneself below `floor`; rows sum to one.

    Weight above the cap goes to oneself. If one's own weight is below the floor then, all others shrink in proportion.
    """
    own_S = A_SS.diagonal()
    others_SS = (A_SS - torch.diag(own_S)).clamp(max=cap)
    own_S = 1 - others_SS.sum(dim=1)
    shrink_S = torch.where(own_S < floor, (1 - floor) / (1 - own_S).clamp(min=1e-300), 1.0)
    others_SS = others_SS * shrink_S[:, None]
    return others_SS + torch.diag(1 - others_SS.sum(dim=1))


def discounted(A_SS: torch.Tensor, fresh_S: torch.Tensor) -> torch.Tensor:
    """Multiply each device's weight in the rows of the others by `fresh_S`. What they lose goes to the row's own device.

    A device's own value is its newest one, so it is not stale for the device itself.
    """
    others_SS = (A_SS * fresh_S).fill_diagonal_(0)
    return others_SS + torch.diag(1 - others_SS.sum(dim=1))


BLOCK = 4_096  # columns of a product in float32: a cosine is then within 2e-7, measured for S from 2 to 50
WIDE = 1 << 20  # columns of a block on a GPU, where a block of any size costs the same calls
EXACT = 65_536  # fewer columns than these are multiplied in float64: their few blocks would not average the error out


def _columns(X_SD: torch.Tensor) -> int:
    """Return the columns of a block on the processor on which these numbers lie."""
    return BLOCK if X_SD.device.type == "cpu" else WIDE


def stack(updates: Sequence[PartUpdate], names: Sequence[str]) -> torch.Tensor:
    """Return these tensors of every client, flattened and concatenated: (S, D), at least float32."""
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
    """Return all inner products, (S, S) float64; with `from_first`, those of the differences from the first row.

    Blocks are multiplied in float32 and summed in float64. All is in float64 with `exact`, with few columns, with float64
    values, and on a GPU. Distances are the same from any origin, and exact only from a near one: hence `from_first`.
    """
    S, D = X_SD.shape
    G_SS = torch.zeros(S, S, dtype=torch.float64, device=X_SD.device)
    exact = exact or D < EXACT or X_SD.dtype == torch.float64 or X_SD.device.type != "cpu"
    product_SS = torch.empty(S, S, dtype=torch.float64 if exact else torch.float32, device=X_SD.device)
    for X_SB in torch.split(X_SD, _columns(X_SD), dim=1):
        block_SB = X_SB - X_SB.narrow(0, 0, 1) if from_first else X_SB
        block_SB = block_SB.to(product_SS.dtype)
        torch.mm(block_SB, block_SB.T, out=product_SS)
        G_SS += product_SS
    return G_SS


def mix_(X_SD: torch.Tensor, A_SS: torch.Tensor) -> None:
    """Compute X <- A X in place, block of columns by block: each is copied into the cache and multiplied back to its place."""
    A_SS = A_SS.to(X_SD)
    columns = _columns(X_SD)
    copy_SB = X_SD.new_empty(len(X_SD), min(columns, X_SD.shape[1]))
    for X_SB in torch.split(X_SD, columns, dim=1):
        block_SB = copy_SB.narrow(1, 0, X_SB.shape[1])
        torch.mul(X_SB, 1, out=block_SB)  # a copy that, unlike copy_, fails between two processors
        torch.mm(A_SS, block_SB, out=X_SB)
