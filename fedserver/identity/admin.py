"""The operator's decisions about who may take part: join tokens are made, listed and withdrawn, devices are revoked.

The commands of a home and the running server decide by the same code. Each decision is in the audit log before it counts. A
running server must be woken after it, to let new tokens in and to cut off revoked devices.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from attune.common.errors import SettingError, nearest
from attune.common.identity.credential import fingerprint_of
from attune.common.identity.names import check_name
from attune.common.identity.token import JoinToken
from attune.common.plan import check_tag
from attune.fedserver.core.tags import of_token
from attune.fedserver.ports.ledger import Ledger, Token

DAY_S = 86400.0
LONGEST_TTL_S = 3650 * DAY_S  # of a token
BY_OPERATOR, AT_START, FOR_LOCAL = "operator", "start", "local"  # origins of tokens


class TokenView(msgspec.Struct, frozen=True):
    """A join token as an operator sees it, without its secret, which is not stored. Times are unix times."""

    id: str
    state: str  # live, used up, expired or withdrawn
    origin: str
    uses: int
    uses_left: int
    made_at: float  # 0: not known
    expires_at: float
    only_for: str
    devices: tuple[str, ...]  # that have enrolled with it


def user() -> str:
    """Return the user who runs this process; a number where the system has no name for it, as in a container."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"round": {"clients": 5}} as {"round.clients": 5}."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flattened


def state_of(token: Token, now: float) -> str:
    """Return whether a token is live, used up, expired or withdrawn."""
    if token.withdrawn_at is not None:
        return "withdrawn"
    if token.expires_at < now:
        return "expired"
    return "live" if token.uses_left > 0 else "used up"


class FederationAdmin:
    """The operator's decisions in one ledger; `by` says in the audit log who decides."""

    def __init__(self, ledger: Ledger, by: str) -> None:
        self._ledger, self._by = ledger, by

    async def new_token(
        self,
        authority_public_key: bytes,
        uses: int = 1,
        ttl_s: float = DAY_S,
        *,
        only_for: str = "",
        tag: str = "",
        origin: str = BY_OPERATOR,
        keep: int | None = None,
    ) -> str:
        """Make a join token, admit it in the ledger, and return it.

        Args:
            authority_public_key: The key that the token pins.
            uses: How many devices it admits.
            ttl_s: Seconds for which it is valid.
            only_for: The device that may use it, and no other. It need not be enrolled: a device whose enrolment the server has
                lost is not.
            tag: Tag of the devices that it admits; empty: the one that a device gives itself.
            origin: Place of the request, such as the dashboard.
            keep: How many tokens of this origin stay, the newest.

        Raises:
            SettingError: No device can have the name `only_for`, or this tag.
        """
        check_tag(tag)
        if only_for:
            check_name(only_for)
        token = JoinToken.new(authority_public_key)
        pem, now = token.bootstrap().certificate_pem, time.time()
        made = Token(
            fingerprint_of(pem), pem, uses, now + ttl_s, origin, id=token.label, uses=uses, made_at=now, only_for=only_for
        )
        await self._note(
            "token made", id=made.id, uses=uses, ttl_s=ttl_s, origin=origin, only_for=only_for, **({"tag": tag} if tag else {})
        )
        if tag:
            await self._ledger.note_tags({of_token(made.id): tag})
        await self._ledger.add_token(made, keep)
        return token.encode()

    async def tokens(self) -> list[TokenView]:
        """Return the tokens that are kept, the newest last."""
        now, devices = time.time(), await self._ledger.devices()
        return [
            TokenView(
                token.id,
                state_of(token, now),
                token.origin,
                token.uses,
                token.uses_left,
                token.made_at,
                token.expires_at,
                token.only_for,
                tuple(device.name for device in devices if device.token == token.id),
            )
            for token in await self._ledger.tokens()
        ]

    async def revoke_token(self, id: str, devices: bool = False) -> list[str]:
        """Withdraw a token, and with `devices` revoke the devices that have enrolled with it; return their names.

        A token that is not kept any more may still be named for its devices.

        Raises:
            SettingError: No token and no device has this id.
        """
        enrolled = [device for device in await self._ledger.devices() if device.token == id]
        known = [token.id for token in await self._ledger.tokens()]
        if id not in known and not enrolled:
            raise SettingError(f"no token {id!r} was made here{nearest(id, known)}: `fedserver token list` shows their ids")
        await self._note("token withdrawn", id=id)
        await self._ledger.withdraw(id, time.time())
        names = [device.name for device in enrolled if devices and not device.revoked]
        for name in names:
            await self.revoke(name)
        return names

    async def revoke(self, name: str) -> None:
        """Refuse a device and its certificates from now on. Tokens for its name end: a thief may have one.

        Raises:
            SettingError: There is no such device.
        """
        await self._known(name)
        await self._note("device revoked", name=name)
        await self._ledger.update_device(name, revoked=True)
        for token in await self._ledger.tokens():
            if token.only_for == name and token.withdrawn_at is None:
                await self._note("token withdrawn", id=token.id)
                await self._ledger.withdraw(token.id, time.time())

    async def set_settings(self, overrides: Mapping[str, Any]) -> None:
        """Bind the federation to these settings, and note those that have changed, by their dotted names."""
        before, after = flat((await self._ledger.snapshot()).overrides or {}), flat(overrides)
        if changed := {
            key: [before.get(key), after.get(key)]
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        }:
            await self._note("settings", changed=changed)
        await self._ledger.set_overrides(overrides)

    async def note_pause(self, on: bool) -> None:
        """Note that the federation is paused, or goes on. Call it before that is done."""
        await self._note("paused" if on else "resumed")

    async def pause_record(self, on: bool) -> None:
        """Pause a federation that no server runs, from its next start on, or let it go on."""
        await self.note_pause(on)
        record = (await self._ledger.snapshot()).record
        await self._ledger.put_record(msgspec.structs.replace(record, paused=on))

    async def unknown(self, name: str) -> str:
        """Return a sentence if no device of this name is enrolled, else an empty text."""
        names = [device.name for device in await self._ledger.devices()]
        return "" if name in names else f"no device {name!r} is enrolled here{nearest(name, names)}"

    async def _known(self, name: str) -> None:
        if unknown := await self.unknown(name):
            raise SettingError(unknown)

    async def _note(self, event: str, **facts: object) -> None:
        await self._ledger.note(event, self._by, **facts)
