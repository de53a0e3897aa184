"""Command lines of the kit: every one in the README can be parsed, and those of the server are run."""

import os
import re
import signal
import subprocess
from pathlib import Path


def test_every_command_line_in_the_readme_is_one(attune_lines, parse):
    said = {(Path(words[0]).name, parse(words).info_name) for words in attune_lines}
    assert said == {
        ("fedserver", "fedserver"), ("fedserver", "status"), ("fedserver", "token"), ("fedserver", "revoke"),
        ("fedclient", "join"), ("fedclient", "evaluate"), ("fedclient", "partition"),
    }  # fmt: skip


def test_the_server_of_the_unit_runs_is_healthy_and_lets_a_device_join(deploy, unit, instructions, commands, tmp_path):
    environment = os.environ | {"ATTUNE_HOME": str(tmp_path), "PATH": f"{commands['fedserver'].parent}:{os.environ['PATH']}"}
    words = unit("fedserver.service")["Service"]["ExecStart"].replace("--port 50051", "--port 0").split()
    words = [word.replace("/opt/attune/bin/", "").replace("/etc/attune", str(deploy)) for word in words]
    health = ["sh", "-c", dict(instructions("Dockerfile.server"))["HEALTHCHECK"].partition("CMD ")[2]]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60)

    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            listens = next(line for line in server.stdout if "listens on" in line)
            port = re.search(r":(\d+) ", listens)
            assert port is not None
            next(line for line in server.stdout if "fedclient join" in line)
            assert run(*health).returncode == 0
            token = run("fedserver", "token", "--uses", "5", "--ttl", "24h").stdout.strip()
            home = str(tmp_path / "press-7")
            address = f"127.0.0.1:{port.group(1)}"
            joined = run("fedclient", "join", "--server", address, "--token", token, "--name", "press-7", "--home", home)
            assert (joined.returncode, joined.stderr) == (0, "")
            assert run("fedserver", "revoke", "press-7").returncode == 0
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert server.returncode == 0
    assert run(*health).returncode != 0
