"""AUROCs of models on a device's test samples: their intervals, and the test of a difference of two.

N samples, C classes. A case is a sample of the rarer answer. Samples of one group count as one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from attune.common.metrics import FALSE_RATES, RivalMetrics
from attune.common.statistics import Z, student, student_p
from attune.fedclient.work.comparison import Floats, Places, by_group, sign_flip

FEWEST_CASES = 10  # events, and others, below which no number leaves the device
FEWEST_FOR_DELONG = 20  # below it a permutation test counts: DeLong's has too many false findings
HALVINGS = 60  # halvings of an interval: to the last digit
Events = npt.NDArray[np.bool_]


def rarer(event_N: Events, groups: Places | None = None) -> int:
    """Return the number of events or of others, whichever is smaller; a group of samples counts once."""
    group_N = np.arange(len(event_N)) if groups is None else groups
    return min(len(np.unique(group_N[event_N])), len(np.unique(group_N[~event_N])))


def freedom(event_N: Events, groups: Places | None = None) -> int:
    """Return the degrees of freedom of a variance between cases: one less than there are, of groups of unequal sizes fewer.

    Where samples of a group are alike, a group of n has n^2 parts of the variance, so the groups are as good as
    (sum n^2)^2 / sum n^4 equal ones (Satterthwaite, Biometrics Bulletin 1946).
    """
    group_N = np.arange(len(event_N)) if groups is None else groups
    parts = [np.unique(group_N[of_N], return_counts=True)[1].astype(float) ** 2 for of_N in (event_N, ~event_N)]
    return max(1, round(min(float(part_G.sum() ** 2 / (part_G @ part_G)) for part_G in parts)) - 1)


def has_cases(y_N: npt.NDArray[np.intp], classes: int, groups: Places | None = None, fewest: int = FEWEST_CASES) -> bool:
    """Return whether each class, and the rest against it, has enough cases for a number."""
    return all(rarer(event_N, groups) >= fewest for event_N in _events(y_N, classes).values())


def _events(y_N: npt.NDArray[np.intp], classes: int) -> dict[int, Events]:
    """Return which samples are events: of the second of two classes, or of each one against the rest."""
    return {label: y_N == label for label in (range(classes) if classes > 2 else (1,))}


def aurocs(
    kept_NC: Floats,
    alone_NC: Floats | None,
    y_N: npt.NDArray[np.intp],
    groups: Places | None = None,
    fewest: int = FEWEST_CASES,
) -> dict[str, float]:
    """Return the numbers of Metrics: both areas (of more classes their mean), and of two an interval and the difference's test.

    Args:
        kept_NC: Probabilities of classes by what is kept.
        alone_NC: The same by ordinary models alone, if the device has any.
        y_N: The classes.
        groups: Group of each sample as a number from 0 on, (N,).
        fewest: Cases of each class below which there are no numbers.
    """
    if not has_cases(y_N, kept_NC.shape[1], groups, fewest):
        return {}
    events = _events(y_N, kept_NC.shape[1])
    models = {"kept": kept_NC} | ({} if alone_NC is None else {"alone": alone_NC})
    areas = {
        f"auroc_{name}": float(np.mean([_area(share_NC[:, label], event_N) for label, event_N in events.items()]))
        for name, share_NC in models.items()
    }
    if len(events) == 1:
        areas |= zip(("auroc_low", "auroc_high"), interval(kept_NC[:, 1], events[1], groups), strict=True)
    if len(events) == 1 and alone_NC is not None:
        gained = gain(kept_NC[:, 1], alone_NC[:, 1], events[1], groups)
        areas |= zip(("auroc_gain_alone", "auroc_error_alone", "auroc_p_alone"), gained, strict=True)
    return areas


def _area(score_N: Floats, event_N: Events) -> float:
    return float(_placed(score_N, event_N)[event_N].mean())


def difference(kept_N: Floats, rival_N: Floats, event_N: Events, groups: Places | None = None) -> tuple[float, float]:
    """Return the difference of the areas by two models, and its error as it is reported.

    Test and interval are by Student's t. For that the error (DeLong's; with groups Obuchowski's) is made larger, so that an
    interval by the normal distribution is as wide, wherever it is made.
    """
    placed_N = _placed(kept_N, event_N) - _placed(rival_N, event_N)
    return float(placed_N[event_N].mean()), _delong(placed_N, event_N, groups) * student(freedom(event_N, groups)) / Z


def gain(kept_N: Floats, rival_N: Floats, event_N: Events, groups: Places | None = None) -> tuple[float, float, float]:
    """Return the difference of the areas by two models, its error, and the p-value of the paired test."""
    (over, error), degrees = difference(kept_N, rival_N, event_N, groups), freedom(event_N, groups)
    if rarer(event_N, groups) < FEWEST_FOR_DELONG:
        return over, error, _swapping(kept_N, rival_N, event_N, groups)
    return over, error, student_p(over / error * student(degrees) / Z, degrees) if error else 1.0


def sensitivities(score_N: Floats, event_N: Events) -> tuple[float, ...]:
    """Return the share of events that are called where the share of others that are called is each of FALSE_RATES.

    Equal scores are called together; between two thresholds the ROC curve is a line.
    """
    threshold_T = np.unique(score_N)[::-1]
    false_T, true_T = (1 - np.searchsorted(np.sort(score_N[of_N]), threshold_T) / of_N.sum() for of_N in (~event_N, event_N))
    return tuple(np.interp(FALSE_RATES, [0.0, *false_T], [0.0, *true_T]).round(4).tolist())


def threshold_of(share_N: Floats, event_N: Events) -> float:
    """Return the probability of the event from which sensitivity plus specificity is largest (Youden, Cancer 1950)."""
    from sklearn.metrics import roc_curve

    false_T, true_T, threshold_T = roc_curve(event_N, share_N)
    return float(threshold_T[1 + np.argmax((true_T - false_T)[1:])])


def compared_areas(
    mine_N: Floats, rival_N: Floats, event_N: Events, names: RivalMetrics, groups: Places | None = None
) -> dict[str, float]:
    """Return what is reported of a model against a rival where the score is AUROC, as `comparison.compared`."""
    over, error, p = gain(mine_N, rival_N, event_N, groups)
    known = {} if groups is None else {"test_groups": int(groups.max()) + 1}
    return known | {names.gain: over, names.error: error, names.p: p}


def interval(score_N: Floats, event_N: Events, groups: Places | None = None) -> tuple[float, float]:
    """Return the interval of an AUROC at LEVEL: Newcombe's, or with groups a jackknife."""
    if groups is not None:
        return jackknife(score_N, event_N, groups)
    return newcombe(_area(score_N, event_N), int(event_N.sum()), int((~event_N).sum()))


def newcombe(auroc: float, events: int, others: int) -> tuple[float, float]:
    """Return the interval of an AUROC at LEVEL: method 5 of Newcombe (Statistics in Medicine 2006).

    It is a score interval by Hanley and McNeil's variance, in which both sizes less one are (events + others) / 2 - 1.
    """
    return _edge(auroc, 0.0, events, others), _edge(auroc, 1.0, events, others)


def _edge(auroc: float, outside: float, events: int, others: int) -> float:
    """Return the end of the interval between `outside`, which it excludes, and the area, by bisection."""
    inside, size = auroc, (events + others) / 2 - 1
    for _ in range(HALVINGS):
        area = (inside + outside) / 2
        spread = 1 + size * ((1 - area) / (2 - area) + area / (1 + area))
        excluded = (auroc - area) ** 2 > Z * Z * area * (1 - area) * spread / (events * others)
        inside, outside = (inside, area) if excluded else (area, outside)
    return inside


def jackknife(score_N: Floats, event_N: Events, group_N: Places) -> tuple[float, float]:
    """Return the interval of an AUROC at LEVEL by leaving out each of G groups, on the scale of logits, with Student's t.

    Areas of 0 and 1, which show no deviation, have Newcombe's interval, in which a group counts as one sample of each kind that
    it has.
    """
    groups, placed_N = int(group_N.max()) + 1, _placed(score_N, event_N)
    area = float(placed_N[event_N].mean())
    if area in (0.0, 1.0):
        return newcombe(area, *(len(np.unique(group_N[of_N])) for of_N in (event_N, ~event_N)))
    events_G, others_G = (np.bincount(group_N[of_N], minlength=groups) for of_N in (event_N, ~event_N))
    events, others = int(events_G.sum()), int(others_G.sum())
    total = float(placed_N[event_N].sum() * others)  # pairs that are in order
    lost_G = np.bincount(group_N, placed_N * np.where(event_N, others, events), groups)
    for group in np.flatnonzero((events_G > 0) & (others_G > 0)):  # the pairs within a group were taken out twice
        of_N = group_N == group
        lost_G[group] -= _placed(score_N[of_N], event_N[of_N])[event_N[of_N]].sum() * others_G[group]
    least = 0.5 / (events * others)
    left_G = ((total - lost_G) / np.maximum(1, (events - events_G) * (others - others_G))).clip(least, 1 - least)
    logit_G = np.log(left_G / (1 - left_G))
    middle = math.log(area / (1 - area))
    error = math.sqrt((groups - 1) / groups * float(np.square(logit_G - logit_G.mean()).sum()))
    half = student(freedom(event_N, group_N)) * error
    return 1 / (1 + math.exp(half - middle)), 1 / (1 + math.exp(-half - middle))


def _below(score_M: Floats, among_K: Floats) -> Floats:
    """Return the share of `among_K` below each score; equal ones count half."""
    ordered = np.sort(among_K)
    return (np.searchsorted(ordered, score_M) + np.searchsorted(ordered, score_M, "right")) / (2 * len(ordered))


def _placed(score_N: Floats, event_N: Events) -> Floats:
    """Return the share of others below each event, and of events above each other one (Sun and Xu, IEEE SPL 2014)."""
    placed_N = np.empty(len(score_N))
    placed_N[event_N] = _below(score_N[event_N], score_N[~event_N])
    placed_N[~event_N] = 1 - _below(score_N[~event_N], score_N[event_N])
    return placed_N


def _delong(placed_N: Floats, event_N: Events, groups: Places | None) -> float:
    """Return DeLong's standard error of a mean placement, or of a difference of two (Biometrics 1988).

    Samples of a group are dependent (Obuchowski, Biometrics 1997); groups of one sample leave DeLong's.
    """
    group_N = np.arange(len(event_N)) if groups is None else groups
    size, sums, variance = int(group_N.max()) + 1, [], 0.0
    for of_N in (event_N, ~event_N):
        sums.append(np.bincount(group_N[of_N], (placed_N[of_N] - placed_N[of_N].mean()) / of_N.sum(), size))
        count = len(np.unique(group_N[of_N]))
        variance += float(sums[-1] @ sums[-1]) * count / max(1, count - 1)
    return math.sqrt(max(0.0, variance + 2 * float(sums[0] @ sums[1]) * size / max(1, size - 1)))


def _swapping(kept_N: Floats, alone_N: Floats, event_N: Events, groups: Places | None) -> float:
    """Return the p-value of the test that swaps the ranks by both models within samples, or groups.

    The difference of the areas is a sum over samples of terms that a swap multiplies by -1, so it is a test of sign flips.
    (Each pair's term is half that with the partner's rank by one model, and half that by the other one.)
    """
    kept_N, alone_N = _below(kept_N, kept_N), _below(alone_N, alone_N)  # ranks
    term_N = np.empty(len(kept_N))
    for of_N, sign in ((event_N, 1), (~event_N, -1)):
        among = np.concatenate([kept_N[~of_N], alone_N[~of_N]])
        term_N[of_N] = sign * (_below(kept_N[of_N], among) - _below(alone_N[of_N], among)) / of_N.sum()
    return sign_flip(by_group(term_N, groups))
