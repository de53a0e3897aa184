"""Tables as hospitals export them: three sites, of which one lacks a column, up to predictions for a new export."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError
from attune.common.schema import schema_of_json
from attune.fedclient.cli import main
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.portable import SCHEMA, TOLERANCE
from attune.fedclient.model.portable import export as export_model

COLUMNS = ("case", "age", "sex", "seen", "ward", "smokes", "remark", "ill")


def export(path: Path, site: int, rows: int = 90, columns: tuple[str, ...] = COLUMNS, wards: str = "ABC") -> Path:
    """Write a table. Who smokes, is old, or lies in ward A is ill."""
    rng = np.random.default_rng(site)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for n in range(rows):
            age, smokes, ward = int(rng.integers(20, 90)), rng.random() < 0.5, str(rng.choice(list(wards)))
            cells = {
                "case": f"K{site}{n:04}",
                "age": "" if rng.random() < 0.2 else age,
                "sex": rng.choice(["f", "m"]),
                "seen": f"{n % 28 + 1:02}.{n % 12 + 1:02}.2024",
                "ward": "" if rng.random() < 0.2 else ward,
                "smokes": "ja" if smokes else "nein",
                "remark": f"came {n} times and went",
                "ill": "yes" if age / 40 + 2 * smokes + 2 * (ward == "A") + rng.normal() > 3 else "no",
            }
            writer.writerow(cells[name] for name in columns)
    return path


def sites(folder: Path) -> list[Path]:
    lacking = tuple(name for name in COLUMNS if name != "smokes")
    return [
        export(folder / "kiel.csv", 0),
        export(folder / "lund.csv", 1),
        export(folder / "oslo.csv", 2, columns=lacking),
    ]


def test_three_sites_train_and_predict_a_new_export(tmp_path: Path) -> None:
    home, data = tmp_path / "home", sites(tmp_path)
    result = attune.simulate(data, "fedper", label="ill", rounds=4, table={"schema": "auto"}, home=home)
    assert np.mean([row.accuracy for row in result.table()]) > 0.6
    model = Model.load(home / "devices" / "oslo" / "model")
    schema = model.info.table_schema
    assert schema is not None and schema.columns["smokes"].missing == "indicator" and "case" in schema.left_out
    new = export(tmp_path / "new.csv", 7, rows=30, columns=("ward", "sex", "age", "seen"), wards="AZ")
    out = tmp_path / "labels.csv"
    oslo = ["--home", str(home / "devices" / "oslo")]
    said = CliRunner().invoke(main, ["predict", *oslo, "--data", str(new), "--out", str(out)], catch_exceptions=False)
    assert said.exit_code == 0 and "filled like missing values: smokes" in said.output and "`other`: Z" in said.output
    assert len(out.read_text().splitlines()) == 31
    score = CliRunner().invoke(main, ["evaluate", *oslo, "--data", str(data[2])])
    assert score.exit_code == 0, score.output
    exported, inside = tmp_path / "model.pt2", {SCHEMA: ""}
    assert export_model(model, exported) <= TOLERANCE
    torch.export.load(str(exported), extra_files=inside)
    assert schema_of_json(inside[SCHEMA], "the export") == schema


def test_the_order_of_columns_does_not_matter(tmp_path: Path) -> None:
    one = sites(tmp_path)
    (tmp_path / "turned").mkdir()
    turned = [export(tmp_path / "turned" / path.name, at, columns=COLUMNS[::-1]) for at, path in enumerate(one[:2])]
    given = {"method": "fedavg", "label": "ill", "rounds": 1, "table": {"schema": "auto"}}
    a, b = attune.simulate(one[:2], **given), attune.simulate(turned, **given)
    assert a.model("kiel").info.table_schema == b.model("kiel").info.table_schema
    assert [row.accuracy for row in a.table()] == [row.accuracy for row in b.table()]


def test_a_conflict_stops_before_round_1(tmp_path: Path) -> None:
    data = sites(tmp_path)
    data[0].write_text(data[0].read_text().replace("seen", "ward2").replace("ward,", "seen,").replace("ward2", "ward"))
    with pytest.raises(SettingError, match=r"(?s)2 conflicts.*seen: category in kiel; date in lund, oslo.*ward: date in kiel"):
        attune.simulate(data, "fedavg", label="ill", rounds=1, table={"schema": "auto"})
