"""The name of one piece of work for one device: the same before and after a restart of either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from attune.common.errors import UpdateRefused


@dataclass(frozen=True)
class OrderId:
    """`work` is "train" (for the round after the last closed one) or "evaluate" (of the state after `round`)."""

    work: str
    round: int
    client: str

    def __str__(self) -> str:
        return f"{self.work}-{self.round}-{self.client}"

    @classmethod
    def parse(cls, text: str, client: str) -> Self:
        """Errors: UpdateRefused if this is no order, or one for another device than `client`."""
        work, _, rest = text.partition("-")
        number, _, name = rest.partition("-")
        if work not in ("train", "evaluate") or not number.isascii() or not number.isdecimal() or len(number) > 9:
            raise UpdateRefused(f"{client} answered {text[:80]!r}, which is no order of this server")
        if name != client:
            raise UpdateRefused(f"{client} answered an order for another device: {text[:80]!r}")
        return cls(work, int(number), client)
