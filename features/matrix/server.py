"""Start of a matrix's run, and its picture and table.

Shapes: S sites whose network was shared (rows), C sites that have scored them (columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from attune.common.errors import SettingError
from attune.common.given_model import GivenModel
from attune.common.methods.registry import configured_from
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section
from attune.common.plan import Plan
from attune.common.statistics import Finding, Pair, column_of
from attune.common.task import SCORED, ScoredTask
from attune.common.text import listed
from attune.fedserver.core.accuracy import comparisons
from attune.fedserver.core.records import Report
from attune.fedserver.runs import check_shareable

if TYPE_CHECKING:
    from attune.common.wire.tensors import Tensors

WRITTEN = 12  # sites of which the picture has numbers
MARKS: dict[Finding, str] = {"better": ", better", "worse": ", worse", "unclear": ""}
CAPTION = (
    "A row is a site's network, a column the site whose test samples score it, by {metric}. In brackets, and as colours: the "
    "difference to that site's own network on the same samples. Better and worse (framed): beyond chance, by the paired test "
    "at this site, corrected for all networks that it has scored (Holm, level 5 %). Networks alone are compared: sites may "
    "predict with blends, whose other models stay where they are. "
)


def matrix_of(plan: Plan) -> tuple[GivenModel, Tensors]:
    """Return a model like those of a run, with its first tensors, as the seam says."""
    from attune.common.models.registry import build
    from attune.common.models.structure import tensors_of

    check_shareable(plan)
    method = configured_from({**plan.method_options, "name": plan.method}, returns={}).method
    if set(method.kinds) == {"shared"} and (method.predictor, method.evaluate) == ("model", "served"):
        raise SettingError(
            f"--matrix: devices of {plan.method} end with one common model, so there is one row: take `fedserver evaluate` "
            "without it, or name a run of another method (--run)"
        )
    return GivenModel.of_plan(plan, "personalized"), tensors_of(build(plan.model, plan.seed))


def matrix_section(rows: Sequence[Report], task: ScoredTask, drawn: bool) -> Section | None:
    """Return the matrix in the sites' reports as a table with its caption, and a picture, as the seam says."""
    reports = {name: row for name, row in comparisons(rows).items() if row.accuracy_before is not None or row.others}
    sites, sharing = figures.natural(reports), figures.natural({name for row in reports.values() for name in row.others})
    if not sharing:
        return None
    columns = {name: column_of(row.others, row.test_samples or 0, row.test_groups) for name, row in reports.items()}
    cells = [[_cell(one, name, reports[name], columns[name]) for name in sites] for one in sharing]
    said = [f"{name} ({_best(column)})" for name, column in columns.items() if _best(column)]
    caption = CAPTION.format(metric=SCORED[task].metric)
    caption += f"Another site's network is better at {listed(said)}." if said else "No site's own network is beaten."
    heads = ("network of", *(f"at {name}" for name in sites))
    table = PageTable(heads, [(name, *line) for name, line in zip(sharing, cells, strict=True)])
    picture = Picture("matrix", _drawn(sharing, sites, cells, columns, SCORED[task].metric)) if drawn else None
    return Section("Every site on every model", caption, picture, table)


def _cell(owner: str, site: str, row: Report, column: Mapping[str, Pair]) -> Cell:
    """Return the score of a network at a site in words, with its difference to the own one; empty if there is none."""
    if owner == site:
        return None if row.accuracy_before is None else f"{row.accuracy_before:.3f}"
    if owner not in row.others:
        return None
    score = f"{row.others[owner].score:.3f}"
    return f"{score} ({column[owner].difference:+.3f}{MARKS[_finding(column[owner])]})" if owner in column else score


def _finding(pair: Pair) -> Finding:
    return pair.finding(pair.p)  # corrected before


def _best(column: Mapping[str, Pair]) -> str:
    """Return the network that beats the own one most, in words; empty if none does beyond chance."""
    better = {name: pair for name, pair in column.items() if _finding(pair) == "better"}
    if not better:
        return ""
    name, pair = max(better.items(), key=lambda item: item[1].difference)
    return "that of {}, {:+.3f}, 95 % {:+.3f} to {:+.3f}".format(name, pair.difference, *pair.interval())


def _drawn(
    sharing: Sequence[str],
    sites: Sequence[str],
    cells: Sequence[Sequence[Cell]],
    columns: Mapping[str, Mapping[str, Pair]],
    metric: str,
) -> Any:
    """Draw differences as colours, with a frame where the own network is beaten, or beats the other, beyond chance."""
    over_SC = np.full((len(sharing), len(sites)), np.nan)
    figure, grid = figures.grid(1, 1, 1, 3.2 + 0.8 * min(len(sites), 20), 1.8 + 0.55 * min(len(sharing), 20))
    axes = grid[0, 0]
    for (row, owner), (place, site) in product(enumerate(sharing), enumerate(sites)):
        one = columns[site].get(owner)
        if one is not None:
            over_SC[row, place] = one.difference
        elif owner == site:
            over_SC[row, place] = 0.0
        if one is not None and _finding(one) != "unclear":
            x_P, y_P = (
                [at + 0.47 * way for way in ways] for at, ways in ((place, (-1, 1, 1, -1, -1)), (row, (-1, -1, 1, 1, -1)))
            )
            axes.plot(x_P, y_P, color=figures.COLOURS[1] if _finding(one) == "better" else "0.3", linewidth=2.5)
        if len(sites) <= WRITTEN:
            axes.text(place, row, str(cells[row][place] or "").replace(" ", "\n"), ha="center", va="center", fontsize=8)
    most = 1.5 * float(np.nanmax(np.abs(over_SC), initial=0.01))  # so that black is read on each colour
    image = axes.imshow(over_SC, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set_facecolor("0.85")
    axes.set_xticks(range(len(sites)), figures.short(sites), rotation=90 * (max(map(len, figures.short(sites))) > 8))
    axes.set_yticks(range(len(sharing)), figures.short(sharing))
    axes.set(xlabel="scored at", ylabel="network of", title="Every site on every model")
    figure.colorbar(image, ax=axes, label=f"{metric}, less that of the site's own network")
    return figure
