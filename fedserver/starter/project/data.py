"""Tables of the sites: one file for each site, in `data/`. Put your own files there."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "data"
LABEL = "ill"  # the column with the classes; all other columns are features


def sites() -> dict[str, str]:
    """Return the path of each site's table, by the site's name."""
    if not FOLDER.exists():
        make_up(FOLDER)
    return {path.stem: str(path) for path in sorted(FOLDER.glob("*.csv"))}


def make_up(folder: Path) -> None:
    """Make up tables of three sites. All have the same eight features, and similar, but not equal, rules for who is ill."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    common = rng.normal(size=(8, 3))
    for site in ("kiel", "lund", "oslo"):
        x = rng.normal(size=(160, 8))
        ill = np.tanh(x @ common) @ rng.normal(1.0, 1.0, size=3) + rng.normal(0.0, 0.3, size=160) > 0
        rows = [
            ",".join([*(f"{value:.3f}" for value in row), "yes" if sick else "no"]) for row, sick in zip(x, ill, strict=True)
        ]
        header = ",".join([*(f"m{number}" for number in range(1, 9)), LABEL])
        (folder / f"{site}.csv").write_text("\n".join([header, *rows]) + "\n")
