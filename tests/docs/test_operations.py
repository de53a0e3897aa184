"""docs/operations.md against what the commands print and end with."""

from __future__ import annotations

from typing import Any

from attune.common.errors import AttuneError
from attune.common.metrics import METRICS
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.export import ORDER_COLUMNS
from attune.fedserver.view.status import status

PAGE = "docs/operations.md"


def codes(error: type[AttuneError] = AttuneError) -> set[int]:
    return {error.exit_code}.union(
        *(codes(child) for child in error.__subclasses__() if not child.__module__.startswith("test"))
    )


def test_every_exit_code_is_in_the_table(page: Any) -> None:
    listed = [int(row[0]) for row in page(PAGE).table("## When something goes wrong") if row[0].isdigit()]
    assert sorted(set(listed)) == listed
    assert set(listed) >= codes() | {0, 130, 143}


def test_every_field_of_the_status_is_described(page: Any) -> None:
    record = Record(phase=Phase.TRAINING, devices=("anna",), cohort=("anna",), opened_at=5.0)
    said = status(Snapshot(None, None, record, (DeviceRecord("anna", "key"),), (), ()), set())
    rows = [row[0].strip("`") for row in page(PAGE).table("## Status")]
    [client] = said["clients"]
    assert METRICS.keys() <= client.keys()
    assert rows == [*said, *(field for field in client if field not in METRICS)]
    described = page(PAGE).section("## Status")
    for field in [*said["awaited"][0], "mean_over_clients", "over_samples"]:
        assert f"`{field}`" in described


def test_every_column_of_the_metrics_is_described(page: Any) -> None:
    described = page(PAGE).section("## Export")
    assert all(f"`{column}`" in described for column in ORDER_COLUMNS)
    assert "(protocol.md#the-metrics)" in described
