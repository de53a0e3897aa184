"""Facts of a federation, the interface of their sources, and the parts of the page with them, as values for JSON. Pure code.

A part is sent to a browser when it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from attune import __version__
from attune.common.metrics import METRICS
from attune.common.paired import gain_of
from attune.common.task import described
from attune.fedserver.federation.device_activity import DeviceStage, Span
from attune.fedserver.view.status import FINISHED, warnings_of
from attune.fedserver.web.condensed import RoundLine, Totals

Kind = Literal["server", "standby", "home", "folder", "simulation"]


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


RUN = (
    "state", "phase", "running", "address", "method", "model", "round", "rounds", "adapting", "min_clients", "accuracy",
    "metric", "constant", "no_better_than_constant", "buffer", "paused", "reason", "troubles", "fleet",
)  # fmt: skip
DEVICE = (
    "name", "since", "progress", "samples", "note", "accuracy", "interval", "verdict", "probably",
)  # fmt: skip
LISTED_ROUNDS = 60  # last rounds for which the page shows which devices took part
SHOWN_SPANS = 60  # of each device
AWAY, REVOKED = ("disconnected", FINISHED), "revoked"


def parts(facts: PageFacts) -> dict[str, Any]:
    """Return the parts `run`, `devices`, `timeline`, `rounds` and `faults`, as the page's scripts read them."""
    status = facts.status
    finished = finishers(facts)
    devices = [_device(client, facts, client["name"] in finished) for client in status["clients"]]
    run = {name: status[name] for name in RUN} | {
        "auto": status.get("auto"),  # a saved status of an earlier version has none
        "kind": facts.kind,
        "privacy": status.get("privacy"),  # older saved results have none
        "version": __version__,
        **asdict(facts.home),
        "warnings": warnings_of(status),
        "metric_described": described(status["metric"]),
        "left_s": left_s(facts),
        "charts": [{"name": m.name, "title": m.title, "unit": m.unit, "chart": m.chart} for m in METRICS.values() if m.chart],
        **{name: sum(line.metrics[name] or 0 for line in facts.lines) for name, m in METRICS.items() if m.per == "round"},
    }
    return {
        "run": run,
        "devices": devices,
        "timeline": {name: _spans(spans) for name, spans in facts.spans.items()},
        "rounds": _rounds(facts),
        "faults": [asdict(fault) for fault in facts.faults],
    }


def left_s(facts: PageFacts) -> float | None:
    """Estimate the seconds that the remaining rounds take; None if that is not known, or none remain."""
    left = facts.status["rounds"] - facts.status["round"]
    running = facts.status["running"] and facts.status["state"] in ("training", "aggregating")
    return facts.round_s * left if facts.round_s is not None and left > 0 and running else None


def finishers(facts: PageFacts) -> set[str]:
    """Return the devices that have the final model: those that evaluated it."""
    if facts.status["state"] != "done":
        return set()
    return {name for line in facts.lines if line.round >= facts.status["rounds"] for name in line.evaluated}


def _device(client: Mapping[str, Any], facts: PageFacts, finished: bool) -> dict[str, Any]:
    spans = facts.spans.get(client["name"])
    stage, why = (spans[-1].stage, spans[-1].why) if spans else (_stage(client["state"]), "")
    if client["state"] in (REVOKED, *AWAY) and stage is not DeviceStage.ABSENT:
        stage, why = DeviceStage.ABSENT, ""
    if finished and client["state"] != REVOKED:
        stage, why = DeviceStage.FINISHED, "has its model and has left" if client["state"] in AWAY else "has its model"
    elif client["state"] == REVOKED or (stage is DeviceStage.ABSENT and not why):
        why = absence(client, facts)
    return {name: client.get(name) for name in (*DEVICE, *METRICS)} | {
        "gain": gain_of(client),
        "totals": facts.totals.get(client["name"], {}),
        "stage": stage,
        "why": why,
        "revoked": client["state"] == REVOKED,
        "expires": facts.expires.get(client["name"]),
    }


def absence(client: Mapping[str, Any], facts: PageFacts) -> str:
    """Return why a device takes no part now."""
    if client["state"] == REVOKED:
        return "revoked by the operator"
    if client["note"]:
        return str(client["note"])
    if not client["since"]:
        return "enrolled, and never connected"
    return "disconnected" if facts.status["running"] else "no server runs"


def _stage(state: str) -> DeviceStage:
    if state == "working":
        return DeviceStage.TRAINING
    return DeviceStage.ABSENT if state in (*AWAY, REVOKED) else DeviceStage.WAITING


def _spans(spans: Sequence[Span]) -> list[list[Any]]:
    """Return [stage, unix time, why] for each of the last spans."""
    return [[span.stage, round(span.began_at, 2), span.why] for span in spans[-SHOWN_SPANS:]]


def _rounds(facts: PageFacts) -> list[dict[str, Any]]:
    """Return a line for each round; only those of the last rounds name the devices that took part."""
    listed = len(facts.lines) - LISTED_ROUNDS
    rounds = []
    for at, line in enumerate(facts.lines):
        fields = asdict(line)
        names = {} if at >= listed else {"trained": (), "evaluated": ()}
        rounds.append(fields | fields.pop("metrics") | names | {"answers": len(line.trained)})
    return rounds
