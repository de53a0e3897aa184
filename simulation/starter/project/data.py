"""Tables of the sites: one file for each site, in `data/`. Put your own files there."""

import csv
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "data"
LABEL = "ill"  # the column with the classes; all other columns are features
TABLE = {"schema": "auto"}  # what the columns are follows from all sites' tables
COLUMNS = ["case", "admitted", "age", "sex", "ward", "smokes", "crp", "remark", LABEL]


def sites() -> dict[str, str]:
    """Return the path of each site's table, by the site's name."""
    if not FOLDER.exists():
        make_up(FOLDER)
    return {path.stem: str(path) for path in sorted(FOLDER.glob("*.csv"))}


def make_up(folder: Path) -> None:
    """Make up tables as hospitals export them: words, dates and empty cells. Oslo has no column `smokes`.

    new.csv is a later export of another hospital, without labels, and with a ward that no other hospital has.
    """
    folder.mkdir()
    without = [name for name in COLUMNS if name != "smokes"]
    for number, (site, columns) in enumerate({"kiel": COLUMNS, "lund": COLUMNS, "oslo": without}.items()):
        export(folder / f"{site}.csv", columns, 160, number, ["surgery", "heart", "lung"])
    export(folder.parent / "new.csv", without[:-1], 40, 3, ["heart", "lung", "children"])


def export(path: Path, columns: list[str], rows: int, seed: int, wards: list[str]) -> None:
    """Write one table."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        for row in range(rows):
            age, crp, smokes, ward = rng.integers(20, 90), rng.gamma(2, 8), rng.random() < 0.4, rng.choice(wards)
            risk = age / 25 + crp / 12 + 2 * smokes + 2 * (ward == "lung") - 0.5 * seed
            patient = {
                "case": f"{path.stem}-{row:04}",
                "admitted": f"{rng.integers(1, 29):02}.{rng.integers(1, 13):02}.2024",
                "age": age,
                "sex": rng.choice(["f", "m"]),
                "ward": ward,
                "smokes": "ja" if smokes else "nein",
                "crp": f"{crp:.1f}",
                "remark": f"seen {rng.integers(1, 99)} times, comes from room {row}",
                LABEL: "yes" if risk + rng.normal() > 5 else "no",
            }
            for name in ("age", "ward", "crp"):
                patient[name] = "" if rng.random() < 0.1 else patient[name]
            table.writerow(patient)
