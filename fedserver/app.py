"""One run of the server: home, identity, port, coordinator; from the start to a signal or the end of the rounds."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from attune.common.durable import write_file
from attune.common.errors import PortInUse
from attune.common.models.options import cautions
from attune.common.pb import federation_pb2, federation_pb2_grpc
from attune.fedserver.core import planning
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import NOTHING_PERSONAL, Coordinator
from attune.fedserver.federation.updates import Updates
from attune.fedserver.home import Address, Home
from attune.fedserver.identity.registrar import LOCAL_TTL_S, LOCAL_USES, Registrar, install_operator, new_token
from attune.fedserver.identity.server_tls import server_options
from attune.fedserver.pb import admin_pb2, admin_pb2_grpc
from attune.fedserver.rpc.admin_service import AdminService
from attune.fedserver.rpc.auth import Auth
from attune.fedserver.rpc.blob_service import BlobService
from attune.fedserver.rpc.pulses import Pulses
from attune.fedserver.rpc.service import FederationService
from attune.fedserver.stores.sqlite import Store
from attune.fedserver.stores.uploads import Uploads

LOG = logging.getLogger("fedserver")
ANY_HOST, DEFAULT_PORT = "0.0.0.0", 50051  # noqa: S104
REFRESH_S = 3600.0
STOP_GRACE_S = 5.0  # for what is in flight when the server is told to stop
JOIN_USES, JOIN_TTL_S = 100, 86400.0
KEPT_JOIN_TOKENS = 8  # of those printed at a start; every live token costs a little at each handshake


@dataclass(frozen=True)
class Options:
    """What a start may say that is not a setting of the federation."""

    home: Path
    host: str | None  # None: where this home was served before
    port: int | None
    exit_when_done: bool
    say: Callable[[str], None]


async def run(options: Options, overrides: dict[str, Any]) -> None:
    """Serves until SIGINT, SIGTERM or, with exit_when_done, the end. Errors: AttuneError, each before or instead of serving."""
    home = Home(options.home)
    if not home.exists():
        planning.resolve(overrides)  # a misspelt first start leaves no home behind
    with home.locked():
        authority = home.create()
        store = Store(home.database)
        executors = Executors()
        try:
            merged = planning.reconcile(store.get("overrides"), overrides)
            settings = planning.resolve(merged)
            store.put("overrides", merged)
            registrar = Registrar(authority, store, settings.server.certificate_days)
            coordinator = Coordinator(home, store, settings, authority.fingerprint, executors)
            server = _server(settings, registrar, coordinator, store, executors, home)
            address = _listen(server, options, home.address(), registrar)
            install_operator(authority, store, home.operator)
            local = new_token(authority.public_key_compressed, store, LOCAL_USES, LOCAL_TTL_S, origin="local", keep=1)
            write_file(home.local_token, local.encode())
            join = new_token(
                authority.public_key_compressed, store, JOIN_USES, JOIN_TTL_S, origin="start", keep=KEPT_JOIN_TOKENS
            )
            registrar.refresh()
            await coordinator.start()
            await server.start()
            home.write_address(address)
            _greet(options, address, authority.short_fingerprint, join, settings)
            await _until_told(coordinator, registrar, options.exit_when_done)
            coordinator.streams.hang_up()
            await server.stop(STOP_GRACE_S)
            if coordinator.error is not None and (options.exit_when_done or coordinator.unusable.is_set()):
                raise coordinator.error
        finally:
            executors.shutdown()
            store.close()


def _server(
    settings: ResolvedSettings,
    registrar: Registrar,
    coordinator: Coordinator,
    store: Store,
    executors: Executors,
    home: Home,
) -> grpc.aio.Server:
    """The gRPC server with all its services, not listening yet."""
    auth, pulses = Auth(registrar), Pulses(settings.server.keepalive_s)
    server = grpc.aio.server(interceptors=[auth], options=server_options())
    uploads = Uploads(home.uploads)
    updates = Updates(coordinator, uploads, store, executors)
    federation_pb2_grpc.add_FederationServicer_to_server(
        FederationService(coordinator, updates, registrar, auth, pulses), server
    )
    server.add_generic_rpc_handlers((BlobService(coordinator.book, updates, uploads, auth, executors, pulses).handler(),))
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(coordinator, registrar, store), server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    services = [descriptor.full_name for file in (federation_pb2, admin_pb2, health_pb2) for descriptor in _services(file)]
    reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
    return server


def _listen(server: grpc.aio.Server, options: Options, before: Address | None, registrar: Registrar) -> Address:
    """Binds where the options say, else where this home was served before, for its devices look there. Errors: PortInUse."""
    host = options.host or (before.host if before else ANY_HOST)
    port = options.port if options.port is not None else (before.port if before else DEFAULT_PORT)
    try:
        bound = server.add_secure_port(f"{host}:{port}", registrar.tls.credentials)
    except RuntimeError:
        raise PortInUse(
            f"port {port} on {host} is in use, or {host} is not an address of this machine: choose another"
        ) from None
    return Address(host, bound, os.getpid())


def _services(file: Any) -> list[Any]:
    return list(file.DESCRIPTOR.services_by_name.values())


def _greet(options: Options, address: Address, fingerprint: str, join: str, settings: ResolvedSettings) -> None:
    host = socket.gethostname() if address.host in (ANY_HOST, "[::]") else address.host
    options.say(f"fedserver listens on {address.host}:{address.port} (home {options.home})")
    options.say(f"certificate authority {fingerprint}")
    options.say(
        f"method {settings.method.name}, {settings.round.rounds} rounds; waiting for {settings.round.min_clients} devices"
    )
    if settings.round.adapt_rounds and settings.adaptation is None:
        options.say(NOTHING_PERSONAL.format(settings.method.name))
    for warning in cautions(settings.model_name, settings.model_options):
        options.say(f"warning: {warning}")
    options.say(f"on a device: fedclient join --server {host}:{address.port} --token {join}")


async def _until_told(coordinator: Coordinator, registrar: Registrar, exit_when_done: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    waits: set[asyncio.Task[Any]] = {asyncio.create_task(stop.wait()), asyncio.create_task(coordinator.unusable.wait())}
    if exit_when_done:
        waits.add(asyncio.create_task(coordinator.goodbye()))
    while True:
        done, _ = await asyncio.wait(waits, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            break
        registrar.refresh()
    for task in waits:
        task.cancel()
