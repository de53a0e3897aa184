"""Rows of the ledger as values: devices, slots of the state, reports, and arrivals of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from attune.common.errors import SettingError
from attune.common.metrics import Metrics
from attune.common.wire.blobs import Blob

if TYPE_CHECKING:
    from attune.fedserver.core.messages import Record

KEPT_LABELS = 500  # characters of a device's classes


class DeviceRecord(msgspec.Struct, frozen=True):
    """A member of the federation. Times are unix times."""

    name: str
    public_key: str  # SHA-256 of the key, to recognise a device that asks again
    enrolled_at: float = 0.0
    founder: bool = False  # enrolled before round 1 was closed
    revoked: bool = False
    connected: bool = False
    since: float = 0.0  # when `connected` changed last
    samples: int | None = None  # training samples, as declared; None: it never connected
    contributed: int = 0  # last round that aggregated an update of it; 0: none
    fetched: int = -1  # round of the state that it was last served; -1: none
    progress: float = 0.0  # share of its order that is done, in quarters
    note: str = ""  # its last trouble, in words
    labels: str = ""  # the classes that it declared, in words
    token: str = ""  # id of the join token with which it enrolled; empty: not known


class Slot(msgspec.Struct, frozen=True):
    """One durable tensor file of the state: its part and key there, and the file's name, digest and size in bytes."""

    part: str
    key: str
    file: str
    digest: str
    size: int


class Report(Metrics, frozen=True, kw_only=True):
    """Report of one device for one order: its metrics, and which order they are of."""

    round: int
    work: str  # "train" or "evaluate"
    client: str
    samples: int | None = None  # training samples that the update stands for
    staleness: int | None = None  # in buffered rounds: how many states are newer than the one that it began from
    arrival: int | None = None  # in buffered rounds: its place in the order of arrivals of its round, from 1


class Smaller(msgspec.Struct, frozen=True):
    """Compressed form (PACKED) of a value: its change from the older value with the digest `base`, or all of it."""

    blob: Blob
    base: str = ""


class AcceptedUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accepted update: the report, and for each part that was handed in a blob and the facts found on arrival."""

    row: Report
    parts: Mapping[str, Blob]
    facts: Mapping[str, Mapping[str, float]] = {}
    attempt: int = 0  # of secure aggregation, whose keys mask the parts
    fresh: float = 1.0  # weight by its staleness, in buffered rounds
    check: str = ""  # digest of the file without it, so that a changed byte is noticed; homes of older versions have none


class Arrival(NamedTuple):
    """An update that counted: the device, the rounds in which it got its order and in which it was aggregated, from 1.

    A founder was enrolled before round 1 was closed.
    """

    device: str
    order: int
    round: int
    founder: bool = True


def arrivals_of(rows: Iterable[Report], devices: Iterable[DeviceRecord], record: Record) -> list[Arrival]:
    """Return the order in which the updates of buffered rounds arrived, from what the ledger has of a run.

    Raises:
        SettingError: A state was taken back. The updates that had spoiled it are not in the ledger.
    """
    if record.given_up:
        raise SettingError(
            f"this run has no order of arrivals to repeat: the state after round {record.given_up} was taken back"
        )
    founders = {device.name for device in devices if device.founder}
    counted = [(row.round, row.arrival, row) for row in rows if row.arrival is not None and row.staleness is not None]
    return [
        Arrival(row.client, row.round - (row.staleness or 0), row.round, row.client in founders)
        for _, _, row in sorted(counted, key=lambda entry: entry[:2])
    ]
