"""The commands: their output and exit codes, and help without torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from attune.fedclient.cli import main
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard


def call(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_help_imports_neither_torch_nor_grpc():
    code = (
        "import sys, click.testing, fedclient.cli as c; r = click.testing.CliRunner().invoke(c.main, ['--help']);"
        "assert r.exit_code == 0; print(sorted({'torch', 'grpc', 'numpy', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--dta", "x"], "--data"),
        (["joyn"], "Did you mean 'join'?"),
        (["join", "--sever", "x"], "--server"),
        (["--data", "x"], "--server"),
        ([], "--data"),
    ],
)
def test_misspelt_commands_and_options_are_usage_errors_with_a_hint(args, hint):
    result = call(*args)
    assert result.exit_code == 2
    assert hint in result.output


def test_errors_are_one_line_and_their_own_exit_code(tmp_path):
    result = call("--data", tmp_path / "none", "--server", "localhost:1")
    assert result.exit_code == 6
    assert result.output.startswith("fedclient: ")
    assert "Traceback" not in result.output
    assert call("--data", tmp_path, "--server", "localhost").exit_code == 2
    assert call("evaluate", "--data", tmp_path).exit_code == 19
    assert call("join", "--server", "localhost:1", "--token", "x").exit_code == 11


@pytest.fixture
def finished(bench):
    bench.server.works, bench.server.rounds = ["train", "evaluate"], [1, 1]
    bench.run()
    return bench


def test_predict_gives_the_original_labels_back(finished, tmp_path):
    with np.load(finished.shard / "test.npz") as test:
        np.savez(tmp_path / "new.npz", x=test["x"])
        labels = test["y"]
    result = call("predict", "--data", tmp_path / "new.npz", "--out", tmp_path / "labels.csv", "--home", tmp_path / "home")
    assert result.exit_code == 0, result.output
    with (tmp_path / "labels.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["index", "label"]
    assert [row[0] for row in rows[1:]] == [str(n) for n in range(20)]
    said = json.loads((tmp_path / "home" / "model" / "model.json").read_text())
    right = np.mean([row[1] == label for row, label in zip(rows[1:], labels, strict=True)])
    assert right == said["accuracy"]


def test_predict_standardises_as_in_training(finished, tmp_path):
    said = json.loads((tmp_path / "home" / "model" / "model.json").read_text())
    standardiser = prepare(load_shard(finished.shard), finished.server.plan).standardiser
    assert said["standardiser"] == standardiser.to_dict()


def test_predict_names_what_is_wrong_with_the_features(finished, tmp_path):
    home = ("--out", tmp_path / "labels.csv", "--home", tmp_path / "home")
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 7), np.float32))
    assert call("predict", "--data", tmp_path / "wrong.npz", *home).exit_code == 9
    np.savez(tmp_path / "nan.npz", x=np.full((3, 6), np.nan, np.float32))
    assert call("predict", "--data", tmp_path / "nan.npz", *home).exit_code == 7
    assert call("predict", "--data", tmp_path / "absent.npz", *home).exit_code == 6
    assert not (tmp_path / "labels.csv").exists()


def test_evaluate_finds_the_shards_own_model(bench):
    bench.server.works, bench.server.rounds = ["evaluate"], [0]
    bench.run(home=None)
    result = call("evaluate", "--data", bench.shard)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("kiel (fedavg): accuracy 0.")
    assert "on 20 test samples" in result.output


def test_a_model_that_was_changed_is_not_loaded(finished, tmp_path):
    (tmp_path / "home" / "model" / "model.json").write_text("{}")
    assert call("evaluate", "--data", finished.shard, "--home", tmp_path / "home").exit_code == 19


def test_partition_writes_shards_a_picture_and_a_table(tmp_path):
    pytest.importorskip("sklearn")
    args = ("--dataset", "digits", "--scheme", "pathological", "--clients", "5", "--out", tmp_path / "out")
    result = call("partition", *args)
    assert result.exit_code == 0, result.output
    written = ["partition.json", "partition.png", *(f"shard{n}" for n in range(5))]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written
    assert "shard4" in result.output
    wrong = call("partition", "--dataset", "digits", "--scheme", "dirichlit", "--clients", "5", "--out", tmp_path / "out2")
    assert wrong.exit_code == 2
    assert "did you mean 'dirichlet'" in wrong.output


def test_a_folder_that_cannot_be_written_is_an_error_without_traceback(bench, tmp_path):
    (tmp_path / "file").write_text("")
    result = call("--data", bench.shard, "--server", "localhost:1", "--home", tmp_path / "file" / "home")
    home, file = tmp_path / "file" / "home", tmp_path / "file"
    assert result.exit_code == 2
    assert result.stderr == f"fedclient: {home} cannot be a folder, because {file} is a file; choose another --home\n"
