"""The closed form as models of a device, against independent calculations in numpy."""

from statistics import variance

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.methods.ridge import (
    CROSS,
    GRAM,
    SQUARES,
    STRENGTH,
    WEIGHT,
    drawn,
    nothing_solved,
    out_of_fold,
    solved,
    sums_manifest,
)
from attune.common.models.closed_form import PIXELS
from attune.common.models.registry import default_spec
from attune.common.wire.tensors import manifest_of
from attune.fedclient.data.holdout import folds_of
from attune.fedclient.work.blend import leave_one_out
from attune.fedclient.work.portfolio.evaluators import LEAST, evaluator
from attune.fedclient.work.portfolio.federated import DRAWS, NEAREST, SHARPNESS, FederatedRidge
from attune.fedclient.work.portfolio.fitting import Samples
from attune.fedclient.work.portfolio.portfolio import Portfolio, fitted_on

NONE, D = np.zeros(0, np.intp), 501  # D: features, with the constant
SPEC = default_spec("images", (3, 2, 1), 3, 0, "mlr", {})


def images(number: int = 20, seed: int = 0) -> Samples:
    draws = np.random.default_rng(seed)
    y = np.arange(number) % 3
    return Samples((draws.random((number, 6)) + 0.2 * y[:, None]).astype("f4"), y, "classes", "images")


def served(seed: int = 1, strength: float = 1.0) -> dict[str, torch.Tensor]:
    centre = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, D)) / 30)
    return {WEIGHT: centre, STRENGTH: torch.tensor(strength, dtype=torch.float64)}


def features(ridge: FederatedRidge, x: np.ndarray) -> np.ndarray:
    """Return z(x) in numpy, with its frequencies and phases."""
    F, p = (ridge._features[name].double().numpy() for name in ("frequency", "phase"))
    random = np.cos((x.astype("f8") - PIXELS[0]) / PIXELS[1] @ F + p) * np.sqrt(2 / len(p))
    return np.concatenate([random, np.ones((len(x), 1))], axis=1)


@given(st.integers(1, 12), st.integers(2, 8), st.floats(1e-3, 1e3), st.integers(0, 99))
def test_weights_from_samples_are_those_from_sums(samples: int, width: int, strength: float, seed: int) -> None:
    draws = np.random.default_rng(seed)
    Z, T, centre = (torch.from_numpy(draws.normal(size=size)) for size in ((samples, width), (samples, 2), (2, width)))
    expected = solved(Z.T @ Z, Z.T @ T, strength, centre)
    torch.testing.assert_close(drawn(Z, T, strength, centre), expected, rtol=1e-6, atol=1e-6)


def test_a_weight_by_hand() -> None:
    """One sample z = 2 with t = 3, strength 1, centre 1: (4 w - 6) + (w - 1) = 0."""
    Z, T, centre = (torch.tensor([[value]], dtype=torch.float64) for value in (2.0, 3.0, 1.0))
    assert float(drawn(Z, T, 1.0, centre)) == pytest.approx(7 / 5)
    assert torch.isnan(out_of_fold(Z, T, torch.tensor([-1]), centre, [1.0])).all()


def test_sums_are_those_of_all_training_samples() -> None:
    samples = images()
    ridge = FederatedRidge(SPEC, samples, NONE)
    sums, Z, T = ridge.sums(), features(ridge, samples.x), np.eye(3)[samples.y]
    assert manifest_of(sums) == sums_manifest(3, [D])
    np.testing.assert_allclose(sums[GRAM], (Z.T @ Z)[np.triu_indices(D)], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sums[CROSS], Z.T @ T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sums[SQUARES], T.sum(axis=0))


def test_numbers_in_another_scale_have_the_sums_and_the_models_of_the_common_one() -> None:
    x, (factor, shift) = images().x, np.random.default_rng(3).uniform(0.5, 3, (2, 6))
    spec, y = default_spec("tabular", (6,), 3, 0, "mlr", {}), images().y
    one = FederatedRidge(spec, Samples(x, y, "classes", "tabular"), NONE, (factor, shift))
    other = FederatedRidge(spec, Samples((factor * x + shift).astype("f4"), y, "classes", "tabular"), NONE)
    for name, tensor in one.sums().items():
        np.testing.assert_allclose(tensor, other.sums()[name], atol=1e-5)
    new = images(7, seed=5).x
    inputs = ((one, new), (other, (factor * new + shift).astype("f4")))
    tensors = [(ridge.models(served())[NEAREST].tensors, torch.from_numpy(some)) for ridge, some in inputs]
    np.testing.assert_allclose(*(evaluator(NEAREST, its, "classes", 3).forward(some) for its, some in tensors), atol=1e-4)


def test_each_model_and_its_scores_out_of_fold_are_those_of_numpy() -> None:
    samples, given_weights = images(), served()
    ridge = FederatedRidge(SPEC, samples, NONE)
    Z, T, centre = features(ridge, samples.x), np.eye(3)[samples.y], given_weights[WEIGHT].numpy()
    folds = folds_of(samples.y, "images", None, NONE)
    new = images(7, seed=5)
    models = ridge.models(given_weights)
    assert list(models) == list(DRAWS)

    def weights(rows: np.ndarray, strength: float) -> np.ndarray:
        G, B = Z[rows].T @ Z[rows], Z[rows].T @ T[rows]
        return np.linalg.solve(G + strength * np.eye(len(G)), B + strength * centre.T)

    def log_shares(value: np.ndarray) -> np.ndarray:
        share = np.exp(SHARPNESS * (value - value.max(axis=1, keepdims=True)))
        share /= share.sum(axis=1, keepdims=True)
        return np.log((share + LEAST) / (1 + 3 * LEAST))

    for name, strength in DRAWS.items():
        module = evaluator(name, models[name].tensors, "classes", 3)
        expected = log_shares(features(ridge, new.x) @ weights(np.arange(20), strength))
        np.testing.assert_allclose(module.forward(torch.from_numpy(new.x)), expected, atol=1e-5)
        for row in range(20):
            predicted = Z[row : row + 1] @ weights(np.flatnonzero(folds != folds[row]), strength)
            np.testing.assert_allclose(models[name].scores[row : row + 1], log_shares(predicted), atol=1e-5)


def test_before_the_first_sums_there_is_no_model() -> None:
    assert FederatedRidge(SPEC, images(), NONE).models(nothing_solved(3, [D])) == {}


def test_a_device_with_too_few_samples_takes_the_served_weights() -> None:
    ridge, few = FederatedRidge(SPEC, images(4), NONE), served(strength=0.0)
    (name, model), *others = ridge.models(few).items()
    assert (name, others) == (NEAREST, [])
    np.testing.assert_allclose(model.tensors["weight"], SHARPNESS * few[WEIGHT][:, :-1])
    assert model.scores.isfinite().all(), "the served weights do not know these samples"


def test_a_federated_model_is_never_what_the_device_would_take_alone() -> None:
    """Its scores are right about every sample here, and those of the fitted models are not."""
    samples = images()
    portfolio = Portfolio(fitted_on(samples, 3, NONE), samples, NONE, 3, torch.device("cpu"))
    before = portfolio.chosen
    right = torch.from_numpy(np.log(np.eye(3)[samples.y] * 0.98 + 0.01)).float()
    models = FederatedRidge(SPEC, samples, NONE).models(served())
    models = {name: type(model)(model.tensors, right) for name, model in models.items()}
    together = portfolio.joined(models)
    assert set(together.candidates) == {*portfolio.candidates, *DRAWS}
    assert together.chosen == before
    assert set(portfolio.candidates).isdisjoint(DRAWS), "the portfolio itself is as before"
    shares = {name: fit.probability for name, fit in together.fits.items()}
    own = {name: shares[name] for name in portfolio.candidates}
    assert portfolio.gained == (None, None)
    gain_N = (leave_one_out(shares) - leave_one_out(own)).tolist()
    assert together.gained == pytest.approx((sum(gain_N), (20 * variance(gain_N)) ** 0.5)) and sum(gain_N) > 1.0
    pairs = np.arange(20) // 2
    grouped = Portfolio(together._models, samples._replace(groups=pairs), NONE, 3, torch.device("cpu"))
    gain_N = (leave_one_out(shares, groups=pairs) - leave_one_out(own, groups=pairs)).tolist()
    gain_G = [gain_N[first] + gain_N[first + 1] for first in range(0, 20, 2)]
    assert grouped.gained == pytest.approx((sum(gain_G), (10 * variance(gain_G)) ** 0.5)), "a group is one piece of evidence"


@pytest.mark.parametrize("scores", [None, np.log([[0.98, 0.01, 0.01]])])
def test_models_that_know_nothing_more_gain_nothing(scores: np.ndarray | None) -> None:
    samples = images()
    portfolio = Portfolio(fitted_on(samples, 3, NONE), samples, NONE, 3, torch.device("cpu"))
    like = portfolio._models[portfolio.chosen]
    made = like.scores if scores is None else torch.from_numpy(np.repeat(scores, 20, axis=0)).float()
    together = portfolio.joined({"closed-form": type(like)(like.tensors, made)})
    gain, error = together.gained
    assert gain is not None and error is not None and gain < 0.5 and error > 0.0


def test_alone_the_only_sample_of_a_class_is_a_guess_among_all_classes() -> None:
    """Both models are alike elsewhere, so each weighs a half, and one gain of d among ten has the standard error d."""
    samples = images(10)._replace(y=np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 2]))
    (name, model), *_ = fitted_on(samples, 3, NONE).items()
    right = np.log(np.eye(3)[np.minimum(samples.y, 1)] * 0.7 + 0.1)
    alone, joined = (
        torch.from_numpy(np.vstack([right[:9], last])).float() for last in ([0.0, 0.0, -99.0], np.log([0.1, 0.1, 0.8]))
    )
    portfolio = Portfolio({name: type(model)(model.tensors, alone)}, samples, NONE, 3, torch.device("cpu"))
    together = portfolio.joined({"closed-form": type(model)(model.tensors, joined)})
    share_C = np.array([0.1, 0.1, 0.8]) ** together.fits["closed-form"].sharpness
    d = np.log(share_C[2] / share_C.sum() / 2) - np.log(1 / 3)
    assert together.gained == pytest.approx((d, d), abs=1e-4) and d > 0.0
