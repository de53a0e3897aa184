"""Simulated daily looks at a finished model: how often `fedclient watch` cries wolf, and how soon it finds a risen error.

    python -m benchmarks.drift

It draws the errors on the test part and on new samples, and calls the product's own code. Written to results/drift.csv, with
the standard error of each share, and an upper bound of what any test can find.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.stats import binom

from attune.features.finished.drift import CHANCE, begun, looked
from benchmarks.result_file import table

RESULT = Path(__file__).parent / "results" / "drift.csv"
FLEET, PER_LOOK, YEAR = 1000, 20, 365  # devices drawn, new samples a look, looks
WITHIN = 500  # samples in which a rise is to be found
BEFORE, AFTER = 0.10, 0.25  # shares of errors
REFERENCES = (50, 100, 200, 400)
QUIET = (0, 100, 365)  # looks before the rise
SEED = 58


def alarm_of(rng: np.random.Generator, reference: int, rates: np.ndarray) -> tuple[int, float]:
    """Return at which look there is an alarm (a large number: at none), and the limit; rates: the error at each look."""
    watch = begun("", reference, int(rng.binomial(reference, BEFORE)))
    for look, wrong in enumerate(rng.binomial(PER_LOOK, rates)):
        watch = looked(watch, int(wrong), PER_LOOK)
        if watch.alarm:
            return look, watch.limit
    return 10**9, watch.limit


def most_found(reference: int, steps: int = 61) -> float:
    """Return a bound on how often any test at CHANCE finds the rise, even one that looks once, after WITHIN samples.

    The most powerful test (Neyman and Pearson) knows both errors after the rise, and the one error without it. The bound is the
    least over that one error: a test at CHANCE has its level at each.
    """
    counts = np.arange(reference + 1)[:, None], np.arange(WITHIN + 1)[None]

    def log_chance(old: float, new: float) -> np.ndarray:
        return np.ravel(binom.logpmf(counts[0], reference, old) + binom.logpmf(counts[1], WITHIN, new))

    risen, found_at = log_chance(BEFORE, AFTER), []
    for error in np.linspace(BEFORE, AFTER, steps):
        calm = log_chance(error, error)
        order = np.argsort(calm - risen)
        found_at.append(np.interp(CHANCE, np.exp(calm[order]).cumsum(), np.exp(risen[order]).cumsum()))  # random at the edge
    return float(min(found_at))


def shown(values: np.ndarray) -> str:
    """Return a share in % with its standard error."""
    share = float(values.mean())
    return f"{100 * share:.1f} ({100 * (share * (1 - share) / len(values)) ** 0.5:.1f})"


def main() -> None:
    """Simulate, and write the table."""
    rng, rows = np.random.default_rng(SEED), []
    for reference in REFERENCES:
        calm = [alarm_of(rng, reference, np.full(YEAR, BEFORE)) for _ in range(FLEET)]
        row = {
            "test samples": reference,
            "median limit": f"{np.median([limit for _, limit in calm]):.3f}",
            "false alarms in a year, % (s.e.)": shown(np.array([look < YEAR for look, _ in calm])),
        }
        for quiet in QUIET:
            looks = quiet + WITHIN // PER_LOOK
            rates = np.where(np.arange(looks) < quiet, BEFORE, AFTER)
            alarms = np.array([alarm_of(rng, reference, rates)[0] for _ in range(FLEET)])
            row[f"rise found within {WITHIN} samples after {quiet} quiet looks, % (s.e.)"] = shown(
                (alarms >= quiet) & (alarms < looks)
            )
        row[f"most that any test finds of {WITHIN} samples, %"] = f"{100 * most_found(reference):.1f}"
        rows.append(row)
        print(row, flush=True)
    with table(RESULT, list(rows[0])) as write:
        for row in rows:
            write(row)


if __name__ == "__main__":
    main()
