"""Results of a fleet's devices about their models, as the prior of the next evaluation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.fedserver.core.prior import FEW, fitted_of, prior_of, votes_of
from attune.fedserver.core.records import Report

MODELS = ("personalized", "common", "local")
values = st.floats(-1.7e308, 1.7e308)


def log_posterior(share, found):
    """Compute the posterior: each device's samples are explained by one of its models; the prior is one vote each."""
    whole = sum(share.values())
    explained = [sum(share[model] * math.exp(value) for model, value in device.items()) for device in found]
    each = [math.log(p / sum(share[model] for model in device)) for p, device in zip(explained, found, strict=True)]
    return sum(each) + sum(math.log(value / whole) for value in share.values())


def shares_of(found):
    """Return the shares of devices with any names."""
    return prior_of({str(number): each for number, each in enumerate(found)}).shares


def test_where_all_devices_find_the_same_the_count_is_that_of_votes():
    """Use ten devices for which only one model explains the samples: (10 + 1) / (10 + 3)."""
    found = shares_of([{"personalized": -900.0, "common": -900.0, "local": -2.0}] * 10)
    assert found == pytest.approx({"personalized": 1 / 13, "common": 1 / 13, "local": 11 / 13})


def test_without_a_difference_nothing_is_preferred():
    assert shares_of([{"common": -3.0, "local": -3.0}] * 4) == pytest.approx({"common": 0.5, "local": 0.5})
    assert shares_of([]) == {}


def test_it_is_the_likeliest_a_posteriori():
    draw = np.random.default_rng(5)
    found = [dict(zip(MODELS[: 2 + i % 2], draw.normal(-6, 3, 3).tolist(), strict=False)) for i in range(9)]
    best = shares_of(found)
    assert sum(best.values()) == pytest.approx(1)
    for _ in range(500):
        other = dict(zip(MODELS, draw.dirichlet(np.ones(3)).tolist(), strict=True))
        assert log_posterior(best, found) >= log_posterior(other, found) - 1e-9


def test_who_lacks_a_model_says_nothing_against_it():
    """Use two devices that trained a model alone and do best with it, and eighteen without such a model."""
    both = {"common": -20.0, "local": -1.0}
    found = shares_of([*[{"personalized": -5.0, "common": -5.0}] * 18, both, both])
    assert found["local"] > 2 * found["common"]


@given(st.lists(st.dictionaries(st.sampled_from(MODELS), values, min_size=1), min_size=1, max_size=8), values, values)
def test_no_device_has_more_than_its_vote(found, one, other):
    """Check that a device's claim moves a share no further than one vote does, if others have seen a difference."""
    honest = [{"personalized": -2.0, "common": -90.0, "local": -90.0}] * 12 + [{"personalized": -80.0, "common": -1.0}] * 8
    without, with_it = shares_of(honest), shares_of([*honest, {"personalized": one, "common": other, "local": 0.0}])
    assert all(abs(with_it[name] - without[name]) <= 1.5 / 20 for name in MODELS)
    said = shares_of(found)
    assert all(0 < share <= 1 for share in said.values()) and sum(said.values()) == pytest.approx(1)


def test_who_has_weighed_several_models_has_a_say():
    def row(name, **more):
        return Report(round=2, work="evaluate", client=name, **more)

    rows = [row("a", likelihood_common=-5.0, likelihood_local=-6.0), row("b"), row("c", likelihood_common=-7.0)]
    assert votes_of(rows) == {"a": {"common": -5.0, "local": -6.0}}


def test_a_device_is_told_what_the_others_found():
    """Leave out a device's own samples, which it weighs itself: they would count twice."""
    sees, blind = {"common": -6.0, "local": -1.0}, {"common": -3.0, "local": -3.0}
    found = prior_of({"a": sees} | {f"b{i}": blind for i in range(9)})
    assert found.of("a") == pytest.approx({"common": 0.5, "local": 0.5}), "no other device has seen a difference"
    assert found.of("b0")["local"] > 0.6 and found.of("nobody") == found.shares
    assert prior_of({"a": sees}).of("a") == pytest.approx({"common": 0.5, "local": 0.5})


def test_without_a_device_is_as_if_it_had_not_voted():
    draw = np.random.default_rng(7)
    found = {f"d{i}": dict(zip(MODELS, draw.normal(-6, 2, 3).tolist(), strict=True)) for i in range(12)}
    whole = prior_of(found)
    for name in found:
        others = prior_of({other: each for other, each in found.items() if other != name}).shares
        assert whole.of(name) == pytest.approx(others, abs=1e-6)
        assert sum(whole.of(name).values()) == pytest.approx(1) and min(whole.of(name).values()) > 0


def test_of_very_many_devices_ones_own_vote_is_left_in():
    found = prior_of({str(i): {"common": -6.0, "local": -1.0} for i in range(FEW + 1)})
    assert found.of("0") == found.shares


def test_fitted_models_have_the_mean_weight_of_the_other_devices():
    fitted = {
        "a": {"logistic": 0.9, "forest": 0.1},
        "b": {"logistic": 0.5, "forest": 0.5},
        "c": {"logistic": 0.1, "forest": 0.9},
    }
    found = prior_of({}, fitted)
    assert found.shares == pytest.approx({"forest": 0.5, "logistic": 0.5}) == found.of("newcomer")
    assert found.of("a") == pytest.approx({"forest": 0.7, "logistic": 0.3})
    votes = {name: {"personalized": -3.0, "alone": -1.0} for name in fitted}
    both = prior_of(votes, fitted).of("b")
    assert both["forest"] == pytest.approx(0.5) and both["alone"] > both["personalized"]
    assert both["alone"] + both["personalized"] == pytest.approx(1)


def test_a_model_that_some_devices_lack_counts_where_it_is():
    found = prior_of({}, {"a": {"logistic": 1.0}, "b": {"logistic": 0.5, "boosting": 0.5}})
    assert found.shares == pytest.approx({"boosting": 0.25, "logistic": 0.75})


@given(st.lists(st.dictionaries(st.sampled_from(["logistic", "forest"]), st.floats(0, 1), max_size=2), max_size=6))
def test_no_device_has_more_than_one_vote_on_fitted_models(claims):
    rows = [Report(round=1, work="evaluate", client=f"d{i}", fitted=claim) for i, claim in enumerate(claims)]
    found = fitted_of(rows)
    assert all(sum(of.values()) <= 1 + 1e-9 for of in found.values())
    shares = prior_of({}, found).shares
    assert not shares or (sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0)


def test_before_anything_is_known_networks_together_weigh_as_much_as_fitted_models():
    equal = {"personalized": -2.0, "common": -2.0, "alone": -2.0}
    assert shares_of([equal]) == pytest.approx({"personalized": 0.25, "common": 0.25, "alone": 0.5})
