"""The commands: their output and exit codes, help without torch, the doctor's findings, and a whole run over mutual TLS."""

import csv
import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.metrics import read_metrics
from attune.common.wire.files import read_tensors
from attune.fedclient import doctor
from attune.fedclient.cli import main
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import PLAIN


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


def test_a_folder_that_cannot_be_written_is_an_error_without_traceback(bench, tmp_path):
    (tmp_path / "file").write_text("")
    result = call("--data", bench.shard, "--server", "localhost:1", "--home", tmp_path / "file" / "home")
    home, file = tmp_path / "file" / "home", tmp_path / "file"
    assert result.exit_code == 2
    assert result.stderr == f"fedclient: {home} cannot be a folder, because {file} is a file; choose another --home\n"


def shard(folder, test=True):
    folder.mkdir()
    for part in ("train", "test")[: 1 + test]:
        np.savez(folder / f"{part}.npz", x=np.random.default_rng(0).random((80, 3)), y=np.arange(80) % 2)
    return folder


def by_name(found):
    return {each.what: each for each in found}


def test_a_device_that_can_take_part(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = by_name(doctor.examine([str(shard(tmp_path / "s"))], address, tmp_path / "home", PLAIN))
    assert (found["data"].verdict, found["data"].text) == ("ok", "tabular, 80 samples, 80 to test on")
    assert found["torch"].verdict == "ok"
    assert found["identity"].verdict == "warn" and "a token of the server is needed" in found["identity"].text
    assert found["server"].verdict == "ok"
    assert not (tmp_path / "home").exists(), "it changes nothing"


def test_a_shard_without_a_test_part_has_one_made(tmp_path):
    found = doctor.shard(shard(tmp_path / "s", test=False), PLAIN)[0]
    assert (found.verdict, found.text) == ("ok", "tabular, 60 samples, 20 to test on"), "a part is kept aside for testing"


@pytest.mark.parametrize(("free", "verdict"), [(1 << 20, "warn"), (1 << 40, "ok")])
def test_little_memory_and_disk_are_said(tmp_path, monkeypatch, free, verdict):
    monkeypatch.setattr(doctor, "available_memory", lambda: free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(free, 0, free))
    assert by_name(doctor.machine())["memory"].verdict == verdict
    assert doctor.disk(tmp_path / "not" / "yet").verdict == verdict


def test_all_problems_are_named_at_once(tmp_path):
    """A wrong address ended the command before it looked at anything else."""
    (tmp_path / "file").touch()
    words = ["doctor", "--data", str(tmp_path / "none"), "--server", "nowhere", "--home", str(tmp_path / "file" / "home")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    failed = {line.split()[1].rstrip(":") for line in done.output.splitlines() if line.startswith("FAIL")}
    assert failed == {"data", "disk", "identity", "server"}


def test_a_damaged_identity_does_not_hide_the_server(tmp_path):
    home = tmp_path / "home"
    (home / "identity").mkdir(parents=True)
    (home / "device.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = by_name(doctor.examine([], f"127.0.0.1:{port}", home, PLAIN))
    assert (found["identity"].verdict, found["server"].verdict) == ("FAIL", "FAIL")
    assert "cannot be reached" in found["server"].text


def test_a_whole_run_ends_with_a_model_that_works_offline(bench, tmp_path):
    folder = bench.run()
    assert folder == tmp_path / "home" / "model"
    assert [update.order_id for update in bench.server.seen.submits] == ["train-1-kiel", "train-2-kiel", "evaluate-2-kiel"]
    first, _, last = bench.server.seen.submits
    first_metrics, last_metrics = (read_metrics(update.metrics_json, "kiel") for update in (first, last))
    assert first.samples == 36, "a tenth of 40 is held out"
    assert first_metrics.test_samples == 20
    assert first_metrics.loss is not None
    assert first_metrics.accuracy_after is not None
    assert not last.parts
    assert last_metrics.loss is None
    assert last_metrics.accuracy_after is None

    assert bench.server.seen.progress[0].order_id == "train-1-kiel"
    assert 0 < bench.server.seen.progress[0].done <= 1
    served = bench.server.serving["shared"]
    kept = read_tensors(folder / "model.safetensors")
    assert all(kept[name].equal(value) for name, value in served.items())
    said = json.loads((folder / "model.json").read_text())
    assert said["classes"] == ["ant", "bee", "cow"]
    assert said["accuracy"] == last_metrics.accuracy_before > 0.8
    assert bench.lines.lines[-1].endswith(str(folder))

    bench.server.stop()
    bench.server.stop = lambda: None
    result = CliRunner().invoke(main, ["evaluate", "--data", str(bench.shard), "--home", str(tmp_path / "home"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["accuracy"] == last_metrics.accuracy_before


def test_a_name_keeps_its_letters(bench):
    bench.run(name="München")
    assert bench.server.seen.enrolled == ["München"]
    assert bench.server.seen.submits[0].order_id == "train-1-München"
