"""A finished model from a stranger, whose model.json names code: it runs only after the user's consent."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.errors import NoModel, SettingError
from attune.common.models.registry import size_bytes
from attune.common.plan import ModelSpec
from attune.common.text import from_json
from attune.fedclient.cli import main
from attune.fedclient.model.artifact import Model
from tests.fedclient.conftest import tabular_shard
from tests.fedclient.model.test_predict_images import model_in

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
