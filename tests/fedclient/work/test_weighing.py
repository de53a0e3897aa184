"""Weights of networks and fitted models, worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from attune.fedclient.work import weighing
from attune.fedclient.work.calibration import Calibrated
from attune.fedclient.work.executor import alone
from attune.fedclient.work.weighing import LEAST_WEIGHT, UNKNOWN_SHARE, weighed


class Evaluates:
    """Network whose probabilities of the right labels are given."""

    def __init__(self, probability):
        self.probability = torch.tensor(probability)

    def calibrated(self, tensors, x, y, weight):
        yield from ()
        return Calibrated(2.0, self.probability)


class Fitted:
    """Portfolio of models whose probabilities out of fold, of training and of held-out labels, are given."""

    def __init__(self, held, told=None, lasts=True):
        self.held = {name: torch.tensor(p) for name, p in held.items()}
        told = held if told is None else told
        self.fits = {name: Calibrated(3.0, torch.tensor(p)) for name, p in told.items()} if lasts else {}
        self.candidates = {name: (name, {}) for name in held}

    def held_out(self, weights):
        return sum(weight * self.held[name] for name, weight in weights.items())


def data(held):
    rows = torch.zeros(held, 1)
    return SimpleNamespace(validation_x=rows, validation_y=rows, validation_weight=None, train_x=rows, train_y=rows)


def found(networks, portfolio, prior=None, own="personalized", held=None):
    candidates = {name: (Evaluates(p), {}) for name, p in networks.items()}
    held = len(next(iter(networks.values()))) if held is None else held
    return alone(weighed(candidates, own, data(held), prior or {}, portfolio))


def test_fitted_models_are_one_model_beside_the_networks():
    """Two equal networks and a fitted model that explain each sample alike have the weights of the prior: a half together."""
    even = found({"personalized": [0.5] * 4, "common": [0.5] * 4}, Fitted({"logistic": [0.5] * 4, "forest": [0.5] * 4}))
    weights = {name: member.weight for name, member in even.members.items()}
    assert weights == pytest.approx({"personalized": 0.25, "common": 0.25, "logistic": 0.25, "forest": 0.25})
    assert {name: member.sharpness for name, member in even.members.items()} == {
        "personalized": 2.0, "common": 2.0, "logistic": 3.0, "forest": 3.0,
    }  # fmt: skip
    assert even.likelihood == pytest.approx(dict.fromkeys(("personalized", "common", "alone"), 4 * -0.6931472))
    assert even.fitted == pytest.approx({"logistic": 0.5, "forest": 0.5})


def test_fitted_models_are_weighed_by_all_samples_and_networks_by_held_out_ones():
    """The forest explains the training samples; the held-out ones are explained by the network alone."""
    told = {"logistic": [0.1] * 200, "forest": [0.9] * 200}
    result = found({"personalized": [0.9] * 60}, Fitted({"logistic": [0.1] * 60, "forest": [0.2] * 60}, told))
    weights = {name: member.weight for name, member in result.members.items()}
    assert set(weights) == {"personalized", "forest"}, "the logistic model weighs less than LEAST_WEIGHT"
    assert weights["personalized"] > 0.9 and sum(weights.values()) == pytest.approx(1)
    assert result.fitted["logistic"] < LEAST_WEIGHT < result.fitted["forest"]


def test_other_devices_are_told_what_the_devices_own_samples_say_and_not_the_prior():
    prior = {"logistic": 0.99, "forest": 0.01, "alone": 0.5, "personalized": 0.5}
    portfolio = Fitted({"logistic": [0.5] * 4, "forest": [0.5] * 4})
    result = found({"personalized": [0.5] * 4}, portfolio, prior)
    assert result.fitted == pytest.approx({"logistic": 0.5, "forest": 0.5})
    assert result.members.keys() == {"personalized", "logistic"}, "by the prior the forest weighs less than LEAST_WEIGHT"
    assert result.members["logistic"].weight + result.members["personalized"].weight == pytest.approx(1)


def test_a_network_that_diverged_is_left_out():
    result = found({"personalized": [float("nan")] * 3}, Fitted({"logistic": [0.5] * 3}))
    assert {name: member.weight for name, member in result.members.items()} == {"logistic": 1.0}


@pytest.mark.parametrize(("prior", "share"), [({}, UNKNOWN_SHARE), ({"alone": 0.8, "common": 0.2}, 0.8)])
def test_without_held_out_samples_the_share_is_that_of_the_fleet(monkeypatch, prior, share):
    def own_alone(*given):
        yield from ()
        return {}

    monkeypatch.setattr(weighing, "unweighed", own_alone)
    result = found({"personalized": []}, Fitted({"logistic": [], "forest": []}, lasts=False), prior, held=0)
    weights = {name: member.weight for name, member in result.members.items()}
    assert weights == pytest.approx({"personalized": 1 - share, "logistic": share / 2, "forest": share / 2})
    told = prior | {"logistic": 0.3, "forest": 0.1}
    again = found({"personalized": []}, Fitted({"logistic": [], "forest": []}, lasts=False), told, held=0)
    assert again.members["logistic"].weight == pytest.approx(3 * again.members["forest"].weight)


def test_what_cannot_be_predicted_out_of_fold_takes_the_share_of_the_fleet_too():
    result = found(
        {"personalized": [0.5] * 4}, Fitted({"logistic": [0.5] * 4}, lasts=False), {"alone": 0.75, "personalized": 0.25}
    )
    assert {name: member.weight for name, member in result.members.items()} == pytest.approx(
        {"personalized": 0.25, "logistic": 0.75}
    )


def test_without_a_portfolio_nothing_is_dropped():
    """Older servers know no fitted models: the blend stays as it was."""
    result = found({"personalized": [0.9] * 100, "common": [0.001] * 100}, None)
    assert 0 < result.members["common"].weight < LEAST_WEIGHT and result.fitted == {}
    assert found({"personalized": [0.9] * 3}, None).members == {}
