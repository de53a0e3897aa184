"""Files from strangers: pipes without end, deep JSON, sizes that take all memory, and models whose model.json names code."""

import csv
import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from attune.common.errors import NoModel, SettingError, ShardError
from attune.common.models.registry import size_bytes
from attune.common.plan import ModelSpec
from attune.common.text import from_json
from attune.common.wire.files import read_tensors
from attune.fedclient.cli import main
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.artifact import Model, read_info, save
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


CODE = """
from pathlib import Path
import torch

Path(__file__).with_name("ran").touch()

def model(spec):
    return torch.nn.Linear(3, 3)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a model whose description names a module that is importable, as the stranger hoped."""
    (tmp_path / "strangers_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers_code", raising=False)
    model_in(tmp_path, kind="tabular", columns=("a", "b", "c"))
    path = tmp_path / "model" / "model.json"
    info = json.loads(path.read_text())
    info["model"]["name"] = "strangers_code:model"
    path.write_text(json.dumps(info))
    (tmp_path / "new.csv").write_text("a,b,c\n1,2,3\n")
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 3), np.float32))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "--data", "{}/new.csv", "--out", "{}/labels.csv", "--home", "{}"],
        ["predict", "--data", "{}/new.npz", "--out", "{}/labels.csv", "--home", "{}"],
        ["evaluate", "--data", "{}/shard", "--home", "{}"],
        ["evaluate", "--data", "{}/shard", "--home", "{}", "--json"],
        ["plot", "--data", "{}/shard", "--out", "{}/pictures", "--home", "{}"],
        ["plot", "--data", "{}/shard", "--out", "{}/pictures", "--model", "{}/model"],
        ["export", "--out", "{}/model.onnx", "--home", "{}"],
    ],
)
def test_commands_run_no_code_that_a_models_folder_names(home: Path, command: list[str]) -> None:
    tabular_shard(home / "shard")
    done = CliRunner().invoke(main, [word.format(home) for word in command])
    assert done.exit_code == SettingError.exit_code, done.output
    assert "--allow-model strangers_code:model" in done.output
    assert not (home / "ran").exists()


def test_python_runs_it_after_consent_only(home: Path) -> None:
    with pytest.raises(SettingError, match="allow_models"):
        Model.load(home / "model")
    with pytest.raises(SettingError, match="allow_models"):
        Model.load(home / "model", allow_models=["another:model"])
    assert not (home / "ran").exists()
    Model.load(home / "model", allow_models=["strangers_code:model"])
    assert (home / "ran").exists()


def large(folder: Path) -> int:
    """Let model.json describe a network of 257 MB, and return its bytes."""
    info = json.loads((folder / "model.json").read_text())
    info["model"]["name"], info["model"]["options"] = "dnn", {"hidden": [8000, 8000]}
    (folder / "model.json").write_text(json.dumps(info | {"files": {}}))
    return size_bytes(from_json(json.dumps(info["model"]), ModelSpec))


def test_a_file_with_holes_does_not_hold_a_model(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("a", "b", "c"))
    size = large(tmp_path / "model")
    os.truncate(tmp_path / "model" / "model.safetensors", size)
    with pytest.raises(NoModel, match="hold"):
        Model.load(tmp_path / "model")


def test_a_file_that_is_no_part_of_a_model_does_not_hold_it(tmp_path: Path) -> None:
    model_in(tmp_path, kind="tabular", columns=("a", "b", "c"))
    (tmp_path / "model" / "more.safetensors").write_bytes(bytes(large(tmp_path / "model") // 4))
    with pytest.raises(NoModel, match="hold"):
        Model.load(tmp_path / "model")


def inner(tree: dict[str, torch.Tensor], node: int, left: int, right: int) -> None:
    tree["left"][node], tree["right"][node] = left, right


def doubling(tree: dict[str, torch.Tensor]) -> None:
    """Let both sides of each node be the next one: 2^59 paths."""
    for node in range(59):
        inner(tree, node, node + 1, node + 1)


def long(tree: dict[str, torch.Tensor]) -> None:
    nodes = torch.arange(100_000)
    tree |= {name: tensor.new_zeros(len(nodes), *tensor.shape[1:]) for name, tensor in tree.items() if len(tensor) == 60}
    tree["left"], tree["right"] = torch.where(nodes % 2 == 1, nodes, nodes + 1), torch.where(nodes % 2 == 1, nodes, nodes + 2)
    inner(tree, 99_998, 99_998, 99_998)


TREE_LIES = {
    "endless": lambda tree: inner(tree, 2, 0, 0),
    "doubling": doubling,
    "long": long,
    "far": lambda tree: inner(tree, 0, 10**6, 2),
    "no feature": lambda tree: tree["feature"].fill_(99),
    "no class": lambda tree: tree["classes"].fill_(99),
    "no numbers": lambda tree: tree.update(left=tree["left"].double()),
    "no threshold": lambda tree: tree.pop("threshold"),
    "no shape": lambda tree: tree.update(value=tree["value"][:, :2]),
}


@pytest.mark.parametrize("lie", TREE_LIES)
def test_trees_that_are_none_are_refused_in_time(tmp_path: Path, lie: str) -> None:
    model_in(tmp_path, kind="tabular", columns=("a", "b", "c"))
    folder = tmp_path / "model"
    nodes = torch.arange(60)
    tree = {"feature": 0 * nodes, "left": nodes.clone(), "right": nodes.clone(), "threshold": 0.0 * nodes}
    tree |= {"value": torch.rand(60, 3), "root": torch.tensor([0]), "base": torch.zeros(3), "classes": torch.arange(3)}
    inner(tree, 0, 1, 2)
    info = msgspec.structs.replace(read_info(folder), weights={"personalized": 0.5, "forest": 0.5}, files={})
    models = {"personalized": read_tensors(folder / "model.safetensors"), "forest": tree}
    assert Model.load(save(folder, info, models)).predict(np.zeros((2, 3), np.float32))
    TREE_LIES[lie](tree)
    with pytest.raises(NoModel, match="do not fit"):
        Model.load(save(folder, info, models))
