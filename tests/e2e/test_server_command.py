"""Refusals of the server's commands: one line on stderr and an exit code of its own. Quick commands import little."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Federation, FederationAt, tabular_shard, until


@pytest.fixture(scope="module")
def home(federation_at: FederationAt) -> Federation:
    """Return a home in which a server has run and was stopped."""
    federation = federation_at("commands")
    server = federation.server("--rounds", "3", "--set", "method.embedding_dim=8")
    second = federation.command("fedserver", "--port", "0", code=5)
    assert "already runs" in second.stderr
    third = federation.command(
        "fedserver", "--host", "127.0.0.1", "--port", str(server.port), "--home", str(federation.folder / "other"), code=3
    )
    assert str(server.port) in third.stderr
    assert server.stop() == 0
    return federation


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rounds", "4"), "round.rounds is 3 here, not 4"),
        (("--method", "fedavg"), "method.name is 'fedtp' here, not 'fedavg'"),
        (("--set", "method.embedding_dim=16"), "method.embedding_dim is 8 here, not 16"),
        (("--set", "train.lr=0.5"), "train.lr"),
        (("--seed", "1"), "seed is 0 here, not 1"),
        (("--model", "vit"), "model.name"),
    ],
)
def test_a_restart_that_contradicts_its_home_is_refused_and_names_the_difference(home, flags, named):
    done = home.command("fedserver", "--port", "0", *flags, code=4)
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_restart_without_flags_or_with_the_same_goes_on(home):
    for flags in ((), ("--rounds", "3"), ("--set", "server.keepalive_s=3.0")):
        server = home.server(*flags)
        assert (home.status()["rounds"], home.status()["running"]) == (3, True)
        assert server.stop() == 0
    assert home.status()["running"] is False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--method", "fedpt"), 2, "fedtp"),
        (("--set", "method.sigmma=1", "--method", "fedmcsa"), 2, "sigma"),
        (("--set", "round.round=1"), 2, "rounds"),
        (("--model", "vitt"), 2, "vit"),
        (("--set", "nonsense"), 2, "section.key=value"),
        (("--config", "/nowhere.toml"), 2, "/nowhere.toml"),
        (("--rounds", "0"), 2, "rounds"),
        (("status",), 4, "holds no federation"),
        (("token",), 4, "holds no federation"),
        (("export", "--out", "/nowhere"), 4, "holds no federation"),
    ],
)
def test_mistakes_are_named_and_leave_no_home(tmp_path, home, words, code, said):
    command = (words[0], "--home", str(tmp_path / "new"), *words[1:]) if not words[0].startswith("-") else (
        "--port", "0", "--home", str(tmp_path / "new"), *words)  # fmt: skip
    done = home.command("fedserver", *command, code=code)
    assert said in done.stderr
    assert not (tmp_path / "new" / "ca").exists()


def test_export_before_the_first_round_says_so(home):
    assert "no model yet" in home.command("fedserver", "export", "--out", str(home.folder / "x"), code=19).stderr


@pytest.mark.parametrize("ttl", ["never", "-1h", "0", "1y"])
def test_a_ttl_that_is_none_is_refused(home, ttl):
    assert "--ttl" in home.command("fedserver", "token", f"--ttl={ttl}", code=2).stderr


def test_a_token_is_alone_on_stdout(home):
    done = home.command("fedserver", "token", "--uses", "3", "--ttl", "30m")
    assert len(done.stdout.split()) == 1
    assert len(done.stdout.strip()) == 76


def test_quick_commands_do_not_import_torch(home):
    """Check, without measuring time, that a command can answer in half a second. All run in one interpreter."""
    commands = ["--help", "status --json", "status", "token", "revoke nobody"]
    program = """
import sys
from fedserver import cli
for line in sys.argv[1:]:
    sys.argv = ["fedserver", *line.split()]
    try:
        cli.main()
    except SystemExit:
        pass
    print(f"{line}:", [name for name in ("torch", "numpy") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *commands], capture_output=True, text=True, env=home.environment, timeout=120
    )
    said = done.stderr.splitlines()
    assert [line for line in said if line.endswith("]")] == [f"{command}: []" for command in commands], done.stderr


# --- server and device under a supervisor that listens as systemd does

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "1", "--rounds", "1")


def test_server_and_device_tell_their_supervisor_how_they_are(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("supervised")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        place = Path(f"/tmp/attune-{tmp_path.stat().st_ino}")  # noqa: S108 (a socket's path is short)
        listener.bind(str(place))
        listener.setblocking(False)
        heard: list[str] = []

        def told(start: str, part: str = "") -> bool:
            try:
                while True:
                    heard.append(listener.recv(4096).decode())
            except BlockingIOError:
                return any(message.startswith(start) and part in message for message in heard)

        federation.environment |= {"NOTIFY_SOCKET": str(place), "WATCHDOG_USEC": "900000"}
        try:
            server = federation.server(*FLAGS)
            until(lambda: told("READY=1", "waiting"), "the server to be ready")
            until(lambda: told("WATCHDOG=1", "waiting"), "the server's heartbeat")
            heard.clear()
            device = federation.device(tabular_shard(tmp_path / "s", 0))
            until(lambda: told("READY=1"), "the device to be ready")
            assert device.code() == 0
            until(lambda: told("STOPPING=1"), "the device to say that it stops")
            until(lambda: told("WATCHDOG=1", "done"), "the server's heartbeat at the end")
            heard.clear()
            assert server.stop() == 0
            assert told("STOPPING=1")
        finally:
            place.unlink()
