"""One run of the server: home, identity, port, coordinator; from the start to a signal or the end of the rounds."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attune.common.durable import write_file
from attune.common.errors import AttuneError, LedgerBusy
from attune.common.faults import SERVER, fail_at
from attune.common.models.options import cautions
from attune.common.supervisor import supervised
from attune.common.text import listed
from attune.fedserver import fleet_race, logs, process, runs
from attune.fedserver.consent import check_consent, code_in, keep_consent
from attune.fedserver.core import planning
from attune.fedserver.core.client_privacy import check_secret
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.executors import Executors
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.members import NOTHING_PERSONAL
from attune.fedserver.federation.refusals import Refusals
from attune.fedserver.federation.steps import Clock
from attune.fedserver.fleet_race import Turn
from attune.fedserver.home import ServedAddress, ServerHome, StoragePlace
from attune.fedserver.identity import trust
from attune.fedserver.identity.admin import AT_START, FOR_LOCAL, FederationAdmin, user
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.bound_secrets import bind_secrets, check_secrets
from attune.fedserver.identity.registrar import LOCAL_TTL_S, LOCAL_USES, Registrar, install_operator
from attune.fedserver.lab.client_noise import secret_of
from attune.fedserver.lab.declared import check_declared
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.storage import Storage
from attune.fedserver.rpc.server import GrpcServer
from attune.seams import NeverServed, Running, only_server, page

LOG = logging.getLogger("fedserver")
ANY_HOST, DEFAULT_PORT = "0.0.0.0", 50051  # noqa: S104
REFRESH_S = 30.0  # between two looks whether tokens have ended, and whether a clock that was set makes a new certificate due
STEP_S, JOIN_TTL_S = 0.1, 86400.0  # between two looks whether the devices have left; life of the printed token
GOODBYE_S, RETURN_S = 10.0, 60.0  # for devices that know the end; for devices to come back to the run that has won a race
KEPT_JOIN_TOKENS = 8  # of those printed at a start; every live token costs a little at each handshake


@dataclass(frozen=True)
class ServerOptions:
    """Options of a start that are no settings of the federation."""

    home: Path
    host: str | None  # None: where this home was served before
    port: int | None
    exit_when_done: bool
    say: Callable[[str], None]
    dashboard: str | None = None  # HOST:PORT, "off", or None: where it was before, else on this machine alone
    clock: Clock = Clock()  # noqa: RUF009 - it is immutable
    join_uses: int = 1  # how many devices the printed token admits
    storage: StoragePlace | None = None  # where ledger and blobs are; None: where they were before, else in the home
    is_first: bool = True  # whether this process has served no leg of a race before
    allow_code: tuple[str, ...] = ()  # code that the home may bring, by name


@dataclass(frozen=True)
class _Opened:
    """A home that this process alone has open, and what works on its state. `overrides`: of this start, over those before."""

    home: ServerHome
    authority: Authority
    storage: Storage
    lab: ThreadLab
    executors: Executors
    overrides: dict[str, Any]
    settings: ResolvedSettings
    turn: Turn | None  # of a race

    def admin(self, who: str) -> FederationAdmin:
        return FederationAdmin(self.storage.ledger, who)


async def run(options: ServerOptions, overrides: dict[str, Any]) -> None:
    """Serve until SIGINT, SIGTERM or, with `exit_when_done`, the end.

    Raises:
        AttuneError: Before or instead of serving.
    """
    home = ServerHome(options.home, options.storage)
    home.check()
    if not home.exists():
        # A first start that cannot work leaves no home behind.
        first = planning.resolve(fleet_race.first_settings(overrides) if fleet_race.is_asked_for(overrides) else overrides)
        check_secret(first.privacy)
        for line in await asyncio.to_thread(check_declared, first):
            options.say(f"warning: {line}")
    elif home.storage_place() or options.storage:  # before it waits as a standby
        snapshot = home.snapshot()
        check_consent(home, snapshot, {*options.allow_code, *code_in(overrides)})
        check_secrets(snapshot.commitments, home.authority, home.open().blobs)
    signalled = _signals()
    try:
        goes_on = True
        while goes_on:
            async with _opened(options, home, overrides, signalled) as opened:
                goes_on = await _serve(options, opened, signalled)
            served = home.address()  # devices look for the next leg at the same port, which a start may have drawn
            options = replace(options, is_first=False, port=served.port if served else options.port)
    except NeverServed:
        return
    except Exception as error:
        LOG.error("stopping: %s", error)
        raise


@asynccontextmanager
async def _opened(
    options: ServerOptions, home: ServerHome, overrides: dict[str, Any], signalled: asyncio.Future[str]
) -> AsyncIterator[_Opened]:
    """Open the home during the block.

    Raises:
        HomeMismatch: The home is damaged, or of another federation.
        HomeBusy: A server runs on it.
        SettingError: A setting cannot be.
        NeverServed: A signal came before.
    """
    async with only_server(home, _address(options, home.address()), options.dashboard, options.say, signalled):
        home.check()  # another server may have begun meanwhile
        home.create()
        storage, executors = home.open(), Executors()
        try:
            await asyncio.to_thread(storage.check_ledger)
            for line in await trust.settle(storage):
                options.say(f"warning: {line}; repaired from the audit log as far as it goes (`fedserver audit`)")
            snapshot = await storage.ledger.snapshot()
            check_consent(home, snapshot, {*options.allow_code, *code_in(overrides)})
            await runs.tidy(storage, snapshot)
            turn = await fleet_race.turn_of(home, storage, overrides)
            if turn is not None:
                snapshot, overrides = await storage.ledger.snapshot(), turn.overrides
            merged = planning.reconcile(snapshot.overrides, overrides)
            check_secrets(snapshot.commitments, home.authority, storage.blobs)
            authority = home.open_authority()
            settings = replace(planning.resolve(merged), until=turn.until if turn else None)
            check_secret(settings.privacy)
            if settings.privacy.on_server:
                secret_of(storage.blobs)
            await bind_secrets(storage, snapshot.commitments, home.authority, settings.privacy.on_server)
            storage.bound_cache(settings.server.cache_bytes)
            storage.blobs.sweep()
            server = settings.server
            lab = ThreadLab(storage.blobs, executors, server.threads, server.max_model_bytes, server.device)
            yield _Opened(home, authority, storage, lab, executors, merged, settings, turn)
        finally:
            executors.shutdown()
            await storage.close()


async def _serve(options: ServerOptions, opened: _Opened, signalled: asyncio.Future[str]) -> bool:
    """Serve until a signal, the end, or the end of a leg of a race. Return whether another leg follows."""
    turn, ledger = opened.turn, opened.storage.ledger
    home, authority, settings = opened.home, opened.authority, opened.settings
    registrar = Registrar(authority, ledger, settings.server.certificate_days)
    state = FederationState(opened.storage, opened.lab, settings, opened.executors, options.clock)
    coordinator = Coordinator(state, authority.fingerprint)
    grpc_server = GrpcServer(
        settings.server, registrar, opened.admin("operator over the network"), Refusals(ledger), coordinator, opened.storage,
        opened.executors,
    )  # fmt: skip
    address = _address(options, home.address())
    address.port = grpc_server.listen(address.host, address.port)
    join = await _begun(options, opened)
    await registrar.refresh()
    snapshot = await state.restore()
    resumed = coordinator.resume(snapshot)
    logs.follow(lambda: state.round.record.open_orders[1])
    try:
        # While the lab takes up its state, the devices of a server that died shake hands again.
        async with grpc_server.open():
            process.keep_what_has_begun()
            home.write_address(address)
            with page(home, options.dashboard, address, settings.server, Running(coordinator, registrar, opened.admin)) as url:
                if turn is not None:
                    options.say(turn.words())
                if options.is_first:
                    _greet(options, address, authority.short_fingerprint, join, settings, url)
                async with supervised(lambda: state.line):
                    leg = await _until(signalled, resumed, coordinator, registrar, options.exit_when_done, turn)
    finally:  # also after an error of this block: the turn under way must not meet a closed ledger
        await coordinator.stop()
    if turn is not None and leg is not None and not signalled.done():
        race = await fleet_race.end_leg(ledger, turn, coordinator, leg.result())
        for line in fleet_race.new_words(turn.race, race):
            options.say(line)
        return True
    if coordinator.error is not None and (options.exit_when_done or coordinator.unusable.is_set()):
        raise coordinator.error
    if signalled.done():
        LOG.info("stopping: %s; what is accepted is kept, and the next start goes on", signalled.result())
    else:
        LOG.info("stopping: all rounds are closed, and the devices have left (--exit-when-done)")
    return False


async def _begun(options: ServerOptions, opened: _Opened) -> str:
    """Bind the home to its settings, and return the join token to print. Only a start that has its port may do this."""
    if opened.turn is not None:  # before the settings, which are those of its first run alone
        await opened.storage.ledger.set_race(opened.turn.race)
    starting = opened.admin(f"operator {user()}, start of the server")
    await starting.set_settings(opened.overrides)
    keep_consent(opened.home, opened.authority.fingerprint, code_in(opened.overrides))
    fail_at(SERVER, 0, "settings-written")
    await install_operator(opened.authority, opened.storage.ledger, opened.home.operator)
    if not options.is_first:
        return ""  # the tokens of the first leg stay
    key = opened.authority.public_key_compressed
    local = await starting.new_token(key, LOCAL_USES, LOCAL_TTL_S, origin=FOR_LOCAL, keep=1)
    write_file(opened.home.local_token, local.encode())
    return await starting.new_token(key, options.join_uses, JOIN_TTL_S, origin=AT_START, keep=KEPT_JOIN_TOKENS)


def _address(options: ServerOptions, before: ServedAddress | None) -> ServedAddress:
    """Return host and port of the options, else those where this home was served before, for its devices look there."""
    before = before or ServedAddress(ANY_HOST, DEFAULT_PORT, 0)
    return ServedAddress(options.host or before.host, before.port if options.port is None else options.port, os.getpid())


def _greet(
    options: ServerOptions,
    address: ServedAddress,
    fingerprint: str,
    join: str,
    settings: ResolvedSettings,
    dashboard: str | None,
) -> None:
    options.say(f"fedserver listens on {address.host}:{address.port} (home {options.home})")
    options.say(f"certificate authority {fingerprint}")
    work = f"method {settings.method.name}, {settings.round.rounds} rounds" if settings.round.given is None else "an evaluation"
    options.say(f"{work}; waiting for {settings.round.min_clients} devices")
    if settings.round.adapt_rounds and settings.adaptation is None:
        options.say(NOTHING_PERSONAL.format(settings.method.name))
    for warning in cautions(settings.model_name, settings.model_options):
        options.say(f"warning: {warning}")
    if dashboard is not None:
        options.say(f"dashboard {dashboard}")
    options.say(f"on a device: fedclient join --server {address.joined(settings.server.advertise)} --token {join}")
    admits = "one device" if options.join_uses == 1 else f"{options.join_uses} devices"
    options.say(f"this token admits {admits}, for a day; for more devices: fedserver token --uses N")


def _signals() -> asyncio.Future[str]:
    """Return a future that gets the name of the first SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[str] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not signalled.done():
            signalled.set_result(number.name)

    if threading.current_thread() is threading.main_thread():  # others cannot hear signals
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, note, number)
    return signalled


async def _until(
    signalled: asyncio.Future[str],
    resumed: asyncio.Future[None],
    coordinator: Coordinator,
    registrar: Registrar,
    exit_when_done: bool,
    turn: Turn | None,
) -> asyncio.Future[AttuneError | None] | None:
    """Wait for a signal, for damage, for the end of a leg of a race, or for the end of the rounds if that is wanted.

    Returns:
        The leg's end, if it is there (fleet_race.over).

    Raises:
        AttuneError: As for `resumed`.
    """
    ends: set[asyncio.Future[Any]] = {signalled, asyncio.create_task(coordinator.unusable.wait())}
    leg: asyncio.Task[AttuneError | None] | None = None
    if turn is not None and turn.until is not None:
        leg = asyncio.create_task(fleet_race.over(turn, coordinator))
        ends.add(leg)
    elif exit_when_done:
        ends.add(asyncio.create_task(_goodbye(coordinator, returning=turn is not None)))
    begun, done = {resumed}, set[asyncio.Future[Any]]()
    while not done & ends:
        done, _ = await asyncio.wait(ends | begun, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done & begun:
            task.result()
        begun -= done
        if not done:
            try:
                await registrar.refresh()
            except LedgerBusy as error:
                coordinator.state.troubles.met(error)
    for task in ends - {signalled}:
        task.cancel()
    return leg if leg in done else None


async def _goodbye(coordinator: Coordinator, returning: bool) -> None:
    """Wait until the federation is done or has failed, and until its devices have hung up or had time to.

    A device that left without its farewell would wait for ever for a server. So it has `round.grace_s` to come back, from when
    it left or from the start of this process. A device that comes and goes cannot make this longer: all have as much from the
    end of the federation.

    Args:
        coordinator: The federation.
        returning: True if a race has just ended with another run, from which devices must come back. They have RETURN_S.
    """
    await coordinator.finished.wait()
    state = coordinator.state
    patience_s = RETURN_S if returning else state.settings.round.grace_s
    if coordinator.error is None and (away := _away(state, patience_s)):
        LOG.info("waiting up to %.0f s for devices that left before they knew the end: %s", patience_s, listed(away))
        await _while(lambda: _away(state, patience_s), patience_s, state.clock)
    await _while(lambda: state.streams, GOODBYE_S, state.clock)


async def _while(devices: Callable[[], Sized], most_s: float, clock: Clock) -> None:
    """Wait as long as there are such devices, for this number of seconds at most."""
    end = clock.monotonic() + most_s
    while len(devices()):
        if clock.monotonic() >= end:
            return
        await asyncio.sleep(STEP_S)


def _away(state: FederationState, patience_s: float) -> list[str]:
    """Return the devices that left within these seconds, and have not had their farewell."""
    since, left_at = state.clock.monotonic() - patience_s, state.round.left_at
    return sorted(name for name in left_at.keys() - state.streams.dismissed if left_at[name] > since)
