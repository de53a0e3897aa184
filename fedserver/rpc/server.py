"""gRPC server of a federation: one port, mutual TLS, services behind the authorisation by certificate, and health.

The health service has limits, so that a slow watcher holds up no other call; it follows the watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer
from grpc_reflection.v1alpha import reflection

from attune.common import hardware
from attune.common.config import ServerSettings
from attune.common.errors import LedgerBusy, LimitExceeded, PortInUse, TooMany
from attune.common.exchange.protobuf import SERVICES
from attune.fedserver import process
from attune.fedserver.core.advice import HANDSHAKE
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.refusals import Refusals
from attune.fedserver.federation.steps import DOOR, try_stores
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.identity.server_tls import server_options
from attune.fedserver.pb import admin_pb2, admin_pb2_grpc
from attune.fedserver.ports.storage import Storage
from attune.fedserver.process import raise_limit
from attune.fedserver.rpc.admin_service import AdminService
from attune.fedserver.rpc.auth import Auth, caller
from attune.fedserver.rpc.connection_limiter import PAUSE_S, Bounds, ConnectionLimiter, ConnectionReport
from attune.fedserver.rpc.pulses import DevicePulses
from attune.fedserver.rpc.service import BlobService, FederationService

WATCHES_A_CALLER, WATCHES = 2, 256


class Health(HealthServicer):  # type: ignore[misc]
    """Health of the whole server (the service ""). There are no other services."""

    def __init__(self) -> None:
        self._status = pb.HealthCheckResponse.SERVING
        self._changed = asyncio.Event()
        self._watches: Counter[str] = Counter()

    def set(self, serving: bool) -> None:
        self._status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:  # noqa: N802
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._status)

    async def Watch(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """Yield the present status, then each change that there is time for.

        Raises:
            TooMany: The caller, or all callers together, watch too often.
        """
        who = caller().fingerprint
        if self._watches[who] >= WATCHES_A_CALLER or self._watches.total() >= WATCHES:
            raise TooMany(f"{caller().name} watches the health of this server {WATCHES_A_CALLER} times already, or too many do")
        self._watches[who] += 1
        try:
            said = None
            while True:
                changed, now = self._changed, self._status
                if request.service:
                    now = pb.HealthCheckResponse.SERVICE_UNKNOWN
                if now != said:
                    yield pb.HealthCheckResponse(status=now)
                    said = now
                await changed.wait()
        finally:
            self._watches[who] -= 1
            if not self._watches[who]:
                del self._watches[who]


WATCHDOG = "watchdog"  # the name of a trouble
LOOKS = 4  # in the span that it allows


async def watch(coordinator: Coordinator, limit_s: float, tell: Callable[[bool], None]) -> None:
    """Call `tell` with False when a step makes no progress for `limit_s`, and with True when it does again. This never ends."""
    healthy = True
    while True:
        await asyncio.sleep(limit_s / LOOKS)
        stuck_s = coordinator.stuck_s
        if stuck_s >= limit_s:
            phase = coordinator.state.round.record.phase
            coordinator.state.troubles.set(WATCHDOG, f"the step {phase} has made no headway for {limit_s:.0f} s or longer")
        else:
            coordinator.state.troubles.clear(WATCHDOG)
        if healthy != (stuck_s < limit_s):
            healthy = not healthy
            tell(healthy)


NEWS_S = 1.0  # between two looks for decisions that were made on other machines
NEW_CONNECTIONS = "new connections"  # a trouble
MANY_ENDED = 64  # connections: 6 MiB, which is worth a look at all free blocks
STOP_GRACE_S = 5.0  # for what is in flight when the server is told to stop


class GrpcServer:
    """Server and its port. It listens after `listen`, and answers while `open` is entered."""

    def __init__(
        self,
        settings: ServerSettings,
        registrar: Registrar,
        admin: FederationAdmin,
        refusals: Refusals,
        coordinator: Coordinator,
        storage: Storage,
        executors: Executors,
    ) -> None:
        self._settings, self._registrar, self._coordinator = settings, registrar, coordinator
        state, members, updates = coordinator.state, coordinator.members, coordinator.updates
        self._health, self._refusals = Health(), refusals
        self._connections, self._port = ConnectionLimiter(Bounds.of(raise_limit()), settings.handshake_s), 0
        self._cut = False  # connections were cut since memory was returned
        self._mapped = self._returned = 0  # least size of a block of its own; ended connections whose memory was returned
        self._pulses = pulses = DevicePulses(settings.keepalive_s)
        options = server_options(handshake_s=settings.handshake_s, connections=self._connections.bounds.connections)
        auth = Auth(registrar, state.troubles, refusals, self._connections, coordinator.ready)
        self._server = server = grpc.aio.server(interceptors=[auth], options=options)
        federation = FederationService(members, updates, registrar, pulses, state.turns)
        transfers = BlobService(state.book, storage.blobs, updates, executors, pulses, state.activity)
        server.add_generic_rpc_handlers((federation.handler(), transfers.handler()))
        self._storage, self._operators = storage, AdminService(coordinator, registrar, admin, storage.ledger)
        admin_pb2_grpc.add_AdminServicer_to_server(self._operators, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        files: list[Any] = [admin_pb2, health_pb2]
        names = [service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection([*SERVICES, *names, reflection.SERVICE_NAME], server)

    def listen(self, host: str, port: int) -> int:
        """Bind the port, or a free one for 0, and return it.

        Raises:
            PortInUse: The port is in use, or the host is no address of this machine.
        """
        try:
            self._port = int(self._server.add_secure_port(f"{host}:{port}", self._registrar.tls.credentials))
        except RuntimeError:
            raise PortInUse(
                f"port {port} on {host} is in use, or {host} is not an address of this machine: choose another"
            ) from None
        return self._port

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer calls during the block. At its end streams are closed, and calls in flight have a moment to finish."""
        self._health.set(False)
        await self._server.start()
        watches = {
            "the watch on connections": self._guard,
            "the watch on steps": self._watch,
            "the watch on other machines' decisions": self._follow,
            "the watch on stores": self._try_stores,
            "the watch on streams": self._pulses.run,
        }
        keep_up = self._coordinator.state.troubles.keep_up
        watching = [asyncio.create_task(keep_up(step, watch)) for step, watch in watches.items()]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            self._coordinator.state.streams.hang_up()
            await self._server.stop(STOP_GRACE_S)

    async def _watch(self) -> None:
        await self._coordinator.ready.wait()
        self._health.set(True)
        if self._settings.watchdog_s:
            await watch(self._coordinator, self._settings.watchdog_s, self._health.set)

    async def _follow(self) -> None:
        """Read the ledger again when a command on another machine has made a decision, such as to revoke a device.

        Where another server may take over, no device stays with one that has lost the ledger.
        """
        known: str | None = None
        while True:
            await asyncio.sleep(NEWS_S)
            try:
                news = await asyncio.to_thread(self._storage.news)
                if news is None:
                    return
                if news != known:
                    await self._operators.wake()
                    known = news
            except LedgerBusy as error:
                self._coordinator.state.troubles.met(error)
                self._coordinator.state.streams.hang_up()

    async def _try_stores(self) -> None:
        state, most = self._coordinator.state, self._settings.max_blob_bytes
        while True:
            await asyncio.sleep(NEWS_S)
            largest = min(most, max(state.max_bytes.values(), default=0))
            await try_stores(state.troubles, self._storage, largest)

    async def _guard(self) -> None:
        """Enforce the limits on connections, in a thread."""
        loop, over = asyncio.get_running_loop(), threading.Event()

        def begun() -> int:
            return self._registrar.tls.handshakes

        def tell(look: ConnectionReport | OSError, begun: int) -> None:
            loop.call_soon_threadsafe(self._looked, look, begun)

        try:
            await asyncio.to_thread(self._connections.watch, self._port, begun, over, tell)
        finally:
            over.set()

    def _looked(self, look: ConnectionReport | OSError, begun: int) -> None:
        """Tell the operator which connections were dropped.

        The memory of those that have ended goes back to the system, and that of idle ones is kept small.
        """
        # Before there is a plan no frames travel, and many devices enrol.
        least = process.OWN_MAPPING_BYTES if self._coordinator.state.plan else process.ENROLLING_MAPPING_BYTES
        if least != self._mapped:
            process.map_blocks(least)
            self._mapped = least
        if isinstance(look, OSError):
            self._coordinator.state.troubles.set(DOOR, str(look.strerror))
            return
        self._coordinator.state.troubles.clear(DOOR)
        # To look for free blocks stops the process for up to seconds while a flood fills its memory.
        self._cut |= bool(look.too_much)
        calm = not look.too_much and not look.paused
        if calm and self._connections.ended - self._returned >= (1 if self._cut else MANY_ENDED):
            self._returned, self._cut = self._connections.ended, False
            asyncio.get_running_loop().run_in_executor(None, hardware.return_free_memory)
        for kind, dropped, why in (
            (HANDSHAKE, look.too_long, "connections that had not finished the handshake were dropped"),
            (TooMany.kind, look.too_many, "connections of one certificate were dropped"),
            (LimitExceeded.kind, look.too_much, "connections were dropped whose bytes belong to no message"),
        ):
            for address, number in Counter(sock.peer[0] for sock in dropped).items():
                self._refusals.tell(kind, f"{number} {why}", address)
        waits = f"they wait for {PAUSE_S:g} s, because of a flood; open ones go on" if look.paused else ""
        self._coordinator.state.troubles.show(NEW_CONNECTIONS, waits)
        if self._connections.failing(begun, look.unfinished, time.monotonic()):
            self._refusals.tell(HANDSHAKE, "connections ended before their first call", "somebody")
