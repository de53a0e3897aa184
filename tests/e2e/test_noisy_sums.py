"""Client-level privacy by real processes: a server that is killed before the commit releases the same noise afterwards."""

from __future__ import annotations

import json
import signal
import stat

from tests.e2e.harness import digit_shards

SETTINGS = (
    *("method.name=fedavg", "model.name=mlr", "train.local_epochs=1", "server.threads=1", "round.rounds=2"),
    *(
        "privacy.unit=client",
        "privacy.devices=3",
        "privacy.noise=2.0",
        "privacy.delta=0.1",
        "data.classes=[0,1,2,3,4,5,6,7,8,9]",
    ),
)


def test_a_killed_server_repeats_its_noise_and_charges_it_once(federation_at, tmp_path):
    federation = federation_at("server")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    server = federation.server("--min-clients", "3", *flags, fault="server:2:aggregated=kill")
    devices = federation.devices(digit_shards(tmp_path / "shards", 3, 60, 20))
    assert server.code() == -signal.SIGKILL, server.text
    file = federation.home / "state" / "shared.value.2.safetensors"
    staged, first = file.read_bytes(), (federation.home / "state" / "shared.value.1.safetensors").read_bytes()
    server = federation.server("--exit-when-done")
    assert [process.code() for process in (*devices, server)] == [0] * 4, server.text
    assert file.read_bytes() == staged != first
    spent = json.loads(federation.command("fedserver", "privacy", "--home", str(federation.home), "--json").stdout)["released"]
    assert (spent["releases"], spent["rate"]) == (2, 1.0) and 0 < spent["spent"] < 10
    secret = federation.home / "privacy" / "noise-secret"
    assert len(secret.read_bytes()) == 32 and stat.S_IMODE(secret.stat().st_mode) == 0o600
