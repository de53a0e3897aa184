"""`fedserver statistics` over the network: a running server, devices that disclose, and one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.e2e.harness import Federation, tabular_shard


def test_statistics_of_connected_devices_before_training(federation_at: Callable[[str], Federation], tmp_path: Path) -> None:
    federation = federation_at("statistics")
    shards = [tabular_shard(tmp_path / f"site{number}", number) for number in range(6)]
    federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9")
    federation.fleet(shards[:5], "--disclose", "statistics")
    federation.device(shards[5])
    federation.await_status(lambda status: [client["state"] for client in status["clients"]].count("idle") == 6)

    found = json.loads(
        federation.command(
            "fedserver", "statistics", "--home", str(federation.home), "--json", "--out", str(tmp_path / "page")
        ).stdout
    )
    x = np.concatenate([np.load(shard / part)["x"] for shard in shards[:5] for part in ("train.npz", "test.npz")])
    y = np.concatenate([np.load(shard / part)["y"] for shard in shards[:5] for part in ("train.npz", "test.npz")])
    assert found["devices"] == 5 and found["samples"] == len(x) == 300
    for place in range(6):
        column, values = found["columns"][f"column {place + 1}"], x[:, place].astype(np.float64)
        assert column["rows"] == 300 and column["missing"] == 0
        assert np.isclose(column["mean"], values.mean()) and np.isclose(column["deviation"], values.std())
        median = np.quantile(values, 0.5, method="inverted_cdf")
        assert abs(column["quantiles"]["0.5"] - median) <= 0.01 * abs(median - values.mean()) + 0.001 * values.std()
    assert found["classes"] == {str(label): int((y == label).sum()) for label in range(3)}
    assert "--disclose statistics" in found["without"]["site5"]
    assert "Columns" in (tmp_path / "page" / "index.html").read_text() and (tmp_path / "page" / "column-1.png").exists()

    shown = federation.command("fedserver", "statistics", "--home", str(federation.home), "--columns", "column 2").stdout
    assert "5 devices answered" in shown and "column 2" in shown and "column 1" not in shown
    wrong = federation.command("fedserver", "statistics", "--home", str(federation.home), "--columns", "age", code=None)
    assert wrong.returncode != 0 and "no connected device has a column 'age'" in wrong.stderr
    log = federation.command(
        "fedclient", "disclosed", "--data", str(shards[0]), "--server", f"localhost:{federation.port}"
    ).stdout
    assert "statistics" in log and '"counts"' in log


def test_statistics_are_refused_beside_privacy(federation_at: Callable[[str], Federation]) -> None:
    federation = federation_at("private")
    flags = (
        "--set",
        "privacy.unit=example",
        "--set",
        "privacy.epsilon=4",
        "--set",
        "privacy.delta=1e-5",
        "--set",
        "privacy.orders=9",
    )
    federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9", *flags)
    refused = federation.command("fedserver", "statistics", "--home", str(federation.home), code=None)
    assert refused.returncode != 0 and "statistics have no noise" in refused.stderr


def test_without_a_server_the_command_says_what_to_do(federation_at: Callable[[str], Federation]) -> None:
    federation = federation_at("stopped")
    federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9").stop()
    refused = federation.command("fedserver", "statistics", "--home", str(federation.home), code=None)
    assert refused.returncode != 0 and "no server runs" in refused.stderr and "start it" in refused.stderr
