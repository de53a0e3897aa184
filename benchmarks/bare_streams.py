"""Memory of bare streams: a gRPC server with the same TLS and options as ours, whose handler only waits.

    python -m benchmarks.bare_streams benchmarks/results/bare_streams.json 300

What a device costs above this is the server's own. Memory is private memory above that of the server without connections.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from attune.common import aio
from attune.common.exchange.messages import Hello
from attune.common.exchange.protobuf import CONNECT, FEDERATION
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, server_options
from benchmarks.machine import machine
from benchmarks.reliability import steady_bytes


def serve(folder: Path, told: Connection) -> None:
    """Serve until killed, in a process of its own, and send the port."""

    async def connect(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()
        await context.write(b"")
        await asyncio.Event().wait()

    async def main() -> None:
        authority = Authority.load(folder)
        server = grpc.aio.server(options=server_options())
        handlers = {CONNECT.name: grpc.stream_stream_rpc_method_handler(connect, None, None)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FEDERATION, handlers),))
        tls = LiveServerCredentials([authority.certificate_pem], authority.issue_server())
        port = server.add_secure_port("127.0.0.1:0", tls.credentials)
        await server.start()
        told.send(port)
        await asyncio.Event().wait()

    aio.run(main())


async def opened(authority: Authority, port: int, number: int) -> tuple[grpc.aio.Channel, grpc.aio.StreamStreamCall]:
    """Return an open stream over a TLS connection of its own."""
    key = new_key()
    credential = Credential(key, authority.issue_device(csr_der(key, "idle"), f"idle{number}", 30.0))
    root_pem = authority.certificate_pem
    options = [*channel_options(root_pem), ("grpc.enable_retries", 0)]
    channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials(root_pem, credential), options)
    call = channel.stream_stream(CONNECT.path, CONNECT.request.write, None)(wait_for_ready=True)
    await call.write(Hello("idle", b"{}"))
    await call.read()
    return channel, call


async def measured(authority: Authority, port: int, pid: int, count: int) -> float:
    """Return KiB of each stream."""
    before = steady_bytes(pid)
    streams = [await opened(authority, port, number) for number in range(count)]
    await asyncio.sleep(5)
    kib = (await asyncio.to_thread(steady_bytes, pid) - before) / count / 1024
    for channel, call in streams:
        call.cancel()
        await channel.close(None)
    return round(kib, 1)


def main(out: Path, count: int) -> None:
    """Measure and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder) / "authority")
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        server = context.Process(target=serve, args=(Path(folder) / "authority", there), daemon=True)
        server.start()
        assert server.pid is not None
        try:
            kib = aio.run(measured(authority, here.recv(), server.pid, count))
        finally:
            server.kill()
    asked = f"python -m benchmarks.bare_streams benchmarks/results/{out.name} {count}"
    result = {"command": asked, "machine": machine(), "load": os.getloadavg()[0], "streams": count, "kib_a_stream": kib}
    print(result)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
