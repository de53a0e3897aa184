"""docs/data.md: each scheme, each of its settings with its default, and each reader has a row."""

from __future__ import annotations

from typing import Any

from attune.simulation.partition import features
from attune.simulation.partition.readers import registry as readers
from attune.simulation.partition.schemes import registry


def plain(cell: str) -> str:
    return "" if cell == "empty" else cell.strip("`")


def test_every_scheme_has_its_row_and_an_example(page: Any) -> None:
    rows = page("docs/data.md").table("## Schemes")
    assert sorted(plain(row[0]) for row in rows) == [*registry.SCHEMES]
    assert all(f"--scheme {plain(row[0])}" in row[3] for row in rows)


def test_every_setting_of_a_scheme_has_its_row_and_default(page: Any) -> None:
    said = {(plain(row[0]), plain(row[1])): plain(row[2]) for row in page("docs/data.md").table("## Settings of the schemes")}
    known = {
        (name, key): str(default) for name in registry.SCHEMES for key, default in registry.fields(registry.get(name)).items()
    }
    assert said == known


def test_every_reader_has_its_row(page: Any) -> None:
    rows = page("docs/data.md").table("## Files")
    forms = [row for row in rows if len(row) == 3]
    assert len(forms) == len(readers.BUILT_IN) + 1  # READERS and the digits
    assert all("fedclient partition" in row[2] for row in forms)


def test_every_normalisation_has_its_row(page: Any) -> None:
    rows = page("docs/data.md").table("## Normalisation and noise")
    assert {plain(name) for row in rows for name in row[0].split(", ")} == set(features.HOWS)
