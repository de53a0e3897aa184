"""Proofs of another device about one device from the sums that it is served, against what the ledger charges."""

from functools import partial

import numpy as np
import pytest
import torch

from attune.common.exchange.transform import Cohort, PartUpdate, RoundContext
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.common.privacy.noise import key_of
from attune.common.wire.tensors import manifest_of
from attune.fedserver.lab.client_noise import ClientNoise, _Values, noise_key
from tests.empirical_epsilon import Scores, lower_bound
from tests.needs import needs

pytestmark = needs("dp_accounting")

CLIP, DENOMINATOR, ROUNDS, NOISE, DELTA, TRIALS = 0.5, 3, 1, 0.85, 1e-3, 1000
NUMBERS = 8


def held(tensor: torch.Tensor) -> _Values:
    return _Values({"w": tensor}, manifest_of({"w": tensor}))


def scores(is_there: bool, noise: float) -> Scores:
    """Return for each trial how far the released sums have moved the victim's way; the server's secret differs in each."""
    before, others = torch.zeros(NUMBERS), torch.ones(NUMBERS) / 10
    victim = torch.zeros(NUMBERS)
    victim[0] = 40 * CLIP  # clipped to CLIP
    updates = {"a": others, "b": -others} | ({"victim": victim} if is_there else {})
    cohort = Cohort("shared", tuple(PartUpdate(name, 1.0, held(values)) for name, values in updates.items()))
    totals = np.zeros(TRIALS)
    for trial in range(TRIALS):
        secret = key_of(b"s" * 32, "there" if is_there else "not", trial)
        mechanism = ClientNoise(CLIP, noise, DENOMINATOR, 1, partial(noise_key, secret, ""))
        for round_ in range(1, ROUNDS + 1):
            context = RoundContext("shared", round_, lambda _: held(before), inputs=tuple(sorted(updates)))
            [released] = mechanism.on_cohort(cohort, context).updates
            totals[trial] += float(released.tensors["w"][0]) * DENOMINATOR / CLIP
    return totals


def claimed() -> float:
    return epsilon_of([NoisySteps(1.0, NOISE, ROUNDS)], DELTA)


def test_another_device_proves_less_than_the_ledger_charges_and_not_nothing() -> None:
    inside, outside = scores(True, NOISE), scores(False, NOISE)
    assert outside.var() == pytest.approx(ROUNDS * NOISE**2, rel=0.1)
    assert inside.mean() == pytest.approx(ROUNDS, abs=0.15)
    assert 0.7 < lower_bound(inside, outside, DELTA) <= claimed()


def test_with_too_little_noise_another_device_proves_more() -> None:
    assert lower_bound(scores(True, NOISE / 5), scores(False, NOISE / 5), DELTA) > claimed()
