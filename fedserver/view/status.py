"""What the operator sees: the state of a home as one JSON-able object. Reads the database and the inbox; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from attune.common.config import RoundSettings
from attune.common.interval import wilson
from attune.common.metrics import Metrics
from attune.fedserver.core import planning
from attune.fedserver.core.accuracy import accuracies, latest_metrics, over_all
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.policy import quorum_of
from attune.fedserver.core.records import Device
from attune.fedserver.home import Home
from attune.fedserver.stores.sqlite import Store


def state_of(record: Record, connected: set[str], reported: set[str], policy: RoundSettings, *, served: bool) -> str:
    """One of waiting, training, aggregating, done, failed: training that cannot reach its quorum for want of devices waits."""
    if record.phase is Phase.TRAINING:
        reachable = reported | (set(record.devices) & connected)
        waits = served and len(reachable & set(record.cohort)) < quorum_of(policy, record)
        return "waiting" if waits else "training"
    return "training" if record.phase is Phase.EVALUATING else str(record.phase)


def status(home: Home, store: Store) -> dict[str, Any]:
    """The object of `fedserver status --json`; see docs/operations.md for its fields."""
    settings = planning.resolve(store.get("overrides") or {})
    record, rows, devices = store.record(), store.rows(), store.devices()
    served, address = home.is_served(), home.address()
    connected = {device.name for device in devices if device.connected and served}
    reported = reported_names(home, record)
    ended = [row for row in rows if row.work == "evaluate" and row.round >= settings.round.rounds]
    final = ended if record.phase is Phase.DONE else rows
    latest, reports = accuracies(final, settings.method.evaluate), latest_metrics(rows)
    awaited = (
        set(record.devices) - reported - set(record.excused) if record.phase in (Phase.TRAINING, Phase.EVALUATING) else set()
    )
    return {
        "state": state_of(record, connected, reported, settings.round, served=served),
        "phase": str(record.phase),
        "running": served,
        "address": f"{address.host}:{address.port}" if served and address else None,
        "method": settings.method.name,
        "model": (store.get("plan") or {}).get("model", {}).get("name"),
        "round": record.round,
        "rounds": settings.round.rounds,
        "adapting": sorted(record.adapting),
        "min_clients": settings.round.min_clients,
        "clients": [
            _client(device, device.name in connected, awaited, reported)
            | _accuracy(latest.get(device.name))
            | msgspec.structs.asdict(reports.get(device.name, Metrics()))
            for device in devices
        ],
        "awaited": [{"name": name, "since": _since(name, devices, record)} for name in sorted(awaited)],
        "accuracy": over_all(latest),
        "reason": record.reason or None,
    }


def reported_names(home: Home, record: Record) -> set[str]:
    """Devices whose answer to the open orders lies in the inbox."""
    work, number = record.open_orders
    prefix = f"{work}-{number}-"
    return {path.name.removeprefix(prefix) for path in home.inbox.glob(f"{prefix}*")}


def _since(name: str, devices: Iterable[Device], record: Record) -> float:
    """Unix time since when a device is awaited: since it left, if it left after the order went out."""
    left = next((device.since for device in devices if device.name == name and not device.connected), 0.0)
    return max(left, record.opened_at)


def _accuracy(latest: tuple[float, int] | None) -> dict[str, Any]:
    """Of the model by which the method is judged, a fraction of the client's test part, with its 95 % interval."""
    return {"accuracy": latest[0] if latest else None, "interval": wilson(*latest) if latest else None}


def _client(device: Device, connected: bool, awaited: set[str], reported: set[str]) -> dict[str, Any]:
    if device.revoked:
        state = "revoked"
    elif not connected:
        state = "disconnected"
    elif device.name in awaited:
        state = "working"
    else:
        state = "reported" if device.name in reported else "idle"
    return {
        "name": device.name,
        "state": state,
        "since": device.since,
        "progress": device.progress if state == "working" else None,
        "samples": device.samples,
        "note": device.note or None,
    }
