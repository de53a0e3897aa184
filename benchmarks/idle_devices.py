"""Cost of idle devices: processor time and memory of a server to which many enrolled devices are connected that only beat.

    python -m benchmarks.idle_devices benchmarks/results/idle_devices.json 600 2500 10000

The devices are enrolled streams of this process, each with its certificate and its own TLS connection. The server waits for one
device more, so there is no plan. Memory is private memory above that of the server without devices. At the end the server is
started again, and the devices come back: then it has not enrolled them itself. SPAN_S: seconds of each measurement (60).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import msgspec

from attune.common import aio
from attune.common.exchange.messages import Beat, EnrolRequest, Hello, IssuedCertificate
from attune.common.exchange.protobuf import CONNECT, ENROL
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.common.plan import Profile
from benchmarks.machine import machine
from benchmarks.processes import BIN, START_S, running
from benchmarks.reliability import steady_bytes
from benchmarks.usage import cpu_s

PROFILE = Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5)
AT_ONCE = 16  # devices that connect at the same time
SPAN_S = float(os.environ.get("SPAN_S", "60"))
RETRY_S = 1.0
LEFT_S = 30.0  # until the connections of 10,000 devices that left at once have ended


class IdleDevice:
    """Enrolled device that connects and beats, and does nothing else."""

    def __init__(self, port: int, token: JoinToken, name: str) -> None:
        self.port, self._token, self._name = port, token, name
        self._key = new_key()
        self._issued: IssuedCertificate | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """Enrol, open the stream, and wait for the first beat; again, as a device does, where a busy server hangs up."""
        while True:
            try:
                return await self._enter()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _enter(self) -> None:
        if self._issued is None:
            async with self._channel(self._token.trust_anchor_pem(), self._token.bootstrap()) as channel:
                enrol = channel.unary_unary(ENROL.path, ENROL.request.write, ENROL.reply.read)
                request = EnrolRequest(self._name, csr_der(self._key, "idle"))
                self._issued = await enrol(request, wait_for_ready=True, timeout=300)
        self._open = self._channel(self._issued.ca_pem, Credential(self._key, self._issued.certificate_pem))
        connect = self._open.stream_stream(CONNECT.path, CONNECT.request.write, CONNECT.reply.read)
        self._call = connect(wait_for_ready=True)
        await self._call.write(Hello("idle", msgspec.json.encode(PROFILE)))
        first = await self._call.read()
        assert isinstance(first, Beat), first
        self._beat = first
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._speak())]

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._open.close(None)
        del self._call, self._open, self._tasks  # else they would keep the connection

    def _channel(self, root_pem: bytes, credential: Credential) -> grpc.aio.Channel:
        options = [*channel_options(root_pem), ("grpc.enable_retries", 0)]
        return grpc.aio.secure_channel(f"127.0.0.1:{self.port}", channel_credentials(root_pem, credential), options)

    async def _listen(self) -> None:
        """Take the pace of each beat, as a device does."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if isinstance(message, Beat) and message != self._beat:
                self._beat = message
                await self._call.write(message)

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(self._beat.every_s / 2)
            await self._call.write(self._beat)


class Fleet:
    """Idle devices, which enter a server in order."""

    def __init__(self, token: JoinToken) -> None:
        self._token, self._devices = token, list[IdleDevice]()
        self.rows: list[dict[str, Any]] = []

    async def measure(self, leg: str, port: int, pid: int, counts: list[int], empty_bytes: int) -> None:
        """Let as many devices enter as each of `counts` says, in ascending order, and add a row for each; then all leave."""
        gate, inside = asyncio.Semaphore(AT_ONCE), 0

        async def enter(device: IdleDevice) -> None:
            async with gate:
                await device.enter()

        for count in sorted(counts):
            self._devices += [IdleDevice(port, self._token, f"idle{number}") for number in range(len(self._devices), count)]
            more, begun = self._devices[inside:count], time.monotonic()
            for device in more:
                device.port = port
            await asyncio.gather(*map(enter, more))
            inside, entered_s = count, time.monotonic() - begun
            await asyncio.sleep(SPAN_S / 4)
            before, at = cpu_s(pid), time.monotonic()
            await asyncio.sleep(SPAN_S)
            cores = (cpu_s(pid) - before) / (time.monotonic() - at)
            memory = await asyncio.to_thread(steady_bytes, pid)
            row = {
                "leg": leg,
                "devices": count,
                "cores": round(cores, 3),
                "kib_a_device": round((memory - empty_bytes) / count / 1024, 1),
                "devices_that_entered_a_second": round(len(more) / entered_s, 1),
            }
            print(row, flush=True)
            self.rows.append(row)
        await asyncio.gather(*(device.leave() for device in self._devices))
        gc.collect()
        await asyncio.sleep(LEFT_S)
        left = (await asyncio.to_thread(steady_bytes, pid) - empty_bytes) / inside / 1024
        self.rows.append({"leg": leg, "devices": 0, "kib_of_each_that_left": round(left, 1)})
        print(self.rows[-1], flush=True)


async def legs(work: Path, counts: list[int]) -> list[dict[str, Any]]:
    """Let the devices enrol, and then come back to a server that was started again."""
    fleet: Fleet | None = None
    flags = ["--method", "fedavg", "--model", "mlr", "--min-clients", str(max(counts) + 1), "--join-uses", str(max(counts))]
    command = [str(BIN / "fedserver"), "--port", "0", "--host", "127.0.0.1", "--dashboard", "off", *flags]
    for leg in ("enrol", "come back"):
        with running("fedserver", command, work) as server:
            port = int(server.wait_for(r"listens on 127\.0\.0\.1:(\d+)", START_S)[1])
            fleet = fleet or Fleet(JoinToken.parse(server.wait_for(r"--token (\S+)", START_S)[1]))
            pid = server.process.pid
            await fleet.measure(leg, port, pid, counts, steady_bytes(pid))
    return fleet.rows if fleet else []


def main(out: Path, counts: list[int]) -> None:
    """Measure and write the file."""
    with tempfile.TemporaryDirectory() as work:
        rows = aio.run(legs(Path(work), counts))
    asked = f"SPAN_S={SPAN_S:g} python -m benchmarks.idle_devices benchmarks/results/{out.name} {' '.join(map(str, counts))}"
    result = {"command": asked, "machine": machine(), "span_s": SPAN_S, "load": os.getloadavg()[0], "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])) or [600, 2500])
