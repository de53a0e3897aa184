"""Masked statistics by real processes, over mutual TLS: killed on either side at each exchange, and one sum."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import Federation, FederationAt, Process, tabular_shard

EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")
FLAGS = (
    *("--method", "fedavg", "--model", "mlr", "--min-clients", "9", "--set", "privacy.secure_aggregation=true"),
    *("--set", "privacy.secure_wait_s=60"),
)
MASKED = ("--disclose", "masked-statistics")


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [tabular_shard(tmp_path / f"site{number}", number) for number in range(6)]


def idle(federation: Federation, count: int) -> None:
    federation.await_status(lambda status: [client["state"] for client in status["clients"]].count("idle") == count)


def asked(federation: Federation, code: int | None = 0) -> Any:
    """Return the statistics, or the process of the command if it may fail."""
    done = federation.command(
        "fedserver", "statistics", "--home", str(federation.home), "--patience", "60", "--json", code=code
    )
    return json.loads(done.stdout) if code == 0 else done


def check_whole(report: dict[str, Any], shards: list[Path]) -> None:
    x = np.concatenate([np.load(shard / part)["x"] for shard in shards for part in ("train.npz", "test.npz")]).astype(float)
    assert (report["devices"], report["samples"]) == (len(shards), len(x))
    for place in range(x.shape[1]):
        column = report["columns"][f"column {place + 1}"]
        assert column["rows"] == len(x)
        assert np.isclose(column["mean"], x[:, place].mean(), rtol=1e-12)
        assert np.isclose(column["deviation"], x[:, place].std(), rtol=1e-12)


def killed(process: Process) -> None:
    assert process.code() == -signal.SIGKILL, process.text


def test_a_server_that_is_killed_at_each_exchange_makes_one_sum(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("masked-server")
    server = federation.server(*FLAGS, fault=f"server:0:secure-{EXCHANGES[0]}=kill")
    federation.fleet(shards[:5], *MASKED)
    for exchange in (*EXCHANGES[1:], ""):
        idle(federation, 5)
        asked(federation, code=None)
        killed(server)
        server = federation.server(fault=f"server:0:secure-{exchange}=kill" if exchange else "")
    idle(federation, 5)
    report = asked(federation)
    check_whole(report, shards[:5])
    assert "the statistics of 5 devices are summed" in server.text
    federation.device(shards[5], *MASKED)
    idle(federation, 6)
    again = asked(federation)
    assert "one masked sum" in again["without"].pop("site5") and again == report


def test_a_device_that_is_killed_at_each_exchange_still_counts(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("masked-device")
    federation.server(*FLAGS)
    federation.fleet(shards[:5], *MASKED)
    device = federation.device(shards[5], *MASKED, fault=f"*:0:secure-{EXCHANGES[0]}=kill")
    idle(federation, 6)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked, federation)
        for exchange in (*EXCHANGES[1:], ""):
            killed(device)
            device = federation.device(shards[5], *MASKED, fault=f"*:0:secure-{exchange}=kill" if exchange else "")
        check_whole(waiting.result(), shards)
