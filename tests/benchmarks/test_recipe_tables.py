"""The table of points at which devices keep less than they could, from rows made up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from attune.simulation.recipes.catalogue import LOCAL, TUNED
from attune.simulation.recipes.run import RecipeRow
from benchmarks.recipe_tables import missed


def row(x: float, seed: int, method: str, kept: float, own: float | None = None, harmed: float = 0.0) -> RecipeRow:
    return RecipeRow("", x, seed, method, 10, 20.0, kept, kept, kept, own, None, 0.1, harmed, harmed, 0, 1.0)


def cell(tmp_path: Path, rows: list[RecipeRow]) -> str:
    """Return the cell of FedTP in the recipe digits."""
    finished = tmp_path / "auto.csv"
    finished.write_text("method,kept,unfinished\nauto,9,0\nfedtp,80,78.5\nfedtp,80,79.5\n")
    lines = list(missed({"digits": rows, "wisdm": []}, finished))
    heads = next(line for line in lines if line.startswith("| recipe")).split(" | ")
    [found] = [line for line in lines if line.startswith("| digits")]
    assert "`fedtp` 1.0 (" in " ".join(lines)
    return found.strip("| ").split(" | ")[heads.index("FedTP")] if len(rows) else ""


def test_a_point_misses_the_goal_beyond_two_errors_only(tmp_path: Path) -> None:
    """Take gaps to tuned FedAvg of 2 and 4 points (mean 3, error 1) at x 1, and of 1 and 5 (mean 3, error 2) at x 2."""
    rows = [row(x, seed, LOCAL, 0.5) for x in (1, 2) for seed in (0, 1)]
    rows += [row(x, seed, TUNED, 0.9) for x in (1, 2) for seed in (0, 1)]
    rows += [row(1, 0, "FedTP", 0.88), row(1, 1, "FedTP", 0.86), row(2, 0, "FedTP", 0.89), row(2, 1, "FedTP", 0.85, harmed=0.1)]
    rows += [row(x, seed, other, 0.9) for x in (1, 2) for seed in (0, 1) for other in OTHERS]
    assert cell(tmp_path, rows) == "1 of 2 (3.0, FedAvg, tuned); 1"


@pytest.mark.parametrize(("own", "expected"), [(0.9, "0 of 1; 0"), (0.93, "1 of 1 (3.0, its own model); 0")])
def test_one_seed_counts_as_it_is_and_the_own_model_is_a_rival(tmp_path: Path, own: float, expected: str) -> None:
    rows = [row(1, 0, name, 0.9) for name in (LOCAL, TUNED, *OTHERS)] + [row(1, 0, "FedTP", 0.9, own)]
    assert cell(tmp_path, rows) == expected


OTHERS = ("FedMCSA", "FedMCSA, dial", "FedTP x MCSA, dial")
