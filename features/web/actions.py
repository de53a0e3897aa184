"""Actions behind the buttons of the page. Only the page of a running server has any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from attune.common.errors import SettingError
from attune.common.text import from_json
from attune.fedserver.identity.admin import DAY_S, LONGEST_TTL_S


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
