"""Calibration against numpy's float64, and a device that can hold out no samples: its models, weights and sharpness."""

import math

import numpy as np
import pytest
import torch

from attune.fedclient.work import calibration
from attune.fedclient.work.blend import unweighed, weights_of
from attune.fedclient.work.calibration import SHARPNESSES, calibrated, sharpened, spread
from attune.fedclient.work.executor import alone
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


CLASSES = MEASURES["classes"]


def calibrate(logits, y):
    sharpnesses = CLASSES.sharpnesses
    return calibrated(sharpnesses, torch.cat([CLASSES.evidence(each, y) for each in sharpened(logits, sharpnesses)]))


def hesitant_and_sure(samples, seed=0):
    """Return logits and y of two models: one is right four times in five and unsure, one is right half the time and sure."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 10, samples)

    def scores(share, height):
        said = np.where(draw.random(samples) < share, y, (y + 1 + draw.integers(0, 9, samples)) % 10)
        return torch.tensor(height * np.eye(10)[said] + 0.1 * height * draw.normal(size=(samples, 10)))

    return scores(0.8, 0.5), scores(0.5, 12.0), torch.tensor(y)


@pytest.mark.parametrize("samples", [1, 6, 60, 600])
def test_the_likeliest_sharpness_of_all(samples):
    """Compare with a search on a finer grid by numpy, to the width of a step."""
    *models, y = hesitant_and_sure(samples)
    grid = np.linspace(-3, 3, 2001)
    for logits in models:
        scaled = np.exp(grid)[:, None, None] * logits.numpy()
        right = scaled[:, range(samples), y.numpy()] - np.log(np.exp(scaled).sum(axis=2))
        posterior = np.maximum(right, math.log(1e-6)).sum(axis=1) - 0.5 * (grid * (samples + 3) / samples) ** 2
        found = calibrate(logits, y)
        assert math.log(found.sharpness) == pytest.approx(grid[posterior.argmax()], abs=0.25)
        expected = torch.softmax(found.sharpness * logits, -1)[range(samples), y]
        np.testing.assert_allclose(found.probability.numpy(), expected, rtol=1e-5)


def test_the_hesitant_become_surer_and_the_sure_less_so():
    hesitant, sure, y = hesitant_and_sure(200)
    assert calibrate(hesitant, y).sharpness > 3 and calibrate(sure, y).sharpness < 0.4


def test_without_samples_that_say_otherwise_nothing_changes():
    assert calibrate(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)).sharpness == 1.0 == SHARPNESSES[12]


def test_few_samples_say_little_of_how_sure_a_model_may_be():
    assert [spread(each) for each in (1, 3, 97)] == [0.25, 0.5, 0.97]
    hesitant, sure, y = hesitant_and_sure(200)
    for logits in (hesitant, sure):
        moved = [abs(math.log(calibrate(logits[:some], y[:some]).sharpness)) for some in (2, 200)]
        assert moved[0] <= 0.75 < moved[1]


def test_scores_are_sharpened_no_more_at_a_time_than_memory_allows(monkeypatch):
    scores = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0))
    at_once = list(sharpened(scores, SHARPNESSES))
    monkeypatch.setattr(calibration, "SHARPENED_ELEMENTS", 10 * scores.numel() + 1)
    in_parts = list(sharpened(scores, SHARPNESSES))
    assert [len(each) for each in at_once] == [25] and [len(each) for each in in_parts] == [10, 10, 5]
    torch.testing.assert_close(torch.cat(in_parts), torch.stack([each * scores for each in SHARPNESSES]))
    assert torch.equal(torch.cat(in_parts), at_once[0])


def test_numbers_have_one_sharpness():
    assert MEASURES["regression"].sharpnesses == (1.0,)


@pytest.mark.parametrize("samples", [6, 20, 100])
def test_a_poor_model_that_swears_does_not_drown_a_good_one_that_hesitates(samples):
    """Compare with raw probabilities, by which the poor, but sure, model outweighs the good, but unsure, one."""
    tested = 2000

    def right(sharpen):
        found = []
        for seed in range(20):
            hesitant, sure, y = hesitant_and_sure(samples + tested, seed)
            shares, weights = [], {}
            for name, logits in (("common", hesitant), ("local", sure)):
                sharpness = calibrate(logits[:samples], y[:samples]).sharpness if sharpen else 1.0
                shares.append(CLASSES.shares(sharpness * logits[samples:]))
                [weights[name]] = CLASSES.evidence(sharpness * logits[None, :samples], y[:samples])
            blended = sum(w * each for w, each in zip(weights_of(weights).values(), shares, strict=True))
            found.append(float((blended.argmax(-1) == y[samples:]).double().mean()))
        return np.mean(found)

    assert right(sharpen=False) < 0.55 and right(sharpen=True) > 0.65
