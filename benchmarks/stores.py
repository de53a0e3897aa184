"""Cost of an update and of a commit in SQLite and a folder, and in PostgreSQL and S3.

`python -m benchmarks.stores --ledger postgresql://... --blobs s3://...` with an empty database and prefix. Each figure is the
median of single calls, in ms, while nothing else runs on the stores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import click
import msgspec

from attune.common import aio
from attune.common.wire.digest import digest_of
from attune.fedserver.core.messages import OrderId, Record
from attune.fedserver.core.records import Report, Slot
from attune.fedserver.home import ServerHome, StoragePlace
from attune.fedserver.ports.ledger import Certificate
from attune.fedserver.ports.storage import HomeStorage
from attune.fedserver.stores.inbox import Inbox
from benchmarks.machine import machine

TIMES, DEVICES, BYTES = 30, 100, 1 << 20
RESULTS = Path(__file__).parent / "results" / "stores.json"


async def timed(work: Callable[[int], Awaitable[object]]) -> float:
    """Return the median time of a call, in ms."""
    took = []
    for number in range(TIMES):
        began = time.perf_counter()
        await work(number)
        took.append(1000 * (time.perf_counter() - began))
    return round(median(took), 2)


async def measure(storage: HomeStorage) -> dict[str, float]:
    """Return the cost of each kind of call."""
    storage.create()
    async with storage as opened:
        ledger, blobs, inbox = opened.ledger, opened.blobs, Inbox(opened.blobs)
        for number in range(DEVICES):
            await ledger.enrol(f"d{number}", f"k{number}", Certificate(f"f{number}", f"d{number}", "device", 1e9), 1.0)

        async def accept(number: int) -> None:
            data = number.to_bytes(4, "big") * (BYTES // 4)
            growing = opened.spool.grow(f"d{number}/shared", digest_of(data), BYTES)
            growing.append(memoryview(data))
            order = OrderId("train", 1, f"d{number}")
            inbox.accept(order, Report(round=1, work="train", client=f"d{number}"), {"shared": growing.seal()})

        async def commit(number: int) -> None:
            rows = [Report(round=number, work="train", client=f"d{device}") for device in range(DEVICES)]
            marks = {row.client: {"contributed": number} for row in rows}
            await ledger.commit_round(Record(round=number), [Slot("shared", "value", "file", "d", 1)], rows, marks)

        async def read(number: int) -> None:
            for entry in inbox.entries("train", 1).values():
                blobs.open(entry.parts["shared"]).close()

        return {
            "whose certificate it is": await timed(lambda number: ledger.certificate(f"f{number}")),
            "a change of the record": await timed(lambda number: ledger.put_record(Record(round=number))),
            "an update of 1 MiB accepted": await timed(accept),
            "30 updates opened": await timed(read),
            "a round of 100 devices committed": await timed(commit),
        }


@click.command()
@click.option("--ledger", required=True)
@click.option("--blobs", required=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(ledger: str, blobs: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folder = aio.run(measure(ServerHome(Path(one)).open()))
        remote = aio.run(measure(ServerHome(Path(other), StoragePlace(ledger, blobs)).open()))
    result = {"machine": machine(), "folder": folder, "PostgreSQL and S3": remote}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    click.echo(out.read_text())


if __name__ == "__main__":
    main()
