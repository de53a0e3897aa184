"""What there is to show of a federation at one moment, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from attune.fedserver.federation.journal import Span
from attune.fedserver.web.condensed import RoundLine, Totals

Kind = Literal["server", "home", "folder", "simulation"]


@dataclass(frozen=True)
class LoggedFault:
    """Something that a person may have to see to. at: unix time."""

    at: float
    level: str
    text: str


@dataclass(frozen=True)
class PageFacts:
    """status: the object of `fedserver status --json`. expires: unix time at which a device's newest certificate ends.

    spans: what devices did since this process began; none where nothing runs. round_s: how long a round takes.
    """

    kind: Kind
    status: Mapping[str, Any]
    lines: Sequence[RoundLine]
    totals: Mapping[str, Totals] = field(default_factory=dict)
    expires: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    faults: Sequence[LoggedFault] = ()  # the last ones
    fault_totals: Mapping[str, int] = field(default_factory=dict)  # of all, by level
    round_s: float | None = None


@dataclass(frozen=True)
class AttentionMatrix:
    """Who learned from whom: row i has the weights with which device i's value was mixed. why: there is no matrix."""

    names: Sequence[str]
    matrix: Sequence[Sequence[float]]
    units: Sequence[str]
    unit: str
    why: str = ""


class PageSource(Protocol):
    """Asked from one thread at a time, never the one on which the federation lives."""

    def look(self) -> PageFacts:
        """Errors: AttuneError if it cannot be read now."""

    def attention(self, unit: str) -> AttentionMatrix:
        """unit: a component of the model; empty: their mean."""

    def stuck(self) -> str:
        """What has made no headway for too long; empty: nothing."""

    def trouble(self) -> str:
        """Why devices are not served now; empty: they are. A finished run serves nobody, and nobody expects it to."""

    def close(self) -> None: ...
