"""How often intervals and tests of AUROC are right in simulated fleets, among the figures that are shown.

`python -m benchmarks.calibrated --out benchmarks/results/calibrated.csv`. Rows that the file has are not measured again.
Fleets of any size are dealt from the same sites. `site_error` and `pooled_error` are Monte Carlo standard errors of a share of
95 or 5 %. Grouped sites with 2 % events and equal models were measured more often (`--sites 33600 --looked 12000`).

A site has 40 to 2,000 test cases, log-uniform; in grouped fleets each case (a patient) has 1 to 7 samples. The risks by both
models are normal with a correlation of 0.5, so true areas are known. In a fleet of kind "none" both models are equally good. In
"some" the gain differs between sites. A call is wrong if the true gain is 0 or has the other sign.
"""

from __future__ import annotations

import csv
import math
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

import click
import numpy as np

from attune.common.metrics import KEPT_RIVALS
from attune.common.statistics import LEVEL, pairs_of
from attune.fedclient.work.auroc import compared_areas, difference, has_cases, interval
from attune.fedserver.core.fleet_verdict import pooled

SHARES, SITES = (0.02, 0.05, 0.2), (3, 5, 20, 60)
SIZES, MOST_SAMPLES = (40, 2000), 7
CORRELATION, RIVAL, GAIN, DEVIATION = 0.5, 1.0, 0.4, 0.15  # separations of risks, in deviations of them
STOCKS = [(share, kind, grouped) for grouped, share, kind in product((False, True), SHARES, ("none", "some"))]
COLUMNS = (
    "events", "kind", "grouped", "looked_at", "sites_shown", "area_covered", "gain_covered", "wrong", "power", "site_error",
    "sites", "fleets", "pooled_shown", "pooled_covered", "pooled_wrong", "pooled_power", "pooled_error",
)  # fmt: skip


class Shown(NamedTuple):
    """Figures of one site: what it shows, and whether its intervals hold the true values and its calls are right."""

    gain: float
    error: float
    right: tuple[bool, bool, bool, bool] | None  # None: not looked at


def area_of(separation: float) -> float:
    """Return the AUROC of two normal risks whose means are this many deviations apart."""
    return NormalDist().cdf(separation / math.sqrt(2))


def site(draw: np.random.Generator, share: float, some: bool, grouped: bool, looked: bool) -> Shown | None:
    """Return what a site shows; None with too few cases."""
    size = round(math.exp(draw.uniform(math.log(SIZES[0]), math.log(SIZES[1]))))
    group_N = np.repeat(np.arange(size), draw.integers(1, MOST_SAMPLES + 1, size)) if grouped else np.arange(size)
    groups = group_N if grouped else None
    event_N = (draw.random(size) < share)[group_N]
    if not has_cases(event_N.astype(np.intp), 2, groups):
        return None
    separation = RIVAL + (draw.normal(GAIN, DEVIATION) if some else 0.0)
    # Half of a risk's variance is the patient's, in grouped sites; half of either part is common to both models.
    parts = [of[group_N] for of in draw.normal(size=(3, size))] if grouped else draw.normal(size=(3, len(group_N)))
    rest = draw.normal(size=(3, len(group_N)))
    halves = [
        math.sqrt(CORRELATION / 2) * of[0] + math.sqrt((1 - CORRELATION) / 2) * of[1:] for of in map(np.array, (parts, rest))
    ]
    risk = halves[0] + halves[1]
    mine, rival = (risk[i] + more * event_N for i, more in enumerate((separation, RIVAL)))
    if not looked:
        return Shown(*difference(mine, rival, event_N, groups), None)
    low, high = interval(mine, event_N, groups)
    numbers = compared_areas(mine, rival, event_N, KEPT_RIVALS["alone"], groups)
    [pair] = pairs_of({"test_samples": len(event_N)} | numbers)
    least, most = pair.interval()
    true, called = area_of(separation) - area_of(RIVAL), pair.p <= 1 - LEVEL
    wrong = called and (true == 0 or pair.difference * true < 0)
    covered = low <= area_of(separation) <= high, least <= true <= most
    return Shown(pair.difference, pair.error or 0.0, (*covered, wrong, called))


def rows(share: float, kind: str, grouped: bool, sites: int, looked: int) -> list[dict[str, object]]:
    """Return the lines of one kind of sites, one for each size of fleets; `looked` sites with figures are looked at, too."""
    draw, some = np.random.default_rng((round(100 * share), kind == "some", grouped)), kind == "some"
    stock, right = list[Shown | None](), list[tuple[bool, bool, bool, bool]]()
    for _ in range(sites):
        stock.append(one := site(draw, share, some, grouped, len(right) < looked))
        if one is not None and one.right is not None:
            right.append(one.right)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    true = sum(w * area_of(RIVAL + GAIN + DEVIATION * t) for t, w in zip(nodes, weights / weights.sum(), strict=True))
    true = float(true) - area_of(RIVAL) if some else 0.0

    def rate(values: list[bool]) -> str:
        return f"{fmean(values):.4f}" if values else ""

    def error(count: int) -> str:
        return f"{math.sqrt(LEVEL * (1 - LEVEL) / max(1, count)):.4f}"

    of_sites = (
        share, kind, "yes" if grouped else "no", len(right), f"{sum(one is not None for one in stock) / sites:.4f}",
        *(rate([of[at] for of in right]) for at in range(3)), rate([called for *_, called in right]) if some else "",
        error(len(right)),
    )  # fmt: skip
    lines = list[dict[str, object]]()
    for size in SITES:
        fleets = [[one for one in stock[at : at + size] if one is not None] for at in range(0, sites - size + 1, size)]
        means = [pooled([(one.gain, one.error) for one in fleet]) for fleet in fleets]
        over = [mean.interval for mean in means if mean is not None and mean.interval is not None]
        beyond = [high < 0 or (low > 0 and not some) for low, high in over]
        of_fleets = (
            size, len(fleets), f"{len(over) / len(fleets):.4f}", rate([low <= true <= high for low, high in over]),
            rate(beyond), rate([low > 0 for low, _ in over]) if some else "", error(len(over)),
        )  # fmt: skip
        lines.append(dict(zip(COLUMNS, of_sites + of_fleets, strict=True)))
    return lines


@click.command()
@click.option("--sites", default=24000, show_default=True, help="Sites of each kind, dealt to fleets.")
@click.option(
    "--looked", default=3000, show_default=True, help="Sites with figures whose own intervals and tests are looked at."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(sites: int, looked: int, out: Path) -> None:
    """Measure what `out` has not, and write rows as they come."""
    with out.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        known = {tuple(line[name] for name in COLUMNS[:3]) for line in csv.DictReader(file)}
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not known:
            writer.writeheader()
        for share, kind, grouped in STOCKS:
            if (str(share), kind, "yes" if grouped else "no") not in known:
                writer.writerows(rows(share, kind, grouped, sites, looked))
                file.flush()


if __name__ == "__main__":
    main()
