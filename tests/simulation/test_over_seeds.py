"""Several seeds: means, deviations and the paired t-test by hand; each seed has the bits of a run of its own."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError
from attune.common.statistics import interval_of_mean, student_p
from attune.fedserver.cli import cli
from attune.simulation.over_seeds import SeedDifference, SeedResults, difference_over_seeds
from tests.e2e.harness import tabular_shard

QUICK = {"train.local_epochs": 1, "model.name": "mlr"}


def test_the_paired_test_by_hand() -> None:
    """Compute for the differences .01, .02, .03: mean .02, deviation .01, t = 2 * sqrt 3 with two degrees of freedom.

    With two degrees, P(|T| > t) = 1 - t / sqrt(t^2 + 2), and the quantile of 95 % is 4.303.
    """
    found = difference_over_seeds({0: 0.51, 1: 0.62, 2: 0.73, 9: 1.0}, {0: 0.5, 1: 0.6, 2: 0.7, 8: 0.0})
    assert found is not None and found.seeds == 3
    assert (found.difference, found.deviation) == pytest.approx((0.02, 0.01))
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-6)
    assert found.verdict == "unclear", "p is 0.074"


@pytest.mark.parametrize(("sign", "verdict"), [(1, "better"), (-1, "worse")])
def test_a_clear_difference(sign: int, verdict: str) -> None:
    means = {seed: 0.5 + sign * (0.1 + 0.01 * (seed % 2)) for seed in range(4)}
    found = difference_over_seeds(means, dict.fromkeys(range(4), 0.5))
    assert found is not None and found.verdict == verdict and found.p is not None and found.p < 0.001
    assert f": {verdict} (paired t-test over seeds, p = " in found.words("a", "b")


def test_nothing_is_claimed_below_three_seeds() -> None:
    found = difference_over_seeds({0: 0.9, 1: 0.8}, {0: 0.1, 1: 0.1})
    assert found is not None and (found.verdict, found.p, found.interval) == (None, None, None)
    assert found.words("a", "b").endswith("over 2 seeds on these devices: no claim below 3 seeds")
    assert difference_over_seeds({0: 0.9}, {1: 0.9}) is None


def test_equal_differences_have_no_test() -> None:
    found = difference_over_seeds({0: 0.3, 1: 0.2, 2: 0.4}, {0: 0.2, 1: 0.1, 2: 0.3})
    assert found is not None and found.verdict == "unclear" and found.p is None
    assert "no claim, because all seeds give the same difference" in found.words("a", "b")


def test_the_p_value_agrees_with_the_quantile_and_the_interval() -> None:
    assert student_p(12.7062, 1) == pytest.approx(0.05, abs=1e-6)
    assert student_p(-2.2281, 10) == pytest.approx(0.05, abs=1e-5)
    assert student_p(0.0, 3) == 1.0
    assert interval_of_mean([0.5]) is None
    assert interval_of_mean([0.0, 2.0]) == pytest.approx((1 - 12.7062, 1 + 12.7062), abs=1e-3), "12.706 * sqrt 2 / sqrt 2"


def data(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, (2, 40))
    return {f"site{i}": (rng.normal(size=(40, 3)) + y[i][:, None], y[i]) for i in range(2)}


@pytest.fixture(scope="module")
def three() -> SeedResults:
    return attune.simulate(data(), "fedavg", rounds=1, settings=QUICK, progress=False, seeds=(2, 0, 1))


def test_each_seed_has_the_bits_of_its_own_run(three: SeedResults) -> None:
    assert list(three) == [2, 0, 1]
    single = attune.simulate(data(), "fedavg", rounds=1, settings=QUICK, progress=False, seed=1)
    assert three[1].digests == single.digests != three[0].digests
    assert three[1].table()[0] == single.table()[0]


def test_the_table_has_mean_and_deviation_of_each_device(three: SeedResults) -> None:
    kept = [[result.table()[at].kept or 0.0 for result in three.values()] for at in range(2)]
    table = three.table()
    at = list(table.heads).index("kept")
    for row, values in zip(table.rows, kept, strict=False):
        assert (row[at].mean, row[at].deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    means = np.mean(kept, axis=0)
    assert (table.rows[2][at].mean, table.rows[2][at].deviation) == pytest.approx((means.mean(), means.std(ddof=1)))
    assert list(three.means().values()) == pytest.approx(means.tolist())


def test_a_method_against_itself_and_against_other_devices(three: SeedResults) -> None:
    same = three.against(three)
    assert isinstance(same, SeedDifference) and (same.difference, same.verdict) == (0.0, "unclear")
    other = attune.simulate({"far": data()["site0"]}, "fedavg", rounds=1, settings=QUICK, progress=False, seeds=[0])
    with pytest.raises(SettingError, match="of other devices"):
        three.against(other)
    with pytest.raises(SettingError, match="no column 'keeps' of accuracies"):
        three.means("keeps")


def test_results_are_saved_for_each_seed_and_compared_again(three: SeedResults, tmp_path: Path) -> None:
    three.save(tmp_path / "first")
    other = attune.simulate(
        data(), "local", rounds=1, settings=QUICK, progress=False, seeds=(0, 1, 2), home=tmp_path / "second"
    )
    assert (tmp_path / "second" / "seed-2" / "server").is_dir()
    with (tmp_path / "first" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == ["site0", "site1", "mean"] and float(rows[2]["kept deviation"]) >= 0
    done = CliRunner().invoke(cli, ["compare", str(tmp_path / "first"), str(tmp_path / "second")], catch_exceptions=False)
    assert done.exit_code == 0 and "first/seed-2" in done.output and "second/seed-0" in done.output
    found = other.against(three, "accuracy")
    assert f"second against first: {found.difference:+.4f} ± {found.deviation:.4f} over 3 seeds" in done.output


@pytest.mark.parametrize("seeds", [(), (1, 1), "012", ("0",), 3, (True,), (False, 1)])
def test_wrong_seeds_are_refused(seeds: object) -> None:
    with pytest.raises(SettingError, match="seeds are"):
        attune.simulate(data(), "fedavg", seeds=seeds)


def test_a_seed_beside_the_seeds_is_refused() -> None:
    for given in ({"seed": 1}, {"settings": {"seed": 1}}):
        with pytest.raises(SettingError, match="there is a seed and there are seeds"):
            attune.simulate(data(), "fedavg", seeds=(0, 1), **given)


def run(folder: Path, *words: str) -> tuple[int, str]:
    for n in range(2):
        if not (folder / f"site{n}").exists():
            tabular_shard(folder / f"site{n}", seed=n, samples=24)
    quick = ("--rounds", "1", "--set", "train.local_epochs=1")
    done = CliRunner().invoke(cli, ["simulate", "--data", str(folder / "*"), *quick, *words])
    return done.exit_code, done.output + str(done.exception or "")


def test_the_command_compares_methods_over_seeds_and_writes_a_table(tmp_path: Path) -> None:
    words = ("--method", "local,fedavg", "--seeds", "0,1,2", "--table", str(tmp_path / "t.csv"), "--out", str(tmp_path / "out"))
    code, printed = run(tmp_path / "shards", *words)
    assert code == 0, printed
    results = {
        method: attune.simulate(
            f"{tmp_path}/shards/*", method, rounds=1, settings={"train.local_epochs": 1}, progress=False, seeds=(0, 1, 2)
        )
        for method in ("local", "fedavg")
    }
    assert results["fedavg"].against(results["local"]).words("fedavg", "local") in printed
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for method, result in results.items():
        means = list(result.means().values())
        assert float(rows[method]["kept"]) == pytest.approx(np.mean(means))
        worst = [min(row.kept or 0.0 for row in one.table()) for one in result.values()]
        assert float(rows[method]["worst device"]) == pytest.approx(np.mean(worst))
        assert (tmp_path / "out" / method / "seed-1" / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "0,x"), "--seeds takes whole numbers"),
        (("--seeds", "0,0"), "a seed comes twice"),
        (("--seeds", "0", "--seed", "1"), "give --seed or --seeds"),
        (("--table", "t.xlsx"), "a table is a file .csv, .tex, .html"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, printed = run(tmp_path / "shards", *words)
    assert code != 0 and said in printed, printed
