"""`fedclient predict`: probabilities, identifiers, intervals of numbers, and the models that a simulation writes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attune
from attune.common.config import TrainSettings
from attune.common.plan import ModelSpec
from attune.common.wire.files import read_tensors
from attune.fedclient.cli import main
from attune.fedclient.cli.model_commands import PredictionLines
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.model_info import ModelInfo

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


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def written(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_probabilities_and_identifiers_stand_beside_each_label(classes: Path, tmp_path: Path) -> None:
    """Compute softmax(W (x - mean) / std + b) by hand from the model's files."""
    new = table(tmp_path / "new.csv", "key,dose,age", 9, rows=7)
    out, model = tmp_path / "out.csv", classes / "kiel"
    done = run("predict", "--model", model, "--data", new, "--out", out, "--probabilities", "--id", "key")
    assert done.exit_code == 0, done.output
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
    assert run("predict", "--model", model, "--data", new, "--out", out, "--probabilities").exit_code == 0
    assert run("export", "--model", model, "--out", tmp_path / "model.pt2").exit_code == 0
    x = torch.tensor([[float(row["age"]), float(row["dose"])] for row in written(new)])
    exported = torch.export.load(tmp_path / "model.pt2").module()(x).detach().numpy()
    found = np.array([[float(row["p(0)"]), float(row["p(1)"])] for row in written(out)])
    assert len(json.loads((model / "model.json").read_text())["weights"]) > 1, "a blend"
    np.testing.assert_allclose(found, exported, atol=1e-5)


def test_several_labels_have_a_probability_each(tmp_path: Path) -> None:
    models = models_of(tmp_path, "age,dose,also,other", "also,other", "multilabel")
    new, out = table(tmp_path / "new.csv", "age,dose", 9, rows=5), tmp_path / "out.csv"
    done = run("predict", "--model", models / "lund", "--data", new, "--out", out, "--probabilities")
    assert done.exit_code == 0, done.output
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
    done = run("predict", "--model", numbers / "kiel", "--data", new, "--out", out, "--intervals", shard)
    assert done.exit_code == 0, done.output
    errors = sorted(np.abs(np.array(Model.load(numbers / "kiel").predict(x[1:])) - y[1:].astype(np.float64)))
    half = errors[math.ceil(0.95 * 40) - 1]
    for row in written(out):
        assert list(row) == ["index", "wanted", "wanted low", "wanted high"]
        value = float(row["wanted"])
        assert float(row["wanted low"]) == pytest.approx(value - half, rel=1e-5)
        assert float(row["wanted high"]) == pytest.approx(value + half, rel=1e-5)
    np.savez(shard / "test.npz", x=x[:18], y=y[:18])
    done = run("predict", "--model", numbers / "kiel", "--data", new, "--out", out, "--intervals", shard)
    assert done.exit_code == 6 and "18 test samples" in done.output and "19" in done.output, done.output


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
        done = run("predict", "--out", out, *words)
        assert done.exit_code == 2 and said in done.output, done.output
        assert not out.exists()


def test_models_of_a_simulation_are_evaluated_as_in_the_simulation(classes: Path) -> None:
    info = json.loads((classes / "kiel" / "model.json").read_text())
    shard = classes.parent.parent / "kiel.csv"
    words = ("--label", "ill", "--columns", "age,dose", "--json")
    done = run("evaluate", "--model", classes / "kiel", "--data", shard, *words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["accuracy"] == info["accuracy"] and info["test_samples"] > 0
    fleet = run("evaluate", "--model", classes, "--data", str(shard.parent / "*.csv"), *words)
    assert fleet.exit_code == 0, fleet.output
    assert [client["name"] for client in json.loads(fleet.stdout)["clients"]] == ["kiel", "lund"]


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    done = run("evaluate", "--model", tmp_path, "--data", tmp_path)
    assert done.exit_code == 19 and str(tmp_path) in done.output, done.output


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
