"""Pages: of the server in this process, with its buttons; of a standby, a simulation and, for `fedserver dashboard`, a home."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from attune.common.config import ServerSettings
from attune.common.durable import write_file
from attune.common.errors import CertificateRefused, HomeMismatch, PortInUse, SettingError
from attune.common.text import from_json, newer_format
from attune.features.web import serving
from attune.features.web.page_tokens import METRICS_FILE, Keyring, metrics_token, new_token, own_token
from attune.features.web.serving import PageAddress
from attune.features.web.sources import FaultFeed, LedgerSource, ProcessView, RunningServer, WaitingServer, listening
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import REVOKED, DeviceActivity
from attune.fedserver.home import ServedAddress, ServerHome
from attune.fedserver.identity.admin import DAY_S, LONGEST_TTL_S
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.inbox import Inbox
from attune.seams import Running, Watch

PLACE_FILE = "dashboard.json"
HERE = "this process"  # shown of a simulation, in place of the address at which devices find a server


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments for a new join token."""

    uses: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_TTL_S)] = DAY_S


class DeviceName(msgspec.Struct, forbid_unknown_fields=True):
    """Name of the device that an action is about."""

    name: str


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of an action without any."""


ARGUMENTS: Mapping[str, type[msgspec.Struct]] = {
    "token": NewToken,
    "revoke": DeviceName,
    "pause": NoArguments,
    "resume": NoArguments,
}
Action = Callable[[Any, str], Awaitable[dict[str, Any]]]  # of the arguments, and of who acts in the audit log's words


class Actions:
    """Actions by name. They run on the federation's event loop, whichever thread asks for them."""

    def __init__(self, by_name: Mapping[str, Action], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._by_name, self._loop = by_name, loop

    @property
    def names(self) -> list[str]:
        return [name for name in ARGUMENTS if name in self._by_name]

    async def do(self, name: str, body: bytes, by: str) -> dict[str, Any]:
        """Run an action with its arguments as JSON, and return its result.

        Args:
            name: The action.
            body: The arguments.
            by: Name of the person who acts, in the audit log's words.

        Raises:
            SettingError: There is no such action, or its arguments are wrong; the action may raise other errors.
        """
        if name not in self._by_name or self._loop is None:
            raise SettingError(f"this page cannot {name}: only the page of a running server can")
        try:
            arguments = from_json(body or b"{}", ARGUMENTS[name])
        except msgspec.DecodeError as error:
            raise SettingError(f"{name}: {error}") from None

        async def work() -> dict[str, Any]:
            return await self._by_name[name](arguments, by)

        # A caller that vanishes does not stop the action half-way.
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop)))


NO_ACTIONS = Actions({})


class Operator:
    """Actions of the operator, on the federation's event loop. The audit log records each of them."""

    def __init__(self, running: Running, join_address: str) -> None:
        self._coordinator, self._registrar, self._admin_of = running
        self._address = join_address

    def actions(self) -> Actions:
        """Return the actions by name."""
        by_name: dict[str, Action] = {"token": self.token, "revoke": self.revoke, "pause": self.pause, "resume": self.resume}
        return Actions(by_name, asyncio.get_running_loop())

    async def token(self, asked: NewToken, by: str) -> dict[str, Any]:
        """Make a join token, and return the command that a device runs with it."""
        token = await self._admin_of(by).new_token(self._registrar.authority.public_key_compressed, asked.uses, asked.ttl_s)
        await self._registrar.refresh()
        line = f"fedclient join --server {self._address} --token {token}"
        return {"line": line, "uses": asked.uses, "expires": time.time() + asked.ttl_s}

    async def revoke(self, asked: DeviceName, by: str) -> dict[str, Any]:
        """Revoke a device and end its stream."""
        await self._admin_of(by).revoke(asked.name)
        await self._coordinator.members.shut_out({asked.name: CertificateRefused(REVOKED.format(asked.name))})
        return {"said": f"{asked.name} is revoked"}

    async def pause(self, asked: NoArguments, by: str) -> dict[str, Any]:
        """Open no further round."""
        return await self._paused(True, by)

    async def resume(self, asked: NoArguments, by: str) -> dict[str, Any]:
        """Let rounds open again."""
        return await self._paused(False, by)

    async def _paused(self, on: bool, by: str) -> dict[str, Any]:
        await self._admin_of(by).note_pause(on)
        await self._coordinator.pause(on)
        return {"said": "The open round goes on to its end. No further round opens until you resume." if on else ""}


def page_of_simulation(dashboard: bool | int | str) -> Watch:
    """Answer the seam `watch`. True is a free port, for this machine only.

    Raises:
        SettingError: The address is not a port or HOST:PORT.
    """
    place = PageAddress() if dashboard is True else PageAddress.parse(str(dashboard))

    @contextlib.contextmanager
    def watched(coordinator: Coordinator, storage: Storage) -> Iterator[None]:
        listener, token = serving.bind(place), new_token()
        with listening() as feed:
            source = LedgerSource("simulation", storage, RunningServer(coordinator, HERE, feed))
            with serving.serving(listener, place.host, Keyring(token), source):
                click.echo(f"dashboard {serving.url_of(listener, token)}", err=True)
                yield

    return watched


class SavedAddress(msgspec.Struct, frozen=True):
    """Contents of dashboard.json: the address of this home's page, so that it stays the same."""

    host: str
    port: int
    format: int = 1


def remembered(home: ServerHome) -> PageAddress | None:
    """Return the saved address of this home's page; None if there is none.

    Raises:
        HomeMismatch: The file is damaged, or a newer version wrote it.
    """
    path = home.path / PLACE_FILE
    try:
        text = path.read_bytes()
        if newer := newer_format(text, path, "fedserver"):
            raise HomeMismatch(newer)
        address = from_json(text, SavedAddress)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"{path} is damaged ({error}): remove it") from None
    return PageAddress(address.host, address.port)


def keyring_of(home: ServerHome, server: ServerSettings) -> Keyring:
    """Return the tokens of this home's page. Missing ones are made.

    Raises:
        SettingError: The token for /metrics cannot be kept where the settings want it.
    """
    place = Path(server.metrics_token_file).expanduser() if server.metrics_token_file else home.path / METRICS_FILE
    return Keyring(own_token(home), metrics_token(place, server.metrics_token_mode), home)


@contextlib.contextmanager
def page(
    home: ServerHome, asked: str | None, address: ServedAddress, server: ServerSettings, life: Running | str
) -> Iterator[str | None]:
    """Serve the page during the block; yield its address with the token, or None if the page is off. The seam `page`.

    Args:
        home: The server's home.
        asked: An address, or "off". None: the page's last address, else the port after that of `address`, on this machine
            only. If that port is in use, a free one is taken.
        address: Address at which the server serves devices, or would.
        server: The settings of the server.
        life: As for the seam.

    Raises:
        PortInUse: The port that was asked for is in use.
        SettingError: `asked` is no address.
    """
    if asked == "off":
        yield None
        return
    before = remembered(home)
    place = (
        PageAddress.parse(asked)
        if asked is not None
        else before or PageAddress(port=address.port + 1 if 0 < address.port < 65535 else 0)
    )
    try:
        listener = serving.bind(place)
    except PortInUse:
        if asked is not None:
            raise
        listener = serving.bind(PageAddress(place.host))
    chosen = SavedAddress(place.host, listener.getsockname()[1])
    write_file(home.path / PLACE_FILE, msgspec.json.encode(chosen))
    keys = keyring_of(home, server)
    with listening() as feed:
        if isinstance(life, str):
            actions: Actions | None = None
            view: ProcessView = WaitingServer(life, feed)
        else:
            view = RunningServer(life.coordinator, f"{address.host}:{address.port}", feed)
            actions = Operator(life, address.joined(server.advertise)).actions()
        source = LedgerSource("server" if actions else "standby", home.open(), view, home)
        with serving.serving(listener, place.host, keys, source, actions, server.advertise):
            yield serving.url_of(listener, own_token(home), server.advertise)


class StoppedHome:
    """ProcessView of a home that this process does not serve."""

    troubles: Sequence[str] = ()

    def __init__(self, home: ServerHome) -> None:
        self.standby = home.standby()
        self._home, self.activity, self.feed = home, DeviceActivity(time.time), FaultFeed()

    @property
    def address(self) -> str | None:
        return self._home.served_at()

    def reported(self, snapshot: Snapshot) -> Collection[str]:
        return Inbox(self._home.open().blobs).names(*snapshot.record.open_orders)

    def stuck(self) -> str:
        return ""  # no step runs in this process

    def trouble(self) -> str:
        return "" if self.address else "no server runs on this home"


def of_home(home: ServerHome) -> LedgerSource:
    """Return the source of a home's page.

    Raises:
        HomeMismatch: There is no home.
    """
    home.require()
    return LedgerSource("home", home.open(), StoppedHome(home), home)


def running_page(home: ServerHome) -> str | None:
    """Return the address of the running server's page; None if no server runs, or it has no page."""
    place = remembered(home) if home.exists() and home.is_served() else None
    if place is None or not place.answers():
        return None
    return page_url(home, own_token(home))


def page_url(home: ServerHome, token: str) -> str | None:
    """Return the address of a home's page, where it was served last, with a token; None if it never was."""
    place = remembered(home)
    return place.url(token, home.snapshot().settings.server.advertise) if place else None


def show(home: ServerHome, place: PageAddress, say: Callable[[str], None]) -> None:
    """Serve the page of a home until Ctrl-C.

    Raises:
        PortInUse: Another process listens on the port.
        SettingError: The folder has an exported result.
        HomeMismatch: There is no home, or it is damaged.
    """
    if (home.path / "summary.json").exists():
        raise SettingError(f"{home.path} is a result and no home: `fedserver compare {home.path} --out PAGE` draws it")
    source = of_home(home)
    listener, token = serving.bind(place), new_token()
    with serving.serving(listener, place.host, Keyring(token), source):
        say(f"dashboard {serving.url_of(listener, token)}")
        say("Ctrl-C ends it")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return
