"""Places for results are checked before the work, and what is written is whole or absent."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.durable import check_file, check_folder
from attune.common.errors import AttuneError, SettingError
from attune.fedclient.cli import main
from attune.fedclient.link.diagnose import _no_proxy
from tests import forked

TABLE = "v,w,ill\n" + "".join(f"{n % 7},{n * 0.5},{n % 2}\n" for n in range(60))
BIN = Path(sys.executable).parent

# Runs commands in one interpreter, and prints the exit status of each after its output.
ONE_BY_ONE = """
import json, sys
from attune import fedclient, fedserver
import attune.fedclient.cli, attune.fedserver.cli
sys.stderr = sys.stdout
for sys.argv in json.loads(sys.argv[1]):
    try:
        {"fedclient": fedclient, "fedserver": fedserver}[sys.argv[0]].cli.main()
    except SystemExit as end:
        print(f"\\nexit status {end.code} ended")
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.run(list(map(str, words)), os.environ | forked.STEADY, 100.0)


def run_fresh(*words: str | Path, limit: int | None = None, clean: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a new interpreter, with a limit on the size of files, or as a user without a name and a home."""

    def bounded() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {key: value for key, value in os.environ.items() if not clean or key not in ("HOME", "ATTUNE_HOME")}
    if clean:
        environment["XDG_STATE_HOME"] = ""
    prefix = ("unshare", "-U", "--map-user=12345") if clean else ()
    return subprocess.run(
        [*prefix, *map(str, words)], capture_output=True, text=True, timeout=100, env=environment, preexec_fn=bounded
    )


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    (tmp_path / "c").mkdir()
    check_folder(tmp_path / "c")
    check_file(tmp_path / "c" / "labels.csv")
    assert [path.name for path in tmp_path.rglob("*")] == ["c"]


def test_no_folder_is_made_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the home of one of two devices that start at once: folders that come and go ended the other one."""

    def made(self: Path, *arguments: object, **named: object) -> None:
        raise AssertionError(f"{self} was made")

    monkeypatch.setattr(Path, "mkdir", made)
    check_folder(tmp_path / "devices" / "localhost_50051" / "ada")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below", "file/below/deeper"])
def test_a_file_is_no_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match=r"cannot be a folder, because .*file is a file; choose another --home"):
        check_folder(tmp_path / place, "--home")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys/kernel").is_dir(), reason="needs a folder that takes no files")
def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(AttuneError, match="cannot write to /proc/attune"):
        check_folder(Path("/proc/attune"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is a folder, and a file is needed"):
        check_file(tmp_path)
    with pytest.raises(SettingError, match="there is no folder"):
        check_file(tmp_path / "none" / "labels.csv")
    check_file(Path("/dev/null"))


@pytest.mark.parametrize("option", ["--out", "--home"])
def test_simulate_refuses_a_place_that_cannot_be_before_it_trains(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.csv").write_text(TABLE)
    (tmp_path / "file").touch()
    done = run(
        BIN / "fedserver", "simulate", "--data", tmp_path / "a.csv", "--label", "ill", "--method", "fedavg,local",
        option, tmp_path / "file" / "x",
    )  # fmt: skip
    assert done.returncode == 2 and "is a file; choose another" in done.stderr
    assert "fedavg ..." not in done.stderr and "Errno" not in done.stderr


@pytest.mark.parametrize("home", ["file", "file/x"])
def test_homes_that_cannot_be(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.csv").write_text(TABLE)
    for words in (
        (BIN / "fedserver", "--home", tmp_path / home, "--port", "0", "--host", "127.0.0.1"),
        (
            BIN / "fedclient",
            "--data",
            tmp_path / "a.csv",
            "--label",
            "ill",
            "--server",
            "127.0.0.1:1",
            "--home",
            tmp_path / home,
        ),
    ):
        done = run(*words)
        assert done.returncode and "Traceback" not in done.stderr and "Errno" not in done.stderr
        assert "file" in done.stderr


def test_shard_and_partition_say_it_before_they_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["shard", str(tmp_path / "none.csv"), "--out", str(tmp_path / "file" / "x")])
    assert "is a file; choose another --out" in done.output


def test_a_full_disk_leaves_no_half_shard(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n * 0.37},{n % 2}\n" for n in range(20000))
    (tmp_path / "a.csv").write_text("v,w,ill\n" + rows)
    done = run_fresh(BIN / "fedclient", "shard", tmp_path / "a.csv", "--label", "ill", "--out", tmp_path / "out", limit=20000)
    assert done.returncode == 6 and "cannot write the shard" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_full_disk_leaves_no_half_part_of_a_partition(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "all.npz", x=rng.random((4000, 8)), y=np.arange(4000) % 4)
    done = run_fresh(
        BIN / "fedclient", "partition", "--dataset", tmp_path / "all.npz", "--scheme", "iid", "--clients", "2",
        "--out", tmp_path / "out", limit=30000,
    )  # fmt: skip
    assert done.returncode and "cannot write shards" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "out").rglob("*.npz"))


@pytest.mark.skipif(not Path("/usr/bin/unshare").exists(), reason="needs unshare of util-linux")
def test_a_user_without_a_name_and_a_home(tmp_path: Path) -> None:
    if run_fresh("unshare", "-U", "--map-user=12345", "true").returncode:
        pytest.skip("user namespaces are not allowed here")
    (tmp_path / "a.csv").write_text(TABLE)
    doctor = ["fedclient", "doctor", "--label", "ill", "--data"]
    commands = [["fedserver", "status"], [*doctor, str(tmp_path / "a.csv")], [*doctor, "~/a.csv"]]
    done = run_fresh(sys.executable, "-c", ONE_BY_ONE, json.dumps(commands), clean=True)
    *answers, rest = done.stdout.split(" ended\n")
    assert (rest, done.returncode) == ("", 0)
    assert len(answers) == 3
    for said in answers:
        assert said.endswith("exit status 2") and "Traceback" not in said and "Set ATTUNE_HOME" in said


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({"https_proxy": "http://proxy:3128"}, True),
        ({"HTTPS_PROXY": "http://proxy:3128"}, True),
        ({"all_proxy": "socks5://proxy"}, True),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "server.example"}, False),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "*"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_proxy_that_is_not_used_is_said(monkeypatch: Any, environment: dict[str, str], used: bool) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("use no proxy" in _no_proxy("server.example")) == used


def test_python_refuses_them_too(tmp_path: Path) -> None:
    import attune

    (tmp_path / "file").touch()
    rng = np.random.default_rng(0)
    given = {"a": (rng.random((40, 3)).astype("f4"), np.arange(40) % 2)}
    with pytest.raises(SettingError, match="is a file; choose another home"):
        attune.simulate(given, "local", rounds=1, progress=False, home=tmp_path / "file" / "x")
    with pytest.raises(SettingError, match="is a file; choose another folder"):
        attune.simulate(given, "local", rounds=1, progress=False).save(tmp_path / "file")


CLOSED = """
import os, sys, click
from pathlib import Path
from attune.common.command_group import ExtensibleGroup

@click.group(cls=ExtensibleGroup)
def group(): pass
ExtensibleGroup.entry_point_group = "attune.none"

@group.command()
@click.argument("out")
def say(out):
    click.echo("hello")
    click.echo("hello", err=True)
    sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.read()
    with open(out, "w") as file:
        file.write(f"{file.fileno() > 2} {[os.fstat(n).st_rdev == os.stat(os.devnull).st_rdev for n in range(3)]}")

group()
"""


def test_closed_standard_streams_are_nobody_s_files(tmp_path: Path) -> None:
    """A file that the command opens must not get the number on which libraries print their errors."""
    out = tmp_path / "out"
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, "say", str(out)]
    assert subprocess.run(words, check=False).returncode == 0
    assert out.read_text() == "True [True, True, True]"
