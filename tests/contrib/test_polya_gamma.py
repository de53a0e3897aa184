"""Draws of PG(1, c) against the closed forms of its mean, its variance and its Laplace transform."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from attune.contrib.gp import polya_gamma

DRAWS = 40_000
SITES = [0.0, 1e-6, 1e-3, 0.7, -3.0, 12.0, 60.0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(c, seed=0):
    return polya_gamma.draw(torch.full((DRAWS,), c, dtype=torch.float64), generator(seed)).numpy()


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
    found = polya_gamma.mean(torch.tensor([c, -c], dtype=torch.float64))
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


@pytest.mark.parametrize("t", [0.0, 0.5, 4.0, 60.0])
def test_the_transform_is_the_integral_over_the_density(t):
    """Check the reference itself: 1 / cosh(sqrt(t / 2)) by the trapezoidal rule."""
    omega = np.linspace(1e-6, 8, 40_001)
    assert np.trapezoid(np.exp(-t * omega) * density(omega), omega) == pytest.approx(laplace_of(0.0, t), abs=1e-6)


def test_the_distribution_is_that_of_the_density():
    """Compare shares of draws in bins with the integral of the density, within 4 standard errors each."""
    omega, edges = drawn(0.0, seed=5), np.array([1e-9, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 8.0])
    counts, _ = np.histogram(omega, edges)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        x = np.linspace(max(low, 1e-6), high, 20_001)
        share = np.trapezoid(density(x), x)
        assert abs(count / DRAWS - share) < 4 * math.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.parametrize("c", [0.0, 5.0, 100.0])
def test_what_the_truncated_series_misses_of_the_variance(c):
    """Compute the docstring's figures from the series: terms of variance 1 / (2 pi^2 ((k - 1/2)^2 + (c / 2 pi)^2))^2."""
    k = np.arange(1, polya_gamma.TERMS + 1) - 0.5
    kept = ((2 * math.pi**2 * (k**2 + (c / (2 * math.pi)) ** 2)) ** -2.0).sum()
    assert 0 <= variance_of(c) - kept < 3.3e-9
    assert kept > (0.99 if c else 1 - 1e-7) * variance_of(c)


def test_a_seed_gives_the_same_draws_and_another_one_others():
    assert np.array_equal(drawn(1.0), drawn(1.0)) and not np.array_equal(drawn(1.0), drawn(1.0, seed=1))
