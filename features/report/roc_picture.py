"""ROC curves of sites and their mean, as a picture in the page for people who decide.

The mean is taken at each site's false positive rates, so scores of different sites are never ranked together (Janes and Pepe,
Biometrika 2009). They weigh sites by cases, which no site tells: here each site counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from attune.common.metrics import FALSE_RATES
from attune.fedserver.core.records import Report

SIDE, LEFT, UNDER = 320, 56, 44  # of the picture: length of the axes, room beside and below them
MOST_DRAWN = 60  # sites with a thin curve
SHOWN = 0.1  # the false positive rate of which the text speaks
WORDS: dict[Literal["kept", "alone"], str] = {"kept": "what sites predict with", "alone": "what they can have alone"}


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean sensitivity of S sites at each of FALSE_RATES; curves: (S, R)."""
    return [fmean(at_rate) for at_rate in zip(*curves, strict=True)]


def roc_picture(rows: Iterable[Report]) -> str:
    """Draw the curves of sites that have reported both, with the mean of each kind; empty without any.

    Args:
        rows: The latest evaluation of each site.
    """
    both = [row.roc for row in rows if row.roc.keys() == WORDS.keys()]
    if not both:
        return ""
    drawn = [_line("axis", [0.0, 1.0], [0.0, 1.0]), _line("axis", [0.0, 0.0, 1.0], [1.0, 0.0, 0.0])]
    said = []
    for kind, words in WORDS.items():
        curves = [roc[kind] for roc in both]
        mean = mean_curve(curves)
        drawn += [_line(f"{kind} site", FALSE_RATES, curve) for curve in curves[:MOST_DRAWN]]
        drawn.append(_line(f"{kind} mean", FALSE_RATES, mean))
        said.append(f"{mean[FALSE_RATES.index(SHOWN)]:.2f} by {words}")
    drawn += [
        f'<text x="{LEFT + SIDE / 2:.0f}" y="{SIDE + UNDER - 12}" text-anchor="middle">false positive rate, 0 to 1</text>',
        f'<text x="-{SIDE / 2:.0f}" y="{LEFT - 24}" text-anchor="middle" transform="rotate(-90)">sensitivity, 0 to 1</text>',
    ]
    sites = f"{len(both)} site{'s' * (len(both) > 1)}"
    label = f"ROC curves: {WORDS['kept']} (solid) and {WORDS['alone']} (dashed). Thick: the mean of {sites}, each counted once"
    caption = (
        f"{label}, at each site's own false positive rate. Where {SHOWN:.0%} of those without the event are called, so is this "
        f"share of those with it: {' and '.join(said)}. No test is made of these means."
    )
    size = f'class="roc" viewBox="0 0 {LEFT + SIDE + 10} {SIDE + UNDER}"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(drawn)}</svg><p class="soft">{caption}</p>'


def _line(kind: str, false_R: Sequence[float], true_R: Sequence[float]) -> str:
    points = (f"{LEFT + SIDE * x:.1f} {6 + SIDE * (1 - y):.1f}" for x, y in zip(false_R, true_R, strict=True))
    return f'<path class="{kind}" d="M{"L".join(points)}"/>'
