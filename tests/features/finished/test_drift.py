"""`fedclient watch`: bets by hand and against the binomial distribution; samples count once; a risen error is found."""

import csv
import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binom

import attune
from attune.common.errors import HomeMismatch, SettingError
from attune.features.finished.drift import OF_BETS, OF_BOUND, PARTS, RESERVE, SHARE, begun, looked, watch_new
from attune.fedclient.cli import main
from attune.fedclient.home import DeviceHome


def capital_of(watch) -> float:
    return math.fsum(map(math.exp, watch.capitals))


@pytest.mark.parametrize(("errors", "samples"), [(5, 50), (20, 200), (0, 30)])
def test_the_bound_is_the_error_under_which_so_few_would_be_rare(errors: int, samples: int) -> None:
    assert binom.cdf(errors, samples, begun("", samples, errors).limit) == pytest.approx(OF_BOUND)
    assert begun("", samples, errors, 0.05).limit == pytest.approx(begun("", samples, errors).limit + 0.05)


def test_one_look_by_hand() -> None:
    """Bet j stakes b of its capital at odds by which one wrong answer gives 1 + b (1 - m) / m, a right one 1 - b."""
    watch, stake = begun("", 50, 5), (1 - RESERVE) / (len(PARTS) - 1)
    odds = (1 - watch.limit) / watch.limit
    wrong, right = looked(watch, 1, 1), looked(watch, 0, 1)
    assert [math.exp(c) for c in wrong.capitals] == pytest.approx([RESERVE, *(stake * (1 + part * odds) for part in PARTS[1:])])
    assert [math.exp(c) for c in right.capitals] == pytest.approx([RESERVE, *(stake * (1 - part) for part in PARTS[1:])])
    later = looked(right, 0, 1)
    assert math.exp(later.capitals[0]) == pytest.approx(RESERVE * (1 - SHARE)), "a part of the reserve is staked at each look"


def test_where_the_error_is_at_the_limit_no_look_changes_the_expected_capital() -> None:
    watch = begun("", 40, 6)
    for seen in (0, 3):
        before = looked(watch, seen, 10) if seen else watch
        after = [binom.pmf(wrong, 25, watch.limit) * capital_of(looked(before, wrong, 25)) for wrong in range(26)]
        assert math.fsum(after) == pytest.approx(capital_of(before))
    assert looked(watch, 0, 0) is watch


def test_an_alarm_comes_when_the_capital_has_grown_by_so_much_and_stays() -> None:
    watch = begun("", 200, 20)
    while not watch.alarm:
        before, watch = watch, looked(watch, 5, 10)
    assert capital_of(before) < 1 / OF_BETS <= capital_of(watch) and watch.alarm == watch.counted
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
