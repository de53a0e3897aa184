"""What the buttons of the page do, for whoever has the means: a running server has, a finished run has not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from attune.common.errors import SettingError
from attune.common.text import from_json

LONGEST_TTL_S = 3650 * 86400.0


class NewToken(msgspec.Struct, forbid_unknown_fields=True):
    uses: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_TTL_S)] = 86400.0


class DeviceName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


ARGUMENTS: Mapping[str, type[msgspec.Struct]] = {
    "token": NewToken,
    "revoke": DeviceName,
    "pause": NoArguments,
    "resume": NoArguments,
}
Action = Callable[[Any], Awaitable[dict[str, Any]]]


class Actions:
    """Carried out on the federation's own event loop, whichever thread asks."""

    def __init__(self, doing: Mapping[str, Action], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._doing, self._loop = doing, loop

    def __repr__(self) -> str:
        return f"Actions({sorted(self._doing)})"

    @property
    def names(self) -> list[str]:
        return [name for name in ARGUMENTS if name in self._doing]

    async def do(self, name: str, body: bytes) -> dict[str, Any]:
        """Errors: SettingError for an action that there is not, or arguments that cannot be; those of the action."""
        if name not in self._doing or self._loop is None:
            raise SettingError(f"this page cannot {name}: only that of a running server can")
        try:
            arguments = from_json(body or b"{}", ARGUMENTS[name])
        except msgspec.DecodeError as error:
            raise SettingError(f"{name}: {error}") from None

        async def work() -> dict[str, Any]:
            return await self._doing[name](arguments)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))


NO_ACTIONS = Actions({})
