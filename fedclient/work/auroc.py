"""AUROC of what a device keeps and of ordinary models alone on its test part, and the test of their difference.

N test samples, C classes. A case is a sample of the rarer answer; samples of one group count as one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from attune.common.statistics import Z
from attune.fedclient.work.comparison import Places, sign_flip

FEWEST_CASES = 10  # events, and others, below which no number leaves the device
FEWEST_FOR_DELONG = 20  # below it a permutation test counts: DeLong's has too many false findings
STEPS = 60  # halvings of an interval: to the last digit
Floats = npt.NDArray[np.float64]
Events = npt.NDArray[np.bool_]


def rarer(event_N: Events, groups: Places | None = None) -> int:
    """Return the number of events or of others, whichever is smaller; a group of samples counts once."""
    group_N = np.arange(len(event_N)) if groups is None else groups
    return min(len(np.unique(group_N[event_N])), len(np.unique(group_N[~event_N])))


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
    """Return the numbers of Metrics: both areas (of more classes their mean), and for two classes the test of the difference.

    Args:
        kept_NC: Probabilities of classes by what is kept.
        alone_NC: The same by ordinary models alone, if the device has any.
        y_N: The classes.
        groups: Group of each sample as a number from 0 on, (N,).
        fewest: Cases of each class below which there are no numbers.
    """
    events = _events(y_N, kept_NC.shape[1])
    if not has_cases(y_N, kept_NC.shape[1], groups, fewest):
        return {}
    models = {"kept": kept_NC} | ({} if alone_NC is None else {"alone": alone_NC})
    placed = {
        name: {label: _placed(share_NC[:, label], event_N) for label, event_N in events.items()}
        for name, share_NC in models.items()
    }
    areas = {
        f"auroc_{name}": float(np.mean([by_label[label][event_N].mean() for label, event_N in events.items()]))
        for name, by_label in placed.items()
    }
    if alone_NC is None or len(events) > 1:
        return areas
    event_N, group_N = events[1], np.arange(len(y_N)) if groups is None else groups
    gain = areas["auroc_kept"] - areas["auroc_alone"]
    error = _error(placed["kept"][1] - placed["alone"][1], event_N, group_N)
    if rarer(event_N, groups) < FEWEST_FOR_DELONG:
        p = _swapping(kept_NC[:, 1], alone_NC[:, 1], event_N, group_N)
    else:
        p = math.erfc(abs(gain) / error / math.sqrt(2)) if error else 1.0
    return areas | {"auroc_gain_alone": gain, "auroc_error_alone": error, "auroc_p_alone": p}


def newcombe(auroc: float, events: int, others: int) -> tuple[float, float]:
    """Return the interval of an AUROC at LEVEL: method 5 of Newcombe (Statistics in Medicine 2006).

    It is a score interval by Hanley and McNeil's variance, in which both sizes less one are (events + others) / 2 - 1.
    """
    return _edge(auroc, 0.0, events, others), _edge(auroc, 1.0, events, others)


def _edge(auroc: float, outside: float, events: int, others: int) -> float:
    """Return the end of the interval between `outside`, which it excludes, and the area, by bisection."""
    inside, size = auroc, (events + others) / 2 - 1
    for _ in range(STEPS):
        area = (inside + outside) / 2
        spread = 1 + size * ((1 - area) / (2 - area) + area / (1 + area))
        excluded = (auroc - area) ** 2 > Z * Z * area * (1 - area) * spread / (events * others)
        inside, outside = (inside, area) if excluded else (area, outside)
    return inside


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


def _error(placed_N: Floats, event_N: Events, group_N: Places) -> float:
    """Return DeLong's standard error of a mean placement, or of a difference of two (Biometrics 1988).

    Samples of a group are dependent (Obuchowski, Biometrics 1997); groups of one sample leave DeLong's.
    """
    groups = int(group_N.max()) + 1
    sums, variance = [], 0.0
    for of_N in (event_N, ~event_N):
        sum_G = np.bincount(group_N[of_N], (placed_N[of_N] - placed_N[of_N].mean()) / of_N.sum(), groups)
        count = len(np.unique(group_N[of_N]))
        variance += float(sum_G @ sum_G) * count / max(1, count - 1)
        sums.append(sum_G)
    variance += 2 * float(sums[0] @ sums[1]) * groups / max(1, groups - 1)
    return math.sqrt(max(0.0, variance))


def _swapping(kept_N: Floats, alone_N: Floats, event_N: Events, group_N: Places) -> float:
    """Return the p-value of the test that swaps the ranks by both models within samples, or groups.

    The difference of the areas is a sum over samples of terms that a swap multiplies by -1, so it is a test of sign flips.
    (Each pair's term is half that with the partner's rank by one model, and half that by the other one.)
    """
    kept_N, alone_N = _below(kept_N, kept_N), _below(alone_N, alone_N)  # ranks
    term_N = np.empty(len(kept_N))
    for of_N, sign in ((event_N, 1), (~event_N, -1)):
        among = np.concatenate([kept_N[~of_N], alone_N[~of_N]])
        term_N[of_N] = sign * (_below(kept_N[of_N], among) - _below(alone_N[of_N], among)) / of_N.sum()
    return sign_flip(np.bincount(group_N, term_N).astype(float))
