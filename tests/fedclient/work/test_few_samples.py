"""A device that can hold out no samples: the models that it keeps, their weights, and how sure the one trained alone may be."""

from __future__ import annotations

import math

import pytest
import torch

from attune.fedclient.work.blend import unweighed
from attune.fedclient.work.calibration import SHARPNESSES, sharpened
from attune.fedclient.work.job import alone
from attune.fedclient.work.measures import MEASURES

Y = torch.tensor([0, 1])  # a constant answer gives each of them 1/2


class Gives:
    """Trainer whose tensors are the probability that the model gives to the right one of two labels."""

    measure = MEASURES["classes"]

    def likelihoods(self, right, x, y):
        """Return the likelihoods for each sharpness."""
        logit = math.log(right / (1 - right))
        scores = torch.tensor([[logit, 0.0], [0.0, logit]])[y]
        yield from ()
        return torch.cat([self.measure.evidence(each, y) for each in sharpened(scores, SHARPNESSES)])


class Predicts:
    """Trainer for numbers whose tensors are the predictions."""

    measure = MEASURES["regression"]

    def likelihoods(self, scores, x, y):
        yield from ()
        return self.measure.likelihood(self.measure.evidence(scores.unsqueeze(0), y))


def weigh(own, prior=None, y=Y, trainer=None, **models):
    trainer = trainer or Gives()
    found = alone(unweighed({name: (trainer, each) for name, each in models.items()}, own, y, y, prior or {}))
    return {name: (member.weight, member.sharpness) for name, member in found.items()}


def test_the_federations_models_count_alike_or_as_other_devices_found():
    alike = weigh("personalized", personalized=0.9, common=0.7)
    assert alike == {"personalized": (0.5, 1.0), "common": (0.5, 1.0)}
    told = weigh("personalized", {"personalized": 0.2, "common": 0.8}, personalized=0.9, common=0.7)
    assert told == {"personalized": (pytest.approx(0.2), 1.0), "common": (pytest.approx(0.8), 1.0)}


def test_the_model_trained_alone_counts_a_third_and_is_as_sure_as_the_others():
    """Compute by hand: together the others give 0.8, a logit of ln 4. From a logit of ln 999 that is the factor 0.2007.

    The next of the sharpnesses exp(k / 4) is exp(-1.5).
    """
    found = weigh("personalized", personalized=0.9, common=0.7, local=0.999)
    assert found["local"] == (pytest.approx(1 / 3), pytest.approx(math.exp(-1.5)))
    assert [found[name] for name in ("personalized", "common")] == [(pytest.approx(1 / 3), 1.0)] * 2
    assert weigh("common", common=0.7, local=0.999)["common"] == (pytest.approx(2 / 3), 1.0)


def test_one_that_is_never_that_sure_is_taken_where_it_explains_most():
    assert weigh("common", common=0.999999, local=0.6)["local"][1] == pytest.approx(math.exp(3))


@pytest.mark.parametrize(
    ("own", "models", "kept"),
    [
        ("personalized", {"personalized": 0.9, "common": 0.4}, {}),
        ("personalized", {"personalized": 0.9, "common": 0.4, "local": 0.99}, {"personalized": 2 / 3, "local": 1 / 3}),
        ("common", {"common": 0.4, "local": 0.99}, {"local": 1.0}),
        ("common", {"common": 0.4, "local": 0.45}, {}),
        ("common", {"common": 0.6, "local": 0.45}, {}),
        ("personalized", {"personalized": 0.45, "common": 0.6}, {"common": 1.0}),
    ],
)
def test_what_explains_its_samples_no_better_than_a_constant_answer_does_not_count(own, models, kept):
    assert {name: weight for name, (weight, _) in weigh(own, **models).items()} == pytest.approx(kept)


def test_where_all_labels_are_alike_the_own_model_is_kept():
    assert weigh("personalized", y=torch.tensor([1, 1]), personalized=0.9, common=0.7, local=0.99) == {}


def test_numbers_have_no_sharpness():
    y = torch.tensor([[-1.0], [1.0]])  # a constant answer is off by 1
    found = weigh("personalized", y=y, trainer=Predicts(), personalized=y * 0.9, common=y * 0.5, local=y, )  # fmt: skip
    assert found == {name: (pytest.approx(1 / 3), 1.0) for name in ("personalized", "common", "local")}
    assert weigh("personalized", y=y, trainer=Predicts(), personalized=y * 0.9, common=-y) == {}


@pytest.mark.parametrize(
    ("task", "y", "expected"),
    [
        ("classes", [0, 0, 1, 0], [0.75, 0.75, 0.25, 0.75]),
        ("classes", [[0, 1], [1, 1]], [[0.25, 0.75], [0.75, 0.75]]),
        ("multilabel", [[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.5], [1.0, 0.5]]),
        # Deviations of 1 about the mean 3: exp(-1/2) / sqrt(2 pi) each.
        ("regression", [[2.0], [4.0]], [[0.2419707], [0.2419707]]),
    ],
)
def test_how_likely_labels_are_by_a_constant_answer(task, y, expected):
    assert MEASURES[task].constant_likelihood(torch.tensor(y)).tolist() == [pytest.approx(each) for each in expected]
