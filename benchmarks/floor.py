"""Lower bound of the time for a round's bytes on this machine: processor time per byte of each path, and their sum.

A round of N devices whose parts have B bytes (docs/performance.md) sends 2 N B bytes through gRPC over mutual TLS, hashes
(3 N + 1) B, writes (2 N + 1) B to the page cache, and reads 4 N B from it. The sum, spread over all cores, is a time that no
round of this design can go below, even if everything overlaps. Python, torch, syncs and waiting come on top.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import grpc

from attune.common import aio
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.wire.blobs import FRAME_BYTES
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import server_options
from attune.fedserver.process import bound_heaps
from benchmarks.machine import machine
from benchmarks.tls import raw_tls_bytes_per_s

TOTAL_BYTES = 1 << 28
REPEATS = 5
ROWS = ((2, 1_000_000), (8, 1_000_000), (4, 25_000_000))  # devices, float32 values


def per_byte(work: Callable[[], object], size: int = TOTAL_BYTES) -> float:
    """Return this process's processor seconds per byte, the median of REPEATS."""
    found = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        found.append((time.process_time() - began_s) / size)
    return statistics.median(found)


async def _serve(ca: bytes, key: bytes, certificate: bytes, pipe: Connection) -> None:
    frame = os.urandom(FRAME_BYTES)

    async def down(request: bytes, context: Any) -> None:
        for _ in range(TOTAL_BYTES // FRAME_BYTES):
            await context.write(frame)

    async def up(frames: Any, context: Any) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            pass
        return b"done"

    server = grpc.aio.server(options=server_options())
    handlers = {
        "Down": grpc.unary_stream_rpc_method_handler(down, None, None),
        "Up": grpc.stream_unary_rpc_method_handler(up, None, None),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
    await server.start()
    pipe.send(port)
    while not pipe.poll():  # noqa: ASYNC110 (a pipe tells nobody)
        await asyncio.sleep(0.05)
    pipe.send(time.process_time())
    await server.stop(None)


def _server(ca: bytes, key: bytes, certificate: bytes, pipe: Connection) -> None:
    bound_heaps()
    began_s = time.process_time()
    aio.run(_serve(ca, key, certificate, pipe))
    pipe.send(began_s)


async def _both_ways(port: int, ca: bytes, credential: Credential) -> None:
    credentials = channel_credentials(ca, credential)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, list(channel_options(ca))) as channel:
        download = channel.unary_stream("/floor/Down")(b"")
        while await download.read() is not grpc.aio.EOF:
            pass
        upload, frame = channel.stream_unary("/floor/Up")(), os.urandom(FRAME_BYTES)
        for _ in range(TOTAL_BYTES // FRAME_BYTES):
            await upload.write(frame)
        await upload.done_writing()
        await upload


def transport_per_byte() -> float:
    """Return the processor seconds of both sides per byte through grpc.aio and mutual TLS, the mean of both directions."""
    with tempfile.TemporaryDirectory() as folder:
        authority, key = Authority.create(Path(folder) / "authority"), new_key()
        credential = Credential(key, authority.issue_device(csr_der(key, "floor"), "floor", 1.0))
        shown, (here, there) = authority.issue_server(), multiprocessing.Pipe()
        arguments = (authority.certificate_pem, shown.key_pem, shown.certificate_pem, there)
        server = multiprocessing.get_context("spawn").Process(target=_server, args=arguments)
        server.start()
        port = here.recv()
        device_s = time.process_time()
        aio.run(_both_ways(port, authority.certificate_pem, credential))
        device_s = time.process_time() - device_s
        here.send(None)
        server_s = here.recv() - here.recv()
        server.join()
    return float(device_s + server_s) / (2 * TOTAL_BYTES)


def plain_tls_per_byte() -> float:
    """Return the processor seconds of both sides per byte through a TLS socket of Python's ssl module."""

    def spent_s() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime

    began_s = spent_s()
    raw_tls_bytes_per_s(TOTAL_BYTES)
    return (spent_s() - began_s) / TOTAL_BYTES


def paths() -> dict[str, float]:
    """Return the processor seconds per byte of each path."""
    data = memoryview(bytearray(os.urandom(FRAME_BYTES) * (TOTAL_BYTES // FRAME_BYTES)))
    frames = [data[at : at + FRAME_BYTES] for at in range(0, TOTAL_BYTES, FRAME_BYTES)]
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            os.ftruncate(file.fileno(), 0)
            for number, frame in enumerate(frames):
                os.pwrite(file.fileno(), frame, number * FRAME_BYTES)

        def read() -> None:
            for number in range(len(frames)):
                os.preadv(file.fileno(), [buffer], number * FRAME_BYTES)

        def sha256() -> None:
            digest = hashlib.sha256()
            for frame in frames:
                digest.update(frame)

        buffer = bytearray(FRAME_BYTES)
        return {
            "transport": transport_per_byte(),
            "hash": per_byte(sha256),
            "write": per_byte(write),
            "read": per_byte(read),
        }


def floor_s(costs: dict[str, float], devices: int, part_bytes: int, cores: int) -> dict[str, float]:
    """Return the processor seconds of each path of a round, and `floor`: their sum divided by all cores."""
    times = {"transport": 2 * devices, "hash": 3 * devices + 1, "write": 2 * devices + 1, "read": 4 * devices}
    spent = {path: times[path] * part_bytes * costs[path] for path in times}
    return {path: round(value, 4) for path, value in (spent | {"floor": sum(spent.values()) / cores}).items()}


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A JSON file.")
def main(out: Path) -> None:
    """Measure the paths, and write the lower bound of some rounds."""
    costs, cores = paths(), os.cpu_count() or 1
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.floor {' '.join(sys.argv[1:])}",
        "machine": machine(),
        "raw_tls_bytes_per_s": round(raw_tls_bytes_per_s()),
        "processor_s_per_gib": {path: round(cost * 2**30, 4) for path, cost in costs.items()},
        "plain_tls_processor_s_per_gib": round(plain_tls_per_byte() * 2**30, 4),
        "rows": [
            {"clients": devices, "parameters": parameters} | floor_s(costs, devices, 4 * parameters, cores)
            for devices, parameters in ROWS
        ],
    }
    out.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
