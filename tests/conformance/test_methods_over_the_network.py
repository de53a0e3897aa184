"""Every registered method passes the same two rounds over the real network: a server and a hosted fleet of three devices.

`make conformance`; not part of `make test`, for it takes some minutes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attune.common.methods.registry import names
from tests.e2e.harness import Federation, digit_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("shards"), 3, 60, 20)


@pytest.mark.parametrize("method", names())
def test_a_method_runs_to_the_end_and_every_device_can_use_its_model(method: str, shards: list[Path], tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    try:
        flags = ("--rounds", "2", "--min-clients", "3", "--exit-when-done", "--set", "train.local_epochs=1")
        server = federation.server("--method", method, *flags)
        pattern = str(shards[0].parent / "shard*")
        fleet = [
            "fedclient",
            "--data",
            pattern,
            "--server",
            f"localhost:{federation.port}",
            "--device",
            "cpu",
            "--keep",
            "personalized",
        ]
        said = federation.command(*fleet).stdout
        assert server.code() == 0, server.text
        status = federation.status()
        assert (status["state"], status["round"], status["method"]) == ("done", 2, method), said
        served = {client["name"]: client["accuracy"] for client in status["clients"]}
        assert len(served) == 3 and all(0.0 <= accuracy <= 1.0 for accuracy in served.values())
        offline = json.loads(federation.command("fedclient", "evaluate", "--data", pattern, "--json").stdout)
        found = {client["name"]: client["accuracy"] for client in offline["clients"]}
        assert found == pytest.approx(served), "the model that a device keeps is the one that was evaluated"
    finally:
        federation.close()
