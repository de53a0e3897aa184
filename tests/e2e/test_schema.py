"""Tables with words, dates and gaps over the network: devices propose, a conflict stops, and the merge trains and predicts."""

import csv
import json
from pathlib import Path

from tests.e2e.harness import FederationAt
from tests.simulation.test_schema import COLUMNS, export


def test_devices_make_one_schema(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("tables")
    lacking = tuple(name for name in COLUMNS if name != "smokes")
    kiel, oslo = export(tmp_path / "kiel.csv", 0), export(tmp_path / "oslo.csv", 2, columns=lacking)
    odd = export(tmp_path / "odd.csv", 3)
    odd.write_text(odd.read_text().replace("seen", "ward2").replace("ward,", "seen,").replace("ward2", "ward"))
    server = federation.server("--method", "fedper", "--exit-when-done", "--min-clients", "2", "--rounds", "2")
    table = ("--label", "ill", "--schema", "auto")
    first, wrong = federation.device(kiel, *table, name="kiel"), federation.device(odd, *table, name="odd")
    wrong.wait_for("the server cannot begin: 2 conflicts")
    assert "seen: date in kiel; category in odd" in server.text
    wrong.kill()
    home = tmp_path / "home"
    second = federation.device(oslo, *table, "--home", str(home), name="oslo")
    assert [process.code() for process in (first, second, server)] == [0, 0, 0], server.text
    assert "kiel: smokes tells this site" in server.text
    info = json.loads((home / "model" / "model.json").read_text())
    assert info["schema"]["columns"]["smokes"]["missing"] == "indicator"
    new = export(tmp_path / "new.csv", 7, rows=30, columns=("ward", "sex", "age", "seen"), wards="AZ")
    out = tmp_path / "labels.csv"
    said = federation.command("fedclient", "predict", "--data", str(new), "--out", str(out), "--home", str(home))
    assert "filled like missing values: smokes" in said.stderr and len(out.read_text().splitlines()) == 31
    log = federation.command("fedclient", "disclosed", "--home", str(home)).stdout
    assert "proposal" in log and "came 3 times" not in log


def test_units_are_compared_on_the_device(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("units")
    kiel, oslo = export(tmp_path / "kiel.csv", 0), export(tmp_path / "oslo.csv", 2)
    rows = list(csv.DictReader(oslo.open()))
    with oslo.open("w", newline="") as file:  # ages in hundredths of a year
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row | {"age": row["age"] and int(row["age"]) * 100} for row in rows)
    config = tmp_path / "schema.toml"
    made = federation.command("fedclient", "describe", str(kiel), "--label", "ill", "--out", str(config))
    assert "case looks like an identifier" in made.stdout
    config.write_text(config.read_text().replace('[data.columns."age"]', '[data.columns."age"]\nrange = [18, 95]'))
    flags = ("--exit-when-done", "--min-clients", "2", "--rounds", "1", "--config", str(config))
    server = federation.server("--method", "fedavg", *flags)
    (tmp_path / "site.toml").write_text('units = "none"\n')
    table, quiet = ("--schema", str(config)), ("--site", str(tmp_path / "site.toml"))
    first = federation.device(oslo, *table, name="oslo")
    second = federation.device(oslo, *table, *quiet, "--home", str(tmp_path / "quiet"), name="quiet")
    assert [process.code() for process in (first, second, server)] == [0, 0, 0], server.text
    assert "oslo: columns do not fit the schema's ranges, maybe by their unit: age (factor 10)" in server.text
    assert "age does not fit the schema's range (factor 10)" in first.text
    assert "quiet: columns do not fit" not in server.text
