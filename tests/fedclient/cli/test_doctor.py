"""Findings of the doctor: a device that can take part, and each obstacle, with its remedy."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from click.testing import CliRunner

from attune.fedclient import doctor
from attune.fedclient.cli import main
from attune.fedclient.read_options import PLAIN


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


def test_what_is_in_the_way_ends_with_1(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["doctor", "--data", str(tmp_path / "none"), "--server", f"127.0.0.1:{port}", "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    lines = {line.split(":")[0].split()[-1]: line for line in done.output.splitlines()}
    assert lines["data"].startswith("FAIL ") and lines["server"].startswith("FAIL ")
    assert "cannot be reached" in lines["server"]


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
