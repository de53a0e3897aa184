"""Parts of the page as values for JSON. Pure code. A part is sent to a browser when it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attune import __version__
from attune.common.metrics import METRICS
from attune.common.statistics import gain_of
from attune.common.task import described
from attune.features.web.facts import PageFacts
from attune.fedserver.federation.streams import DeviceStage, Span
from attune.fedserver.view.status import FINISHED, warnings_of

RUN = (
    "state", "phase", "running", "address", "method", "model", "round", "rounds", "adapting", "min_clients", "accuracy",
    "metric", "constant", "no_better_than_constant", "buffer", "paused", "reason", "troubles", "fleet",
)  # fmt: skip
DEVICE = (
    "name", "since", "progress", "samples", "variant", "tag", "note", "accuracy", "interval", "verdict", "probably",
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
        "auroc": status.get("auroc"),
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
