"""All problems of all sites are said at once, before anything trains: by `simulate`, and by `doctor` for several shards."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import NonFiniteFeatures, ShapeMismatch, ShardError
from attune.fedclient.cli import main
from attune.fedserver.cli import cli


def table(path: Path, head: str = "age,dose,ill", bad: str = "") -> Path:
    """Write a table of 60 rows; `bad` takes the place of the first cell of the third row."""
    rng = np.random.default_rng(len(path.stem))
    rows = [[f"{value:.2f}" for value in rng.normal(size=head.count(","))] + [str(n % 2)] for n in range(60)]
    if bad:
        rows[2][0] = bad
    path.write_text("\n".join([head, *map(",".join, rows)]) + "\n")
    return path


@pytest.fixture
def sites(tmp_path: Path) -> str:
    table(tmp_path / "bonn.csv")
    table(tmp_path / "kiel.csv", bad="unknown")
    table(tmp_path / "lund.csv", bad="inf")
    table(tmp_path / "oslo.csv", "age,ill")
    (tmp_path / "riga.csv").write_text("age,dose,sick\n1,2,0\n")
    table(tmp_path / "ulm.csv")
    table(tmp_path / "wien.csv")
    return str(tmp_path / "*.csv")


def test_simulate_names_every_problem_of_every_table_and_trains_nothing(sites: str, tmp_path: Path) -> None:
    words = ["simulate", "--data", sites, "--label", "ill", "--method", "local,fedavg", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, ShardError) and done.exception.exit_code == 6, done.output
    lines = str(done.exception).splitlines()
    for name, said in (("kiel", "unknown"), ("lund", "infinite"), ("riga", "'ill'"), ("oslo", "lacks the columns 'dose'")):
        assert any(name in line and said in line for line in lines), (name, lines)
    assert not any(line.startswith("bonn") for line in lines) and not (tmp_path / "out").exists()


def test_the_library_does_so_too_and_settings_are_among_the_problems(sites: str) -> None:
    with pytest.raises(ShardError) as raised:
        attune.simulate(sites, "fedavg", label="ill", progress=False)
    assert all(name in str(raised.value) for name in ("kiel", "lund", "oslo", "riga"))


def test_one_problem_keeps_its_kind(tmp_path: Path) -> None:
    tables = [str(table(tmp_path / f"{name}.csv", bad=bad)) for name, bad in (("kiel", ""), ("lund", "inf"))]
    with pytest.raises(NonFiniteFeatures):
        attune.simulate(tables, "fedavg", label="ill", progress=False)


def test_sites_with_other_columns_are_named_together(tmp_path: Path) -> None:
    tables = [str(table(tmp_path / f"{name}.csv")) for name in ("bonn", "kiel", "lund", "riga", "ulm", "wien")]
    tables += [str(table(tmp_path / f"{name}.csv", head)) for name, head in (("oslo", "age,ill"), ("turku", "age,weight,ill"))]
    with pytest.raises(ShapeMismatch) as raised:
        attune.simulate(tables, "fedavg", label="ill", progress=False)
    assert "oslo lacks the columns 'dose'" in str(raised.value)
    assert "turku lacks the columns 'dose' and has 'weight' instead" in str(raised.value)


def test_arrays_have_problems_too() -> None:
    x, y = np.zeros((20, 3)), np.arange(20) % 2
    broken = x.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ShardError) as raised:
        attune.simulate({"a": (x, y), "b": (broken, y), "c": (x, y[:5])}, "fedavg", progress=False)
    assert "training part of b" in str(raised.value) and "training part of c" in str(raised.value)


def test_doctor_examines_every_shard_of_a_pattern(sites: str) -> None:
    done = CliRunner().invoke(main, ["doctor", "--data", sites, "--label", "ill"])
    assert done.exit_code == 1
    failed = [line for line in done.output.splitlines() if line.startswith("FAIL")]
    for name, said in (("kiel", "unknown"), ("lund", "infinite"), ("riga", "'ill'"), ("oslo", "lacks the columns 'dose'")):
        assert any(name in line and said in line for line in failed), (name, done.output)
    assert sum(line.startswith("ok") and " data " in line for line in done.output.splitlines()) == 3


def test_doctor_examines_one_shard_as_before(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--data", str(table(tmp_path / "kiel.csv")), "--label", "ill"])
    assert done.exit_code == 0 and "data: tabular, 47 samples, 13 to test on" in done.output, done.output


def test_simulate_says_what_is_strange_about_the_data(tmp_path: Path) -> None:
    for name in ("kiel", "lund"):
        rows = [f"{1000 + n},{n % 5},{n % 2}" for n in range(60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["case,dose,ill", *rows]) + "\n")
    arguments = ["simulate", "--data", str(tmp_path / "*.csv"), "--label", "ill", "--method", "fedavg", "--rounds", "1"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert "warning: kiel, lund: every value of case is another whole number" in done.output
