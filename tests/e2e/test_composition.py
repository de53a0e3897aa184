"""The ledger of a device's data against another accountant, which knows what left the device in federations and runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from attune.fedclient.work.private.ledger import METRICS_SHARE, PrivacyLedger
from tests.e2e.harness import FederationAt, tabular_shard

ROUNDS, EPOCHS, NOISE, DELTA = 3, 2, 12.0, 1e-5
EPSILON, STATISTICS, ORDERS = 8.0, 1.0, 30
SETTINGS = (
    "privacy.unit=example", f"privacy.noise={NOISE}", f"privacy.delta={DELTA}", f"privacy.epsilon={EPSILON}",
    f"privacy.statistics_epsilon={STATISTICS}", f"privacy.orders={ORDERS}", "privacy.ranges=[[-9, 9]]",
    "data.classes=[0, 1, 2]", "train.batch_size=1000", f"train.local_epochs={EPOCHS}",
    "train.validation=0.2", "model.name=dnn", "server.threads=1", f"round.rounds={ROUNDS}",
)  # fmt: skip
FLAGS = [word for setting in SETTINGS for word in ("--set", setting)]
TOLD = ("--disclose", "statistics", "--metrics", "noisy")


def delta_of(epsilon: float, mu: float) -> float:
    """Return the delta of Gaussian mechanisms with mu² = the sum of 1 / noise² (Dong, Roth, Su 2022, corollary 1; exact)."""
    normal = NormalDist().cdf
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def bisected(rises: Callable[[float], bool], low: float, high: float) -> float:
    """Return where `rises` becomes true, to 1e-9."""
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if rises(middle) else (middle, high)
    return high


def mu_of(epsilon: float) -> float:
    """Return the largest mu with which this epsilon holds."""
    return bisected(lambda mu: delta_of(epsilon, mu) > DELTA, 1e-3, 50.0)


def logged(logs: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for log in logs for line in log.read_text().splitlines()[1:]]


def spent(lines: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Return the trained orders and the statistics that left, and the epsilon of all of them together.

    All samples are in each step, so each of them is a Gaussian mechanism. A message that was sent again counts once.
    """
    answers = [line["sample"] for line in lines if line["kind"] in ("update", "report")]
    orders = {
        json.dumps([answer["order_id"], answer["metrics_json"], [part["digest"] for part in answer.get("parts", ())]])
        for answer in answers
        if answer["order_id"].startswith("train-")
    }
    statistics = {json.dumps(line["sample"]["report_json"]) for line in lines if line["kind"] == "statistics"}
    of_metrics = mu_of(METRICS_SHARE * EPSILON) ** 2 / ORDERS  # of one order
    square = len(orders) * (EPOCHS / NOISE**2 + of_metrics) + len(statistics) * mu_of(STATISTICS) ** 2
    return len(orders), len(statistics), bisected(lambda epsilon: delta_of(epsilon, square**0.5) < DELTA, 0.0, 50.0)


def test_gaussian_mechanisms_by_hand() -> None:
    """At epsilon 0 the delta is the distance of two normals: P(|Z| < mu / 2)."""
    assert delta_of(0.0, 1.0) == pytest.approx(0.3829249, abs=1e-7)
    assert 1 / mu_of(1.0) == pytest.approx(3.7306, abs=1e-3)  # Balle and Wang 2018: the analytic Gaussian mechanism


def test_the_ledger_has_what_left_in_two_federations_and_two_runs(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("composition")
    shards = [tabular_shard(tmp_path / f"site{number}", number) for number in range(5)]
    for run in ("first", "second"):
        if run == "second":
            federation.command("fedserver", "run", "new", run, "--method", "fedper", "--min-clients", "5", *FLAGS)
        server = federation.server(
            *(("--method", "fedavg", "--min-clients", "5", *FLAGS) if run == "first" else ()), "--exit-when-done"
        )
        fleet = federation.fleet(shards, *TOLD)
        assert (fleet.code(), server.code()) == (0, 0), server.text + fleet.text

    federation.port, home = 0, str(federation.folder / "other")
    server = federation.server("--home", home, "--method", "mr-mtl", "--min-clients", "6", "--exit-when-done", *FLAGS)
    token = tmp_path / "token"
    token.write_text(server.join_token)
    fleet = federation.fleet(shards, *TOLD, "--token-file", str(token))
    for name in ("site0", "site1", "site2", "site3", "site4"):
        fleet.wait_for(f"^{name}: waiting for")
    federation.command("fedserver", "statistics", "--home", home, "--json")
    last = federation.device(tabular_shard(tmp_path / "site5", 5), *TOLD, "--token-file", str(token))
    assert (fleet.code(), last.code(), server.code()) == (0, 0, 0), server.text + fleet.text

    for shard in shards:
        logs = sorted(federation.folder.glob(f"attune/devices/*/{shard.name}-*/disclosed.jsonl"))
        assert len(logs) == 2, "a home in each federation"
        orders, statistics, epsilon = spent(logged(logs))
        assert (orders, statistics) == (3 * ROUNDS, 1)
        ledger = PrivacyLedger.of_data(federation.folder / "attune" / "privacy", shard, "")
        assert ledger.epsilon(DELTA) == pytest.approx(epsilon, rel=0.01)
