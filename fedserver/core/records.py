"""What the server keeps of devices, of the state and of what was reported: the rows of its ledger, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from attune.common.metrics import Metrics
from attune.common.wire.blobs import Blob


class DeviceRecord(msgspec.Struct, frozen=True):
    """A member of the federation. Times are unix times."""

    name: str
    public_key: str  # SHA-256 of the key, to recognise a device that asks again
    enrolled_at: float = 0.0
    founder: bool = False  # enrolled before round 1 was closed
    revoked: bool = False
    connected: bool = False
    since: float = 0.0  # of `connected`
    samples: int | None = None  # training samples, as declared; None: it never connected
    contributed: int = 0  # last round that its update went into; 0: none
    fetched: int = -1  # round of the state that it was last served; -1: none
    progress: float = 0.0  # share of its order, in quarters
    note: str = ""  # its last trouble, in words
    labels: str = ""  # the classes that it declared, in words
    token: str = ""  # id of the join token with which it enrolled; empty: not known


class Slot(msgspec.Struct, frozen=True):
    """One durable tensor file of the state: `key` within a part, and the file's name, digest and size in bytes."""

    part: str
    key: str
    file: str
    digest: str
    size: int


class Report(Metrics, frozen=True, kw_only=True):
    """What one device reported for one round."""

    round: int
    work: str  # "train" or "evaluate"
    client: str
    samples: int | None = None  # training samples that the update stands for


class Smaller(msgspec.Struct, frozen=True):
    """What is sent in the place of a value, as PACKED: its change from the older value with the digest `base`, or all of it."""

    blob: Blob
    base: str = ""


@dataclass(frozen=True)
class AcceptedUpdate:
    """One accepted update: what was reported, and a blob for each part handed in."""

    row: Report
    parts: Mapping[str, Blob]
