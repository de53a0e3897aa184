"""Ridge regression from sums over samples, which are exact however the samples are divided among devices.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang: AFL, CVPR 2025. All numbers are float64. N samples have features Z (N, D) and
targets T (N, C). G = Z' Z (D, D), B = Z' T (D, C), s (C,) are sums of squared targets, and W (C, D) the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attune.common.errors import UpdateRefused
from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import Tensors

WEIGHT, STRENGTH = "head.weight", "strength"  # names in the model of common.models.closed_form
GRAM, CROSS, SQUARES, ERRORS = "gram", "cross", "squares", "errors"  # what a device hands in
# In that model, where devices are served one sum of all: the strength of the common weights, and 1 for a device in the sum.
GAMMA, COUNTED = "gamma", "counted"
GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # strengths between which the server chooses for the common weights
STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3)  # and the fleet for the devices' own; of equal ones the first
MEMBER_FEATURES = 501  # D of the closed form that joins the blends of other methods
FEWEST = 5  # samples with which a device draws weights of its own
ROUNDING = 1e-9  # share of the largest diagonal element by which sums of true samples may miss to be positive semi-definite


def sums_manifest(outputs: int, features: int, *, one_sum: bool = False) -> Manifest:
    """Return the tensors that a device hands in: the triangle of G, B, s, and its error with each of STRENGTHS.

    With `one_sum` the errors have a row for each of GAMMAS, whose first number is the error of the weights of all others.
    """
    errors = (len(GAMMAS), 1 + len(STRENGTHS)) if one_sum else (len(STRENGTHS),)
    shapes = {GRAM: (features * (features + 1) // 2,), CROSS: (features, outputs), SQUARES: (outputs,)}
    return {name: TensorSpec("F64", shape) for name, shape in {**shapes, ERRORS: errors}.items()}


def nothing_solved(outputs: int, features: int) -> Tensors:
    """Return what clients are served before the first sums: W (C, D) of zeros, and the strength 0."""
    return {WEIGHT: torch.zeros(outputs, features, dtype=torch.float64), STRENGTH: torch.zeros((), dtype=torch.float64)}


def targets_of(y: Tensor, outputs: int, labels: bool = False) -> Tensor:
    """Return T (N, C): one-hot classes of y (N,), or numbers (N, C) as they are; with `labels` -1 for 0 and 1 for 1."""
    if y.dim() == 1:
        return torch.nn.functional.one_hot(y, outputs).double()
    return 2.0 * y.double() - 1 if labels else y.double()


def sums_of(Z_ND: Tensor, T_NC: Tensor) -> Tensors:
    """Return G as a triangle, B and s."""
    G_DD = Z_ND.T @ Z_ND
    rows, columns = torch.triu_indices(len(G_DD), len(G_DD))
    return {GRAM: G_DD[rows, columns], CROSS: Z_ND.T @ T_NC, SQUARES: T_NC.square().sum(dim=0)}


def whole(gram: Tensor, features: int) -> Tensor:
    """Return G (D, D) from its triangle."""
    G_DD = gram.new_zeros(features, features)
    rows, columns = torch.triu_indices(features, features)
    G_DD[rows, columns] = gram
    G_DD[columns, rows] = gram
    return G_DD


def solved(G_DD: Tensor, B_DC: Tensor, strength: float, centre_CD: Tensor | None = None) -> Tensor:
    """Return W (C, D) with (G + strength I) W' = B + strength C', in which C is the centre (None: 0)."""
    ridge_DD = G_DD + strength * torch.eye(len(G_DD), dtype=G_DD.dtype, device=G_DD.device)
    right_DC = B_DC if centre_CD is None else B_DC + strength * centre_CD.T
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
    predicted_LNC = T_NC.new_full((len(strengths), *T_NC.shape), torch.nan)
    by_centre_NC = Z_ND @ centre_CD.T
    gap_NC, few = T_NC - by_centre_NC, len(Z_ND) < Z_ND.shape[1]  # few: X are the N samples, as in `drawn`, else D features
    G_XX, B_XC = (Z_ND @ Z_ND.T, gap_NC) if few else (Z_ND.T @ Z_ND, Z_ND.T @ gap_NC)
    for fold in fold_N[fold_N >= 0].unique():
        left_N, rest_N = fold_N == fold, fold_N != fold
        if few:
            left_MX, rest_XX, rest_XC = G_XX[left_N][:, rest_N], G_XX[rest_N][:, rest_N], B_XC[rest_N]
        else:
            left_MX = Z_ND[left_N]
            rest_XX, rest_XC = G_XX - left_MX.T @ left_MX, B_XC - left_MX.T @ gap_NC[left_N]
        for place, strength in enumerate(strengths):
            predicted_LNC[place, left_N] = by_centre_NC[left_N] + left_MX @ solved(rest_XX, rest_XC, strength).T
    return predicted_LNC


def squared_error(W_CD: Tensor, G_DD: Tensor, B_DC: Tensor, squares_C: Tensor) -> float:
    """Return the squared error of W over the samples of these sums: s - 2 <W', B> + <W', G W'>."""
    return float(squares_C.sum() - 2 * (W_CD.T * B_DC).sum() + ((W_CD @ G_DD) * W_CD).sum())


def check_sums(sums: Tensors, classes: bool, who: str) -> None:
    """Check that there can be samples with these sums.

    G is positive semi-definite, and so is [G B; B' T'T] to rounding. With one-hot targets T'T is diag(s), and the row of the
    constant feature in B is s, whose sum is the number of samples. Of other targets only the diagonal of T'T is known, so each
    output is checked by itself.

    Args:
        sums: What a device hands in.
        classes: Targets are one-hot.
        who: The device and what it hands in, for errors.

    Raises:
        UpdateRefused: There are no such samples; it names the device.
    """
    B_DC, squares_C = sums[CROSS], sums[SQUARES]
    G_DD = whole(sums[GRAM], len(B_DC))
    count, size = float(G_DD[-1, -1]), max(float(G_DD.diagonal().max()), 1.0)
    whole_numbers = [count, *squares_C.tolist()] if classes else [count]
    if any(number < 0 or number != round(number) for number in whole_numbers) or (sums[ERRORS] < 0).any():
        raise UpdateRefused(f"{who} has sums that no samples can have: a count, or an error of its models, is impossible")
    if classes and not (torch.equal(B_DC[-1], squares_C) and float(squares_C.sum()) == count):
        raise UpdateRefused(f"{who} has sums that no samples can have: the samples of its classes are not {count:,.0f} in all")
    factor_DD, wrong = torch.linalg.cholesky_ex(G_DD + ROUNDING * size * torch.eye(len(G_DD), dtype=G_DD.dtype))
    if not wrong:
        explained_DC = torch.linalg.solve_triangular(factor_DD, B_DC, upper=False)
        slack_C = ROUNDING * len(G_DD) * squares_C.clamp(min=1.0)
        left_CC = torch.diag(squares_C + slack_C) - explained_DC.T @ explained_DC
        if not classes:
            left_CC = torch.diag(left_CC.diagonal())
        wrong = torch.linalg.cholesky_ex(left_CC)[1]
    if wrong:
        raise UpdateRefused(f"{who} has sums that no samples can have: they are not positive semi-definite together")
