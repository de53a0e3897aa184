"""The paired test for any score: by hand, against McNemar's, and by its own promise."""

import numpy as np
import pytest

from attune.common.statistics import findings_of, mcnemar, pairs_of
from attune.fedclient.work.comparison import EXACT, MANY, sign_flip


def test_by_hand():
    assert sign_flip([1.0, 2.0, 3.0]) == 2 / 8, "only all signs alike sum to 6"
    assert sign_flip([3.0, -1.0, 1.0]) == 6 / 8, "sums 5, 3, 3, 1 and their opposites against 3"
    assert sign_flip([0.0, 0.0]) == sign_flip([]) == 1.0
    assert sign_flip([0.1] * 5 + [0.0] * 90) == 2 / 32, "what is equal says nothing"
    assert sign_flip([0.1, 0.3, -0.4, 0.2, -0.2]) == 1.0, "their sum is 0 but for rounding, and so are others"


def test_gains_of_one_size_have_mcnemars_p():
    for won, lost in ((5, 1), (7, 4), (12, 0), (3, 3)):
        assert sign_flip([0.3] * won + [-0.3] * lost) == pytest.approx(mcnemar(won, lost))
    assert sign_flip([1.0] * 20 + [-1.0] * 5) == pytest.approx(mcnemar(20, 5), abs=0.002), "drawn, not counted"
    won = MANY // 2 + 60
    assert sign_flip([1.0] * won + [-1.0] * (MANY + 1 - won)) == pytest.approx(mcnemar(won, MANY + 1 - won), rel=0.1)


def test_the_same_gains_have_the_same_p_in_any_unit_and_an_outlier_proves_nothing():
    gains = np.random.default_rng(2).normal(0.4, 1, 40)
    assert sign_flip(gains) == sign_flip(1e9 * gains) == sign_flip(-gains)
    assert sign_flip(np.r_[np.tile([0.01, -0.01], 10), 1e12]) > 0.9


@pytest.mark.parametrize(
    ("samples", "draw"),
    [(samples, draw) for samples in (EXACT - 2, 20) for draw in ("normal", "standard_cauchy", "laplace")]
    + [(50, "standard_cauchy")],
)
def test_of_equal_models_at_most_one_finding_in_twenty_is_wrong(samples, draw):
    """Draw 400 devices with two rivals each, and symmetric gains. Two standard errors of a share of 0.05 are 0.022."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(400):
        reported = {"test_samples": samples}
        for rival in ("common", "local"):
            gains = getattr(rng, draw)(size=samples)
            better = int((gains > 0).sum())
            reported |= {f"better_than_{rival}": better, f"worse_than_{rival}": samples - better}
            reported |= {f"gain_{rival}": float(gains.mean()), f"error_{rival}": 1.0, f"p_{rival}": sign_flip(gains)}
        wrong += set(findings_of(pairs_of(reported)).values()) != {"unclear"}
    assert wrong / 400 <= 0.05 + 0.022


def test_what_is_there_is_found():
    rng = np.random.default_rng(3)
    assert np.mean([sign_flip(rng.normal(0.5, 1, 50)) < 0.05 for _ in range(100)]) > 0.85
    assert sign_flip(rng.normal(0.1, 1, 20_000)) < 1e-6


def test_the_mean_decides_and_not_the_count():
    """Make a model a little better on seven samples, and much worse on three."""
    reported = {"test_samples": 10, "better_than_common": 7, "worse_than_common": 3}
    scored = {"gain_common": -0.4, "error_common": 0.1, "p_common": 0.01}
    [pair] = pairs_of(reported | scored)
    assert findings_of([pair]) == {"common": "worse"} and pair.difference == -0.4
    assert pair.interval() == pytest.approx((-0.626, -0.174), abs=1e-3), "nine degrees of freedom: 2.262 standard errors"
    [unclear] = pairs_of(reported | scored | {"p_common": 0.2})
    assert findings_of([unclear]) == {"common": "unclear"} and unclear.interval()[1] == 0.0, "stretched to what is possible"
