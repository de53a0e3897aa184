"""Proofs of an attacker about one sample from what a device hands in, against the epsilon that the ledger charges."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import SgdSettings
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.common.privacy.noise import key_of
from attune.common.seeds import derive
from attune.fedclient.work.objectives.base import LocalTask, Network, Trained
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.private.noisy_steps import OrderNoise, rate_of
from attune.fedclient.work.stacked.lockstep import Stacked
from tests.empirical_epsilon import Scores, lower_bound
from tests.needs import needs

pytestmark = needs("dp_accounting")

SAMPLES, BATCH, STEPS, TRIALS, AT_ONCE = 10, 5, 2, 4000, 400  # a sample is drawn with probability 1/2
# The canary is sample 0, and the only one with the feature 0.
CLIP, RATE, DELTA, NOISE = 0.5, 1e-3, 1e-3, 1.1
CANARY = torch.tensor([1.0, 1.0, -2.0]) / math.sqrt(6)  # direction of the canary's gradient: labels 2 of 3, p near 1/3


def scores(is_there: bool, noise: float, trials: int = TRIALS) -> Scores:
    """Return for each trial how far the weights of the canary's feature have moved its way; the secret differs in each."""
    network = Network(nn.Sequential(nn.Linear(4, 3, bias=False)))
    start = {"0.weight": torch.zeros(3, 4)}
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 0
    x[0] = torch.tensor([5.0, 0, 0, 0]) if is_there else 0.0  # a sample without any feature has no gradient
    settings = TrainSettings(lr=RATE, momentum=0.0, batch_size=BATCH, local_steps=STEPS)

    def task(trial: int) -> LocalTask:
        key = key_of(b"s" * 32, "there" if is_there else "not", trial)
        return LocalTask(
            network, start, start, x, torch.full((SAMPLES,), 2), settings, partial(derive, trial), torch.device("cpu"),
            family="one", noise=OrderNoise(CLIP, noise, key, STEPS),
        )  # fmt: skip

    stacked, moved = Stacked(), []
    for first in range(0, trials, AT_ONCE):
        for trained in stacked.run([Sgd(SgdSettings()).work(task(first + number)) for number in range(AT_ONCE)]):
            assert isinstance(trained, Trained), trained
            moved.append(CANARY @ trained.tensors["0.weight"][:, 0])
    assert stacked.reasons == []
    return -torch.stack(moved).double().numpy() * BATCH / (RATE * CLIP)


def claimed() -> float:
    return epsilon_of([NoisySteps(rate_of(SAMPLES, BATCH), NOISE, STEPS)], DELTA)


def test_an_attacker_proves_less_than_the_ledger_charges_and_not_nothing() -> None:
    inside, outside = scores(True, NOISE), scores(False, NOISE)
    assert outside.var() == pytest.approx(STEPS * NOISE**2, rel=0.1)
    assert inside.mean() == pytest.approx(STEPS * BATCH / SAMPLES, abs=0.2)
    assert 0.7 < lower_bound(inside, outside, DELTA) <= claimed() < 3


def test_with_half_of_the_noise_the_attacker_proves_more() -> None:
    inside, outside = (scores(is_there, NOISE / 2) for is_there in (True, False))
    assert lower_bound(inside, outside, DELTA) > claimed()
