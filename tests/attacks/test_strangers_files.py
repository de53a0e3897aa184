"""Files from strangers: pipes that never end a read, JSON that is too deep, and sizes that take all memory."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from attune.common.errors import NoModel, ShardError
from attune.fedclient.cli import main
from attune.fedclient.data.shard import load_shard
from tests.fedclient.conftest import tabular_shard
from tests.fedclient.model.test_predict_images import model_in

DEEP = '{"classes": ' + "[" * 200_000


def doctor(shard: Path) -> Result:
    return CliRunner().invoke(main, ["doctor", "--data", str(shard)])


@pytest.mark.parametrize("name", ["meta.json", "train.npz", "test.npz"])
def test_a_pipe_in_a_shard_is_refused(tmp_path: Path, name: str) -> None:
    """Put a pipe in the place of a file: who opens it to read waits for a writer."""
    shard = tabular_shard(tmp_path / "shard")
    (shard / name).unlink(missing_ok=True)
    os.mkfifo(shard / name)
    with pytest.raises(ShardError, match=r"regular file"):
        load_shard(shard)


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz", "table.parquet", "arrays.npz"])
def test_a_pipe_in_place_of_a_table_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ShardError):
        load_shard(tmp_path / name)


@pytest.mark.parametrize("text", [DEEP, '{"classes": ' + '{"a":' * 200_000, "[" * 200_000, b"\xff\xfe{}"])
def test_json_that_cannot_be_read_is_one_line(tmp_path: Path, text: str | bytes) -> None:
    shard = tabular_shard(tmp_path / "shard")
    (shard / "meta.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ShardError, match=r"meta\.json is wrong"):
        load_shard(shard)
    assert "Traceback" not in doctor(shard).output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model_in(tmp_path, kind="tabular", columns=("a", "b", "c"))
    (tmp_path / "new.csv").write_text("a,b,c\n1,2,3\n")
    return tmp_path / "model" / "model.json"


@pytest.mark.parametrize("label", ['=HYPERLINK("http://evil")', "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_class_that_is_a_formula_is_text_in_a_spreadsheet(model: Path, label: str) -> None:
    info = json.loads(model.read_text())
    info["classes"] = [label, label + " ", label + "  "]
    model.write_text(json.dumps(info))
    assert predict(model.parents[1]).exit_code == 0
    with (model.parents[1] / "labels.csv").open(newline="", encoding="utf-8") as file:
        _, (_, written) = csv.reader(file)
    assert written.rstrip(" ") == f"'{label}"


@pytest.mark.parametrize("label", [-1, "-1", "+2.5", "healthy", "a=b"])
def test_other_classes_are_written_as_they_are(model: Path, label: object) -> None:
    info = json.loads(model.read_text())
    info["classes"] = [label, f"{label}0", f"{label}00"]
    model.write_text(json.dumps(info))
    assert predict(model.parents[1]).exit_code == 0
    with (model.parents[1] / "labels.csv").open(newline="", encoding="utf-8") as file:
        _, (_, written) = csv.reader(file)
    assert written.startswith(str(label))


def predict(home: Path) -> Result:
    words = ["predict", "--data", str(home / "new.csv"), "--out", str(home / "labels.csv"), "--home", str(home)]
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("hidden", [[10**6, 10**6], [10**9], [10**18], [2**70], [-1], ["a"], 10**9])
def test_sizes_that_take_all_memory_are_refused(model: Path, hidden: object) -> None:
    info = json.loads(model.read_text())
    info["model"]["name"], info["model"]["options"] = "dnn", {"hidden": hidden}
    model.write_text(json.dumps(info))
    done = predict(model.parents[1])
    assert done.exit_code not in (0, 1), done.output
    assert done.output.startswith("fedclient: ")
    assert "Traceback" not in done.output


def test_a_pipe_or_deep_json_in_place_of_model_json_is_refused(model: Path) -> None:
    model.write_text(DEEP)
    assert predict(model.parents[1]).exit_code == NoModel.exit_code
    model.unlink()
    os.mkfifo(model)
    assert predict(model.parents[1]).exit_code == NoModel.exit_code


def test_an_archive_of_thousands_of_arrays_is_one_short_line(tmp_path: Path) -> None:
    for count, words in ((200, "it holds a0, a1"), (5000, "holds 5000 arrays")):
        np.savez(tmp_path / "train.npz", **{f"a{number}": np.zeros(1) for number in range(count)})
        with pytest.raises(ShardError, match=words) as caught:
            load_shard(tmp_path / "train.npz")
        assert len(str(caught.value)) < 500
