"""Measures of each task by hand: losses, scores, likelihoods, constant answers and blends."""

import math

import pytest
import torch

from attune.common.errors import SettingError
from attune.common.metrics import Metrics
from attune.common.task import TASKS, asked, described
from attune.fedclient.work.measures import LOWEST, MEASURES, mean_score

NUMBERS, LABELS, CLASSES = MEASURES["regression"], MEASURES["multilabel"], MEASURES["classes"]
Y = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
SCORES = torch.tensor([[2.0, 0.0], [-1.0, 0.0]])
THERE = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
LOGITS = torch.tensor([[0.0, 0.0, 0.0], [math.log(3), -math.log(3), -1.0]])


def test_squared_errors_by_hand():
    """Expect (1 + 0) / 2 and (0 + 4) / 2 for the two samples."""
    assert float(NUMBERS.loss(SCORES, Y)) == 1.25
    assert float(NUMBERS.loss(SCORES, Y, torch.tensor([1.0, 0.0]))) == 0.5
    assert NUMBERS.right(NUMBERS.of_scores(SCORES), Y).tolist() == [0.5, -1.0]
    assert mean_score(NUMBERS.right(SCORES, Y)) == -0.25


def test_r2_is_what_textbooks_call_so():
    """Use y with mean 0 and variance 1, as if standardised: one minus residual over total sum of squares."""
    y = torch.randn(50, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (y - y.mean()) / y.std(correction=0)
    scores = 0.7 * y + 0.1
    textbook = 1 - ((y - scores) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    assert mean_score(NUMBERS.right(scores, y)) == pytest.approx(float(textbook))
    assert NUMBERS.constant(y, y) == pytest.approx(0.0, abs=1e-12), "the mean answers nothing"


def test_a_model_that_diverged_has_the_lowest_score_that_can_be_reported():
    broken = torch.tensor([[math.nan], [math.inf], [0.0]])
    found = NUMBERS.right(broken, torch.zeros(3, 1))
    assert bool(found.isfinite().all()) and mean_score(found) == LOWEST
    assert Metrics(accuracy_before=LOWEST).accuracy_before == -1
    assert bool(NUMBERS.likelihood(NUMBERS.evidence(broken, torch.zeros(3, 1))).isfinite().all())


def test_the_likelihood_of_numbers_is_gaussian_and_leans_on_the_federations_variance() -> None:
    scores, y = torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [3.0]])  # squared errors 1 and 9; (1 + 9 + 3) / 5 = 2.6
    found = NUMBERS.likelihood(NUMBERS.evidence(scores, y))
    expected = [math.exp(-error / 5.2) / math.sqrt(2 * math.pi * 2.6) for error in (1, 9)]
    assert found.flatten().tolist() == pytest.approx(expected)
    assert bool(NUMBERS.likelihood(NUMBERS.evidence(y, y)).isfinite().all()), "an exact model"


def test_binary_cross_entropy_by_hand():
    """Expect ln 2 three times; then -ln(3/4), -ln(1/4), and ln(1 + 1/e)."""
    first, second = math.log(2), (-math.log(0.75) - math.log(0.25) + math.log1p(math.exp(-1))) / 3
    assert float(LABELS.loss(LOGITS, THERE)) == pytest.approx((first + second) / 2)
    assert float(LABELS.loss(LOGITS, THERE, torch.tensor([0.25, 0.75]))) == pytest.approx(0.25 * first + 0.75 * second)


def test_a_score_of_labels_is_the_share_that_is_right():
    right = LABELS.right(LABELS.of_scores(LOGITS), THERE)
    assert right.tolist() == [[False, True, True], [True, False, True]]
    assert mean_score(right) == pytest.approx(4 / 6)
    assert LABELS.evidence(LOGITS, THERE)[1].tolist() == pytest.approx([0.75, 0.25, 1 / (1 + math.exp(-1))])
    assert LABELS.constant(THERE, 1 - THERE) == pytest.approx(1 / 6), "1, 0, 0 for everybody; the second label ties"


def test_blends_by_hand():
    assert NUMBERS.of_shares(0.25 * NUMBERS.shares(SCORES) + 0.75 * NUMBERS.shares(Y)).tolist() == [[1.25, 0.0], [-1.0, 1.5]]
    shares = 0.5 * LABELS.shares(LOGITS) + 0.5 * LABELS.shares(-LOGITS)
    assert shares.flatten().tolist() == pytest.approx([0.5] * 6)
    for measure in MEASURES.values():
        some = torch.tensor([[0.5, -1.0, 2.0]])
        again = measure.scores_of(measure.shares(some))
        assert measure.shares(again).tolist()[0] == pytest.approx(measure.shares(some).tolist()[0])
        assert measure.of_shares(measure.shares(some)).tolist() == measure.of_scores(some).tolist()


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_a_model_with_another_number_of_outputs_is_named(task):
    with pytest.raises(SettingError, match=r"scores of shape \(2, 3\) for y of shape \(2, 2\)"):
        MEASURES[task].loss(torch.zeros(2, 3), torch.zeros(2, 2))


def test_metrics_say_their_direction():
    assert described("R2") == "R2 (more is better: 1 is perfect, 0 no better than the mean)"
    assert described("accuracy") == TASKS["classes"].described == "accuracy"
    assert asked("regression", ["dose", "age"]) == "regression of 2 targets (dose, age)"
    assert asked("multilabel", list(range(6))) == "multilabel of 6 labels (0, 1, 2, 3, ...)"
