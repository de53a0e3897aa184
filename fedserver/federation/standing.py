"""Devices that are passed over, as the operator sees them: a word in the log, and a note until they are asked again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from attune.fedserver.core.policy import PATIENCE
from attune.fedserver.federation.troubles import Troubles
from attune.fedserver.ports.ledger import Ledger

LOG = logging.getLogger("fedserver")
PASSED_OVER = (
    f"let {PATIENCE} orders in a row run out: it is not asked before it reports progress or connects anew; look at its log, "
    "and whether round.deadline_s is long enough for it"
)


class Standing:
    def __init__(self, ledger: Ledger, troubles: Troubles) -> None:
        self._ledger, self._troubles = ledger, troubles

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

    async def _note(self, name: str, text: str) -> None:
        await self._troubles.overcome("writing a device's note", partial(self._ledger.update_device, name, note=text))
