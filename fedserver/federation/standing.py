"""Devices that are passed over, or whose changes are bounded, as the operator sees them: a word in the log, and a note."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from attune.fedserver.core.policy import PATIENCE
from attune.fedserver.federation.troubles import Troubles
from attune.fedserver.ports.ledger import MemberLedger

LOG = logging.getLogger("fedserver")
PASSED_OVER = (
    f"let {PATIENCE} orders in a row run out: it is not asked before it reports progress or connects anew; look at its log, "
    "and whether round.deadline_s is long enough for it"
)


SHOWN = 3  # names in a line of the log


class Standing:
    def __init__(self, ledger: MemberLedger, troubles: Troubles) -> None:
        self._ledger, self._troubles = ledger, troubles
        self._told: set[str] = set()  # devices whose first bounded change was a warning

    async def pass_over(self, devices: Iterable[str]) -> None:
        for name in devices:
            LOG.warning("%s %s", name, PASSED_OVER, extra={"device": name})
            await self._note(name, PASSED_OVER)

    async def ask_again(self, devices: Iterable[str]) -> None:
        """A note that came after ours stays."""
        for name in devices:
            LOG.info("%s is asked again", name, extra={"device": name})
            device = await self._troubles.overcome("reading a device's note", partial(self._ledger.device, name))
            if device is not None and device.note == PASSED_OVER:
                await self._note(name, "")

    async def bounded(self, number: int, bounded: Mapping[str, float], without_vote: Collection[str]) -> None:
        """bounded: whose change was above the bound, and how many median norms it was; without_vote: who did not count.

        A device's first time is a warning. Honest devices with unlike data pass the bound in most rounds, so after that it is a
        line among others.
        """
        if not bounded:
            return
        largest = sorted(bounded, key=lambda name: -bounded[name])
        more = f" and {len(bounded) - SHOWN} more" if len(bounded) > SHOWN else ""
        said = ", ".join(f"{name} ({bounded[name]:.3g})" for name in largest[:SHOWN])
        level = logging.INFO if bounded.keys() <= self._told else logging.WARNING
        self._told |= bounded.keys()
        LOG.log(level, "round %d: bounded against the cohort, with their norms of change in medians: %s%s", number, said, more)
        for name, medians in bounded.items():
            result = "it had no vote" if name in without_vote else "it was bounded"
            await self._note(name, f"in round {number} its change was {medians:.3g} times the cohort's median norm; {result}")

    async def _note(self, name: str, text: str) -> None:
        await self._troubles.overcome("writing a device's note", partial(self._ledger.update_device, name, note=text))
