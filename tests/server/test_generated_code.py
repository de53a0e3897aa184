"""The generated protobuf code is that of proto/attune/v1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"common/pb": "federation", "fedserver/pb": "admin"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    out = tmp_path_factory.mktemp("pb")
    command = ["-m", "grpc_tools.protoc", *(f"-Iattune/{folder}=proto/attune/v1" for folder in FOLDERS)]
    targets = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    sources = [f"attune/{folder}/{name}.proto" for folder, name in FOLDERS.items()]
    subprocess.run([sys.executable, *command, *targets, *sources], cwd=ROOT, check=True)
    return out / "attune"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_code_is_current(generated, folder):
    fresh = {path.name: path.read_text() for path in (generated / folder).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / folder).glob("*_pb2*.py*")}
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []
