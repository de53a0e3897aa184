"""Writes what a federation has learned as safetensors, CSV and JSON files. Works beside a running server."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from attune.common.errors import NoModel
from attune.common.metrics import METRICS
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors, write_tensors
from attune.common.wire.frames import read_frames
from attune.common.wire.tensors import Tensors
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.aggregators.stored import MATRICES, NETWORK
from attune.fedserver.lab.engine import Engine
from attune.fedserver.ports.blobs import SERVED, Blobs, Damaged, blob_of
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.disk import scratch_blobs
from attune.fedserver.view import summary
from attune.fedserver.view.status import status

ATTEMPTS = 5  # a running server removes the files of a closed round's old state while we read them

ORDER_COLUMNS = ("round", "work", "client", "samples")


def export_home(home: ServerHome, out: Path) -> list[str]:
    """Writes everything below `out` and returns a line for each thing written. Errors: NoModel before round 1."""
    found = home.snapshot()
    if found.plan is None:
        raise NoModel(f"{home.path} has no model yet: the first round has not started")
    out.mkdir(parents=True, exist_ok=True)
    return [*_consistent_tensors(home, out), *write_tables(found, found.plan, out)]


def write_tables(
    found: Snapshot, plan: Plan, out: Path, reported: Collection[str] = (), troubles: Sequence[str] = ()
) -> list[str]:
    """What was measured and what was fixed, as files in the folder `out`; a line for each.

    reported: who has answered the open orders. troubles: what keeps the federation from going on.
    """
    (out / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    with (out / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*ORDER_COLUMNS, *METRICS))
        writer.writeheader()
        writer.writerows(msgspec.structs.asdict(row) for row in found.rows)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summarised(found, plan))))
    (out / "status.json").write_bytes(msgspec.json.format(msgspec.json.encode(status(found, set(reported), None, troubles))))
    return [
        f"{out / 'metrics.csv'}: one row per round and client",
        f"{out / 'summary.json'}: accuracies by the protocols of both papers",
        f"{out / 'status.json'}: what `fedserver status --json` prints",
        f"{out / 'plan.json'}: model, classes and settings",
    ]


def summarised(found: Snapshot, plan: Plan) -> summary.Summary:
    """What summary.json holds."""
    settings = found.settings
    return summary.summarise(found.rows, settings, plan.model.name, found.record.round, plan.task)


def _consistent_tensors(home: ServerHome, out: Path) -> list[str]:
    for attempt in range(ATTEMPTS):
        try:
            return write_state(home.snapshot(), home.open().blobs, out)
        except Damaged:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def write_state(found: Snapshot, blobs: Blobs, out: Path) -> list[str]:
    """The tensors of the state, as files in the folder `out`; a line for each. Errors: Damaged."""
    with scratch_blobs(out) as scratch:
        return list(_tensors(_Exported(found, blobs, scratch), out))


class _Exported:
    """The state as it is, read beside the server that may be running; what is generated goes to `scratch`."""

    def __init__(self, found: Snapshot, blobs: Blobs, scratch: Blobs) -> None:
        assert found.plan is not None  # noqa: S101 (who calls has looked)
        self._blobs, self._scratch = blobs, scratch
        self._slots = {(slot.part, slot.key): blob_of(slot) for slot in found.slots}
        self._engine = Engine(found.plan, found.slots, blobs, found.record.round, served=scratch)
        present = [device for device in found.devices if device.samples is not None and not device.revoked]
        self._clients = [device.name for device in present]
        self._founders = [device.name for device in present if device.founder]

    def copy(self, part: str, key: str, to: Path) -> bool:
        """A slot as a file of its own. False if there is none."""
        blob = self._slots.get((part, key))
        if blob is not None:
            self._blobs.check(blob)
            with to.open("wb") as file:
                file.writelines(read_frames(self._blobs.open(blob), 0))
        return blob is not None

    def own(self) -> Iterator[tuple[str, Tensors]]:
        """Each client and its own weights, all parts together; empty where all is shared."""
        for client, parts in self._engine.serve(self._clients, self._founders).items():
            found: Tensors = {}
            for part, blob in sorted(parts.items()):
                if part != "shared":
                    found |= read_tensors((self._scratch if blob.name.startswith(SERVED) else self._blobs).open(blob))
            yield client, found


def _tensors(state: _Exported, out: Path) -> Iterator[str]:
    if state.copy("shared", "value", out / "shared.safetensors"):
        yield f"{out / 'shared.safetensors'}: what all clients share"
    folder = out / "clients"
    folder.mkdir(exist_ok=True)
    written = 0
    for client, own in state.own():
        if own:
            write_tensors(folder / f"{client}.safetensors", own)
            written += 1
    if written:
        yield f"{folder}: each client's own weights, as the server would send them next ({written} files)"
    if any(state.copy(part, MATRICES, out / "attention.safetensors") for part in ("attended", "generated", "shared")):
        yield f"{out / 'attention.safetensors'}: who learned from whom in the last round"
    if state.copy("generated", NETWORK, out / "server.safetensors"):
        yield f"{out / 'server.safetensors'}: hypernetwork, embeddings and optimiser"
