"""`fedclient evaluate` on a table takes the columns and the task of the model; what a table lacks is named."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attune
from attune.fedclient.cli import main
from attune.fedclient.data.new_samples import new_samples
from attune.fedclient.model.artifact import read_info

SETTINGS = {"train.local_epochs": 1}


def table(path: Path, head: str, seed: int = 1, rows: int = 40) -> Path:
    """Write a table with random numbers; `name` holds text, `ill` the class and `dose_wanted` a number to predict."""
    rng = np.random.default_rng(seed)
    cells = {name: rng.normal(size=rows).round(3).astype(str) for name in head.split(",")}
    cells |= {"ill": rng.integers(0, 2, rows).astype(str), "name": np.array([f"person {n}" for n in range(rows)])}
    lines = [",".join(str(cells[name][row]) for name in head.split(",")) for row in range(rows)]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of a finished device whose model has the columns age and dose."""
    folder = tmp_path_factory.mktemp("columns")
    tables = [str(table(folder / f"{name}.csv", "age,dose,ill", seed)) for seed, name in enumerate(("kiel", "lund"))]
    result = attune.simulate(tables, "fedavg", rounds=1, settings=SETTINGS, label="ill", progress=False)
    (folder / "home").mkdir()
    (result.save(folder / "out") / "models" / "kiel").rename(folder / "home" / "model")
    return folder / "home"


def evaluate(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["evaluate", "--home", str(home), *words])


def test_further_columns_and_another_order_do_not_matter(home: Path, tmp_path: Path) -> None:
    plain = evaluate(home, "--data", str(table(tmp_path / "plain.csv", "age,dose,ill")), "--label", "ill")
    assert plain.exit_code == 0, plain.output
    rows = (tmp_path / "plain.csv").read_text().split()
    more = [f"{dose},{n}x,{ill},{age}" for n, (age, dose, ill) in enumerate(row.split(",") for row in rows[1:])]
    (tmp_path / "more.csv").write_text("\n".join(["dose,name,ill,age", *more]) + "\n")
    done = evaluate(home, "--data", str(tmp_path / "more.csv"), "--label", "ill")
    assert done.exit_code == 0, done.output
    assert done.stdout == plain.stdout


def test_all_columns_that_the_table_lacks_are_named(home: Path, tmp_path: Path) -> None:
    done = evaluate(home, "--data", str(table(tmp_path / "t.csv", "Age,weight,ill")), "--label", "ill")
    assert done.exit_code in (2, 9) and "'age'" in done.output and "'dose'" in done.output, done.output


def test_columns_that_are_given_count(home: Path, tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "age,dose,ill")
    done = evaluate(home, "--data", str(path), "--label", "ill", "--columns", "dose,age")
    assert done.exit_code == 9 and "another order" in done.output


def test_the_task_and_its_targets_are_those_of_the_model(tmp_path: Path) -> None:
    tables = [str(table(tmp_path / f"{name}.csv", "age,dose", seed)) for seed, name in enumerate(("kiel", "lund"))]
    result = attune.simulate(tables, "fedavg", rounds=1, settings=SETTINGS, label="dose", task="regression", progress=False)
    (tmp_path / "home").mkdir()
    (result.save(tmp_path / "out") / "models" / "kiel").rename(tmp_path / "home" / "model")
    path = str(table(tmp_path / "new.csv", "name,dose,age"))
    done = evaluate(tmp_path / "home", "--data", path)
    assert done.exit_code == 0 and "R2" in done.output, done.output
    assert evaluate(tmp_path / "home", "--data", path, "--label", "dose", "--task", "regression").output == done.output


def test_plot_and_export_take_the_columns_of_the_model(home: Path, tmp_path: Path) -> None:
    path = str(table(tmp_path / "t.csv", "name,dose,ill,age"))

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, [words[0], "--home", str(home), "--data", path, *words[1:]])

    done = run("plot", "--label", "ill", "--out", str(tmp_path / "pictures"), "--picture", "confusion")
    assert done.exit_code == 0 and (tmp_path / "pictures" / "confusion.png").exists(), done.output
    done = run("export", "--out", str(tmp_path / "model.pt2"))
    assert done.exit_code == 0 and "differ" in done.output, done.output


def test_words_for_missing_values_are_those_of_the_training(tmp_path: Path) -> None:
    for seed, name in enumerate(("kiel", "lund")):
        text = table(tmp_path / f"{name}.csv", "age,dose,ill", seed).read_text().splitlines()
        text[3] = "-999," + text[3].partition(",")[2]
        (tmp_path / f"{name}.csv").write_text("\n".join(text) + "\n")
    given = {"missing": "median", "missing_words": "usual,-999"}
    attune.simulate(
        str(tmp_path / "*.csv"), "fedavg", rounds=1, home=tmp_path / "home", label="ill", table=given, settings=SETTINGS
    )
    device = tmp_path / "home" / "devices" / "kiel"
    rows = ["age,dose", *(f"{age},{dose}" for dose in (-1, 0, 1) for age in ("?", -999, -998))]
    (tmp_path / "new.csv").write_text("\n".join(rows) + "\n")
    samples = new_samples(
        [str(tmp_path / "new.csv")], (info := read_info(device / "model")).model, info.column_names, info.missing_words
    )
    assert np.isnan(samples.x[:, 0]).tolist() == [True, True, False] * 3
    done = CliRunner().invoke(
        main, ["predict", "--data", str(tmp_path / "new.csv"), "--out", str(tmp_path / "out.csv"), "--home", str(device)]
    )
    assert done.exit_code == 0, done.output
    assert (
        CliRunner()
        .invoke(main, ["evaluate", "--data", str(tmp_path / "kiel.csv"), "--label", "ill", "--home", str(device)])
        .exit_code
        == 0
    )


def predicted(home: Path, table: Path, *lines: str) -> Result:
    """Predict the lines of a table; the file of labels lies beside it."""
    table.write_text("\n".join(lines) + "\n")
    return CliRunner().invoke(
        main, ["predict", "--data", str(table), "--out", str(table.with_suffix(".out")), "--home", str(home)]
    )


def test_lines_that_get_no_label_are_said(home: Path, tmp_path: Path) -> None:
    """The labels would be laid beside the wrong rows."""
    done = predicted(home, tmp_path / "new.csv", "age,dose", "1,2", "", "3,4")
    assert done.exit_code == 0 and "1 line without any cell" in done.output, done.output


def test_a_column_that_only_other_sites_had_is_said(tmp_path: Path) -> None:
    table(tmp_path / "kiel.csv", "age,ill")
    table(tmp_path / "lund.csv", "age,dose,ill", 2)
    given = {"table": {"schema": "auto"}, "label": "ill", "settings": SETTINGS}
    attune.simulate(str(tmp_path / "*.csv"), "fedavg", rounds=1, home=tmp_path / "home", progress=False, **given)
    kiel, lund = (tmp_path / "home" / "devices" / name for name in ("kiel", "lund"))
    done = predicted(kiel, tmp_path / "new.csv", "age,dose", "1,2000", "0,2000")
    assert done.exit_code == 0 and "no value of dose" in done.output, done.output
    labels = (tmp_path / "new.out").read_text()
    predicted(kiel, tmp_path / "new.csv", "age", "1", "0")
    assert (tmp_path / "new.out").read_text() == labels
    assert "no value of" not in predicted(lund, tmp_path / "new.csv", "age,dose", "1,2").output
