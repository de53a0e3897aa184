"""Findings about data, in the same words by every command that reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import attune
from attune.fedclient.cli import main as fedclient
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.doctor import examine
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.cli import cli as fedserver
from attune.simulation.comparison_table import harmed

# An age of 999, a state that tells the label, days and months in an unknown order, and a row that a stray mark has eaten.
NAMES = ("999 in age", "state equals the label ill", "month/day/year", "look like rows")


def table(path: Path) -> Path:
    rows = [
        f"{999 if n % 9 == 0 else 40 + n % 30},{'sick' if n % 2 else 'well'},{1 + n % 12:02d}/{1 + n * 5 % 12:02d}/2024,"
        f"{n % 2 * 5},{n % 2},note {n}"
        for n in range(120)
    ]
    rows[20], rows[22] = rows[20].replace("note", '"note'), f'{rows[22]}"'
    path.write_text("age,state,visit,score,ill,remark\n" + "\n".join(rows) + "\n")
    return path


def run(command: object, *arguments: str | Path) -> Result:
    done = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    return done


def check(said: str, names: tuple[str, ...]) -> None:
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for name in names:
        assert sum(line.startswith("warning: ") and name in line for line in lines) == 1, (name, said)


def test_all_commands_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "kiel.csv")
    auto = ("--label", "ill", "--schema", "auto")
    check(run(fedclient, "describe", path, "--label", "ill", "--out", tmp_path / "s.json").output, NAMES)
    check(run(fedclient, "shard", path, *auto, "--out", tmp_path / "shard").output, NAMES)
    check(run(fedserver, "simulate", "--data", path, *auto, "--method", "fedavg", "--rounds", "1").output, NAMES)
    check(
        "\n".join(f"warning: {text}" for text in LazyShard.on_disk(path, ReadOptions.of("ill", schema="auto")).warnings), NAMES
    )
    doctor = next(
        result.text
        for result in examine([str(path)], None, tmp_path, ReadOptions.of("ill", schema="auto"))
        if result.what == "data"
    )
    assert all(name in doctor for name in NAMES)
    home = tmp_path / "home"
    attune.simulate({"kiel": path}, "fedavg", label="ill", rounds=1, table={"schema": "auto"}, home=home, progress=False)
    check(capsys.readouterr().err, ("kiel: values far", *NAMES))
    device = ("--home", home / "devices" / "kiel")
    check(
        run(fedclient, "evaluate", *device, "--data", path, "--label", "ill").output,
        ("999 in age", "state equals", "look like rows"),
    )
    check(run(fedclient, "evaluate", *device, "--data", path, "--label", "ill", "--json").stderr, ("999 in age",))
    check(
        run(fedclient, "predict", *device, "--data", path, "--out", tmp_path / "p.csv").output, ("999 in age", "look like rows")
    )
    check(
        run(fedclient, "export", *device, "--data", path, "--out", tmp_path / "m.pt2").output, ("999 in age", "look like rows")
    )


def test_a_feature_in_proportion_to_a_target_is_said_and_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("euro,other,cost\n" + "".join(f"{n * 7.5},{(n * 37) % 101 / 3},{n}\n" for n in range(90)))
    said = " ".join(LazyShard.on_disk(path, ReadOptions.of("cost", task="regression")).warnings)
    assert "euro equals the label cost" in said and "other equals" not in said


def test_findings_are_said_once_for_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"label": "ill", "rounds": 1, "table": {"columns": "age,score"}, "progress": False}
    attune.simulate({"kiel": table(tmp_path / "kiel.csv")}, "fedavg", seeds=[0, 1], **given)
    check(capsys.readouterr().err, ("999 in age", "score equals the label ill", "look like rows"))


def test_words_for_what_is_not_known_are_said_among_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("sex,v,ill\n" + "".join(f"{('f', 'm', 'unbekannt')[n % 3]},{n % 7}.5,{n % 2}\n" for n in range(90)))
    said = " ".join(LazyShard.on_disk(path, ReadOptions.of("ill", schema="auto")).warnings)
    assert "values of sex may mean that it is not known: unbekannt" in said and "usual,unbekannt" in said


def test_classes_that_occur_at_one_site_alone_are_said_once(tmp_path, caplog, capsys) -> None:
    for site, words in (("kiel", ("sick", "well")), ("ulm", ("acute", "calm"))):
        rows = [f"{40 + n % 30},{words[n % 2]}" for n in range(80)]
        (tmp_path / f"{site}.csv").write_text("age,ill\n" + "\n".join(rows) + "\n")
    tables = {site: tmp_path / f"{site}.csv" for site in ("kiel", "ulm")}
    attune.simulate(tables, "fedavg", "mlr", rounds=1, label="ill", progress=False)
    said = capsys.readouterr().err + caplog.text
    assert said.count("no class of these devices occurs at another one") == 1, said


# --- harmed devices of a comparison: what they keep is worse than what `local` or `fedavg` leave them, by the paired test


def right(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.bool)


def test_a_device_is_harmed_only_beyond_chance() -> None:
    good, bad = right(*[1] * 20), right(*[1] * 10, *[0] * 10)
    assert harmed(bad, {"local": good}) is True
    assert harmed(good, {"local": bad}) is False
    assert harmed(right(*[1] * 17, 0, 0, 0), {"local": good}) is False, "three of twenty may be chance"
    assert harmed(good, {}) is None


def test_two_rivals_need_more_than_one() -> None:
    """Compute by hand: six losses of six have p = 2 / 64, and twice that is above 5 %."""
    mine, rival = right(*[0] * 6, *[1] * 20), right(*[1] * 26)
    assert harmed(mine, {"local": rival}) is True
    assert harmed(mine, {"local": rival, "common": mine}) is False


def test_a_group_of_samples_counts_once() -> None:
    mine, rival = right(*[0] * 10, *[1] * 10), right(*[1] * 20)
    assert harmed(mine, {"local": rival}) is True
    assert harmed(mine, {"local": rival}, np.repeat(np.arange(4), 5)) is False


def test_numbers_are_compared_by_their_scores() -> None:
    mine, rival = torch.linspace(-3, -2, 30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    assert harmed(mine, {"common": rival}) is True
    assert harmed(rival, {"common": mine}) is False
