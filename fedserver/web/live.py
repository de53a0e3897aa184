"""The page of the server that runs in this process: its facts, and what its buttons do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from attune.common.durable import write_file
from attune.common.errors import CertificateRefused, HomeMismatch, PortInUse
from attune.common.text import from_json
from attune.fedserver.federation.coordinator import REVOKED, Coordinator
from attune.fedserver.federation.members import Members
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.web import serving
from attune.fedserver.web.actions import Action, Actions, DeviceName, NewToken, NoArguments
from attune.fedserver.web.serving import PageAddress
from attune.fedserver.web.sources import LedgerSource, RunningServer, listening

PLACE_FILE, TOKEN_FILE = "dashboard.json", "dashboard-token"


class Operator:
    """What the operator may do, on the federation's own event loop. Every decision is in the audit log."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        registrar: Registrar,
        admin: FederationAdmin,
        join_address: str,
    ) -> None:
        self._coordinator, self._members, self._registrar = coordinator, members, registrar
        self._admin, self._address = admin, join_address

    def actions(self) -> Actions:
        doing: dict[str, Action] = {"token": self.token, "revoke": self.revoke, "pause": self.pause, "resume": self.resume}
        return Actions(doing, asyncio.get_running_loop())

    async def token(self, asked: NewToken) -> dict[str, Any]:
        token = await self._admin.new_token(self._registrar.authority.public_key_compressed, asked.uses, asked.ttl_s)
        await self._registrar.refresh()
        line = f"fedclient join --server {self._address} --token {token}"
        return {"line": line, "uses": asked.uses, "expires": time.time() + asked.ttl_s}

    async def revoke(self, asked: DeviceName) -> dict[str, Any]:
        await self._admin.revoke(asked.name)
        await self._members.shut_out({asked.name: CertificateRefused(REVOKED.format(asked.name))})
        return {"said": f"{asked.name} is revoked"}

    async def pause(self, asked: NoArguments) -> dict[str, Any]:
        return await self._paused(True)

    async def resume(self, asked: NoArguments) -> dict[str, Any]:
        return await self._paused(False)

    async def _paused(self, on: bool) -> dict[str, Any]:
        await self._admin.note_pause(on)
        await self._coordinator.pause(on)
        return {"said": "What is under way goes on to its end; then no round opens before you resume." if on else ""}


class SavedAddress(msgspec.Struct, frozen=True):
    """dashboard.json: where the page of this home is served, so that its address stays the same."""

    host: str
    port: int


def remembered(home: ServerHome) -> PageAddress | None:
    """Errors: HomeMismatch if that is damaged."""
    path = home.path / PLACE_FILE
    try:
        found = from_json(path.read_bytes(), SavedAddress)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"{path} is damaged ({error}): remove it") from None
    return PageAddress(found.host, found.port)


def token_of(home: ServerHome) -> str:
    """The token of this home's page; a new one for a new home."""
    path = home.path / TOKEN_FILE
    if not path.exists():
        write_file(path, serving.new_token().encode())
    return path.read_text(encoding="ascii").strip()


@contextlib.contextmanager
def page(
    home: ServerHome, asked: str | None, address: tuple[str, int], coordinator: Coordinator, operator: Operator
) -> Iterator[str | None]:
    """Serves the page during the block; its address with the token, or None if it was asked to be off.

    asked: a place, "off", or None: where it was before, else on this machine alone, beside the port of `address`. If a port
    is in use that nobody has asked for, a free one is taken. Errors: PortInUse, SettingError.
    """
    if asked == "off":
        yield None
        return
    before = remembered(home)
    place = (
        PageAddress.parse(asked)
        if asked is not None
        else before or PageAddress(port=address[1] + 1 if address[1] < 65535 else 0)
    )
    try:
        listener = serving.bind(place)
    except PortInUse:
        if asked is not None:
            raise
        listener = serving.bind(PageAddress(place.host))
    chosen = SavedAddress(place.host, listener.getsockname()[1])
    write_file(home.path / PLACE_FILE, msgspec.json.encode(chosen))
    token = token_of(home)
    with listening() as feed:
        life = RunningServer(coordinator, f"{address[0]}:{address[1]}", feed)
        source = LedgerSource("server", home.open(), life)
        with serving.serving(listener, place.host, token, source, operator.actions()):
            yield serving.url_of(listener, token)
