"""`fedclient describe` and `fedserver schema`, from tables to one file for all sites."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from attune.common.schema_file import read_schema
from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli.root import cli as fedserver


def site(path: Path, wards: str, unit: str = "cm") -> Path:
    """Write a table of 40 rows, and return the proposal that describe makes of it."""
    rows = [f"{n % 7 + 30.5},{wards[n % len(wards)]},{150 + n % 40 + 0.5},{'no' if n % 3 else 'yes'}" for n in range(40)]
    path.write_text("\n".join([f"age,ward,height_{unit},ill", *rows]) + "\n")
    done = run(fedclient, "describe", path, "--label", "ill", "--out", path.with_suffix(".json"))
    assert done.exit_code == 0 and "names its unit" in done.output
    return path.with_suffix(".json")


def run(command: object, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]


def test_proposals_become_one_file(tmp_path: Path) -> None:
    kiel, lund = site(tmp_path / "kiel.csv", "AB"), site(tmp_path / "lund.csv", "BC")
    statistics = tmp_path / "statistics.json"
    ages = {"age": {"devices": 5, "quantiles": {"0.01": 30.5, "0.99": 36.5}}}
    statistics.write_text(json.dumps({"devices": 5, "without": {}, "columns": ages}))
    out = tmp_path / "schema.json"
    done = run(fedserver, "schema", kiel, lund, "--ranges", statistics, "--out", out)
    assert done.exit_code == 0 and "6 features of 3 columns" in done.output
    schema = read_schema(out)
    assert schema.columns["ward"].values == ["A", "B", "C"] and schema.columns["age"].range == (30.5, 36.5)
    shown = run(fedclient, "describe", tmp_path / "kiel.csv", "--label", "ill", "--schema", out)
    assert "unit of age: fits" in shown.output


def test_a_conflict_ends_with_a_line_for_each(tmp_path: Path) -> None:
    kiel, lund = site(tmp_path / "kiel.csv", "AB"), site(tmp_path / "lund.csv", "ab", unit="in")
    done = run(fedserver, "schema", kiel, lund)
    assert done.exit_code != 0 and str(done.exception).count("\n") == 2
    assert "height_cm (kiel) and height_in (lund)" in str(done.exception)
    edit = tmp_path / "edit.toml"
    heights = "".join(f'[data.columns.height_{unit}]\nkind = "number"\nleft_out = "in two units"\n' for unit in ("cm", "in"))
    edit.write_text(heights + '[data.columns.ward]\nkind = "category"\nvalues = ["A", "B"]\n')
    done = run(fedserver, "schema", kiel, lund, "--edit", edit)
    assert done.exit_code == 0 and "in two units" in done.output


def test_what_is_no_table_or_schema_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.npz").touch()
    assert "is no table" in str(run(fedclient, "describe", tmp_path / "t.npz").output)
    (tmp_path / "t.json").write_text("{}")
    assert "holds no schema" in str(run(fedserver, "schema", tmp_path / "t.json").exception)
    kiel = site(tmp_path / "kiel.csv", "AB")
    assert "no statistics" in str(run(fedserver, "schema", kiel, "--ranges", tmp_path / "gone.json").exception)
