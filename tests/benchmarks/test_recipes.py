"""Recipes: the cuts by their mathematics, harmed devices, the end of a gain; a benchmark runs and continues."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.methods.registry import method_from_options
from attune.fedclient.data.shard import load_shard
from attune.fedserver.core.planning import resolve
from attune.simulation.partition.datasets import load_source
from attune.simulation.partition.samples import Dataset
from attune.simulation.partition.split import Partition, partition
from benchmarks.recipes import catalogue, cuts, picture, site_tables
from benchmarks.recipes.__main__ import main
from benchmarks.recipes.catalogue import ALONE, ALONE_ENTRY, BASELINES, Recipe, RecipeMethod, RecipePoint
from benchmarks.recipes.run import RecipeRow, harmed, read, write


@pytest.fixture(scope="module")
def digits() -> Dataset:
    source = load_source("digits", 0)
    assert isinstance(source, Dataset)
    return source


def test_of_a_large_data_set_a_random_part_is_used_and_of_a_small_one_everything(digits: Dataset, monkeypatch) -> None:
    assert catalogue._small(digits, 0) is digits
    monkeypatch.setattr(catalogue, "FASHION_SAMPLES", 40)
    part = catalogue._small(digits, 0)
    assert isinstance(part, Dataset)
    assert (len(part.train_y), len(part.test_y)) == (40, 10)
    rows = {row.tobytes() for row in digits.train_x}
    assert all(row.tobytes() in rows for row in part.train_x), "training and test part stay apart"


@pytest.mark.parametrize("recipe", catalogue.RECIPES.values(), ids=lambda recipe: recipe.name)
def test_in_every_recipe_the_settings_exist(recipe: Recipe) -> None:
    for entry in (entry for entry in recipe.entries if entry.method != "auto"):  # a race has the settings of the recipe
        said: dict = {"method": {"name": entry.method}}
        for key, value in {**recipe.settings, **entry.settings}.items():
            section, _, name = key.partition(".")
            said.setdefault(section, {})[name] = value
        assert resolve(said).method.name == entry.method and method_from_options(said["method"])
    assert {entry.label for entry in BASELINES} - {ALONE} < {entry.label for entry in recipe.entries}
    assert recipe.entries[0] == ALONE_ENTRY or recipe.name.startswith("roles"), "text has no ordinary models"


@pytest.mark.parametrize(
    "recipe",
    [each for each in catalogue.RECIPES.values() if not each.data and each.public is None],
    ids=lambda recipe: recipe.name,
)
def test_points_on_the_digits_can_be_cut_and_repeat(recipe: Recipe, digits: Dataset) -> None:
    for point in recipe.points:
        one, two = point.cut(digits, 3), point.cut(digits, 3)
        for client in range(len(one.names)):
            for (x, y), (again, labels) in zip(
                *([p.arrays(client, part) for part in ("train", "test")] for p in (one, two)), strict=True
            ):
                assert len(y) and (x == again).all() and (y == labels).all()


def test_fewer_samples_are_nested_and_the_test_parts_stay(digits: Dataset) -> None:
    whole = partition(digits, "dirichlet", 5, 0, alpha=0.3)
    small, large = cuts.fewer(whole, 10, 7), cuts.fewer(whole, 50, 7)
    for client in range(5):
        assert set(small.train[client]) < set(large.train[client]) <= set(whole.train[client])
        assert len(small.train[client]) == 10
        assert (small.test[client] == whole.test[client]).all()


def test_devices_of_a_group_label_alike_and_others_by_a_permutation(digits: Dataset) -> None:
    plain = partition(digits, "iid", 6, 0)
    parts = cuts.relabelled(plain, 3, 0)
    called = [
        dict(zip(plain.arrays(c, "train")[1].tolist(), parts.arrays(c, "train")[1].tolist(), strict=True)) for c in range(6)
    ]
    assert called[0] == {label: label for label in range(10)}
    assert all(called[c] == called[c + 3] and sorted(called[c].values()) == list(range(10)) for c in range(3))
    assert called[1] != called[0] != called[2] != called[1]


def test_images_are_turned_and_mirrored(digits: Dataset) -> None:
    plain = partition(digits, "iid", 6, 0)
    parts = cuts.turned(plain, 6)
    for client, way in enumerate(("ij", "turn", "half", "", "", "mirrored turn")):
        x, seen = (p.arrays(client, "test")[0][0, :, :, 0] for p in (plain, parts))
        expected = {"ij": x, "turn": x.T[::-1], "half": x[::-1, ::-1], "mirrored turn": x.T[::-1, ::-1]}.get(way)
        assert expected is None or (seen == expected).all()


def test_a_mounting_turns_the_three_axes_of_each_sensor() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 9)).astype(np.float32)
    assert cuts.mounted(x, 0, 1) is x
    seen = cuts.mounted(x, 2, 1)
    norms = [np.linalg.norm(each.reshape(2, 5, 3, 3), axis=-1) for each in (x, seen)]
    assert np.allclose(*norms, atol=1e-5) and not np.allclose(x, seen, atol=0.1)
    triple = [np.linalg.det(each.reshape(10, 3, 3)) for each in (x, seen)]
    assert np.allclose(*triple, atol=1e-4), "a rotation, no reflection"


def test_features_of_a_window_by_hand() -> None:
    t = np.arange(128)
    x = np.stack([np.full(128, 2.0), np.sin(2 * np.pi * 2 * t / 128), np.cos(2 * np.pi * 20 * t / 128)], axis=1)[None]
    found = cuts.features(x.astype(np.float32)).reshape(8, 3)
    assert found[0] == pytest.approx([2, 0, 0], abs=1e-5) and found[1] == pytest.approx([0, 0.5**0.5, 0.5**0.5], abs=1e-5)
    assert found[2:4] == pytest.approx(np.array([[2, -1, -1], [2, 1, 1]]), abs=2e-3)
    assert pytest.approx(np.array([[1, 0, 0], [0, 0, 1]]), abs=1e-4) == found[5:, 1:].T, "two waves: low; twenty: high"


def test_a_minute_of_labels_is_the_beginning_of_unbroken_runs() -> None:
    run = np.repeat(np.arange(12), 5)
    person, y = np.repeat([0, 1], 30), np.tile(np.repeat([0, 1, 2], 10), 2)
    data = Dataset("w", "series", np.zeros((60, 4, 3), np.float32), y, np.zeros((0, 4, 3), np.float32), y[:0], [0, 1, 2], 0,
                   {"person": person, "run": run})  # fmt: skip
    parts = partition(data, "natural", None, 0, by="person", group="run")
    few = cuts.minute(parts, data, "run", 3, 0)
    for client in range(2):
        kept = few.train[client]
        assert np.bincount(y[kept]).tolist() == [3, 3, 3] and set(kept) <= set(parts.train[client])
        for label in range(3):
            mine = kept[y[kept] == label]
            assert len(set(run[mine])) == 1 and (mine % 5).tolist() == [0, 1, 2]


def test_harmed_is_worse_than_a_rival_by_more_than_chance() -> None:
    right = np.ones(20, bool)
    worse = np.arange(20) >= 6
    barely = np.arange(20) >= 5
    assert harmed(worse, {"Local": right}), "six losses and no gain: p = 0.031"
    assert not harmed(barely, {"Local": right}), "five: p = 0.0625"
    assert not harmed(worse, {"Local": right, "FedAvg": worse}), "of two rivals: p = 0.0625 by Holm"
    assert not harmed(right, {"Local": worse})


def test_samples_of_one_group_are_one_piece_of_evidence() -> None:
    right, groups = np.ones(20, bool), np.repeat(np.arange(5), 4)
    assert harmed(~right, {"Local": right}), "twenty losses"
    assert not harmed(~right, {"Local": right}, groups), "five recordings lost: p = 0.0625"
    assert harmed(~right, {"Local": right}, np.arange(20))


def test_a_picture_has_gains_and_dashes_where_nothing_is_personalized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, figures = catalogue.get("digits"), []
    monkeypatch.setattr(picture.figures, "file_of", lambda figure: (figures.append(figure), b"")[1])
    means = {picture.LOCAL: 0.5, picture.FEDAVG: 0.25, picture.TUNED: 0.75, "FedTP": 1.0}
    rows = [
        RecipeRow("", x, 0, name, 10, x, mean, mean, mean, None, None, 0.1, 0.0, 0.0, 0, 1.0)
        for x in (20, 40)
        for name, mean in means.items()
    ]
    picture.picture(recipe, rows, tmp_path / "gains.png")
    drawn = {line.get_label(): line for line in figures[0].axes[0].get_lines()}
    assert [list(drawn[name].get_ydata()) for name in ("FedTP", picture.FEDAVG)] == [[50.0, 50.0], [-25.0, -25.0]]
    assert [drawn[name].get_linestyle() for name in ("FedTP", picture.TUNED, picture.FEDAVG)] == ["-", "-", "--"]


def test_where_a_gain_begins_and_ends() -> None:
    assert picture.crossovers([(10, 2.0), (1000, -2.0)]) == [(pytest.approx(100), False)]
    assert picture.crossovers([(10, 2.0), (20, -2.0), (30, 2.0)], log=False) == [(15, False), (25, True)]
    assert picture.crossovers([(10, 2.0), (20, 1.0)]) == picture.crossovers([(10, -2.0), (20, 0.0)]) == []


def untimed(row: RecipeRow) -> RecipeRow:
    return msgspec.structs.replace(row, seconds=0.0)


def test_a_benchmark_prints_its_table_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(source: object, seed: int, *, samples: int) -> Partition:
        return cuts.fewer(partition(source, "pathological", 5, seed, classes_per_client=2), samples, seed)

    tiny = Recipe(
        "digits", "Digits", "samples", tuple(RecipePoint(n, partial(cut, samples=n)) for n in (8, 16)),
        (*BASELINES, RecipeMethod("mine", "fedper"), RecipeMethod("MCSA", "fedmcsa", {"train.lr": 0.1})), 1,
        {"train.local_epochs": 1, "model.name": "mlr"}, (0, 1),
    )  # fmt: skip
    monkeypatch.setitem(catalogue.RECIPES, "digits", replace(tiny, points=tiny.points[:1]))

    def run() -> str:
        done = CliRunner().invoke(main, ["digits", "--out", str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    said = run()
    rows = read(tmp_path / "digits.csv")
    assert [(row.seed, row.method) for row in rows] == [(s, e.label) for s in (0, 1) for e in tiny.entries]
    assert all(row.bytes == 0 and row.served is None for row in rows if row.method == "Local")
    fedavg = [row for row in rows if row.method == "FedAvg"]
    assert all(row.served == pytest.approx(row.mean, abs=1e-4) and row.bytes > 0 for row in fedavg)
    assert all(row.served != row.judged for row in rows if row.method == "MCSA"), "judged after local training"
    mean = 50 * sum(row.mean for row in fedavg)
    found = next(line for line in said.splitlines() if line.startswith("     8  FedAvg  ")).split()
    assert found[2].rstrip("*") == f"{mean:.1f}" and found[3] == f"{50 * sum(row.pooled for row in fedavg):.1f}"
    assert found[2].endswith("*") == (mean <= 50 * sum(row.constant for row in fedavg))
    assert (tmp_path / "digits.png").read_bytes()[:4] == b"\x89PNG"
    made_with = [json.loads(line) for line in (tmp_path / "digits.manifest.jsonl").read_text().splitlines()]
    assert [(made["x"], made["seed"]) for made in made_with] == [(8, 0), (8, 1)]
    assert made_with[0]["method"] == f"{ALONE}, Local, FedAvg, FedAvg, tuned, mine, MCSA"
    assert made_with[0]["data"] != made_with[1]["data"]
    alone = [row for row in rows if row.method == ALONE]
    assert all(row.bytes == 0 and row.harmed == 0 and 0 < row.worst <= row.mean < 1 for row in alone)
    monkeypatch.setitem(catalogue.RECIPES, "digits", tiny)
    run()
    assert read(tmp_path / "digits.csv")[: len(rows)] == rows
    assert {row.x for row in read(tmp_path / "digits.csv")} == {8, 16}
    whole = read(tmp_path / "digits.csv")
    (tmp_path / "digits.csv").unlink()
    write(tmp_path / "digits.csv", [row for row in whole if row.method != "MCSA" or row.x == 8])
    run()
    again = read(tmp_path / "digits.csv")
    assert len(again) == len(whole) and set(map(untimed, again)) == set(map(untimed, whole))
    done = CliRunner().invoke(main, ["digits", "--out", str(tmp_path / "page"), "--decide"], catch_exceptions=False)
    decided = json.loads((tmp_path / "page" / "digits.json").read_text())
    assert done.exit_code == 0 and sum(decided["results"].values()) == 5 and decided["score"] == "accuracy"
    assert "The answer" in (tmp_path / "page" / "digits.html").read_text("utf-8")


def test_schools_are_divided_and_a_smaller_number_keeps_a_part_of_a_larger_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    x[:, 0] = np.arange(120)
    np.savez(tmp_path / "school.npz", x=x, y=3 * x[:, 1] + 20, school=np.repeat([0, 1, 5], 40))
    tables = site_tables.read_school(tmp_path / "school.npz")
    kept: dict[tuple[int, str], set[int]] = {}
    for at_most in (5, 250):
        folders = site_tables.by_site(tables, 1, at_most).write(tmp_path / str(at_most))
        assert [folder.name for folder in folders] == ["shard-school0", "shard-school1", "shard-school5"]
        shard = load_shard(folders[2])
        assert shard.task == "regression" and shard.standardise == "federation"
        for part, rows in (("train", shard.train_x), ("test", shard.test_x)):
            kept[at_most, part] = set(rows[:, 0].astype(int).tolist())
    assert kept[5, "test"] == kept[250, "test"] and len(kept[5, "test"]) == 10
    assert len(kept[5, "train"]) == 5 and kept[5, "train"] < kept[250, "train"]
    assert kept[250, "train"] | kept[250, "test"] == set(range(80, 120))


@pytest.fixture(scope="module")
def heart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small file in the form of heart disease, whose label follows the chest pain alone."""
    rng, names = np.random.default_rng(0), ("age", "cp", "thal")
    x = np.column_stack([rng.integers(30, 80, 160), rng.integers(1, 5, 160), rng.choice([3.0, 6.0, 7.0, np.nan], 160)])
    x[:80, 2] = np.nan  # a hospital without this column
    path = tmp_path_factory.mktemp("heart") / "heart_disease.npz"
    num = np.where(np.isin(x[:, 1], (2, 4)), 2, 0)
    np.savez(path, x=x.astype(np.float32), num=num, hospital=np.repeat([0, 1], 80), columns=np.array(names),
             hospital_names=np.array(["Cleveland", "VA Long Beach"]))  # fmt: skip
    return path


def test_codes_of_heart_disease_are_categories_by_a_schema(heart: Path, tmp_path: Path) -> None:
    cut = site_tables.by_site(site_tables.read_heart(heart), 0)
    first, second = map(load_shard, cut.write(tmp_path / "shards"))
    assert first.schema is not None and first.schema.columns["cp"].kind == "category" and first.schema == second.schema
    place = {name: at for at, name in enumerate(first.schema.feature_names)}
    with np.load(heart) as file:
        rows = file["x"][cut.train[0]]
    ones = [place[f"cp={code}"] for code in (1, 2, 3, 4)]
    assert (first.train_x[:, ones] == (rows[:, [1]] == [1, 2, 3, 4])).all()
    assert (first.train_x[:, place["thal missing"]] == 1).all() and 0 < second.train_x[:, place["thal missing"]].mean() < 1
    assert (first.train_x[:, place["age"]] == rows[:, 0]).all()
    assert len(first.test_y) == len(second.test_y) == 20 and set(first.test_y) == {"well", "ill"}
    assert not list((tmp_path / "shards").glob("*/*.csv"))


def test_scores_of_regression_are_compared_by_their_gains() -> None:
    mine, theirs = np.full(12, 0.5), np.full(12, 0.7)
    assert harmed(mine, {"Local": theirs}) and not harmed(theirs, {"Local": mine})
    mine[:6] = 1.5
    assert not harmed(mine, {"Local": theirs}), "six large gains, six small losses"


def test_rows_go_on_in_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    row = RecipeRow("", 2.0, 0, "Local", 3, 10.5, 0.5, 0.5, 0.25, None, None, 0.5, 0.0, 0.0, 0, 1.5)
    write(tmp_path / "r.csv", [row])
    text = (tmp_path / "r.csv").read_text(encoding="utf-8")
    (tmp_path / "r.csv").write_text(text.replace(",mse", "").replace(",1.5,", ",1.5"), encoding="utf-8")
    write(tmp_path / "r.csv", [msgspec.structs.replace(row, seed=1)])
    assert [(found.seed, found.mse) for found in read(tmp_path / "r.csv")] == [(0, None), (1, None)]
