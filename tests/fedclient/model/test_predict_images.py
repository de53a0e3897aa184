"""`fedclient predict`: images with what they are called, probabilities, identifiers, intervals, and models of a simulation."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import attune
from attune.common.config import TrainSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.common.wire.files import read_tensors
from attune.fedclient.cli import main
from attune.fedclient.cli.model_commands import PredictionLines
from attune.fedclient.model import artifact
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.model_info import ModelInfo

Image = pytest.importorskip("PIL.Image")
HEIGHT, WIDTH = 8, 6
NAMES = ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]


def model_in(home: Path, channels: int = 3, kind: Any = "images", columns: tuple[str, ...] = ()) -> Model:
    """Write a finished model with random weights into a home."""
    shape = (HEIGHT, WIDTH, channels) if kind == "images" else (len(columns),)
    spec, draw = default_spec(kind, shape, 3, 0, "mlr", {}), torch.Generator().manual_seed(3)
    info = ModelInfo("kiel", "f", "fedavg", {}, spec, ["x", "y", "z"], TrainSettings(), column_names=list(columns))
    tensors = {name: torch.randn(values.shape, generator=draw) for name, values in tensors_of(build(spec, 3)).items()}
    return Model.load(artifact.save(home / "model", info, {"personalized": tensors}))


def pictures(folder: Path, names: list[str] = NAMES, channels: int = 3, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    """Write random pictures, and return their pixels (N, H, W, C)."""
    pixels = np.random.default_rng(5).integers(0, 256, (len(names), *size, channels), dtype=np.uint8)
    for name, picture in zip(names, pixels, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.squeeze()).save(folder / name)
    return pixels


def predict(home: Path, *data: Path | str, code: int = 0) -> Result:
    words = [word for path in data for word in ("--data", path)]
    return run("predict", *words, "--home", home, "--out", home / "labels.csv", code=code)


def run(*words: object, code: int = 0) -> Result:
    """Run a command, and check its exit code."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def rows(home: Path) -> list[list[str]]:
    with (home / "labels.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_images_gets_a_label_and_its_name_for_each(tmp_path: Path, channels: int) -> None:
    model, pixels = model_in(tmp_path, channels), pictures(tmp_path / "photos", channels=channels)
    predict(tmp_path, tmp_path / "photos")
    labels = model.predict(pixels)
    assert len(set(labels)) > 1, "else a constant would pass"
    assert rows(tmp_path) == [["index", "label", "file"], *([str(n), labels[n], NAMES[n]] for n in range(len(NAMES)))]


def test_one_file_several_files_and_a_pattern(tmp_path: Path) -> None:
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos")
    labels, photos = model.predict(pixels), tmp_path / "photos"
    for given, expected in (
        ([photos / "c.png"], [2]),
        ([photos / "c.png", photos / "a.png"], [2, 0]),
        ([photos / "[bd].png"], [1, 3]),
    ):
        predict(tmp_path, *given)
        assert rows(tmp_path)[1:] == [[str(n), labels[at], str(photos / NAMES[at])] for n, at in enumerate(expected)]


def test_nested_folders_are_read_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    names = ["monday/1.png", "monday/ward 2/2.PNG", "tuesday/3.bmp"]
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos", names)
    pictures(tmp_path / "photos", [".thumbnails/4.png", "__MACOSX/5.png"])
    (tmp_path / "photos" / "notes.txt").write_text("hello")
    done = predict(tmp_path, tmp_path / "photos")
    assert [row[1:] for row in rows(tmp_path)[1:]] == [list(pair) for pair in zip(model.predict(pixels), names, strict=True)]
    assert "left out: 3 files" in done.output and "notes.txt" in done.output


def test_images_of_another_size_are_resized_and_that_is_said(tmp_path: Path) -> None:
    model_in(tmp_path)
    pictures(tmp_path / "photos", ["a.png"], size=(20, 20))
    pictures(tmp_path / "photos", ["b.png"])
    done = predict(tmp_path, tmp_path / "photos")
    assert len(rows(tmp_path)) == 3
    assert "1 of 2 images" in done.output and "8 x 6" in done.output and "a.png (20 x 20)" in done.output


def test_grey_images_for_a_colour_model_and_the_reverse(tmp_path: Path) -> None:
    colour, grey_pixels = model_in(tmp_path / "colour"), pictures(tmp_path / "grey", channels=1)
    predict(tmp_path / "colour", tmp_path / "grey")
    assert [row[1] for row in rows(tmp_path / "colour")[1:]] == colour.predict(np.repeat(grey_pixels, 3, axis=3))
    grey, pixels = model_in(tmp_path / "plain", 1), pictures(tmp_path / "photos")
    predict(tmp_path / "plain", tmp_path / "photos")
    as_grey = np.stack([np.asarray(Image.fromarray(picture).convert("L")) for picture in pixels])[..., None]
    assert [row[1] for row in rows(tmp_path / "plain")[1:]] == grey.predict(as_grey)


def test_a_table_that_names_image_files(tmp_path: Path) -> None:
    model, pixels = model_in(tmp_path), pictures(tmp_path / "photos")
    (tmp_path / "list.csv").write_text("patient,photo\n7,photos/b.png\n9,photos/a.png\n")
    predict(tmp_path, tmp_path / "list.csv")
    labels = model.predict(pixels)
    assert rows(tmp_path)[1:] == [["0", labels[1], "photos/b.png"], ["1", labels[0], "photos/a.png"]]


def test_what_cannot_be_read_is_named_all_at_once(tmp_path: Path) -> None:
    model_in(tmp_path)
    pictures(tmp_path / "photos")
    (tmp_path / "photos" / "cut.png").write_bytes((tmp_path / "photos" / "a.png").read_bytes()[:60])
    (tmp_path / "photos" / "text.jpg").write_text("no image")
    done = predict(tmp_path, tmp_path / "photos", code=6)
    assert "cut.png" in done.output and "text.jpg" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize("given", ["nothing", "empty", "list.csv", "a.txt"])
def test_what_holds_no_images_is_refused_with_the_way_out(tmp_path: Path, given: str) -> None:
    model_in(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a.txt").write_text("hello")
    done = predict(tmp_path, tmp_path / given, code=6)
    assert "image" in done.output and given in done.output, done.output


def test_a_model_of_columns_takes_no_images(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("age", "dose"))
    pictures(tmp_path / "photos")
    for path in (tmp_path / "photos", tmp_path / "photos" / "a.png"):
        done = predict(tmp_path, path, code=9)
        assert "tabular" in done.output and "image" in done.output, done.output


def test_a_model_with_four_channels_says_that_image_files_have_three(tmp_path: Path) -> None:
    model_in(tmp_path, channels=4)
    pictures(tmp_path / "photos")
    done = predict(tmp_path, tmp_path / "photos", code=9)
    assert "4 channels" in done.output and ".npz" in done.output, done.output


def test_all_columns_that_a_table_lacks_are_named(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("age", "dose", "weight"))
    (tmp_path / "new.csv").write_text("Age,dose\n1,2\n")
    done = predict(tmp_path, tmp_path / "new.csv", code=2)
    assert "'age'" in done.output and "'weight'" in done.output and "'Age'" in done.output, done.output


SETTINGS = {"train.local_epochs": 1, "model.name": "mlr"}
PLAIN = {"rounds": 1, "settings": SETTINGS, "progress": False, "keep": "personalized", "baseline": "none"}


def table(path: Path, head: str, seed: int, rows: int = 120) -> Path:
    """Write numbers; `ill` is a class of three words, `key` tells rows apart, and `wanted` and `also` follow from `age`."""
    rng = np.random.default_rng(seed)
    age = rng.normal(size=rows).round(3)
    cells = {"age": age, "dose": rng.normal(size=rows).round(3), "ill": rng.choice(["no", "mild", "severe"], rows)}
    cells |= {"key": [f"P-{seed}{n:03}" for n in range(rows)], "wanted": (100 + 10 * age + rng.normal(size=rows)).round(2)}
    cells |= {"also": (age < 0).astype(int), "other": (age > 1).astype(int)}
    names = head.split(",")
    lines = [",".join(str(cells[name][row]) for name in names) for row in range(rows)]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def models_of(folder: Path, head: str, label: str, task: str = "classes") -> Path:
    """Return the folder with the models of kiel and lund after one round over these columns."""
    tables = [str(table(folder / f"{name}.csv", head, seed)) for seed, name in enumerate(("kiel", "lund"), 1)]
    result = attune.simulate(tables, "fedavg", label=label, task=task, table={"columns": "age,dose"}, **PLAIN)  # type: ignore[call-overload]
    return Path(result.save(folder / "out")) / "models"


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_of(tmp_path_factory.mktemp("classes"), "key,age,dose,ill", "ill")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_of(tmp_path_factory.mktemp("numbers"), "age,dose,wanted", "wanted", "regression")


def written(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_probabilities_and_identifiers_stand_beside_each_label(classes: Path, tmp_path: Path) -> None:
    """Compute softmax(W (x - mean) / std + b) by hand from the model's files."""
    new = table(tmp_path / "new.csv", "key,dose,age", 9, rows=7)
    out, model = tmp_path / "out.csv", classes / "kiel"
    run("predict", "--model", model, "--data", new, "--out", out, "--probabilities", "--id", "key")
    rows = written(out)
    assert list(rows[0]) == ["index", "label", "p(mild)", "p(no)", "p(severe)", "key"]
    assert [row["key"] for row in rows] == [f"P-9{n:03}" for n in range(7)]
    info, tensors = json.loads((model / "model.json").read_text()), read_tensors(model / "model.safetensors")
    weight, bias = tensors["head.weight"].double().numpy(), tensors["head.bias"].double().numpy()
    scale = info["standardiser"]
    x = np.array([[float(row["age"]), float(row["dose"])] for row in written(new)])
    logits = (x - scale["mean"]) / scale["std"] @ weight.T + bias
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = np.array([[float(row[f"p({name})"]) for name in info["classes"]] for row in rows])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [row["label"] for row in rows] == [info["classes"][index] for index in expected.argmax(axis=1)]


def test_probabilities_of_a_blend_are_those_of_the_exported_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tables = [str(table(tmp_path / f"{name}.csv", "age,dose,also", seed)) for seed, name in enumerate(("kiel", "lund"), 1)]
    result = attune.simulate(tables, "fedavg", rounds=1, label="also", progress=False, baseline="local")
    model = result.save(tmp_path / "out") / "models" / "kiel"
    new, out = table(tmp_path / "new.csv", "age,dose", 9, rows=5), tmp_path / "out.csv"
    run("predict", "--model", model, "--data", new, "--out", out, "--probabilities")
    run("export", "--model", model, "--out", tmp_path / "model.pt2")
    x = torch.tensor([[float(row["age"]), float(row["dose"])] for row in written(new)])
    exported = torch.export.load(tmp_path / "model.pt2").module()(x).detach().numpy()
    found = np.array([[float(row["p(0)"]), float(row["p(1)"])] for row in written(out)])
    assert len(json.loads((model / "model.json").read_text())["weights"]) > 1, "a blend"
    np.testing.assert_allclose(found, exported, atol=1e-5)


def test_several_labels_have_a_probability_each(tmp_path: Path) -> None:
    models = models_of(tmp_path, "age,dose,also,other", "also,other", "multilabel")
    new, out = table(tmp_path / "new.csv", "age,dose", 9, rows=5), tmp_path / "out.csv"
    run("predict", "--model", models / "lund", "--data", new, "--out", out, "--probabilities")
    for row in written(out):
        for name in ("also", "other"):
            assert (float(row[f"p({name})"]) > 0.5) == (row[name] == "1")


def test_the_interval_of_a_number_is_the_error_that_19_of_20_test_samples_stay_below(numbers: Path, tmp_path: Path) -> None:
    """Take the ceil(0.95 (n + 1))-th smallest absolute error of n test samples as half width: split conformal prediction."""
    shard = tmp_path / "shard"
    shard.mkdir()
    rows = written(table(tmp_path / "all.csv", "age,dose,wanted", 5, rows=40))
    x = np.array([[float(row["age"]), float(row["dose"])] for row in rows], dtype=np.float32)
    y = np.array([float(row["wanted"]) for row in rows], dtype=np.float32)
    (shard / "meta.json").write_text('{"task": "regression", "classes": ["wanted"], "columns": ["age", "dose"]}')
    np.savez(shard / "train.npz", x=x[:1], y=y[:1])
    np.savez(shard / "test.npz", x=x[1:], y=y[1:])
    new, out = table(tmp_path / "new.csv", "age,dose", 9, rows=4), tmp_path / "out.csv"
    run("predict", "--model", numbers / "kiel", "--data", new, "--out", out, "--intervals", shard)
    errors = sorted(np.abs(np.array(Model.load(numbers / "kiel").predict(x[1:])) - y[1:].astype(np.float64)))
    half = errors[math.ceil(0.95 * 40) - 1]
    for row in written(out):
        assert list(row) == ["index", "wanted", "wanted low", "wanted high"]
        value = float(row["wanted"])
        assert float(row["wanted low"]) == pytest.approx(value - half, rel=1e-5)
        assert float(row["wanted high"]) == pytest.approx(value + half, rel=1e-5)
    np.savez(shard / "test.npz", x=x[:18], y=y[:18])
    done = run("predict", "--model", numbers / "kiel", "--data", new, "--out", out, "--intervals", shard, code=6)
    assert "18 test samples" in done.output and "19" in done.output, done.output


def test_options_that_do_not_fit_the_model_say_what_does(classes: Path, numbers: Path, tmp_path: Path) -> None:
    new, out = table(tmp_path / "new.csv", "age,dose", 9, rows=4), tmp_path / "out.csv"
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 2), np.float32))
    for words, said in (
        (("--model", numbers / "kiel", "--data", new, "--probabilities"), "--intervals SHARD"),
        (("--model", classes / "kiel", "--data", new, "--intervals", new), "--probabilities"),
        (("--model", classes / "kiel", "--data", new, "--id", "kye"), "no column 'kye'"),
        (("--model", classes / "kiel", "--data", tmp_path / "new.npz", "--id", "key"), "--id names a column of a table"),
        (("--model", classes / "kiel", "--home", tmp_path, "--data", new), "--home"),
    ):
        done = run("predict", "--out", out, *words, code=2)
        assert said in done.output, done.output
        assert not out.exists()


def test_models_of_a_simulation_are_evaluated_as_in_the_simulation(classes: Path) -> None:
    info = json.loads((classes / "kiel" / "model.json").read_text())
    shard = classes.parent.parent / "kiel.csv"
    words = ("--label", "ill", "--columns", "age,dose", "--json")
    done = run("evaluate", "--model", classes / "kiel", "--data", shard, *words)
    assert json.loads(done.stdout)["accuracy"] == info["accuracy"] and info["test_samples"] > 0
    fleet = run("evaluate", "--model", classes, "--data", str(shard.parent / "*.csv"), *words)
    assert [client["name"] for client in json.loads(fleet.stdout)["clients"]] == ["kiel", "lund"]


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    done = run("evaluate", "--model", tmp_path, "--data", tmp_path, code=19)
    assert str(tmp_path) in done.output, done.output


def test_every_position_has_its_probabilities() -> None:
    spec = ModelSpec("lstm", "tokens", (2,), 2, vocabulary=3, per_position=True)
    info = ModelInfo("kiel", "f", "fedavg", {}, spec, ["a", "b"], TrainSettings())
    shares = [[[0.75, 0.25], [0.5, 0.5]], [[0.25, 0.75], [1.0, 0.0]]]
    assert list(PredictionLines(info, [["a", "a"], ["b", "a"]], "key", ("x", "y"), shares)) == [
        ("index", "position", "label", "p(a)", "p(b)", "key"),
        (0, 0, "a", 0.75, 0.25, "x"),
        (0, 1, "a", 0.5, 0.5, "x"),
        (1, 0, "b", 0.25, 0.75, "y"),
        (1, 1, "a", 1.0, 0.0, "y"),
    ]
