"""Erratum E8: alpha of the Synthetic scheme changes no label, and documents and help say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from click.testing import CliRunner

import attune
from attune.fedclient.cli import main
from attune.simulation.partition.schemes.cut import generator
from attune.simulation.partition.schemes.scheme_settings import SyntheticSettings
from attune.simulation.partition.schemes.synthetic import samples

ROOT = Path(attune.__file__).resolve().parent


def test_no_label_depends_on_alpha() -> None:
    for client in range(10):
        drawn = [samples(500, SyntheticSettings(alpha=alpha), generator(7, "synthetic", client)) for alpha in (0.0, 0.5, 50.0)]
        for x, y in drawn[1:]:
            assert np.array_equal(x, drawn[0][0]) and np.array_equal(y, drawn[0][1])


def test_it_is_said_where_alpha_is_explained() -> None:
    assert "- **E8** `alpha` of Synthetic has no effect" in (ROOT / "docs/methods/fedmcsa.md").read_text(encoding="utf-8")
    [row] = [
        line
        for line in (ROOT / "docs/data.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `synthetic` | `alpha`")
    ]
    assert "labellings differ" not in row and "E8" in row
    assert "E8" in CliRunner().invoke(main, ["partition", "--help"]).output
