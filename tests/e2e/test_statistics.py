"""`fedserver statistics` over the network: a running server, devices that disclose, and one that does not."""

import json
from pathlib import Path

import numpy as np

from tests.e2e.harness import FederationAt, tabular_shard


def test_statistics_of_connected_devices_before_training(federation_at: FederationAt, tmp_path: Path) -> None:
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


PRIVATE = ("unit=example", "epsilon=4", "delta=1e-5", "orders=9", "ranges=[[-9, 9]]")


def private_flags(*more: str) -> list[str]:
    return [word for said in (*PRIVATE, *more) for word in ("--set", f"privacy.{said}")]


def test_statistics_are_refused_beside_privacy(federation_at: FederationAt) -> None:
    federation = federation_at("private")
    federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9", *private_flags())
    refused = federation.command("fedserver", "statistics", "--home", str(federation.home), code=None)
    assert refused.returncode != 0 and "statistics have no noise" in refused.stderr
    assert "set privacy.statistics_epsilon" in refused.stderr


def test_noisy_statistics_cost_each_device_once(federation_at: FederationAt, tmp_path: Path) -> None:
    """The same question gets the same bits, also after all have started anew; a device with a small budget is excused."""
    federation = federation_at("noisy")
    shards = [tabular_shard(tmp_path / f"site{number}", number) for number in range(6)]
    start = ("--method", "fedavg", "--model", "mlr", "--min-clients", "9", "--set", "data.classes=[0, 1, 2]")
    ask = ("fedserver", "statistics", "--home", str(federation.home))
    answers = []
    for _ in range(2):
        server = federation.server(*start, *private_flags("statistics_epsilon=2"))
        fleet = federation.fleet(shards[:5], "--disclose", "statistics")
        small = federation.device(shards[5], "--disclose", "statistics", "--max-epsilon", "1")
        federation.await_status(lambda status: [client["state"] for client in status["clients"]].count("idle") == 6)
        answers.append(json.loads(federation.command(*ask, "--json").stdout))
        for process in (small, fleet, server):
            process.stop()
    assert answers[0] == answers[1]

    seen = answers[0]
    parts = [np.load(shard / part) for shard in shards[:5] for part in ("train.npz", "test.npz")]
    x, y = np.concatenate([part["x"] for part in parts]), np.concatenate([part["y"] for part in parts])
    assert seen["devices"] == 5 and seen["samples"] == 300 and seen["noise"]["epsilon"] == 2
    assert "privacy budget is spent" in seen["without"]["site5"] and "differences between sites" in seen["withheld"]
    for place in range(6):
        column = seen["columns"][f"column {place + 1}"]
        assert abs(column["rows"] - 300) < 4 * column["errors"]["rows"]
        assert abs(column["mean"] - np.clip(x[:, place], -9, 9).mean()) < 4 * column["errors"]["mean"]
    for label, count in seen["classes"].items():
        assert count is None or abs(count - (y == int(label)).sum()) < 4 * seen["noise"]["error"]
    ledgers = [json.loads(path.read_text()) for path in (federation.folder / "attune" / "privacy").glob("*/ledger.json")]
    charged = [[len(run["attempts"]) for run in ledger["runs"]] for ledger in ledgers]
    assert sorted(charged) == [[], *[[1]] * 5]


def test_without_a_server_the_command_says_what_to_do(federation_at: FederationAt) -> None:
    federation = federation_at("stopped")
    federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9").stop()
    refused = federation.command("fedserver", "statistics", "--home", str(federation.home), code=None)
    assert refused.returncode != 0 and "no server runs" in refused.stderr and "start it" in refused.stderr
