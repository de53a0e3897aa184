"""`fedserver simulate` with several methods and grids: one model, settings for one method, a table that explains itself."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attune
from attune.common.errors import AttuneError, SettingError, ShardError
from attune.fedclient.console import kept_words
from attune.fedserver.cli import cli
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.grid_search import best, parse_grid, validation_members
from tests.e2e.harness import tabular_shard

QUICK = ("--rounds", "2", "--seed", "3", "--set", "train.local_epochs=1")
SETTINGS = {"train.local_epochs": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    for n in range(3):
        tabular_shard(folder / f"site{n}", seed=n, samples=24 + n)
    return str(folder / "*")


def run(data: str, *words: str) -> Result:
    return simulated("--data", data, *QUICK, *words)


def simulated(*words: str) -> Result:
    """Run the command. An error of Attune's becomes its exit code and the end of the output, as in the entry point."""
    done = CliRunner().invoke(cli, ["simulate", *words])
    if isinstance(done.exception, AttuneError):
        done.exit_code, done.output_bytes = done.exception.exit_code, done.output_bytes + str(done.exception).encode()
    return done


def lines(data: str, *words: str) -> list[str]:
    done = run(data, *words)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def models_in(head: str) -> str:
    assert head.startswith("model: "), head
    return head


def test_methods_are_compared_with_one_model_which_the_head_names(data: str) -> None:
    head = lines(data, "--method", "local,fedavg,fedtp")[:2]
    assert models_in(head[0]) == "model: transformer, for all methods"
    assert head[1] == "the usual model for tabular, dnn, has no qkv, which method fedtp needs"
    assert models_in(lines(data, "--method", "local,fedavg")[0]) == "model: dnn, for all methods"
    assert models_in(lines(data, "--method", "fedtp")[0]) == "model: transformer; method: fedtp"


def test_a_method_that_cannot_use_the_model_has_its_own_and_the_head_says_why(data: str) -> None:
    head = lines(data, "--method", "local,fedtp,fedavg", "--model", "dnn")[:2]
    assert head[0] == "model: dnn (local, fedavg), transformer (fedtp)"
    assert head[1].startswith("fedtp cannot use dnn: ") and "qkv" in head[1]


def test_a_model_of_ones_own_that_one_method_cannot_use(data: str) -> None:
    head = lines(data, "--method", "fedavg,fedtp", "--model", "tests.simulation.test_comparison:linear")[:2]
    assert head[0] == "model: tests.simulation.test_comparison:linear (fedavg), transformer (fedtp)"
    assert head[1].startswith("fedtp cannot use tests.simulation.test_comparison:linear: ")


def linear(spec):
    """Return a linear model, which has no attention."""
    from torch import nn

    return nn.Linear(spec.shape[0], spec.classes)


def test_a_model_that_no_method_can_use_ends_it_before_any_training(data: str, tmp_path: Path) -> None:
    done = run(data, "--method", "fedavg,local", "--model", "convnet", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and "convnet" in done.output and not (tmp_path / "out").exists()


def test_a_setting_for_one_of_several_methods(data: str) -> None:
    words = ("--method", "fedavg,fedavg+ft", "--set", "fedavg+ft:method.tune_epochs=7", "--set", "fedavg+ft:train.lr=0.1")
    printed = lines(data, *words)
    settings = {**SETTINGS, "method.tune_epochs": 7, "train.lr": 0.1}
    table = attune.simulate(data, "fedavg+ft", rounds=2, seed=3, settings=settings, progress=False).table()
    means = [line.split() for line in printed if line.startswith("mean") and "fedavg+ft" in line]
    assert f"{table.mean('kept'):.3f}" in means[0]
    usual = attune.simulate(data, "fedavg+ft", rounds=2, seed=3, settings=SETTINGS, progress=False).table()
    assert [row.accuracy for row in usual] != [row.accuracy for row in table], "else the setting changes nothing"


def test_a_value_may_have_colons_and_equal_signs(data: str) -> None:
    done = run(data, "--method", "fedavg,local", "--set", "fedavg:model.name=tests.simulation.test_comparison:linear=x")
    assert done.exit_code == 2 and "tests.simulation.test_comparison:linear=x" in done.output


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("fedavg+tf:method.tune_epochs=2", "did you mean 'fedavg+ft'"),
        ("fedprox:method.mu=1", "fedprox is not among the methods of this comparison (local, fedavg+ft)"),
        ("fedavg+ft:method.tune_epoch=2", "did you mean 'tune_epochs'"),
        (":method.tune_epochs=2", "--set takes"),
        ("fedavg+ft:=2", "--set takes"),
        ("fedavg+ft:method.tune_epochs", "--set takes"),
        ("fedavg+ft:method.name=fedprox", "--method names the methods"),
        ("method.preset=published", "has no settings as published"),
        ("method.tune_epochs=2", "--set fedavg+ft:method.tune_epochs=2"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_training(data: str, tmp_path: Path, assignment: str, said: str) -> None:
    done = run(data, "--method", "local,fedavg+ft", "--set", assignment, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and said in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_rounds_and_seed_of_one_method_win_over_those_of_all(data: str, tmp_path: Path) -> None:
    words = ("--method", "local,fedavg", "--set", "fedavg:round.rounds=3", "--set", "fedavg:seed=9", "--out", str(tmp_path))
    lines(data, *words)
    for method, rounds, seed in (("local", 2, 3), ("fedavg", 3, 9)):
        status = json.loads((tmp_path / method / "status.json").read_bytes())
        summary = json.loads((tmp_path / method / "summary.json").read_bytes())
        assert (status["method"], status["state"], status["round"], summary["seed"]) == (method, "done", rounds, seed)


def test_a_preset_of_one_method_is_given_to_it_alone(data: str) -> None:
    done = run(data, "--method", "fedmcsa,local", "--set", "method.preset=published")
    assert done.exit_code == 2 and "--set fedmcsa:method.preset=published" in done.output, done.output


def test_an_option_that_the_common_model_lacks_says_which_model_that_is(data: str) -> None:
    done = run(data, "--method", "local,fedavg,fedtp", "--set", "model.hidden=[8]")
    assert done.exit_code == 2 and done.output.count("model.hidden") == 1, done.output
    assert "transformer" in done.output and "--model" in done.output


def test_options_for_the_model_of_one_method_are_never_dropped(data: str) -> None:
    head = lines(data, "--method", "local,fedavg,fedtp", "--set", "fedavg:model.hidden=[8]")[:2]
    assert head[0] == "model: transformer (local, fedtp), dnn (fedavg)"
    assert head[1].startswith("fedavg cannot use transformer: ") and "hidden" in head[1]
    done = run(data, "--method", "local,fedavg,fedtp", "--set", "fedavg:model.hiden=[8]")
    assert done.exit_code == 2 and "model.hiden" in done.output


def test_without_test_parts_nobody_is_told_to_add_methods(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"site{n}").mkdir()
        x = np.random.default_rng(n).normal(size=(20, 3))
        np.savez(tmp_path / f"site{n}" / "train.npz", x=x, y=np.arange(20) % 2)
        np.savez(tmp_path / f"site{n}" / "test.npz", x=x[:0], y=np.arange(0))
    printed = lines(str(tmp_path / "*"), "--method", "local,fedavg")
    assert printed[-1] == "harmed: it is not known who is harmed, because no device has a test part"


def test_all_wrong_methods_and_settings_are_named_at_once(data: str) -> None:
    done = run(data, "--method", "fedavgg,fedtpp,local")
    assert done.exit_code == 2 and "'fedavgg'" in done.output and "'fedtpp'" in done.output
    done = run(data, "--method", "fedavg,fedprox", "--set", "fedavg:train.lr=-1", "--set", "fedprox:method.my=1")
    assert "train.lr" in done.output and "method.my" in done.output, done.output


def test_the_table_says_what_is_kept_what_is_served_and_who_is_harmed(data: str) -> None:
    methods = ("local", "fedavg", "fedper")
    printed = lines(data, "--method", ", ".join(methods), "--baseline", "none")
    head = re.split(r"  +", printed[1].strip())
    assert head == ["device", "samples", "method", "kept", "own", "served", "verdict", "harmed", "probably", "keeps"]
    said = {"rounds": 2, "seed": 3, "settings": SETTINGS, "baseline": "none", "progress": False}
    results = {m: attune.simulate(data, m, **said) for m in methods}
    body = [re.split(r"  +", line.strip()) for line in printed[2:]]
    for site in range(3):
        for at, method in enumerate(methods):
            row, cells = results[method].table()[site], body[3 * site + at]
            assert cells[:3] == [f"site{site}", str(row.samples), method]
            assert cells[3] == f"{results[method].status['clients'][site]['accuracy_kept']:.3f}"
            assert cells[4] == f"{row.accuracy:.3f}"
            assert cells[5] == (
                "-" if method == "local" else f"{results[method].status['clients'][site]['accuracy_before']:.3f}"
            )
            assert cells[6] == (row.verdict or "-") and cells[7] in ("yes", "no")
            assert cells[8] in ("-", "helped", "harmed") and cells[9] == row.keeps
    means = body[9:12]
    assert [cells[0] for cells in means] == ["mean"] * 3
    for method, cells in zip(methods, means, strict=True):
        assert cells[2:4] == [f"{results[method].table().mean(score):.3f}" for score in ("kept", "accuracy")], cells
        assert re.fullmatch(r"\d of 3", cells[-2]) and re.fullmatch(r"\d helped, \d harmed", cells[-1])
    constant = results["local"].table().mean("constant")
    assert printed[14] == f"a constant answer has {constant:.3f} on average"
    beaten = [method for method in methods if results[method].table().mean("kept") <= constant]
    assert (f"no better than a constant answer: {', '.join(beaten)}" in printed) == bool(beaten)
    against = [line for line in printed if line.startswith("fedper: what devices keep against a network trained alone: ")]
    gain = results["fedper"].table().mean("kept") - results["local"].table().mean("kept")
    assert len(against) == 1 and float(against[0].split()[9]) == pytest.approx(gain, abs=6e-4)


def test_keeps_has_the_words_of_the_device(data: str) -> None:
    result = attune.simulate(data, "fedper", rounds=2, seed=3, settings=SETTINGS, baseline="local", progress=False)
    for row in result.table():
        assert row.keeps == kept_words(result._outcome.results[row.device])
        assert re.search(r"a blend of .*\d\.\d\d, .*\d\.\d\d \(weighted on \d+ samples|the \w+ model \(", row.keeps), row.keeps
    assert any("blend of" in row.keeps for row in result.table()), "else the shares are never shown"


def test_without_rivals_it_says_how_to_learn_who_is_harmed(data: str) -> None:
    printed = lines(data, "--method", "fedper", "--baseline", "none")
    assert any("add local and fedavg to --method" in line for line in printed)
    assert not any("add local" in line for line in lines(data, "--method", "fedper,local"))


def test_each_method_tries_every_combination_of_the_keys_that_it_has() -> None:
    grid = parse_grid(["method.mu=0.1, 1", "train.lr=0.01,0.1", "round.train=all"], ["fedavg", "fedprox"])
    assert grid["fedavg"] == [("train.lr=0.01", "round.train=all"), ("train.lr=0.1", "round.train=all")]
    assert grid["fedprox"] == [
        (lr, "round.train=all", mu) for lr in ("train.lr=0.01", "train.lr=0.1") for mu in ("method.mu=0.1", "method.mu=1")
    ]
    assert parse_grid(["model.hidden=[8],[16, 8]"], ["local"])["local"] == [("model.hidden=[8]",), ("model.hidden=[16, 8]",)]
    assert parse_grid(["method.mu=1,1,2"], ["fedprox", "local"]) == {
        "fedprox": [("method.mu=1",), ("method.mu=2",)],
        "local": [()],
    }


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["train.lr"], "--grid takes section.key=VALUE,VALUE"),
        (["lr=1,2"], "--grid takes section.key=VALUE,VALUE"),
        (["fedprox:method.mu=1,2"], "for all methods that have the key"),
        (["train.lr=1,2", "train.lr=3"], "--grid train.lr comes twice"),
        (["method.sigma=10,50"], "none of fedavg, fedprox has this setting"),
    ],
)
def test_a_wrong_grid_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("(", r"\(")):
        parse_grid(texts, ["fedavg", "fedprox"])


def test_of_equal_settings_the_first_is_chosen() -> None:
    assert best({("a=1",): 0.5, ("a=2",): 0.7, ("a=3",): 0.7}) == ("a=2",)


def numbered(samples: int, groups: bool = False) -> tuple[np.ndarray, ...]:
    """Return data whose samples are numbers: training samples from 0 on, test samples from 1,000 on."""
    x = np.arange(samples, dtype=float)[:, None]
    return x, np.arange(samples) % 2, x[:8] + 1000, np.full(8, 2)


def test_validation_parts_are_cut_from_training_parts_and_keep_the_classes() -> None:
    members = read_shards(data_by_name({"a": numbered(40), "b": numbered(12)}))
    cut = validation_members(members, seed=1)
    a, b = (cut[name].load() for name in "ab")
    assert sorted([*a.train_x[:, 0], *a.test_x[:, 0]]) == list(range(40)) and len(a.test_x) == 10
    assert np.bincount(a.test_y).tolist() == [5, 5] and a.labels == [0, 1, 2], "class 2 is only in the real test part"
    assert len(b.test_x) == 0 and len(b.train_x) == 12, "too few samples to hold some out"
    again = validation_members(members, seed=1)["a"].load()
    assert (again.test_x == a.test_x).all() and (validation_members(members, seed=2)["a"].load().test_x != a.test_x).any()
    with pytest.raises(ShardError, match="no device has 20 training samples"):
        validation_members({"b": members["b"]}, seed=1)


def test_groups_are_never_divided(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for part, n in (("train", 40), ("test", 8)):
        groups = np.arange(n) // 4
        np.savez(folder / f"{part}.npz", x=np.random.default_rng(0).normal(size=(n, 2)), y=np.arange(n) % 2, person=groups)
    (folder / "meta.json").write_text('{"groups": "person"}')
    cut = validation_members(read_shards(data_by_name([folder])), seed=0)["a"].load()
    assert cut.groups is not None and cut.test_groups is not None and len(cut.test_groups) >= 8
    assert not set(cut.groups) & set(cut.test_groups)


@pytest.fixture(scope="module")
def reversed_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make shards whose training labels follow the features, and whose test labels say the opposite."""
    folder = tmp_path_factory.mktemp("shards")
    for n in range(2):
        (folder / f"site{n}").mkdir()
        rng = np.random.default_rng(n)
        y = rng.integers(0, 2, 60)
        x = rng.normal(size=(60, 3)) + 4 * y[:, None]
        np.savez(folder / f"site{n}" / "train.npz", x=x, y=y)
        np.savez(folder / f"site{n}" / "test.npz", x=x, y=1 - y)
    return str(folder / "*")


def run_grid(data: str, *words: str) -> Result:
    return simulated("--data", data, "--rounds", "2", "--model", "mlr", *words)


def test_settings_are_chosen_on_parts_of_the_training_data(reversed_data: str, tmp_path: Path) -> None:
    """Choose between a rate that learns, which is the worst on the reversed test parts, and one that learns nothing."""
    done = run_grid(reversed_data, "--method", "local,fedprox", "--grid", "train.lr=1e-9,0.1", "--grid", "method.mu=0.01,0.02",
               "--out", str(tmp_path), "--seeds", "3,4")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "local: train.lr=0.1, the best of 2 on validation parts of the training data" in done.output
    assert "fedprox: train.lr=0.1 method.mu=0.0" in done.output
    with (tmp_path / "grid.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["local"] * 2 + ["fedprox"] * 4
    scores = {row["settings"]: float(row["kept"]) for row in rows if row["method"] == "local"}
    assert scores["train.lr=0.1"] > 0.9 > scores["train.lr=1e-9"]
    settings = {"train.lr": 0.1, "model.name": "mlr"}
    result = attune.simulate(reversed_data, "local", rounds=2, seeds=(3, 4), settings=settings, progress=False)
    assert max(result.means().values()) < 0.2, "the test parts say the opposite, and had no say"
    means = [line.split() for line in done.output.splitlines() if line.startswith("mean  ")]
    table = result.table()
    assert means[0][2:5] == ["local", *str(table.rows[-1][table.heads.index("kept")]).split()[:2]]


def test_a_single_value_is_used_without_a_trial(reversed_data: str) -> None:
    done = run_grid(reversed_data, "--method", "local,fedprox", "--grid", "method.mu=0.5")
    assert done.exit_code == 0 and "on validation parts" not in done.output, done.output
    assert "fedprox: method.mu=0.5, without a choice" in done.output
    assert "local: none of the settings of the grid, without a choice" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grid", "train.lr=0.1,-1"), "train.lr"),
        (("--grid", "train.lrr=0.1,1"), "did you mean 'lr'"),
        (("--grid", "train.lr"), "--grid takes"),
    ],
)
def test_a_wrong_grid_ends_it_before_any_training(reversed_data: str, words: tuple[str, ...], said: str) -> None:
    done = run_grid(reversed_data, "--method", "local", *words)
    assert done.exit_code == 2 and said in done.output and "on validation parts" not in done.output, done.output
