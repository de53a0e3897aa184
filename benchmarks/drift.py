"""Simulated daily looks at a finished model: how often `fedclient watch` cries wolf, and how soon it finds a risen error.

    python -m benchmarks.drift

It draws the errors on the test part and on new samples, and calls the product's own code. Written to results/drift.csv.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.features.finished.drift import begun, looked
from benchmarks.result_file import table

RESULT = Path(__file__).parent / "results" / "drift.csv"
FLEET, PER_LOOK, YEAR = 1000, 20, 365  # devices drawn, new samples a look, looks
WITHIN = 500  # samples in which a rise is to be found
BEFORE, AFTER = 0.10, 0.25  # shares of errors
REFERENCES = (50, 100, 200, 400)
QUIET = (0, 100)  # looks before the rise
SEED = 58


def alarm_of(rng: np.random.Generator, reference: int, rates: np.ndarray) -> tuple[int, float]:
    """Return at which look there is an alarm (a large number: at none), and the limit; rates: the error at each look."""
    watch = begun("", reference, int(rng.binomial(reference, BEFORE)))
    for look, wrong in enumerate(rng.binomial(PER_LOOK, rates)):
        watch = looked(watch, int(wrong), PER_LOOK)
        if watch.alarm:
            return look, watch.limit
    return 10**9, watch.limit


def main() -> None:
    """Simulate, and write the table."""
    rng, rows = np.random.default_rng(SEED), []
    for reference in REFERENCES:
        calm = [alarm_of(rng, reference, np.full(YEAR, BEFORE)) for _ in range(FLEET)]
        row = {
            "test samples": reference,
            "median limit": f"{np.median([limit for _, limit in calm]):.3f}",
            "false alarms in a year, %": f"{100 * np.mean([look < YEAR for look, _ in calm]):.1f}",
        }
        for quiet in QUIET:
            looks = quiet + WITHIN // PER_LOOK
            rates = np.where(np.arange(looks) < quiet, BEFORE, AFTER)
            alarms = np.array([alarm_of(rng, reference, rates)[0] for _ in range(FLEET)])
            soon = np.mean((alarms >= quiet) & (alarms < looks))
            row[f"rise found within {WITHIN} samples after {quiet} quiet looks, %"] = f"{100 * soon:.1f}"
        rows.append(row)
        print(row)
    with table(RESULT, list(rows[0])) as write:
        for row in rows:
            write(row)


if __name__ == "__main__":
    main()
