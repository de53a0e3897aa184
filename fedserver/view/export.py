"""Writes what a federation has learned as safetensors, CSV and JSON files. Works beside a running server."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from attune.common.errors import NoModel
from attune.common.metrics import Metrics
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedserver.core import planning
from attune.fedserver.home import Home
from attune.fedserver.lab.aggregators import matrices
from attune.fedserver.lab.engine import Engine
from attune.fedserver.stores.sqlite import Store
from attune.fedserver.view import summary

ATTEMPTS = 5  # a running server removes the files of a closed round's old state while we read them

COLUMNS = ("round", "work", "client", "samples", *Metrics.__struct_fields__)


def export_home(home: Home, store: Store, out: Path) -> list[str]:
    """Writes everything below `out` and returns a line for each thing written. Errors: NoModel before round 1."""
    saved = store.get("plan")
    if saved is None:
        raise NoModel(f"{home.path} has no model yet: the first round has not started")
    plan = msgspec.convert(saved, Plan)
    out.mkdir(parents=True, exist_ok=True)
    lines = _consistent_tensors(home, store, plan, out)
    (out / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    with (out / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(msgspec.structs.asdict(row) for row in store.rows())
    settings = planning.resolve(store.get("overrides") or {})
    found = summary.summarise(store.rows(), settings, plan.model.name, store.record().round)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return [
        *lines,
        f"{out / 'metrics.csv'}: one row per round and client",
        f"{out / 'summary.json'}: accuracies by the protocols of both papers",
        f"{out / 'plan.json'}: model, classes and settings",
    ]


def _consistent_tensors(home: Home, store: Store, plan: Plan, out: Path) -> list[str]:
    for attempt in range(ATTEMPTS):
        try:
            with TemporaryDirectory(dir=out) as scratch:
                engine = Engine(plan, store.slots(), home.state, Path(scratch), store.record().round)
                clients = [device.name for device in store.devices() if device.samples is not None and not device.revoked]
                return list(_tensors(engine, clients, out))
        except FileNotFoundError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _tensors(engine: Engine, clients: list[str], out: Path) -> Iterator[str]:
    if "shared" in engine.vaults:
        shutil.copyfile(engine.vaults["shared"].blob("value").path, out / "shared.safetensors")
        yield f"{out / 'shared.safetensors'}: what all clients share"
    own = {
        client: {part: blob for part, blob in parts.items() if part != "shared"}
        for client, parts in engine.serve(clients).items()
    }
    folder = out / "clients"
    folder.mkdir(exist_ok=True)
    for client, parts in own.items():
        if parts:
            write_tensors(
                folder / f"{client}.safetensors", {k: v for blob in parts.values() for k, v in read_tensors(blob.path).items()}
            )
    if any(own.values()):
        yield f"{folder}: each client's own weights, as the server would send them next ({len(own)} files)"
    for vault in engine.vaults.values():
        if matrices.KEY in vault.keys():  # noqa: SIM118 (a vault is not a mapping)
            shutil.copyfile(vault.blob(matrices.KEY).path, out / "attention.safetensors")
            yield f"{out / 'attention.safetensors'}: which client learned from which in the last round"
    if "generated" in engine.vaults:
        shutil.copyfile(engine.vaults["generated"].blob("network").path, out / "server.safetensors")
        yield f"{out / 'server.safetensors'}: hypernetwork, embeddings and optimiser"
