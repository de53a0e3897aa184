"""`fedclient watch`: bets by hand and against the binomial distribution; samples count once; a risen error is found."""

import csv
import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.integrate import quad
from scipy.stats import binom

import attune
from attune.common.errors import HomeMismatch, SettingError
from attune.features.finished.drift import CHANCE, LEAD, LEAST, LEVELS, ODDS, RESERVE, begun, looked, watch_new
from attune.fedclient.cli import main
from attune.fedclient.home import DeviceHome


def capital_at(error: float, looks: list[tuple[int, int]]) -> float:
    """Return by hand the capital against one error after looks of (wrong, samples): what waits, and what was staked when."""
    waits, total = 1.0, 0.0
    for at in range(len(looks)):
        wrong, samples = map(sum, zip(*looks[at:], strict=True))
        left = RESERVE * LEAD / (LEAD + at)
        grown = (odds**wrong / (1 + (odds - 1) * error) ** samples for odds in ODDS)
        total, waits = total + (waits - left) * math.fsum(grown) / len(ODDS), left
    return waits + total


def watched(samples: int, errors: int, looks: list[tuple[int, int]]):
    watch = begun("", samples, errors)
    for look in looks:
        watch = looked(watch, *look)
    return watch


@pytest.mark.parametrize(("errors", "samples"), [(5, 50), (20, 200), (0, 30)])
def test_each_limit_is_the_error_under_which_so_few_have_its_chance(errors: int, samples: int) -> None:
    limits = begun("", samples, errors).limits
    assert binom.cdf(errors, samples, limits) == pytest.approx(LEVELS[1:])
    assert begun("", samples, errors, 0.05).limits == pytest.approx([limit + 0.05 for limit in limits])


def test_the_chances_of_all_errors_add_up_to_one_in_twenty() -> None:
    assert quad(lambda p: min(1, (LEAST / p) ** 2), 0, 1, points=[LEAST])[0] == pytest.approx(CHANCE) == 0.05


def test_looks_by_hand() -> None:
    """A bet on odds d times as large gives d / (1 + (d - 1) m) for a wrong answer and 1 / (1 + (d - 1) m) for a right one."""
    looks = [(1, 4), (0, 2), (3, 5)]
    watch = watched(50, 5, looks)
    capital_G = np.exp(np.reshape(watch.capitals, (-1, len(ODDS)))).sum(axis=1) + RESERVE * LEAD / (LEAD + 2)
    assert capital_G == pytest.approx([capital_at(limit, looks) for limit in watch.limits])
    assert looked(watch, 0, 0) is watch


def test_where_the_error_is_what_it_was_no_look_changes_the_expected_capital() -> None:
    for error in (0.05, 0.2):
        for before in ([], [(3, 10)]):
            after = [binom.pmf(wrong, 25, error) * capital_at(error, [*before, (wrong, 25)]) for wrong in range(26)]
            assert math.fsum(after) == pytest.approx(capital_at(error, before))


@pytest.mark.parametrize("day", [(5, 20), (4, 20), (60, 60)])
def test_an_alarm_needs_the_capital_against_each_error_and_stays(day: tuple[int, int]) -> None:
    errors = np.linspace(0.001, 0.999, 500)
    needed = (np.maximum(LEAST, binom.cdf(20, 200, errors)) / LEAST) ** 2
    looks: list[tuple[int, int]] = []
    while not (watch := watched(200, 20, looks)).alarm:
        looks.append(day)
    capital = np.array([capital_at(error, looks) for error in errors])
    assert (capital >= needed)[needed > 1].all() and watch.alarm == watch.counted
    soon = np.array([capital_at(error, looks[:-1]) for error in errors])
    assert (soon < 1.5 * needed)[needed > 1].any(), "it does not come much later than it could"
    assert looked(watch, 0, 500).alarm == watch.alarm
    with pytest.raises(SettingError, match="more test samples are needed"):
        begun("", 5, 4)


def rows(seed: int, count: int, flipped: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype("f4")
    y = (x[:, 0] + x[:, 1] > 0).astype(int)
    return x, np.where(rng.random(count) < flipped, 1 - y, y)


def write(path: Path, *parts: tuple[np.ndarray, np.ndarray]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["a", "b", "c", "d", "label"], *([*x, y] for xs, ys in parts for x, y in zip(xs, ys, strict=True))]
        )
    return path


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a device's home with a finished model, and its table."""
    folder = tmp_path_factory.mktemp("device")
    tables = [write(folder / f"{name}.csv", rows(seed, 600)) for seed, name in enumerate("ab")]
    result = attune.simulate(tables, "fedavg", "mlr", 2, progress=False)
    shutil.copytree(result.save(folder / "saved") / "models" / "a", folder / "home" / "model")
    return folder / "home", tables[0]


def test_a_sample_counts_once_and_a_risen_error_is_found(device: tuple[Path, Path], tmp_path: Path) -> None:
    home, shard = DeviceHome(device[0]), device[1]
    with pytest.raises(HomeMismatch, match="--reference"):
        watch_new(home, write(tmp_path / "day.csv", rows(9, 10)))
    first = watch_new(home, write(tmp_path / "day.csv", rows(9, 30)), reference=shard)
    assert first.counted == 30 and first.samples > 50 and not first.alarm
    assert watch_new(home, tmp_path / "day.csv", reference=shard) == first, "the same file changes nothing"
    assert watch_new(home, shard, reference=shard) == first, "nor do those of the shard"
    grown = watch_new(home, write(tmp_path / "day.csv", rows(9, 30), rows(10, 20)), reference=shard)
    assert (grown.counted, grown.looks) == (50, 2), "of a file that has grown the new samples count"
    bad, place = write(tmp_path / "bad.csv", rows(11, 200, 0.5)), ["--home", str(home.path), "--reference", str(shard)]
    said = CliRunner().invoke(main, ["watch", "--data", str(bad), *place], catch_exceptions=False)
    assert said.output.startswith("DRIFT, found after 250 new samples: "), said.output
    told = CliRunner().invoke(main, ["watch", "--home", str(home.path), "--data", str(tmp_path / "bad.csv"), "--json"])
    assert msgspec.json.decode(told.output)["drift"] is True and msgspec.json.decode(told.output)["counted"] == 250
    (home.path / "drift.json").write_text("{")
    with pytest.raises(HomeMismatch, match=r"drift\.json is damaged"):
        watch_new(home, tmp_path / "bad.csv", reference=shard)
