"""Paired tests and intervals, against numbers by hand, brute force, and their own promise."""

import functools
import math

import numpy as np
import pytest
import torch

from attune.common.metrics import RIVALS
from attune.common.statistics import Z, difference, findings_of, holm, mcnemar, pairs_of, verdict_on
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.comparison import compared, comparisons_of


def test_mcnemar_by_hand():
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(5, 0) == mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(12, 2) == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    assert mcnemar(5200, 4800) == pytest.approx(6.7e-5, rel=0.05), "many: the normal distribution at z = 3.99, corrected"


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def score(won, lost, n, delta):
    """Return the score statistic; its nuisance share is found by brute force over the likelihood."""
    best, found = -math.inf, 0.0
    for share_lost in np.linspace(max(0.0, -delta), (1 - delta) / 2, 20001)[1:-1]:
        share_won = share_lost + delta
        rest = 1 - share_won - share_lost
        if share_won > 0 and rest > 0:
            value = won * math.log(share_won) + lost * math.log(share_lost) + (n - won - lost) * math.log(rest)
            if value > best:
                best, found = value, share_lost
    return (won - lost - n * delta) / math.sqrt(n * (2 * found + delta * (1 - delta)))


@pytest.mark.parametrize(("won", "lost", "n"), [(12, 2, 50), (3, 9, 20), (30, 31, 100), (20, 3, 400)])
def test_the_interval_ends_where_the_score_statistic_says_so(won, lost, n):
    low, high = difference(won, lost, n)
    assert low < (won - lost) / n < high
    assert (score(won, lost, n, low), score(won, lost, n, high)) == pytest.approx((Z, -Z), abs=2e-3)


def test_interval_and_test_agree():
    for n, won, lost in ((n, won, lost) for n in (10, 40) for won in range(11) for lost in range(11) if won + lost <= n):
        low, high = difference(won, lost, n)
        assert -1 <= low <= (won - lost) / n <= high <= 1
        assert (low <= 0 <= high) == (mcnemar(won, lost) > 0.05), (n, won, lost)
    assert difference(0, 0, 0) == (-1.0, 1.0)
    assert difference(0, 0, 20)[1] == pytest.approx(Z**2 / (20 + Z**2))


def answers(rng, models, n, accuracy):
    """Return answers (models, n) of equally accurate models, which agree because samples are of different difficulty."""
    easy = rng.beta(2 * accuracy, 2 * (1 - accuracy), n)
    return rng.random((models, n)) < easy


@functools.cache
def finding(samples, counts):
    """Return the finding of a device with (better, worse) counts against each rival."""
    said = {"test_samples": samples}
    for name, (better, worse) in zip(("common", "local"), counts, strict=False):
        said |= {f"better_than_{name}": better, f"worse_than_{name}": worse}
    return verdict_on(comparisons_of(OrderResult(order_id="e", round=1, trained=False, samples=80, **said)))


@pytest.mark.parametrize("samples", [20, 50, 100])
@pytest.mark.parametrize("rivals", [1, 2])
def test_of_equal_models_at_most_one_finding_in_twenty_is_wrong(samples, rivals):
    """Draw 1000 devices at each of three accuracies; two standard errors of a share of 0.05 are 0.014."""
    rng = np.random.default_rng(7)
    for accuracy in (0.5, 0.8, 0.95):
        wrong = 0
        for _ in range(1000):
            own, *others = answers(rng, 1 + rivals, samples, accuracy)
            counts = tuple((int((own & ~rival).sum()), int((rival & ~own).sum())) for rival in others)
            wrong += finding(samples, counts) != "unclear"
        assert wrong / 1000 <= 0.05 + 0.014, (accuracy, wrong / 1000)


def in_groups(rng, groups, samples, wrong):
    """Return the samples that a model gets right that errs on a whole group or not at all: windows of one recording."""
    return torch.from_numpy(np.repeat(rng.random(groups) >= wrong, samples))


@pytest.mark.parametrize("groups", [8, 20])
def test_equal_models_are_not_told_apart_by_the_sizes_of_groups_of_samples(groups):
    """Draw 2000 devices with eleven samples per group. By samples, one device in two would report a false difference."""
    rng, places = np.random.default_rng(11), np.repeat(np.arange(groups), 11)
    by_groups, by_samples = 0, 0
    for _ in range(2000):
        own, rival = in_groups(rng, groups, 11, 0.3), in_groups(rng, groups, 11, 0.3)
        for known in (places, None):
            [pair] = pairs_of(compared(own, rival, RIVALS["common"], known) | {"test_samples": len(own)})
            wrong = findings_of([pair])["common"] != "unclear"
            by_groups, by_samples = by_groups + (known is not None and wrong), by_samples + (known is None and wrong)
    assert by_groups / 2000 <= 0.05 + 0.01
    assert by_samples / 2000 > 0.4


def test_what_is_said_of_groups_by_hand():
    """Compute three groups with gains of +2, +1 and -1 of two samples each: the mean is 2 / 6; p is 6 of 8 signs.

    The error has the deviations 2 - 2/3, 1 - 2/3, -1 - 2/3 from the mean: sqrt(14/3 * 3/2) / 6.
    """
    own = torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.bool)
    rival = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.bool)
    found = compared(own, rival, RIVALS["local"], np.array([0, 0, 1, 1, 2, 2]))
    assert (found["better_than_local"], found["worse_than_local"]) == (3, 1)
    assert found["gain_local"] == pytest.approx(1 / 3) and found["p_local"] == 6 / 8
    assert found["error_local"] == pytest.approx(math.sqrt(14 / 3 * 3 / 2) / 6)
    alone = compared(own, rival, RIVALS["local"], np.arange(6))
    [exact] = pairs_of(compared(own, rival, RIVALS["local"]) | {"test_samples": 6})
    assert alone["p_local"] == pytest.approx(exact.p), "groups of one sample are samples"
