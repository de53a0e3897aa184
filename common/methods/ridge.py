"""Ridge regression from sums over samples, which are exact however the samples are divided among devices.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang: AFL, CVPR 2025. All numbers are float64. N samples have features Z (N, D) and
targets T (N, C). G = Z' Z (D, D), B = Z' T (D, C), s (C,) are sums of squared targets, and W (C, D) the weights.

Features may be of several kinds. Each kind is a block that ends with the constant 1, and a regression by itself: no product of
two blocks is summed. Where tensors are of all blocks, these follow each other, and D is the sum of their sizes.

A light device, which has no torch, calls `sums_of`, `drawn` and `out_of_fold` with arrays of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from attune.common.errors import UpdateRefused
from attune.common.models.options import ClosedFormOptions
from attune.common.plan import Plan
from attune.common.protocol import HAS_TORCH
from attune.common.wire.header import Manifest, TensorSpec

if TYPE_CHECKING or HAS_TORCH:
    import torch
    from torch import Tensor

    from attune.common.wire.tensors import Tensors

# Names in the model of common.models.closed_form: W of all blocks, the ridge strength of the devices' own weights, the place of
# the block that predicts, and the sizes of all blocks.
WEIGHT, STRENGTH, BLOCK, SIZES = "head.weight", "strength", "block", "sizes"
GRAM, CROSS, SQUARES, ERRORS = "gram", "cross", "squares", "errors"  # what a device hands in
SUM_TENSORS = (GRAM, CROSS, SQUARES)
# In that model, where devices are served one sum of all: the strength of each block's common weights, and 1 for a device in it.
GAMMA, COUNTED = "gamma", "counted"
GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # strengths between which the server chooses for the common weights
STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3)  # and the fleet for the devices' own; of equal ones the first
FEWEST = 5  # samples with which a device draws weights of its own
ROUNDING = 1e-9  # share of the largest diagonal element by which sums of true samples may miss to be positive semi-definite


def sums_manifest(outputs: int, sizes: Sequence[int], *, one_sum: bool = False) -> Manifest:
    """Return the tensors that a device hands in: s, and of each block the triangle of G, B, and the errors.

    Args:
        outputs: C.
        sizes: D of each block.
        one_sum: There are errors for each of GAMMAS, too. The first of each is that of the weights of all others.
    """
    errors = (len(sizes), len(GAMMAS), 1 + len(STRENGTHS)) if one_sum else (len(sizes), len(STRENGTHS))
    shapes = {GRAM: (sum(map(_triangle, sizes)),), CROSS: (sum(sizes), outputs), SQUARES: (outputs,)}
    return {name: TensorSpec("F64", shape) for name, shape in {**shapes, ERRORS: errors}.items()}


def nothing_solved(outputs: int, sizes: Sequence[int], one_sum: bool = False) -> Tensors:
    """Return what clients are served before the first sums: W (C, D) of zeros, and the strength 0.

    With `one_sum` there is room for one sum of all devices, too.
    """
    shapes: dict[str, tuple[int, ...]] = {WEIGHT: (outputs, sum(sizes)), STRENGTH: (), BLOCK: ()}
    if one_sum:
        of_sums = sums_manifest(outputs, sizes)
        shapes |= {GRAM: of_sums[GRAM].shape, CROSS: of_sums[CROSS].shape, GAMMA: (len(sizes),), COUNTED: ()}
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {**zeros, SIZES: torch.tensor(sizes, dtype=torch.float64)}


def nothing_served(plan: Plan) -> Tensors:
    """Return the same for the closed form that joins the blends of a plan."""
    return nothing_solved(plan.model.classes, [size + 1 for size in ClosedFormOptions().blocks(0)], plan.one_sum)


def without_own(served: Mapping[str, Tensor], own_sums: Mapping[str, Tensor], gamma: float | None = None) -> Tensor:
    """Return W (C, D) by a served sum of all devices, without what a device in it has given.

    Args:
        served: The sum, and what else is served with it.
        own_sums: What the device has given.
        gamma: Strength of the ridge; None: the served ones.

    Raises:
        RuntimeError: The rest is a sum of no samples.
    """
    rest = {name: served[name] - served[COUNTED] * own_sums[name].to(served[name]) for name in (GRAM, CROSS)}
    gammas = [gamma] * len(served[GAMMA]) if gamma else served[GAMMA].tolist()
    blocks = zip(gammas, blocks_of(rest, sizes_of(served)), strict=True)
    return torch.cat([solved(G_DD, B_DC, strength) for strength, (_, G_DD, B_DC) in blocks], dim=1)


def is_alone_in_a_class(total: Mapping[str, Tensor], own_sums: Mapping[str, Tensor]) -> bool:
    """Return whether a device in a total is the only one with samples of a class: one-hot targets have counts beside the 1."""
    own_C, others_C = own_sums[CROSS][-1], total[CROSS][-1] - own_sums[CROSS][-1]
    return torch.equal(own_C, own_sums[SQUARES]) and bool(((own_C > 0) & (others_C.abs() <= ROUNDING * own_C)).any())


def sizes_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return D of each block of a model."""
    return [int(size) for size in tensors[SIZES].tolist()]


def places_of(sizes: Sequence[int]) -> list[slice]:
    """Return the place of each block among all features."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def blocks_of(sums: Mapping[str, Tensor], sizes: Sequence[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each block its place, G (D, D) with zeros above the diagonal, and B (D, C), from what a device hands in."""
    for place, size, end in zip(places_of(sizes), sizes, _ends(sizes), strict=True):
        yield place, lower(sums[GRAM][end - _triangle(size) : end], size), sums[CROSS][place]


def _ends(sizes: Sequence[int]) -> list[int]:
    """Return where the triangle of each block ends."""
    return list(accumulate(map(_triangle, sizes)))


def _triangle(size: int) -> int:
    return size * (size + 1) // 2


def targets_of(y: Tensor, outputs: int, labels: bool = False) -> Tensor:
    """Return T (N, C): one-hot classes of y (N,), or numbers (N, C) as they are; with `labels` -1 for 0 and 1 for 1."""
    if y.dim() == 1:
        return torch.nn.functional.one_hot(y, outputs).double()
    return 2.0 * y.double() - 1 if labels else y.double()


def sums_of(Z_ND: Tensor, T_NC: Tensor, sizes: Sequence[int]) -> Tensors:
    """Return G of each block as a triangle, B and s."""
    triangles: list[Tensor] = []
    for place, size in zip(places_of(sizes), sizes, strict=True):
        triangles.append((Z_ND[:, place].T @ Z_ND[:, place])[_is_upper(size)])
    return {GRAM: _library(Z_ND).concat(triangles), CROSS: Z_ND.T @ T_NC, SQUARES: (T_NC * T_NC).sum(0)}


def _library(tensor: Tensor) -> Any:
    """Return the library of a tensor: torch, or numpy on a light device."""
    return np if isinstance(tensor, np.ndarray) else torch


_is_upper = lru_cache(maxsize=2)(lambda features: np.triu(np.ones((features, features), dtype=bool)))


def lower(gram: Tensor, features: int) -> Tensor:
    """Return G (D, D) from its triangle, with zeros above the diagonal: no factor needs that half."""
    upper_DD = np.zeros((features, features))
    upper_DD[_is_upper(features)] = gram.numpy()
    return torch.from_numpy(upper_DD).T


def solved(G_DD: Tensor, B_DC: Tensor, strength: float, centre_CD: Tensor | None = None) -> Tensor:
    """Return W (C, D) with (G + strength I) W' = B + strength C', in which C is the centre (None: 0). Of G half is read."""
    right_DC = B_DC if centre_CD is None else B_DC + strength * centre_CD.T
    if _library(G_DD) is np:  # it factors no symmetric matrix; here G is whole
        whole_DD: Any = G_DD
        diagonal_D = whole_DD.diagonal().copy()
        np.fill_diagonal(whole_DD, diagonal_D + strength)  # in place: on a small device, half of the peak are copies of G
        try:
            return np.linalg.solve(whole_DD, right_DC).T  # type: ignore[no-any-return]
        finally:
            np.fill_diagonal(whole_DD, diagonal_D)
    ridge_DD = G_DD.clone()
    ridge_DD.diagonal().add_(strength)
    return torch.cholesky_solve(right_DC, torch.linalg.cholesky(ridge_DD)).T.contiguous()


def drawn(Z_ND: Tensor, T_NC: Tensor, strength: float, centre_CD: Tensor) -> Tensor:
    """Return W of `solved` from samples, by the smaller of two systems.

    Of fewer samples than features that of N equations: W' = C' + Z' (Z Z' + strength I)^-1 (T - Z C').
    """
    if len(Z_ND) >= Z_ND.shape[1]:
        return solved(Z_ND.T @ Z_ND, Z_ND.T @ T_NC, strength, centre_CD)
    return centre_CD + solved(Z_ND @ Z_ND.T, T_NC - Z_ND @ centre_CD.T, strength) @ Z_ND


def out_of_fold(Z_ND: Tensor, T_NC: Tensor, fold_N: Tensor, centre_CD: Tensor, strengths: Sequence[float]) -> Tensor:
    """Return what weights that are drawn from the centre without each sample's fold predict of the sample, (L, N, C).

    It is NaN for samples in no fold (-1). There are weights for each of the L strengths.
    """
    library = _library(T_NC)
    predicted_LNC: Tensor = library.full_like(library.stack([T_NC] * len(strengths)), math.nan)
    by_centre_NC = Z_ND @ centre_CD.T
    gap_NC, few = T_NC - by_centre_NC, len(Z_ND) < Z_ND.shape[1]  # few: X are the N samples, as in `drawn`, else D features
    G_XX, B_XC = (Z_ND @ Z_ND.T, gap_NC) if few else (Z_ND.T @ Z_ND, Z_ND.T @ gap_NC)
    for fold in library.unique(fold_N[fold_N >= 0]):
        left_N, rest_N = fold_N == fold, fold_N != fold
        if few:
            left_MX, rest_XX, rest_XC = G_XX[left_N][:, rest_N], G_XX[rest_N][:, rest_N], B_XC[rest_N]
        else:
            left_MX = Z_ND[left_N]
            rest_XX, rest_XC = -left_MX.T @ left_MX, B_XC - left_MX.T @ gap_NC[left_N]
            rest_XX += G_XX  # in place, and freed below: a small device has room for few of them
        for place, strength in enumerate(strengths):
            predicted_LNC[place, left_N] = by_centre_NC[left_N] + left_MX @ solved(rest_XX, rest_XC, strength).T
        del left_MX, rest_XX
    return predicted_LNC


def fold_errors(
    Z_ND: Tensor, T_NC: Tensor, fold_N: Tensor, centre_CD: Tensor, strengths: Sequence[float], sharpness: float | None
) -> Tensor:
    """Return the errors out of fold for each strength, (L,), of one block; see `error_of`."""
    is_in_N = fold_N >= 0
    predicted_LNC = out_of_fold(Z_ND, T_NC, fold_N, centre_CD, strengths)
    return error_of(predicted_LNC[:, is_in_N], T_NC[is_in_N], sharpness)


def error_of(predicted_LNC: Tensor, T_NC: Tensor, sharpness: float | None) -> Tensor:
    """Return the error of each of L predictions: minus the log-likelihood of classes with this sharpness; None: of squares."""
    if sharpness is None:
        return ((T_NC - predicted_LNC) ** 2).sum((1, 2))
    scores_LNC = sharpness * predicted_LNC
    if _library(T_NC) is not np:
        return -(scores_LNC.log_softmax(dim=2) * T_NC).sum((1, 2))
    total_LN1: Any = np.logaddexp.reduce(scores_LNC, axis=2, keepdims=True)
    errors_L: Tensor = -((scores_LNC - total_LN1) * T_NC).sum((1, 2))
    return errors_L


def squared_error(W_CD: Tensor, G_DD: Tensor, B_DC: Tensor, squares_C: Tensor) -> float:
    """Return the squared error of W over the samples of these sums, of blocks_of: s - 2 <W', B> + <W', G W'>."""
    explained = 2 * ((W_CD @ G_DD) * W_CD).sum() - (W_CD.square() * G_DD.diagonal()).sum()  # zeros lie above the diagonal
    return float(squares_C.sum() - 2 * (W_CD.T * B_DC).sum() + explained)


def rest_of(total: Mapping[str, Tensor], own_sums: Mapping[str, Tensor]) -> Tensors:
    """Return G and B of a total without some of its samples."""
    return {name: total[name] - own_sums[name] for name in (GRAM, CROSS)}


def are_same(sums: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether two devices' sums, or a device's sums of two rounds, have the same bits. Errors do not count."""
    return all(name in others and torch.equal(sums[name], others[name]) for name in SUM_TENSORS)


def check_sums(sums: Tensors, sizes: Sequence[int], classes: bool, who: str, earlier: Tensors | None = None) -> None:
    """Check that there can be samples with these sums.

    In each block G is positive semi-definite, and so is [G B; B' T'T] to rounding. With one-hot targets T'T is diag(s), and the
    row of the constant feature in B is s, whose sum is the number of samples. Of other targets only the diagonal of T'T is
    known, so each output is checked by itself.

    Args:
        sums: What a device hands in.
        sizes: D of each block.
        classes: Targets are one-hot.
        who: The device and what it hands in, for errors.
        earlier: Sums, perhaps a share of some, that are known to be positive semi-definite: the same need no second factor.

    Raises:
        UpdateRefused: There are no such samples; it names the device.
    """
    squares_C, counts = sums[SQUARES], [float(sums[GRAM][end - 1]) for end in _ends(sizes)]
    whole_numbers = [*counts, *squares_C.tolist()] if classes else counts
    if any(number < 0 or number != round(number) for number in whole_numbers) or (sums[ERRORS] < 0).any():
        raise UpdateRefused(f"{who} has sums that no samples can have: a count, or an error of its models, is impossible")
    if len(set(counts)) > 1:
        raise UpdateRefused(f"{who} has sums that no samples can have: its kinds of features are not of as many samples")
    fits = all(torch.equal(sums[CROSS][place.stop - 1], squares_C) for place in places_of(sizes))  # the row of the constant
    if classes and not (fits and float(squares_C.sum()) == counts[0]):
        number = f"{counts[0]:,.0f}"
        raise UpdateRefused(f"{who} has sums that no samples can have: the samples of its classes are not {number} in all")
    is_known = earlier is not None and are_same(sums, earlier)
    if not is_known and not all(_is_possible(G_DD, B_DC, squares_C, classes) for _, G_DD, B_DC in blocks_of(sums, sizes)):
        raise UpdateRefused(f"{who} has sums that no samples can have: they are not positive semi-definite together")


def _is_possible(G_DD: Tensor, B_DC: Tensor, squares_C: Tensor, classes: bool) -> bool:
    """Return whether [G B; B' T'T] is positive semi-definite to rounding."""
    size = max(float(G_DD.diagonal().max()), 1.0)
    G_DD.diagonal().add_(ROUNDING * size)  # in place: it is needed no more
    factor_DD, wrong = torch.linalg.cholesky_ex(G_DD)
    if wrong:
        return False
    explained_DC = torch.linalg.solve_triangular(factor_DD, B_DC, upper=False)
    slack_C = ROUNDING * len(G_DD) * squares_C.clamp(min=1.0)
    left_CC = torch.diag(squares_C + slack_C) - explained_DC.T @ explained_DC
    if not classes:
        left_CC = torch.diag(left_CC.diagonal())
    return not torch.linalg.cholesky_ex(left_CC)[1]
