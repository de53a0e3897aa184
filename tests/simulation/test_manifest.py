"""The manifest of a result: it says what the result was made with, and names no path of the machine."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import attune
from attune.simulation.arguments import data_by_name, read_shards
from attune.simulation.manifest import ResultManifest, commit_of, data_digest, neutral

DATA = {f"site{i}": (np.random.default_rng(i).normal(size=(24, 3)), np.arange(24) % 2) for i in range(2)}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/home/alice/My data/shards/*", "*"),
        ("shards/deep/*", "shards/deep/*"),
        ("../secret/shards", "shards"),
        ("~/out", "out"),
        ("~bob/x/out", "out"),
        ("C:\\Users\\alice\\out", "out"),
        ("--out=/srv/x/out", "--out=out"),
        ("a=/srv/one,/srv/two", "a=one,two"),
        ("method.mu=1/2", "method.mu=1/2"),
        ("my.models:small", "my.models:small"),
        ("/home", "home"),
    ],
)
def test_a_path_outside_the_present_folder_is_cut_to_its_last_name(word: str, shown: str) -> None:
    quoted = f"'{shown}'" if "*" in shown else shown
    assert neutral(["/usr/local/bin/fedserver", "simulate", word]) == f"fedserver simulate {quoted}"


def test_a_saved_result_has_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py"), "--data", str(tmp_path / "deep" / "shards")])
    settings = {"train.local_epochs": 1, "model.name": "mlr"}
    result = attune.simulate(DATA, "fedavg", rounds=1, settings=settings, progress=False, seed=7)
    text = (result.save(tmp_path / "out") / "manifest.json").read_text(encoding="utf-8")
    saved = json.loads(text)
    assert set(saved) == set(ResultManifest.__struct_fields__)
    assert (saved["method"], saved["seed"], saved["executor"]) == ("fedavg", 7, "sequential")
    assert (saved["python"], saved["numpy"]) == (platform.python_version(), np.__version__)
    assert torch.__version__.startswith(saved["torch"].partition("+")[0])
    assert saved["command"] == "program.py --data shards" and str(tmp_path) not in text
    assert saved["data"] == data_digest(read_shards(data_by_name(DATA)))


def test_the_digest_depends_on_data_and_names_and_not_on_their_order() -> None:
    def digest(data: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
        return data_digest(read_shards(data_by_name(data)))

    first = digest(DATA)
    assert digest(dict(reversed(DATA.items()))) == first
    x, y = DATA["site0"]
    assert digest(DATA | {"site0": (x + 1e-9, y)}) != first
    assert digest({"site0": DATA["site1"], "site1": DATA["site0"]}) != first


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(["git", "-C", str(tmp_path), *named, *words], check=True, capture_output=True, text=True).stdout

    assert commit_of(tmp_path) is None, "no checkout"
    git("init", "-q")
    assert commit_of(tmp_path) is None, "no commit"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    (tmp_path / "untracked").write_text("x")
    assert commit_of(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{head}+"
    (tmp_path / "inside").mkdir()
    assert commit_of(tmp_path / "inside") is None, "a package inside another project's checkout has no commit of its own"
