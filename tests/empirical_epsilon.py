"""Lower bound of epsilon that a distinguishing attack proves, from scores with and without one unit.

Jagielski, Ullman, Oprea, 'Auditing Differentially Private Machine Learning', NeurIPS 2020: for any test, epsilon is at least
log((true positive rate - delta) / false positive rate), and by symmetry with the two kinds of error exchanged.
"""

import math

import numpy as np
import numpy.typing as npt

from tests.needs import Later

STATS = Later("scipy.stats")
Scores = npt.NDArray[np.float64]


def lower_bound(inside: Scores, outside: Scores, delta: float, confidence: float = 0.999) -> float:
    """Return an epsilon below which the truth does not lie, with this confidence; 0 if the attack shows nothing.

    The threshold is chosen on the first halves of the scores, and the rates are bounded on the second halves (Clopper and
    Pearson, each bound with half of the error).
    """
    half = min(len(inside), len(outside)) // 2
    error = (1 - confidence) / 2

    def proven(threshold: float, one: Scores, other: Scores) -> float:
        hits, alarms, count = int((one > threshold).sum()), int((other > threshold).sum()), len(one)
        least = float(STATS.beta.ppf(error, hits, count - hits + 1)) if hits else 0.0
        most = float(STATS.beta.ppf(1 - error, alarms + 1, count - alarms)) if alarms < count else 1.0
        return math.log((least - delta) / most) if least > delta else 0.0

    kinds = ((inside, outside), (-outside, -inside))
    tried = [
        (proven(threshold, one[:half], other[:half]), kind, threshold)
        for kind, (one, other) in enumerate(kinds)
        for threshold in np.quantile(np.concatenate([one[:half], other[:half]]), np.linspace(0.02, 0.999, 60))
    ]
    _, kind, threshold = max(tried)
    one, other = kinds[kind]
    return max(0.0, proven(float(threshold), one[half:], other[half:]))
