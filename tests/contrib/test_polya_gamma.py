"""The binary process, and draws of PG(1, c): formulas against inverses and closed forms, the sampler against quadrature."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.contrib.gp import process
from attune.contrib.gp.method import ProcessSettings
from attune.contrib.gp.process import (
    LinAlgError,
    covariance,
    gibbs,
    log_evidence,
    log_probabilities,
    own_covariance,
    posterior,
)
from tests.needs import Later

DRAWS = 40_000
SITES = [0.0, 1e-6, 1e-3, 0.7, -3.0, 12.0, 60.0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(c, seed=0):
    return process.polya_gamma(torch.full((DRAWS,), c, dtype=torch.float64), generator(seed)).numpy()


def mean_of(c):
    """Return tanh(c / 2) / (2 c), in 50 digits."""
    with mpmath.workdps(50):
        return 0.25 if c == 0 else float(mpmath.tanh(mpmath.mpf(c) / 2) / (2 * mpmath.mpf(c)))


def variance_of(c):
    """Return (sinh c - c) / (4 c^3 cosh^2(c / 2)), in 50 digits."""
    with mpmath.workdps(50):
        c = mpmath.mpf(c)
        return 1 / 24 if c == 0 else float((mpmath.sinh(c) - c) / (4 * c**3 * mpmath.cosh(c / 2) ** 2))


def laplace_of(c, t):
    """Return E exp(-t omega) = cosh(c / 2) / cosh(sqrt(c^2 / 4 + t / 2)): Polson et al., equation 3 tilted."""
    return math.cosh(c / 2) / math.cosh(math.sqrt(c * c / 4 + t / 2))


def density(omega):
    """Return the density of PG(1, 0) = J*(1, 0) / 4 by the alternating series of the Jacobi density.

    There is one series for small x, and one for the rest.
    """
    x, k = 4 * omega, np.arange(60)[:, None] + 0.5
    small = (-1.0) ** (k - 0.5) * 2 * k * (2 / (math.pi * x)) ** 1.5 * (math.pi / 2) * np.exp(-2 * k * k / x)
    large = (-1.0) ** (k - 0.5) * math.pi * k * np.exp(-k * k * math.pi**2 * x / 2)
    return 4 * np.where(x < 0.64, small.sum(axis=0), large.sum(axis=0))


@pytest.mark.parametrize("c", SITES)
def test_the_mean_is_the_closed_form(c):
    found = process.polya_gamma_mean(torch.tensor([c, -c], dtype=torch.float64))
    assert found.tolist() == pytest.approx([mean_of(c)] * 2, rel=1e-13)


@pytest.mark.parametrize("c", SITES)
def test_draws_have_mean_and_variance_of_the_closed_forms(c):
    omega = drawn(c)
    assert omega.min() > 0
    deviation = omega - mean_of(c)
    assert abs(deviation.mean()) < 4 * deviation.std() / math.sqrt(DRAWS)
    squares = deviation**2
    assert abs(squares.mean() - variance_of(c)) < 4 * squares.std() / math.sqrt(DRAWS)


@pytest.mark.parametrize("c", [0.0, 0.7, 6.0])
@pytest.mark.parametrize("t", [0.5, 4.0, 60.0])
def test_draws_have_the_laplace_transform(c, t):
    values = np.exp(-t * drawn(c, seed=3))
    assert abs(values.mean() - laplace_of(c, t)) < 4 * values.std() / math.sqrt(DRAWS)


def test_the_distribution_is_that_of_the_density():
    """Compare shares of draws in bins with the integral of the density, within 4 standard errors each."""
    omega, edges = drawn(0.0, seed=5), np.array([1e-9, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 8.0])
    counts, _ = np.histogram(omega, edges)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        x = np.linspace(max(low, 1e-6), high, 20_001)
        share = np.trapezoid(density(x), x)
        assert abs(count / DRAWS - share) < 4 * math.sqrt(share * (1 - share) / DRAWS)


cases = settings(derandomize=True, deadline=None, max_examples=40)
QUADRATURE = Later("scipy.integrate")
SIGN = np.array([1.0, -1.0])


def tensor(array):
    return torch.from_numpy(np.asarray(array, dtype=np.float64))


def problem(points, others, seed):
    """Return settings, features, features of the others, sign, and omega of three chains."""
    rng = np.random.default_rng(seed)
    kernel = ProcessSettings(length_scale=float(rng.uniform(0.3, 2)), output_scale=float(rng.uniform(0.2, 12)), gibbs_draws=3)
    x, x_other = rng.normal(size=(points, 4)), rng.normal(size=(others, 4))
    return kernel, x, x_other, rng.choice([-1.0, 1.0], points), rng.uniform(0.01, 0.6, (3, points))


def rbf(kernel, a, b):
    """Compute the kernel one entry after the other."""
    scale = 2 * a.shape[1] * kernel.length_scale**2
    return np.array([[kernel.output_scale * math.exp(-(math.dist(p, q) ** 2) / scale) for q in b] for p in a])


def own(kernel, a):
    return rbf(kernel, a, a) + 1e-6 * kernel.output_scale * np.eye(len(a))


def test_covariance_by_hand():
    """Compute two features with distance 5: exp(-25 / (2 * 2 * 4)); the jitter is a millionth of the prior variance."""
    kernel = ProcessSettings(length_scale=2.0, output_scale=3.0)
    a = tensor([[0.0, 0.0], [3.0, 4.0]])
    near = 3 * math.exp(-25 / 16)
    assert covariance(kernel, a, a[:1]).flatten().tolist() == pytest.approx([3.0, near], rel=1e-14)
    assert own_covariance(kernel, a).flatten().tolist() == pytest.approx([3.000003, near, near, 3.000003], rel=1e-14)


@cases
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_the_evidence_and_its_gradient_are_those_of_the_regression(points, seed):
    """Compare with log N(z | 0, K + 1/omega) and the difference of the logistic function from that Gaussian.

    The difference is kappa^2 / 2 omega + 1/2 log(2 pi / omega) - log 2 for each point. The gradient in K is 1/2 (A z z' A - A)
    with A = (K + 1/omega)^-1.
    """
    kernel, x, _, sign, omega = problem(points, 1, seed)
    K = tensor(own(kernel, x)).requires_grad_()
    found = log_evidence(K, tensor(omega), tensor(sign))
    for chain, omega_N in enumerate(omega):
        total, z = own(kernel, x) + np.diag(1 / omega_N), sign / 2 / omega_N
        A = np.linalg.inv(total)
        gaussian = -(z @ A @ z) / 2 - np.linalg.slogdet(total)[1] / 2 - points * math.log(2 * math.pi) / 2
        beside = (0.125 / omega_N + 0.5 * np.log(2 * math.pi / omega_N) - math.log(2)).sum()
        assert float(found[chain].detach()) == pytest.approx(gaussian + beside, rel=1e-9, abs=1e-9)
        (gradient,) = torch.autograd.grad(found[chain], K, retain_graph=True)
        expected = (A @ np.outer(z, z) @ A - A) / 2
        np.testing.assert_allclose((gradient + gradient.T).numpy() / 2, expected, rtol=1e-7, atol=1e-9)


@cases
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6))
def test_the_posterior_is_that_of_the_regression(points, others, seed):
    kernel, x, x_other, sign, omega = problem(points, others, seed)
    cross = rbf(kernel, x, x_other)
    mean_SM, variance_SM = posterior(tensor(own(kernel, x)), tensor(cross), kernel.output_scale, tensor(omega), tensor(sign))
    for chain, omega_N in enumerate(omega):
        A = np.linalg.inv(own(kernel, x) + np.diag(1 / omega_N))
        np.testing.assert_allclose(mean_SM[chain].numpy(), cross.T @ A @ (sign / 2 / omega_N), rtol=1e-9, atol=1e-10)
        explained = np.einsum("nm,nk,km->m", cross, A, cross)
        np.testing.assert_allclose(variance_SM[chain].numpy(), kernel.output_scale - explained, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (1.5, 0.0), (-2.0, 4.0), (0.7, 8.0), (30.0, 2.0)])
def test_log_probabilities_are_the_integrals_and_add_up_to_one(mean, variance):
    left, right = log_probabilities(tensor([[mean]]), tensor([[variance]]))
    spread = math.sqrt(variance)

    def weighted(u):
        return 1 / (1 + math.exp(-(mean + spread * u))) * math.exp(-u * u / 2) / math.sqrt(2 * math.pi)

    assert left.exp().item() == pytest.approx(QUADRATURE.quad(weighted, -9, 9, epsabs=1e-11)[0], abs=1e-6)
    assert left.exp().item() + right.exp().item() == pytest.approx(1, abs=1e-12)


def test_chains_are_averaged_as_probabilities():
    left, _ = log_probabilities(tensor([[40.0], [-40.0], [-40.0], [-40.0]]), torch.zeros(4, 1, dtype=torch.float64))
    assert left.exp().item() == pytest.approx(0.25, abs=1e-12)


class Quadrature:
    """Problem of two points with signs 1 and -1, by Gauss-Hermite over f = L u at 80 x 80 points."""

    def __init__(self, K):
        place, weight = np.polynomial.hermite_e.hermegauss(80)
        u = np.stack(np.meshgrid(place, place), axis=-1).reshape(-1, 2)
        self.f = u @ np.linalg.cholesky(K).T
        prior = np.outer(weight, weight).ravel() / (2 * math.pi)
        self.joint = prior / (1 + np.exp(-SIGN * self.f)).prod(axis=1)
        self.evidence = self.joint.sum()

    def mean(self, values):
        return (self.joint[:, None] * values).sum(axis=0) / self.evidence


K2 = np.array([[2.0, 0.9], [0.9, 1.5]])
CHAINS = 8000


@pytest.mark.parametrize("K", [K2[:1, :1], K2], ids=["one point", "two points"])
def test_p_of_y_is_the_mean_over_omegas_prior(K):
    """Expect 1/2 for one point, by symmetry, and p(y) by quadrature for two, within 4 standard errors."""
    points = len(K)
    omega = process.polya_gamma(torch.zeros(40_000, points, dtype=torch.float64), generator(1))
    values = log_evidence(tensor(K), omega, tensor(SIGN[:points])).exp().numpy()
    expected = 0.5 if points == 1 else Quadrature(K).evidence
    assert values.std() > 1e-3
    assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))


def test_gibbs_samples_the_posterior_whose_mean_and_gradient_are_those_of_quadrature():
    """Compare E[f | y], and d log p(y) / dK_12 (by differences of the quadrature) with the mean gradient of the evidence."""
    exact = Quadrature(K2)
    kernel = ProcessSettings(gibbs_steps=12, gibbs_draws=CHAINS)
    omega = gibbs(kernel, tensor(K2), tensor(SIGN), generator(2))
    assert omega.shape == (CHAINS, 2)
    mean_SM, variance_SM = posterior(tensor(K2), tensor(K2), tensor(K2.diagonal().copy()), omega, tensor(SIGN))
    error = 4 * mean_SM.std(dim=0).numpy() / math.sqrt(CHAINS)
    assert (np.abs(mean_SM.mean(dim=0).numpy() - exact.mean(exact.f)) < error).all()
    second = (variance_SM + mean_SM**2).numpy()
    assert (np.abs(second.mean(axis=0) - exact.mean(exact.f**2)) < 4 * second.std(axis=0) / math.sqrt(CHAINS)).all()

    wide = 8 * K2
    kernel = ProcessSettings(gibbs_steps=30, gibbs_draws=CHAINS)
    broad = gibbs(kernel, tensor(wide), tensor(SIGN), generator(3)).numpy()
    exact_wide = Quadrature(wide)
    expected = exact_wide.mean(np.tanh(exact_wide.f / 2) / (2 * exact_wide.f))
    assert (np.abs(broad.mean(axis=0) - expected) < 4 * broad.std(axis=0) / math.sqrt(CHAINS)).all(), "E[omega | y]"

    K = tensor(K2).requires_grad_()
    gradient = torch.autograd.grad(log_evidence(K, omega, tensor(SIGN)).mean(), K)[0]
    away = np.array([[0.0, 1e-4], [1e-4, 0.0]])
    slope = (math.log(Quadrature(K2 + away).evidence) - math.log(Quadrature(K2 - away).evidence)) / 2e-4
    assert float(gradient[0, 1] + gradient[1, 0]) == pytest.approx(slope, abs=0.005)
    assert abs(slope) > 0.1


def test_a_seed_gives_the_same_chains_and_another_one_others():
    kernel = ProcessSettings()
    one, again, other = (gibbs(kernel, tensor(K2), tensor(SIGN), generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.shape == (kernel.gibbs_draws, 2)


def test_duplicates_and_points_that_contradict_each_other_are_no_trouble():
    """Use one point six times, with each sign three times: by symmetry 1/2 there, on average over many chains."""
    kernel = ProcessSettings(gibbs_draws=400, output_scale=8.0)
    x, sign = torch.zeros(6, 5, dtype=torch.float64), tensor([1, -1, 1, -1, 1, -1])
    K = own_covariance(kernel, x)
    omega = gibbs(kernel, K, sign, generator())
    assert torch.isfinite(omega).all() and torch.isfinite(log_evidence(K, omega, sign)).all()
    left, _ = log_probabilities(*posterior(K, covariance(kernel, x, x[:1]), kernel.output_scale, omega, sign))
    assert left.exp().item() == pytest.approx(0.5, abs=0.01)


def test_what_is_not_finite_is_an_error():
    with pytest.raises(LinAlgError):
        gibbs(ProcessSettings(), tensor([[math.nan]]), tensor([1.0]), generator())
