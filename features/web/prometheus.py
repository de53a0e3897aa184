"""State of the federation in Prometheus's format, for /metrics; made anew at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from attune.common.metrics import METRICS
from attune.features.web.facts import PageFacts
from attune.features.web.parts import parts
from attune.fedserver.core.accuracy import mean_metrics
from attune.fedserver.core.messages import Phase
from attune.fedserver.federation.streams import DeviceStage

TYPE = CONTENT_TYPE_LATEST
STATES = ("waiting", "training", "aggregating", "done", "failed")
LISTED = 500  # devices with series of their own; more series would be a burden for the monitor
FOREVER = 2e11  # unix time of a certificate that does not expire


def exposition(facts: PageFacts) -> bytes:
    """Return the text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FederationCollector(facts))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class FederationCollector:
    """Collector of prometheus_client for one federation."""

    def __init__(self, facts: PageFacts) -> None:
        self._facts = facts
        values = parts(facts)
        self._run: Mapping[str, Any] = values["run"]
        self._devices: list[dict[str, Any]] = values["devices"]

    def collect(self) -> Iterable[Metric]:
        """Yield all series; of a standby only that it is one, for the server that serves has the others."""
        standby = self._facts.kind == "standby"
        yield _one("attune_standby", "Whether this process waits for another server to end.", standby)
        if standby:
            return
        yield from self._federation()
        yield from self._totals()
        yield from self._reported()
        yield from self._each_device()

    def _federation(self) -> Iterable[Metric]:
        run = self._run
        labels = ("method", "model", "version", "run", "name")
        info = GaugeMetricFamily("attune_info", "What runs here.", labels=labels)
        info.add_metric([run[label] or "" for label in labels], 1)
        yield info
        yield _by("attune_state", "The present state is 1.", "state", {state: state == run["state"] for state in STATES})
        yield _by("attune_phase", "The present step of the round is 1.", "phase", {one: one == run["phase"] for one in Phase})
        awaited = len(self._facts.status["awaited"])
        yield _one("attune_awaited_devices", "Devices that have an order and have not answered.", awaited)
        if self._facts.opened_at:
            opened_at = self._facts.opened_at
            yield _one("attune_round_opened_seconds", "Unix time of the opening of the open or the last round.", opened_at)
        yield _one("attune_running", "Whether a server serves devices.", run["running"])
        yield _one("attune_paused", "Whether the operator has paused the federation.", run["paused"])
        yield _one("attune_rounds_closed", "Rounds closed.", run["round"])
        yield _one("attune_rounds_planned", "Rounds planned.", run["rounds"])
        stages = {str(stage): sum(device["stage"] == stage for device in self._devices) for stage in DeviceStage}
        yield _by("attune_devices", "Devices by what they do.", "stage", stages)
        taken_back = len(self._facts.status["taken_back"])
        yield _one("attune_take_backs", "How often devices took the state back in the last 50 rounds.", taken_back)
        yield _one("attune_troubles", "Problems that keep the server from going on.", len(run["troubles"]))
        if buffer := run["buffer"]:
            yield _one("attune_buffer_size", "Updates that make the next state (buffered rounds).", buffer["size"])
            yield _one("attune_buffer_filled", "Updates that are in the buffer (buffered rounds).", buffer["filled"])
            if buffer["staleness"] is not None:
                yield _one("attune_staleness", "Mean staleness of the last round (buffered rounds).", buffer["staleness"])
            yield _one("attune_discarded_updates", "Updates that were too stale (buffered rounds).", buffer["discarded"])
        if run["left_s"] is not None:
            yield _one("attune_left_seconds", "Estimated time of the rounds that are left.", run["left_s"])
        if self._facts.round_s is not None:
            yield _one("attune_round_seconds", "Mean time of the last rounds.", self._facts.round_s)
        if run["disk_free_bytes"] is not None:
            yield _one("attune_disk_free_bytes", "Free space on the disk of the home.", run["disk_free_bytes"])
        yield _one("attune_needs_backup", "Whether `fedserver backup` is what copies the state.", run["needs_backup"])
        if run["backup_at"] is not None:
            yield _one("attune_last_backup_seconds", "Unix time of the last backup.", run["backup_at"])
        for key, name in (("accuracy", "attune_accuracy"), ("constant", "attune_accuracy_of_a_constant_answer")):
            if run[key]:
                yield _by(name, "A fraction, by average.", "average", run[key])
        verdicts = {word: sum(device["verdict"] == word for device in self._devices) for word in ("better", "unclear", "worse")}
        yield _by("attune_verdicts", "Devices by whether federation helps them.", "verdict", verdicts)
        probably = {word: sum(device["probably"] == word for device in self._devices) for word in ("helped", "harmed")}
        yield _by("attune_probably", "Devices that what they keep probably helps or harms.", "effect", probably)

    def _totals(self) -> Iterable[Metric]:
        lines = self._facts.lines
        moved = CounterMetricFamily("attune_moved_bytes", "Bytes of parameters that counted.", labels=("direction",))
        moved.add_metric(("up",), self._run["bytes_up"])
        moved.add_metric(("down",), self._run["bytes_down"])
        answers = CounterMetricFamily("attune_answers", "Answers that counted.", labels=("work",))
        answers.add_metric(("train",), sum(len(line.trained) for line in lines))
        answers.add_metric(("evaluate",), sum(len(line.evaluated) for line in lines))
        work = CounterMetricFamily("attune_slowest_device_seconds", "Seconds of the slowest device, over all rounds.")
        work.add_metric((), self._run["seconds"])
        faults = CounterMetricFamily("attune_faults", "Warnings and errors since the server began.", labels=("level",))
        for level in ("warning", "error"):
            faults.add_metric((level,), self._facts.fault_totals.get(level, 0))
        yield from (moved, answers, work, faults)
        loss = next((value for line in reversed(lines) if (value := line.metrics["loss"]) is not None), None)
        if loss is not None:
            yield _one("attune_loss", "Mean training loss of the last round.", loss)

    def _reported(self) -> Iterable[Metric]:
        """Yield a gauge for each metric in `METRICS` that is a number: the mean of what the devices reported last."""
        for name, mean in mean_metrics(self._devices).items():
            yield _one(f"attune_reported_{name}", f"{METRICS[name].meaning}; mean over devices.", mean)

    def _each_device(self) -> Iterable[Metric]:
        listed = self._devices[:LISTED]
        yield _one("attune_devices_without_series", "Devices beyond those listed one by one.", len(self._devices) - len(listed))
        for key, name, what in (
            ("accuracy", "attune_device_accuracy", "A fraction of the device's own test part, or the score of its task."),
            (
                "gain",
                "attune_device_gain",
                "Gain in accuracy of what it keeps over ordinary models alone, or else other rivals.",
            ),
            ("seconds", "attune_device_work_seconds", "Work of the device over all rounds."),
        ):
            known = {device["name"]: value for device in listed if (value := (device | device["totals"])[key]) is not None}
            if known:
                yield _by(name, what, "device", known)
        valid = {device["name"]: device["expires"] for device in listed if device["expires"] and not device["revoked"]}
        expires = {name: until for name, until in valid.items() if until < FOREVER}
        if expires:
            yield _by("attune_certificate_expires_seconds", "Unix time of the end of its certificate.", "device", expires)


def _one(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value=float(value))


def _by(name: str, what: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), float(value))
    return family
