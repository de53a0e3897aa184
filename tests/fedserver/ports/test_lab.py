"""The lab's jobs: their arguments and results are values, and they need neither files nor a local path."""

import ast
import builtins
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attune.common import aio
from attune.common.exchange.messages import UploadTarget
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.collector import Unmasking
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import AcceptedUpdate, Report, Slot, Smaller
from attune.fedserver.executors import Executors
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import NO_VARIANTS, Arrived, RoundOutcome, Served, Started
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.stores.uploads import Uploads
from attune.simulation.memory import MemoryBlobs, MemoryStorage
from tests.fedserver.bench import plan

ROOT = Path(__file__).parents[3]
SMALL = {"width": 4, "heads": 1, "depth": 1}
METHODS = ["fedavg", "fedtp", "fedmcsa", "fedamp", "fedtp@small", "fedmcsa@small"]


def sent(value: Any, kind: Any) -> Any:
    """Return a value as it comes out of another process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


class FarLab:
    """Lab that gets all arguments, and returns all results, as bytes."""

    def __init__(self, lab: ThreadLab) -> None:
        self._lab = lab

    async def start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str] = NO_VARIANTS) -> Started:
        done = self._lab.start(sent(plan, Plan), sent(slots, list[Slot]), closed, sent(variants, dict[str, str]))
        return sent(await done, Started)

    async def vary(self, variants: Mapping[str, str]) -> None:
        await self._lab.vary(sent(variants, dict[str, str]))

    async def serve(self, clients: Sequence[str], founders: Sequence[str] = (), version: int | None = None) -> Served:
        return sent(await self._lab.serve(sent(clients, list[str]), sent(founders, list[str]), version), Served)

    async def describe(self, client: str, description: Sequence[float]) -> bool:
        return await self._lab.describe(client, sent(description, list[float]))

    async def cold_start(self, clients: Sequence[str]) -> Served:
        return sent(await self._lab.cold_start(sent(clients, list[str])), Served)

    async def pack(self, blobs: Sequence[Blob]) -> dict[str, Blob]:
        return sent(await self._lab.pack(sent(blobs, list[Blob])), dict[str, Blob])

    async def changes(self, clients: Sequence[str], parts: Sequence[str]) -> dict[str, Smaller]:
        return sent(await self._lab.changes(sent(clients, list[str]), sent(parts, list[str])), dict[str, Smaller])

    async def arrive(self, client: str, part: str, blob: Blob, encoding: str, served: bool, max_norm: float) -> Arrived:
        return sent(await self._lab.arrive(client, part, sent(blob, Blob), encoding, served, max_norm), Arrived)

    async def aggregate(
        self,
        entries: Mapping[str, AcceptedUpdate],
        founders: Sequence[str] = (),
        adaptation: AdaptationSpec | None = None,
        unmasking: Unmasking | None = None,
    ) -> RoundOutcome:
        spec = sent(adaptation, AdaptationSpec) if adaptation else None
        secrets = sent(unmasking, Unmasking) if unmasking else None
        done = self._lab.aggregate(sent(entries, dict[str, AcceptedUpdate]), sent(founders, list[str]), spec, secrets)
        return sent(await done, RoundOutcome)

    async def go_back(self, to: int) -> RoundOutcome:
        return sent(await self._lab.go_back(to), RoundOutcome)

    async def another_start(self) -> RoundOutcome:
        return sent(await self._lab.another_start(), RoundOutcome)

    async def settle(self, holders: Sequence[str] = ()) -> None:
        await self._lab.settle(sent(holders, list[str]))

    async def forget(self, oldest: int) -> None:
        await self._lab.forget(oldest)


def upload(blobs: Blobs, inbox: Inbox, uploads: Uploads, order: OrderId, part: str, tensors: dict[str, torch.Tensor]) -> Blob:
    """Upload a device's part, frame by frame."""
    scratch = MemoryBlobs()
    blob = write_tensors(partial(scratch.create, "made"), tensors)
    target = UploadTarget(str(order), part, blob.digest, blob.size)
    sink = uploads.sink(order.client, target, blob.size)
    uploads.write(order.client, part, sink, [scratch.get("made")])
    uploads.complete(order.client, part, sink)
    return uploads.take(order.client, part, blob.digest)


async def federation(storage: Storage, lab: ThreadLab, method: str) -> list[str]:
    """Run two rounds and an adaptation with a restart after each. Return digests of all served parts, and of the last state."""
    blobs = storage.blobs
    inbox, uploads = Inbox(blobs), Uploads(storage)
    method, _, variant = method.partition("@")
    fixed, variants = plan(method, "vit"), {"bob": variant} if variant else {}
    if variant:
        fixed = msgspec.structs.replace(fixed, variants={variant: msgspec.structs.replace(fixed.model, options=SMALL)})
    started = await lab.start(fixed, [], 0)
    await lab.vary(variants)
    slots = {(slot.part, slot.key): slot for slot in started.slots}
    await lab.settle()
    digests: list[str] = []
    for number in (1, 2, 3):
        served = await lab.serve(["ann", "bob"])
        digests += [blob.digest for parts in served.values() for blob in parts.values()]
        for client, parts in served.items():
            order, found, facts = OrderId("train", number, client), {}, {}
            for part, blob in parts.items():
                trained = {name: tensor * 0.5 + number for name, tensor in read_tensors(blobs.open(blob)).items()}
                uploaded = upload(blobs, inbox, uploads, order, part, trained)
                arrived = await lab.arrive(client, part, uploaded, "", True, 1e9)
                found[part], facts[part] = arrived.blob, arrived.facts
            row = Report(round=number, work="train", client=client, samples=number + len(client))
            inbox.accept(order, row, found, facts)
        entries = inbox.entries("train", number)
        own = [part for part in started.max_bytes if part != "shared"]
        adapting = number == 3 and own
        outcome = await lab.aggregate(entries, adaptation=AdaptationSpec((), tuple(own), False) if adapting else None)
        slots |= {(slot.part, slot.key): slot for slot in outcome.slots}
        await lab.settle()
        inbox.clear(number)
        assert (await lab.start(fixed, list(slots.values()), number, variants)).remade == []
    digests += [blob.digest for parts in (await lab.cold_start(["ann", "bob"])).values() for blob in parts.values()]
    return digests + [slot.digest for _, slot in sorted(slots.items())]


def run(storage: Storage, method: str, far: bool = False) -> list[str]:
    executors = Executors()
    try:
        lab: ThreadLab = ThreadLab(storage.blobs, executors, threads=1)
        return aio.run(federation(storage, FarLab(lab) if far else lab, method))
    finally:
        executors.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_without_files_and_far_away_every_bit_is_the_same(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_files = run(DiskStorage(tmp_path), method)
    assert len(set(in_files)) >= 4

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    for module, name in [(builtins, "open"), (os, "open"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "link")]:
        monkeypatch.setattr(module, name, refuse)
    in_memory = run(MemoryStorage(), method, far=True)
    monkeypatch.undo()
    assert in_memory == in_files


def test_core_and_lab_know_no_paths() -> None:
    for folder in ("fedserver/core", "fedserver/lab"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"Path", "open"}
            assert not names & {"pathlib", "shutil", "tempfile", "sqlite3"} and not used, path


def test_nothing_calls_around_the_lab() -> None:
    """Require that only the lab, and commands that look at a home without a server, make an engine."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fedserver").rglob("*.py")
        if "lab.engine" in path.read_text() and "lab" not in path.parts[len(ROOT.parts) :][1:2]
    }
    assert found == {"fedserver/view/export.py"}
