"""Comparison of runs: homes and saved results are read alike, numbers are by hand, errors name the run."""

import csv
import unicodedata

import msgspec
import pytest
from click.testing import CliRunner

import attune
from attune.common import aio
from attune.common.errors import NoModel, SettingError
from attune.common.metrics import METRICS
from attune.fedserver.cli import cli
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import Report
from attune.fedserver.home import ServerHome
from attune.fedserver.stores.sqlite import SqliteLedger
from attune.fedserver.view.export import ORDER_COLUMNS
from attune.fedserver.view.summary import summarise
from attune.simulation import compare, compare_views
from tests.e2e.harness import tabular_shard
from tests.pictures import check_pictures

COLUMNS = (*ORDER_COLUMNS, *METRICS)


def saved(folder, accuracies, method="fedavg", won=30, seconds=2.0, constant=None, seed=0):
    """Write the files of `fedserver export` for a run of one round, in which every device has its accuracy on 40 samples."""
    rows = [
        Report(
            round=1, work=work, client=name, accuracy_before=value, accuracy_local=0.1, better_than_local=won,
            worse_than_local=0, test_samples=40, accuracy_constant=constant, seconds=seconds + i, bytes_up=1000, bytes_down=500,
        )
        for work in ("train", "evaluate") for i, (name, value) in enumerate(accuracies.items())
    ]  # fmt: skip
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: getattr(row, name) for name in writer.fieldnames} for row in rows)
    settings = resolve({"method": {"name": method}, "round": {"rounds": 1}, "seed": seed})
    (folder / "summary.json").write_bytes(msgspec.json.encode(summarise(rows, settings, "mlr", 1)))
    return folder


def runs_of(tmp_path, **given):
    return compare.read([f"{name}={saved(tmp_path / name, found)}" for name, found in given.items()], ServerHome(tmp_path))


def test_the_numbers_of_two_runs_by_hand(tmp_path):
    """Use 3 devices in both runs: the second is better on 2 and worse on 1, +0.1 on average; each moved 2 * 1500 bytes."""
    runs = runs_of(
        tmp_path, first={"a": 0.5, "b": 0.6, "c": 0.7}, second={"a": 0.75, "b": 0.75, "c": 0.6, "d": 1.0}
    )  # fmt: skip
    first, second = compare.compared(runs)
    assert first.against_first is None
    assert first.mean_over_clients == pytest.approx(0.6)
    assert (second.devices, second.bytes, second.slowest_s) == (4, 12_000, 10.0), "2 + 3 seconds, in both orders"
    assert second.verdicts == {"better": 4}, "30 to 0"
    assert second.gives == 0.75
    assert second.metrics["seconds"] == 3.5, "2, 3, 4 and 5 seconds"
    found = second.against_first
    assert (found.devices, found.better, found.worse, found.p, found.verdict) == (3, 2, 1, 1.0, "unclear")
    assert found.difference == pytest.approx(0.1)


def test_a_run_that_is_no_better_than_a_constant_answer_is_named(tmp_path):
    runs = compare.read(
        [f"{name}={saved(tmp_path / name, {'a': value}, constant=0.6)}" for name, value in (("good", 0.7), ("bad", 0.6))],
        ServerHome(tmp_path),
    )
    found = compare.compared(runs)
    assert [each.constant for each in found] == [0.6, 0.6]
    assert "no better than a constant answer over clients: bad\n" in compare_views.render(found, runs)


def test_nine_of_nine_devices_are_for_certain(tmp_path):
    """Expect p = 2 / 2**9 of the sign test for 9 to 0."""
    names = "abcdefghi"
    runs = runs_of(tmp_path, low=dict.fromkeys(names, 0.5), high=dict.fromkeys(names, 0.75))
    found = compare.compared(runs)[1].against_first
    assert (found.p, found.verdict) == (2 / 2**9, "better")
    assert "high against low: better on 9 of 9 devices" in compare_views.render(compare.compared(runs), runs)


def test_runs_of_one_name_are_seeds_of_one_method(tmp_path):
    """Compare means .5, .6 and .7 with .6, .72 and .84: differences .1, .12 and .14, on the device that all six runs have."""
    given = []
    for seed in range(3):
        one = saved(tmp_path / f"a{seed}", {"x": 0.5 + 0.1 * seed, "y": 0.0}, seed=seed)
        two = saved(tmp_path / f"b{seed}", {"x": 0.6 + 0.12 * seed}, seed=seed)
        given += [f"a={one}", f"b={two}"]
    runs = compare.read(given, ServerHome(tmp_path))
    assert [run.name for run in runs[:2]] == ["a/seed-0", "b/seed-0"]
    found = compare.compared(runs)
    assert found[0].over_seeds.against_first is None and found[0].over_seeds.mean == pytest.approx(0.3)
    second = found[1].over_seeds
    assert (second.name, second.seeds, second.mean) == ("b", [0, 1, 2], pytest.approx(0.72))
    assert second.deviation == pytest.approx(0.12)
    against = second.against_first
    assert (against.difference, against.deviation, against.verdict) == (pytest.approx(0.12), pytest.approx(0.02), "better")
    assert "b against a: +0.1200 ± 0.0200 over 3 seeds" in compare_views.render(found, runs)


def test_runs_without_a_device_in_common_are_not_compared_with_each_other(tmp_path):
    runs = runs_of(tmp_path, one={"a": 0.5}, two={"b": 0.5})
    assert compare.compared(runs)[1].against_first is None
    assert "two and one have no device in common" in compare_views.render(compare.compared(runs), runs)


def test_what_cannot_be_compared_says_so(tmp_path):
    with pytest.raises(SettingError, match="neither a folder nor a run of"):
        compare.read(["absent"], ServerHome(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match="is not a folder that `fedserver export`"):
        compare.read([str(tmp_path / "empty")], ServerHome(tmp_path))
    twice = str(saved(tmp_path / "x", {"a": 0.5}))
    with pytest.raises(SettingError, match="two runs are called x"):
        compare.read([twice, twice], ServerHome(tmp_path))


def test_a_home_before_its_first_round_has_nothing_to_compare(tmp_path):
    aio.run(SqliteLedger(tmp_path / "state.sqlite").close())
    with pytest.raises(NoModel, match="nothing to compare"):
        compare.read([str(tmp_path)], ServerHome(tmp_path))


def test_the_command_prints_json_and_draws(tmp_path):
    words = [str(saved(tmp_path / "a", {"x": 0.5, "y": 0.25})), str(saved(tmp_path / "b", {"x": 0.75, "y": 0.5}, "fedtp"))]
    done = CliRunner().invoke(cli, ["compare", *words, "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    found = msgspec.json.decode(done.stdout.splitlines()[0], type=list[compare.ComparedRun])
    assert [(each.name, each.method) for each in found] == [("a", "fedavg"), ("b", "fedtp")]
    page = check_pictures(tmp_path / "out", {"compare"})
    assert page.row("x") == ["x", "0.5000", "0.7500"]
    assert page.heads == ["Which run is better?", "Runs side by side", "Every device", "Reports of the devices"]


async def renamed(home, name):
    async with home.open() as storage:
        before = await storage.ledger.snapshot()
        await storage.ledger.begin_run(name, before.overrides)
        await storage.ledger.commit_round(before.record, before.slots, before.rows, {}, before.plan)


def test_a_name_means_a_run_of_the_home_before_a_folder_here(tmp_path, monkeypatch):
    """A folder `first` of something else in the present directory hid the run `first`; `second` is the present run here."""
    server = ServerHome(tmp_path / "server")
    for name in ("first", "second"):
        attune.simulate([tabular_shard(tmp_path / f"shard-{name}", seed=1, samples=30)] * 1, "fedavg", rounds=1, progress=False,
                        home=tmp_path / name)  # fmt: skip
    server.runs.mkdir(parents=True)
    (tmp_path / "first" / "server").rename(server.runs / "first")
    for path in (tmp_path / "second" / "server").iterdir():
        path.rename(server.path / path.name)
    aio.run(renamed(server, "second"))
    here = tmp_path / "here"
    (here / "first").mkdir(parents=True)
    monkeypatch.chdir(here)
    runs = compare.read(["first", "second"], server)
    assert [run.path for run in runs] == [str(server.runs / "first"), str(server.path)]
    assert [run.name for run in runs] == ["first", "second"]
    aio.run(renamed(server, "München"))
    decomposed = unicodedata.normalize("NFD", "München")  # some keyboards and file systems write it so
    assert [(run.name, run.path) for run in compare.read([decomposed], server)] == [("München", str(server.path))]
    with pytest.raises(SettingError, match="is not a folder that `fedserver export`"):
        compare.read(["./first"], server)
