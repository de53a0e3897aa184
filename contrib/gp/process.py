"""One binary Gaussian-process classifier, with the logistic likelihood made Gaussian by Polya-Gamma variables.

N training points, M others, D features, S chains. sign: 1 or -1 for every training point. With kappa = sign / 2,

    1 / (1 + exp(-sign f)) = 1/2 exp(kappa f) E[exp(-omega f^2 / 2)],   omega ~ PG(1, 0),

so given omega the posterior of f ~ N(0, K) is that of a regression on kappa / omega with noise variance 1 / omega. Everything
goes through B = I + Omega^1/2 K Omega^1/2, whose eigenvalues are at least one: K is not inverted. The variables PG(1, c) are
those of Polson, Scott and Windle, JASA 2013; T terms of the series.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.linalg import cholesky, solve_triangular

from attune.contrib.gp.method import ProcessSettings

TERMS = 64


def polya_gamma(c_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one PG(1, c) for every element of c_N (float64), of the same shape and on its device; `generator` is on the CPU.

    The definition: sum over k >= 1 of g_k / (2 pi^2 ((k - 1/2)^2 + (c / 2 pi)^2)), g_k exponential of mean 1. The first TERMS
    are drawn, and the rest is replaced by its mean. So the mean is exact, and the variance too small by at most
    1 / (12 pi^4 TERMS^3) = 3.3e-9 for every c: below 1e-7 of the variance 1/24 at c = 0, below 1% for |c| up to 100.
    """
    c_N1 = c_N.unsqueeze(-1)
    place_T = torch.arange(1, TERMS + 1, dtype=torch.float64, device=c_N.device) - 0.5
    scale_NT = 1 / (2 * math.pi**2 * (place_T.square() + (c_N1 / (2 * math.pi)).square()))
    uniform_NT = torch.rand(scale_NT.shape, dtype=torch.float64, generator=generator).to(c_N.device)
    drawn_NT = -torch.log1p(-uniform_NT)
    return polya_gamma_mean(c_N) + (scale_NT * (drawn_NT - 1)).sum(dim=-1)


def polya_gamma_mean(c_N: Tensor) -> Tensor:
    """Return the mean of PG(1, c): tanh(c / 2) / (2 c), and its limit 1/4 at 0."""
    half_N = c_N.abs() / 2
    safe_N = half_N.clamp(min=1e-4)
    return torch.where(half_N < 1e-4, 0.25 - half_N.square() / 12, safe_N.tanh() / (4 * safe_N))


LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]
JITTER = 1e-6  # share of the prior variance that is added to a point's own: duplicates stay positive definite
QUADRATURE = 48  # points of Gauss-Hermite: wrong by less than 1e-6 at a variance of 8


def exact(features: Tensor) -> Tensor:
    """Return the features in float64, on the CPU where the accelerator has none."""
    return (features.cpu() if features.device.type == "mps" else features).double()


def covariance(settings: ProcessSettings, a_ND: Tensor, b_MD: Tensor) -> Tensor:
    """Return the kernel matrix (N, M): a^2 exp(-|x - y|^2 / (2 D l^2)), with a^2 the output scale and l the length scale."""
    square_NM = (a_ND.square().sum(1)[:, None] + b_MD.square().sum(1) - 2 * a_ND @ b_MD.T).clamp(min=0)
    return settings.output_scale * torch.exp(-square_NM / (2 * a_ND.shape[1] * settings.length_scale**2))


def own_covariance(settings: ProcessSettings, a_ND: Tensor) -> Tensor:
    """Return the kernel matrix (N, N) of points with themselves, with the jitter."""
    jitter = settings.output_scale * JITTER
    return covariance(settings, a_ND, a_ND) + jitter * torch.eye(len(a_ND), dtype=a_ND.dtype, device=a_ND.device)


def gibbs(settings: ProcessSettings, K_NN: Tensor, sign_N: Tensor, generator: torch.Generator) -> Tensor:
    """Return omega (S, N) from its posterior: the last state of S chains that draw f given omega, and omega given f.

    f is drawn by Matheron's rule: a draw of the prior, corrected by what it misses of kappa / omega.
    """
    shape = (settings.gibbs_draws, len(K_NN))
    prior_NN = cholesky(K_NN)
    f_SN = torch.zeros(shape, dtype=K_NN.dtype, device=K_NN.device)
    omega_SN = polya_gamma(f_SN, generator)
    for _ in range(settings.gibbs_steps):
        noise_2SN = torch.randn((2, *shape), dtype=torch.float64, generator=generator).to(K_NN)
        root_SN, factor_SNN = omega_SN.sqrt(), _factor(K_NN, omega_SN)
        f_SN = noise_2SN[0] @ prior_NN.T
        missing_SN = sign_N / 2 / root_SN - root_SN * f_SN - noise_2SN[1]
        solved_SN = torch.cholesky_solve(missing_SN.unsqueeze(-1), factor_SNN).squeeze(-1)
        f_SN = f_SN + (root_SN * solved_SN) @ K_NN
        omega_SN = polya_gamma(f_SN, generator)
    return omega_SN


def log_evidence(K_NN: Tensor, omega_SN: Tensor, sign_N: Tensor) -> Tensor:
    """Return (S,): log p(signs, omega) - log PG(omega | 1, 0) = -N log 2 - 1/2 log|B| + 1/2 kappa' (K^-1 + Omega)^-1 kappa.

    Averaged over the posterior of omega, its gradient in K is that of log p(signs) (Fisher's identity).
    """
    factor_SNN = _factor(K_NN, omega_SN)
    pulled_N = K_NN @ (sign_N / 2)
    half_SN1: Tensor = solve_triangular(factor_SNN, (omega_SN.sqrt() * pulled_N).unsqueeze(-1), upper=False)
    quadratic_S = (sign_N / 2) @ pulled_N - half_SN1.square().sum(dim=(1, 2))
    log_determinant_S = 2 * factor_SNN.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    return (quadratic_S - log_determinant_S) / 2 - len(sign_N) * math.log(2)


def posterior(K_NN: Tensor, cross_NM: Tensor, prior: float | Tensor, omega_SN: Tensor, sign_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (S, M) and the variance (S, M) of f at other points given omega.

    cross_NM: their covariance with the training points. prior: their own variance, (M,) or the same for all.
    """
    factor_SNN, root_SN = _factor(K_NN, omega_SN), omega_SN.sqrt()
    half_SNM = solve_triangular(factor_SNN, root_SN.unsqueeze(-1) * cross_NM, upper=False)
    target_SN1 = solve_triangular(factor_SNN, (sign_N / 2 / root_SN).unsqueeze(-1), upper=False)
    mean_SM: Tensor = (half_SNM * target_SN1).sum(dim=1)
    return mean_SM, (prior - half_SNM.square().sum(dim=1)).clamp(min=0)


def log_probabilities(mean_SM: Tensor, variance_SM: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(left) (M,) and log p(right) (M,): the logistic function under the Gaussians, averaged over chains."""
    place_Q, weight_Q = (part.to(mean_SM) for part in _hermite())
    f_SMQ = mean_SM.unsqueeze(-1) + (2 * variance_SM).sqrt().unsqueeze(-1) * place_Q
    left_M, right_M = ((torch.sigmoid(f) @ weight_Q).mean(dim=0) for f in (f_SMQ, -f_SMQ))
    tiny = torch.finfo(mean_SM.dtype).tiny
    return left_M.clamp(min=tiny).log(), right_M.clamp(min=tiny).log()


def _factor(K_NN: Tensor, omega_SN: Tensor) -> Tensor:
    root_SN = omega_SN.sqrt()
    scaled_SNN = root_SN.unsqueeze(-1) * K_NN * root_SN.unsqueeze(-2)
    factor_SNN: Tensor = cholesky(scaled_SNN + torch.eye(len(K_NN), dtype=K_NN.dtype, device=K_NN.device))
    return factor_SNN


@cache
def _hermite() -> tuple[Tensor, Tensor]:
    place_Q, weight_Q = np.polynomial.hermite.hermgauss(QUADRATURE)
    return torch.from_numpy(place_Q), torch.from_numpy(weight_Q / math.sqrt(math.pi))
