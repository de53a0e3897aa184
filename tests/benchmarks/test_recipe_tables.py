"""The table of points at which devices keep less than they could, from rows made up by hand."""

from pathlib import Path

import pytest

from benchmarks.recipe_tables import gap_of, missed, public
from benchmarks.recipes.catalogue import ALONE, CLOSED_FORM, LOCAL, TUNED
from benchmarks.recipes.run import RecipeRow, write


def row(x: float, seed: int, method: str, kept: float, own: float | None = None, harmed: float = 0.0) -> RecipeRow:
    return RecipeRow("", x, seed, method, 10, 20.0, kept, kept, kept, own, None, 0.1, harmed, harmed, 0, 1.0)


def cell(rows: list[RecipeRow]) -> str:
    """Return the cell of FedTP in the recipe digits."""
    lines = list(missed({"digits": rows, "wisdm": []}))
    heads = next(line for line in lines if line.startswith("| recipe")).split(" | ")
    [found] = [line for line in lines if line.startswith("| digits")]
    return found.strip("| ").split(" | ")[heads.index("FedTP")]


def test_a_point_misses_the_goal_beyond_two_errors_only() -> None:
    """Take gaps to tuned FedAvg of 2 and 4 points (mean 3, error 1) at x 1, and of 1 and 5 (mean 3, error 2) at x 2.

    Of the devices 0 and 10 % are harmed at x 2 (mean 5, error 5), and 10 and 20 % at x 3 (mean 15, error 5).
    """
    rows = [row(x, seed, LOCAL, 0.5) for x in (1, 2) for seed in (0, 1)]
    rows += [row(x, seed, TUNED, 0.9) for x in (1, 2) for seed in (0, 1)]
    rows += [row(1, 0, "FedTP", 0.88), row(1, 1, "FedTP", 0.86), row(2, 0, "FedTP", 0.89), row(2, 1, "FedTP", 0.85, harmed=0.1)]
    rows += [row(3, seed, name, 0.9) for seed in (0, 1) for name in (LOCAL, TUNED, *OTHERS)]
    rows += [row(3, seed, "FedTP", 0.9, harmed=harmed) for seed, harmed in enumerate((0.1, 0.2))]
    rows += [row(x, seed, other, 0.9) for x in (1, 2) for seed in (0, 1) for other in OTHERS]
    assert cell(rows) == "1 of 3 (3.0, FedAvg, tuned); 1"


@pytest.mark.parametrize(("own", "expected"), [(0.9, "0 of 1; 0"), (0.93, "1 of 1 (3.0, its own model); 0")])
def test_one_seed_counts_as_it_is_and_the_own_model_is_a_rival(own: float, expected: str) -> None:
    rows = [row(1, 0, name, 0.9) for name in (LOCAL, TUNED, *OTHERS)] + [row(1, 0, "FedTP", 0.9, own)]
    assert cell(rows) == expected


def test_the_best_is_taken_in_each_seed() -> None:
    """Take kept 0.80, 0.80, 0.80 beside Local 0.82, 0.79, 0.80 and tuned FedAvg 0.79, 0.83, 0.79: gaps of 2, 3 and 0 points."""
    rows = [row(1, seed, LOCAL, kept) for seed, kept in enumerate((0.82, 0.79, 0.80))]
    rows += [row(1, seed, TUNED, kept) for seed, kept in enumerate((0.79, 0.83, 0.79))]
    rows += [row(1, seed, "FedTP", 0.8, harmed=harmed) for seed, harmed in enumerate((0.0, 0.1, 0.2))]
    gap = gap_of(rows, "FedTP")
    assert gap is not None and gap.mean == pytest.approx(5 / 3) and gap.error == pytest.approx((7 / 3 / 3) ** 0.5)
    assert (
        gap.harmed == pytest.approx(10)
        and gap.harmed_error == pytest.approx(10 / 3**0.5)
        and not gap.missed
        and gap_of(rows, "FedMCSA") is None
    )


OTHERS = ("FedMCSA", "FedMCSA, dial", "FedTP x MCSA, dial")


def test_public_tables_have_what_is_kept_the_own_models_and_the_harmed(tmp_path: Path) -> None:
    rows = [row(1, seed, CLOSED_FORM.label, 0.4 + 0.1 * seed, 0.3, harmed=0.02) for seed in (0, 1)] + [row(1, 0, ALONE, 0.25)]
    write(tmp_path / "exam.csv", rows)
    cells = [line.strip("| ").split(" | ") for line in public(tmp_path) if line.startswith("| `exam` | 1 ")]
    assert all(line[1:4] == ["1", "2", "10.0"] for line in cells)
    assert [line[4:6] for line in cells] == [["25.0 / 25.0", "45.0 / 45.0"], ["30.0"], ["2.0"]]
