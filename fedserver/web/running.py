"""What the page shows of a coordinator that lives in this process, besides what its ledger has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.journal import Journal
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.web.facts import Fault
from attune.fedserver.web.feed import Feed


class Running:
    """Implements sources.Living."""

    def __init__(self, coordinator: Coordinator, address: str, feed: Feed) -> None:
        self._coordinator, self.address, self._feed = coordinator, address, feed

    @property
    def troubles(self) -> Sequence[str]:
        return self._coordinator.troubles.lines

    @property
    def journal(self) -> Journal:
        return self._coordinator.journal

    @property
    def faults(self) -> Sequence[Fault]:
        return self._feed.faults

    @property
    def fault_totals(self) -> Mapping[str, int]:
        return self._feed.totals

    def reported(self, found: Snapshot) -> Collection[str]:
        return self._coordinator.round.reported

    def stuck(self) -> str:
        limit_s = self._coordinator.settings.server.watchdog_s
        stuck_s = self._coordinator.stuck_s
        return f"a step has made no headway for {stuck_s:.0f} s" if limit_s and stuck_s >= limit_s else ""

    def trouble(self) -> str:
        if self._coordinator.error is not None:
            return f"failed: {self._coordinator.error}"
        return self.stuck() or "; ".join(self.troubles)
