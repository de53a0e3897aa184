"""docs/operations against the output of the commands."""

from __future__ import annotations

from typing import Any

from attune.common.metrics import METRICS
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.export import ORDER_COLUMNS
from attune.fedserver.view.status import status


def test_every_field_of_the_status_is_described(page: Any) -> None:
    monitoring = page("docs/operations/monitoring.md")
    record = Record(phase=Phase.TRAINING, devices=("anna",), cohort=("anna",), opened_at=5.0)
    said = status(Snapshot(None, None, record, (DeviceRecord("anna", "key"),), (), ()), set())
    rows = [row[0].strip("`") for row in monitoring.table("## Status")]
    [client] = said["clients"]
    assert METRICS.keys() <= client.keys()
    assert rows == [*said, *(field for field in client if field not in METRICS)]
    described = monitoring.section("## Status")
    for field in [*said["awaited"][0], "mean_over_clients", "over_samples"]:
        assert f"`{field}`" in described


def test_every_column_of_metrics_csv_is_described(page: Any) -> None:
    described = page("docs/operations/results.md").section("## Export")
    assert all(f"`{column}`" in described for column in ORDER_COLUMNS)
    assert "(../metrics.md)" in described
