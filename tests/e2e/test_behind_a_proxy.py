"""A federation whose devices reach the server through an HTTP proxy alone: enrolment, doctor, streams and blobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attune.common.errors import Unreachable
from tests.connect_proxy import connect_proxy
from tests.e2e.harness import tabular_shard

# With inline_bytes = 0 every blob is a transfer of its own.
SETTINGS = ("method.name=fedavg", "model.name=mlr", "round.rounds=2", "train.local_epochs=1", "server.inline_bytes=0")


def test_devices_behind_a_proxy_take_part(federation_at: Any, tmp_path: Path) -> None:
    """The name of the server can be looked up by the proxy alone, so nothing goes another way."""
    kiel, lund = (tabular_shard(tmp_path / name, seed=seed) for seed, name in enumerate(("kiel", "lund")))
    secret = tmp_path / "credentials"
    secret.write_text("ana:p@ss:word\n")
    federation = federation_at("federation")
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    server = federation.server("--exit-when-done", "--min-clients", "2", *words)
    with connect_proxy(tmp_path, "--credentials", "ana:p@ss:word") as proxy:
        where = ("--server", f"federation.invalid:{server.port}", "--proxy-credentials", str(secret))
        through, home = (*where, "--proxy", proxy.address), ("--home", str(tmp_path / "home"))
        token = ("--token", server.join_token)
        refused = federation.command(
            "fedclient", "join", *token, *where[:2], "--proxy", proxy.address, "--connect-timeout", "0", code=None
        )
        assert refused.returncode == Unreachable.exit_code and "wants credentials (407" in refused.stderr, refused.stderr
        federation.command("fedclient", "join", *token, *through, *home, "--name", "kiel")
        checked = federation.command("fedclient", "doctor", "--data", str(kiel), *through, *home)
        assert f"lets kiel in, through the proxy {proxy.address}" in checked.stdout
        federation.environment |= {"https_proxy": f"http://{proxy.address}"}
        devices = [
            federation.device(kiel, *through, *home),
            federation.device(lund, *where, "--proxy", "env", *token, "--home", str(tmp_path / "other")),
        ]
        codes = [process.code() for process in (*devices, server)]
        assert not any(codes), "\n".join(process.text for process in (*devices, server))
        asked = set(proxy.asked)
    assert asked == {f"federation.invalid:{server.port} 200", f"federation.invalid:{server.port} 407"}
    assert {row["client"] for row in federation.metrics()} == {"kiel", "lund"}
    assert all(int(row["bytes_up"]) > 0 for row in federation.metrics() if row["work"] == "train")
    for path in (*tmp_path.rglob("*.json*"), *federation.folder.rglob("*.log")):
        assert "p@ss" not in path.read_text(errors="replace") and "p%40ss" not in path.read_text(errors="replace"), path
