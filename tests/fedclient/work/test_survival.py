"""Cox loss and C-index: by hand, against an independent float64 calculation, and against lifelines."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attune.common.errors import SettingError
from attune.fedclient.work.measures import MEASURES, mean_score
from attune.fedclient.work.survival import c_index, cox_loss, has_pairs

SURVIVAL = MEASURES["survival"]
Sample = tuple[int, int, int]  # risk in halves, time, event
SAMPLES = st.lists(st.tuples(st.integers(-6, 6), st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=9)


def columns(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    risk, time, event = torch.tensor(samples, dtype=torch.float64).T
    return risk / 2, time, event


def efron(risk: np.ndarray, time: np.ndarray, event: np.ndarray) -> float:
    """Return the negative partial log-likelihood, written down as Efron's formula has it."""
    total = 0.0
    for moment in np.unique(time[event > 0]):
        tied = (time == moment) & (event > 0)
        whole, part, d = np.exp(risk[time >= moment]).sum(), np.exp(risk[tied]).sum(), int(tied.sum())
        total += sum(math.log(whole - i / d * part) for i in range(d)) - risk[tied].sum()
    return total


def pairs(risk: np.ndarray, time: np.ndarray, event: np.ndarray) -> tuple[float, int]:
    """Return (right pairs, comparable pairs), one pair after the other."""
    right, count = 0.0, 0
    for i in range(len(risk)):
        for j in range(len(risk)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                count += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right, count


def test_the_loss_by_hand():
    """Expect, with hazards 1, 2 and 4: events at 1 and 2, the last is censored at 3."""
    risk, time = torch.tensor([1.0, 2.0, 4.0]).log(), torch.tensor([1.0, 2.0, 3.0])
    first, second = -math.log(1 / 7), -math.log(2 / 6)
    assert float(cox_loss(risk, time, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx((first + second) / 2)
    assert float(cox_loss(risk, time, torch.tensor([0.0, 1.0, 0.0]))) == pytest.approx(second)
    tied = torch.tensor([1.0, 1.0, 1.0])  # 1 and 2 at once: 7, then 7 - 3/2; the third is censored then, and at risk
    expected = -(math.log(1 / 7) + math.log(2 / 5.5)) / 2
    assert float(cox_loss(risk, tied, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(expected)


def test_the_index_by_hand():
    """Expect of the comparable pairs (a b), (a c), (b c): a is above b, equal to c, and b is below c."""
    risk, time, event = torch.tensor([3.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, 0.0])
    assert c_index(risk, time, event) == 1.5 / 3
    assert c_index(torch.tensor([3.0, 2.0, 1.0]), time, event) == 1.0
    assert c_index(torch.zeros(3), time, event) == 0.5 == SURVIVAL.constant(torch.zeros(0, 2), torch.zeros(0, 2))
    assert c_index(torch.full((3,), math.nan), time, event) == 0.0, "a model that diverged"


@given(SAMPLES)
def test_loss_gradient_and_index_are_those_of_the_formulas(samples: list[Sample]):
    risk, time, event = columns(samples)
    risk.requires_grad_()
    loss = cox_loss(risk, time, event)
    [gradient] = torch.autograd.grad(loss, risk)
    plain, events = risk.detach().numpy(), int(event.sum())
    expected = efron(plain, time.numpy(), event.numpy())
    assert float(loss.detach()) == pytest.approx(expected / max(1, events), abs=1e-9)
    for i in range(len(plain)):  # central differences
        moved = [plain + sign * 1e-5 * np.eye(len(plain))[i] for sign in (1, -1)]
        up, down = (efron(at, time.numpy(), event.numpy()) for at in moved)
        assert float(gradient[i]) == pytest.approx((up - down) / 2e-5 / max(1, events), abs=1e-7)
    right, count = pairs(plain, time.numpy(), event.numpy())
    assert has_pairs(time, event) == (count > 0) and math.isnan(c_index(risk, time, event)) == (count == 0)
    if count:
        assert c_index(risk, time, event) == pytest.approx(right / count)


@given(SAMPLES, st.data())
def test_a_risk_that_is_no_number_is_right_in_no_pair(samples: list[Sample], data):
    risk, time, event = columns(samples)
    risk[data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1))] = math.nan
    right, count = pairs(risk.numpy(), time.numpy(), event.numpy())
    assert c_index(risk, time, event) == pytest.approx(right / count if count else math.nan, nan_ok=True)


@given(SAMPLES, st.randoms())
def test_the_order_of_the_samples_and_a_constant_do_not_matter(samples: list[Sample], random):
    shuffled = random.sample(samples, len(samples))
    one, other = columns(samples), columns(shuffled)
    assert float(cox_loss(*one)) == pytest.approx(float(cox_loss(other[0] + 300, *other[1:])), abs=1e-9)
    assert c_index(*one) == pytest.approx(c_index(other[0] + 300, *other[1:]), nan_ok=True)


@pytest.mark.parametrize(
    "samples",
    [[(1, 2, 0), (0, 1, 0)], [(1, 2, 1)], [(1, 2, 0)], [(1, 3, 1), (-2, 3, 1), (4, 3, 1)]],
    ids=["no event", "one row with an event", "one row without", "all at once"],
)
def test_batches_without_a_pair_have_a_finite_loss_and_no_index(samples: list[Sample]):
    risk, time, event = columns(samples)
    risk = risk.float().requires_grad_()
    loss = cox_loss(risk, time, event)
    loss.backward()
    assert bool(loss.isfinite()) and risk.grad is not None and bool(risk.grad.isfinite().all())
    assert not has_pairs(time, event) and math.isnan(c_index(risk, time, event))
    if not event.any() or len(samples) == 1:
        assert float(loss.detach()) == 0 and risk.grad.abs().max() == 0


def test_hazards_that_would_overflow_do_not():
    risk = torch.tensor([400.0, -400.0, 0.0], requires_grad=True)
    loss = cox_loss(risk, torch.tensor([2.0, 1.0, 3.0]), torch.ones(3))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(800 / 3) and bool(risk.grad.isfinite().all())
    half = cox_loss(torch.tensor([400.0, -400.0], dtype=torch.bfloat16), torch.tensor([1.0, 1.0]), torch.ones(2))
    assert half.dtype == torch.float32 and bool(half.isfinite())


def drawn(seed: int, n: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (features (n, 2), whole times with many ties, events) of a Cox model."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    time = np.ceil(rng.exponential(8 * np.exp(-x @ [0.8, -0.5])))
    censored = np.ceil(rng.exponential(12, n))
    return x, np.minimum(time, censored), (time <= censored).astype(float)


@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_are_those_of_lifelines(seed: int):
    """Compare at lifelines' own estimate: its log-likelihood there, and a gradient of 0."""
    pandas, lifelines = pytest.importorskip("pandas"), pytest.importorskip("lifelines")
    x, time, event = drawn(seed)
    assert len(np.unique(time)) < len(time) / 3, "many ties"
    frame = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "time": time, "event": event})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = lifelines.CoxPHFitter().fit(frame, "time", "event")
    assert fitted.summary.shape[0] == 2
    beta = torch.tensor(fitted.params_.to_numpy(), requires_grad=True)
    loss = cox_loss(torch.from_numpy(x) @ beta, torch.from_numpy(time), torch.from_numpy(event))
    assert float(loss.detach()) * event.sum() == pytest.approx(-fitted.log_likelihood_, rel=1e-9)
    loss.backward()
    assert float(beta.grad.abs().max()) < 1e-5


def test_the_measure_has_one_score_of_all_samples_and_none_of_one():
    y = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]])
    scores = torch.tensor([[2.0], [1.0], [1.5]])
    assert mean_score(SURVIVAL.right(SURVIVAL.of_scores(scores), y)) == 1.0
    assert SURVIVAL.can_score(y) and not SURVIVAL.can_score(y[1:]) and not SURVIVAL.can_score(y[:0])
    assert float(SURVIVAL.loss(scores, y)) == pytest.approx(float(cox_loss(scores[:, 0], y[:, 0], y[:, 1])))
    for refused in (lambda: SURVIVAL.evidence(scores, y), lambda: SURVIVAL.constant_likelihood(y)):
        with pytest.raises(SettingError, match="gives no likelihood of a single sample"):
            refused()
    with pytest.raises(SettingError, match="has no loss of a single sample"):
        SURVIVAL.loss(scores, y, torch.ones(3) / 3)
    with pytest.raises(SettingError, match=r"scores of shape \(3, 2\) for times and events of shape \(3, 2\)"):
        SURVIVAL.loss(torch.zeros(3, 2), y)
