"""Facts of a federation that the page shows, and the interface of their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from attune.fedserver.federation.streams import Span
from attune.fedserver.web.condensed import RoundLine, Totals

Kind = Literal["server", "standby", "home", "simulation"]


@dataclass(frozen=True)
class LoggedFault:
    """Warning or error of the server's log. at: unix time."""

    at: float
    level: str
    text: str


@dataclass(frozen=True)
class HomeFacts:
    """Facts of the home in which a federation lies."""

    name: str = ""  # the setting `server.name`
    fingerprint: str = ""  # short form of the authority's key
    run: str = ""
    disk_free_bytes: int | None = None
    backup_at: float | None = None  # unix time of the last `fedserver backup`; None: none was ever made
    needs_backup: bool = False  # whether `fedserver backup` is what copies its state: it is in the folder


@dataclass(frozen=True)
class PageFacts:
    """Facts of a federation at one moment."""

    kind: Kind
    status: Mapping[str, Any]  # the object of `fedserver status --json`
    lines: Sequence[RoundLine]
    totals: Mapping[str, Totals] = field(default_factory=dict)  # by device
    expires: Mapping[str, float] = field(default_factory=dict)  # unix time of the end of each device's newest certificate
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)  # activity of devices in this process
    faults: Sequence[LoggedFault] = ()  # the latest ones
    fault_totals: Mapping[str, int] = field(default_factory=dict)  # number of all, by level
    round_s: float | None = None  # mean time of a round
    opened_at: float = 0.0  # unix time at which the open round, or the last one, was opened; 0: none was
    home: HomeFacts = HomeFacts()


@dataclass(frozen=True)
class AttentionMatrix:
    """Matrix of which device learned from which: row i has the weights with which device i's value was mixed.

    `why`: the reason why there is no matrix.
    """

    names: Sequence[str]
    matrix: Sequence[Sequence[float]]
    units: Sequence[str]
    unit: str
    why: str = ""


class PageSource(Protocol):
    """Source of a page's facts. It is used by one thread at a time, never by the federation's own thread."""

    def look(self) -> PageFacts:
        """Read the present facts.

        Raises:
            AttuneError: They cannot be read now.
        """

    def attention(self, unit: str) -> AttentionMatrix:
        """Read the attention matrix of a component of the model; empty: the mean over components."""

    def stuck(self) -> str:
        """Return which step has made no progress for too long; empty if none."""

    def trouble(self) -> str:
        """Return why devices are not served now; empty if they are."""

    def close(self) -> None: ...
