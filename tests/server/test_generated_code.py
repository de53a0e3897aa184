"""The generated protobuf code in common/pb is that of proto/attune/v1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    out = tmp_path_factory.mktemp("pb")
    command = ["-m", "grpc_tools.protoc", "-Icommon/pb=proto/attune/v1", f"--python_out={out}", f"--pyi_out={out}"]
    sources = ["common/pb/federation.proto", "common/pb/admin.proto"]
    subprocess.run([sys.executable, *command, f"--grpc_python_out={out}", *sources], cwd=ROOT, check=True)
    return out / "common" / "pb"


def test_the_committed_code_is_current(generated):
    fresh = {path.name: path.read_text() for path in generated.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "common" / "pb").glob("*_pb2*.py*")}
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []
