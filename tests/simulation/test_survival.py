"""Whole federations of survival: from sites' tables to a model that says who is at risk."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError, ShardError
from attune.features.finished import model_plots
from attune.fedclient.cli import main as fedclient
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model import portable
from attune.fedclient.model.artifact import Model
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.cli import cli as fedserver

QUICK = {"train.lr": 0.05, "train.batch_size": 32, "train.local_epochs": 3}
COLUMNS = ("age", "stage", "dose", "seen_before", "months", "died")


def cohort(site: int, rows: int = 120) -> list[tuple[object, ...]]:
    """Return patients of a Cox model: age and stage count everywhere, and the dose with another sign at each second site."""
    rng = np.random.default_rng(60 + site)
    age, stage, dose, before = rng.normal(60, 10, rows), rng.choice(list("ABC"), rows), rng.normal(size=rows), rng.random(rows)
    risk = 0.1 * (age - 60) + 1.5 * (stage == "A") + 1.2 * (-1) ** site * dose
    time, censored = 20 * rng.exponential(np.exp(-risk)), rng.exponential(60, rows)
    seen, died = np.round(np.minimum(time, censored), 2), (time <= censored).astype(int)
    columns = (np.round(age, 1), stage, np.round(dose, 3), np.where(before < 0.3, "yes", "no"), seen, died)
    return [tuple(cell.item() for cell in row) for row in zip(*columns, strict=True)]


def write(path: Path, rows: list[tuple[object, ...]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def arrays(site: int, rows: int = 120) -> tuple[np.ndarray, np.ndarray]:
    table = cohort(site, rows)
    x = np.array([(age, stage == "A", dose) for age, stage, dose, *_ in table], dtype=np.float64)
    return x, np.array([row[-2:] for row in table], dtype=np.float64)


def run(method: str, sites: int = 4, rounds: int = 5, **more: Any) -> attune.Result:
    shards = more.pop("shards", None) or {f"site{site}": arrays(site) for site in range(sites)}
    settings = QUICK | more.pop("settings", {})
    return attune.simulate(shards, method, rounds=rounds, task="survival", settings=settings, progress=False, **more)


def test_tables_with_a_schema_train_far_above_chance_and_beside_a_model_alone(tmp_path: Path) -> None:
    data = [write(tmp_path / f"{name}.csv", cohort(site)) for site, name in enumerate(("kiel", "lund", "oslo", "turku"))]
    home = tmp_path / "home"
    result = run("fedper", shards=data, rounds=6, label="months,died", table={"schema": "auto"}, baseline="local", home=home)
    for line in result.status["clients"]:
        assert line["accuracy"] > 0.7 and line["accuracy_local"] > 0.6 and line["accuracy_constant"] == 0.5, line
        assert line["interval"] is line["verdict"] is line["gain_local"] is None, "no statistic of single samples"
    assert result.status["metric"] == "C-index" and result.summary["task"] == "survival"

    folder, shard = home / "devices" / "kiel" / "model", data[0]
    model = Model.load(folder)
    assert model.info.task == "survival" and not model.info.weights
    held = load_shard(shard, options=model.info.options_for(shard))
    assert model.evaluate(held)[1] == len(held.test_x)
    with pytest.raises(
        SettingError, match="there are no pictures of models for survival: `fedclient evaluate` has their score"
    ):
        model_plots.plot([folder], shard, tmp_path / "pictures", 6, ())
    new, out = tmp_path / "new.csv", tmp_path / "risks.csv"
    new.write_text("\n".join(["age,stage,dose,seen_before", "40,C,0,no", "85,A,0,no", "85,,0,"]) + "\n")
    said = CliRunner().invoke(
        fedclient, ["predict", "--data", str(new), "--out", str(out), "--home", str(folder.parent)], catch_exceptions=False
    )
    assert said.exit_code == 0, said.output
    rows = list(csv.DictReader(out.open(newline="")))
    assert list(rows[0]) == ["index", "log hazard"] and float(rows[0]["log hazard"]) + 1 < float(rows[1]["log hazard"])


def test_attention_of_ones_own_is_far_above_chance() -> None:
    small = {"model.width": 16, "model.depth": 1, "model.heads": 2, "method.hidden": 16}
    result = run("fedtp", sites=3, rounds=6, settings=small, baseline="local")
    assert all(row.accuracy is not None and row.accuracy > 0.6 and row.local is not None for row in result.table())


def test_the_score_of_a_device_is_that_of_lifelines() -> None:
    utils = pytest.importorskip("lifelines.utils")
    result = run("fedavg", sites=3, rounds=2)
    score = next(row.accuracy for row in result.table() if row.device == "site1")
    held = shard_of("site1", arrays(1), ReadOptions.of(task="survival")).load()
    months, died = held.test_y.T
    risk = np.array(result.model("site1").predict(held.test_x))
    assert score == pytest.approx(utils.concordance_index(months, -risk, died), abs=1e-6)


def test_whole_batches_find_the_stratified_cox_model_of_lifelines() -> None:
    """Average a linear model whose devices take one step on all their rows: gradient descent on the sum of their likelihoods.

    Sites have equally many rows and events, and features with mean 0 and deviation 1, so each counts alike and none is scaled.
    """
    pandas, lifelines = pytest.importorskip("pandas"), pytest.importorskip("lifelines")
    sites, frames = {}, []
    for site in range(4):
        rng = np.random.default_rng(site)
        x = rng.normal(size=(100, 3))
        x = (x - x.mean(axis=0)) / x.std(axis=0)
        months = np.ceil(10 * (1 + site) * rng.exponential(np.exp(-x @ [0.8, -0.5, 0.2])))
        died = rng.permutation(100) < 60
        y = np.c_[np.where(died, months, np.ceil(months * rng.random(100))), died]
        sites[f"site{site}"] = (x, y, x, y)
        frames.append(pandas.DataFrame(np.c_[x, y], columns=["a", "b", "c", "months", "died"]).assign(site=site))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = lifelines.CoxPHFitter().fit(pandas.concat(frames), "months", "died", strata=["site"])
    plain = {"train.lr": 1.0, "train.momentum": 0.0, "train.batch_size": 100, "train.local_epochs": 1, "train.clip_norm": 0.0}
    more = {"train.weight_decay": 0.0, "method.bound_change": 0.0, "model.name": "mlr"}
    result = run("fedavg", rounds=40, shards=sites, settings=plain | more)
    assert result.model("site0").tensors["head.weight"][0].tolist() == pytest.approx(fitted.params_.to_list(), abs=1e-3)


@pytest.mark.parametrize("method", ["ditto", "apfl", "fedala", "pfedme", "per-fedavg", "fedrep", "fedavg+ft", "fedmcsa"])
def test_methods_of_every_kind_run(method: str) -> None:
    result = run(method, sites=3, rounds=2, settings={"train.local_epochs": 1, "model.name": "dnn"})
    assert all(row.accuracy is not None and 0 <= row.accuracy <= 1 and math.isfinite(row.accuracy) for row in result.table())


def test_stacked_devices_train_one_by_one_with_the_same_result() -> None:
    plain, stacked = run("fedavg", sites=3, rounds=2), run("fedavg", sites=3, rounds=2, executor="stacked")
    assert [row.accuracy for row in plain.table()] == pytest.approx([row.accuracy for row in stacked.table()], rel=1e-5)


def test_a_device_whose_test_part_has_no_pair_has_no_score_and_takes_part() -> None:
    x, y = arrays(0)
    late = np.c_[y[:40, 0] + 1e3, np.zeros(40)]
    shards = {"a": arrays(1), "b": arrays(2), "none": (x[:80], y[:80], x[80:], late)}
    result = run("fedavg", rounds=2, shards=shards)
    scores = {row.device: row.accuracy for row in result.table()}
    assert scores["none"] is None and scores["a"] is not None
    held = shard_of("none", shards["none"], ReadOptions.of(task="survival")).load()
    with pytest.raises(ShardError, match="have no C-index: none had its event before the time of another one"):
        result.model("none").evaluate(held)


def test_all_events_censored_at_a_site_and_one_row_do_no_harm() -> None:
    x, y = arrays(0)
    shards = {"a": arrays(1), "b": arrays(2), "censored": (x, y * [1, 0]), "one": (x[:1], y[:1])}
    result = run("fedavg", rounds=2, shards=shards)
    scores = {row.device: row.accuracy for row in result.table()}
    assert scores["censored"] is scores["one"] is None and scores["a"] is not None and scores["a"] > 0.5


def test_a_model_is_exported_with_its_log_hazards(tmp_path: Path) -> None:
    model, (x, _) = run("fedavg", sites=3, rounds=2, settings={"model.name": "dnn"}).model("site0"), arrays(0)
    assert portable.export(model, tmp_path / "out.pt2") <= portable.TOLERANCE
    found = portable._run_program(tmp_path / "out.pt2", x[:5].astype(np.float32))
    assert found[:, 0] == pytest.approx(model.predict(x[:5]), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy.secure_aggregation": True},
        {"privacy.unit": "client", "privacy.devices": 5, "privacy.noise": 0.01, "privacy.insecure_seed": 1},
    ],
    ids=["masked sums", "noise on the server"],
)
def test_updates_of_survival_are_protected_like_others(settings: dict[str, Any]) -> None:
    result = run("fedavg", sites=5, rounds=3, settings={"model.name": "dnn", **settings})
    assert np.mean([row.accuracy for row in result.table()]) > 0.6


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("pfedgp", {}, "method pfedgp cannot be used for survival"),
        ("fedtp+knn", {}, "method fedtp.knn cannot be used for survival: neighbours vote for classes"),
        ("auto", {}, '"survival" cannot be combined with train.score_after: .*in place of --method auto name a method'),
        (
            "fedavg",
            {"privacy.unit": "example", "privacy.noise": 1.0},
            '"survival" cannot be combined with privacy.unit = "example"',
        ),
    ],
)
def test_what_makes_no_sense_ends_it_before_it_begins(method: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        run(method, settings=settings)


def test_a_comparison_of_methods_says_that_nobody_is_known_to_be_harmed(tmp_path: Path) -> None:
    data = [str(write(tmp_path / f"{name}.csv", cohort(site))) for site, name in enumerate(("kiel", "lund"))]
    asked = ["--label", "months,died", "--task", "survival", "--schema", "auto", "--method", "local,fedavg", "--rounds", "1"]
    shown = CliRunner().invoke(fedserver, ["simulate", *(word for path in data for word in ("--data", path)), *asked])
    assert shown.exit_code == 0, shown.output
    assert "verdict, harmed, probably: not known, because a C-index is no mean over samples" in shown.output
    assert "kept: C-index of what the device predicts with" in shown.output and "a constant answer has 0.500" in shown.output
