"""Status of a federation as one object for JSON, with the privacy of the run. Pure code, without torch.

Its privacy: the mode, what is promised, what of it is spent, and who sees what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import SettingError
from attune.common.methods.private_training import steps_per_order, with_orders
from attune.common.methods.registry import configured_on_device
from attune.common.metrics import METRICS
from attune.common.plan import MAIN, Plan, closed_form_words, score_words, standardisation
from attune.common.privacy.accountant import MEANING, NoisySteps, epsilon_of, mode_of, visible_of
from attune.common.statistics import interval_of, shown_verdict
from attune.common.task import SCORED
from attune.fedserver.core.accuracy import accuracies, constants, latest_metrics, over_all, without_use
from attune.fedserver.core.advice import advice
from attune.fedserver.core.ballot import classes_apart
from attune.fedserver.core.client_privacy import drawn_rate, releases
from attune.fedserver.core.data_form import one_token
from attune.fedserver.core.fleet_verdict import effect_of, fleet_verdicts, pooled_auroc
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.policy import quorum_of
from attune.fedserver.core.records import KEPT_LABELS, DeviceRecord, Report
from attune.fedserver.core.tags import tag_of
from attune.fedserver.ports.ledger import Certificate, Snapshot

ROUNDING = 1e-6  # of a reported epsilon
NO_WORTH = "with privacy.secure_aggregation the sum without one client would tell what that client has handed in"
OF_ORDERS = ("Metrics.", "Trouble.")  # fields that answer an order


def privacy_facts(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status, dashboard and exports say of privacy; None without any."""
    privacy = asked(snapshot)
    if not mode_of(privacy):
        return None
    facts = guarantee(snapshot)
    if facts is None:
        spent, fallen = spent_epsilons(snapshot.rows)
        facts = {
            "unit": privacy.unit,
            "epsilon": privacy.epsilon if privacy.on_devices else None,
            "delta": privacy.delta,
            "spent": max(spent.values(), default=None),
            "fallen": fallen,
        }
        if privacy.on_devices:
            facts["adjacency"] = MEANING["zero-out"].format(unit=privacy.unit)
    return facts | {"mode": mode_of(privacy), "visible": visible_of(privacy), "clipping": clipping(snapshot)}


def clipping(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return how many devices clipped their update in the latest masked sum; None without one."""
    summed, privacy = snapshot.record.summed, asked(snapshot)
    if summed is None or not privacy.secure_aggregation:
        return None
    words = summed.told(privacy.secure_clip)
    return {"round": summed.round, "devices": summed.devices, "clipped": summed.clipped, "above": summed.above, "told": words}


def spent_epsilons(rows: Iterable[Report]) -> tuple[dict[str, float], list[str]]:
    """Return the most that each device has reported as spent on its data, and those devices that reported less later.

    What was spent never falls. It seems to where a device's ledger was replaced by an older copy, which forgets charges.
    """
    most: dict[str, float] = {}
    fallen = set()
    for row in rows:
        if row.epsilon is not None:
            if row.epsilon < most.get(row.client, 0.0) * (1 - ROUNDING):
                fallen.add(row.client)
            most[row.client] = max(row.epsilon, most.get(row.client, 0.0))
    return most, sorted(fallen)


def fallen_line(names: Iterable[str]) -> str:
    """Return the warning about devices whose ledgers have forgotten charges."""
    return (
        f"warning: {', '.join(names)} reported less spent than before: their data are new, or an older copy of the privacy "
        "ledger was restored, and more was spent than is shown. Have the newest copy restored, or revoke the device"
    )


def asked(snapshot: Snapshot) -> PrivacySettings:
    """Return what the plan asks for; before there is one, what the settings ask for."""
    return (snapshot.plan.privacy if snapshot.plan else None) or snapshot.settings.privacy


def guarantee(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what status and exports say of noisy sums; None without client-level privacy. Unknown numbers are None."""
    settings, privacy = snapshot.settings, asked(snapshot)
    if not privacy.on_server:
        return None
    return {
        "unit": privacy.unit,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "spent": _spent(privacy, snapshot),
        "releases": snapshot.record.releases,
        "rate": drawn_rate(privacy, settings.round),
        "clip": privacy.clip,
        "noise": privacy.noise,
        "adjacency": MEANING["zero-out"].format(unit="device"),
        "insecure": privacy.insecure_seed is not None,
    }


def _spent(privacy: PrivacySettings, snapshot: Snapshot) -> float | None:
    try:
        epsilon = epsilon_of(releases(privacy, snapshot.settings.round, snapshot.record.releases), privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return epsilon if math.isfinite(epsilon) else None


def planned_epsilons(snapshot: Snapshot) -> dict[str, float | None]:
    """Return what all orders of the run will have cost each device's data; None if it is not known.

    It is the budget, if there is one: a device sets its noise by that. Else it follows from the noise and the samples that the
    device trains on, which may be fewer than it has declared.
    """
    privacy, plan = with_orders(asked(snapshot), snapshot.settings.round.rounds), snapshot.plan
    if not privacy.on_devices or plan is None:
        return {}
    names = [device.name for device in snapshot.devices]
    if privacy.noise is None:
        return dict.fromkeys(names, privacy.epsilon)
    trained_on = {row.client: row.samples for row in snapshot.rows if row.work == "train" and row.samples}
    cost = {samples: _cost_of_all(plan, privacy, samples) for samples in set(trained_on.values())}
    return {name: cost.get(trained_on.get(name, 0)) for name in names}


def _cost_of_all(plan: Plan, privacy: PrivacySettings, samples: int) -> float | None:
    steps = steps_per_order(configured_on_device(plan), plan.train, samples) * privacy.orders
    try:
        cost = epsilon_of([NoisySteps(min(1.0, plan.train.batch_size / samples), privacy.noise or 0.0, steps)], privacy.delta)
    except SettingError:  # dp-accounting is not installed here
        return None
    return (cost if privacy.epsilon is None else min(cost, privacy.epsilon)) if math.isfinite(cost) else None


def privacy_lines(facts: dict[str, Any]) -> list[str]:
    """Return what `privacy_facts` returns as lines for people."""
    last = [f"  {facts['mode']}: {facts['visible']}", *([f"  {sizes['told']}"] if (sizes := facts.get("clipping")) else [])]
    if "releases" in facts:
        return [*guarantee_lines(facts), *last]
    if facts["unit"] == "none":
        return [f"privacy: {facts['mode']}; {facts['visible']}", *last[1:]]
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "nothing spent yet" if facts["spent"] is None else f"at most {facts['spent']:.3g} spent by a device"
    line = f"privacy: by {facts['unit']}, epsilon with {budget} at delta {facts['delta']:g}; {spent}"
    return [line, *last, *([fallen_line(facts["fallen"])] if facts.get("fallen") else [])]


def guarantee_lines(facts: dict[str, Any]) -> list[str]:
    """Return the guarantee as lines for people."""
    budget = "no budget" if facts["epsilon"] is None else f"a budget of {facts['epsilon']:g}"
    spent = "an unknown epsilon" if facts["spent"] is None else f"epsilon = {facts['spent']:.3g}"
    line = f"privacy: by device, {spent} spent on {facts['releases']} released sums, with {budget} at delta {facts['delta']:g}"
    return [line, "its noise comes from a seed, so it protects nobody"] if facts["insecure"] else [line]


def spent_words(status: Mapping[str, Any]) -> list[str]:
    """Return what a run promises and has spent, in lines for people who decide."""
    if facts := status.get("privacy"):
        return [line.strip().removeprefix("privacy: ") for line in privacy_lines(facts)]
    said = "No noise was added and no update was masked, so no privacy budget was spent, and no guarantee is given"
    return [f"{said}: who sees what a site sends can try to learn of its samples from it."]


SENT_WORDS = {  # of the modes in fedclient/disclosed.toml
    "sent": "sent",
    "not sent": "not sent",
    "declared": "only what meta.json declares",
    "disclosed": "only with `--disclose statistics`",
    "disclosed unmasked": "only with `--disclose statistics`, without `masked-statistics`",
    "disclosed noisy": "only with `--disclose statistics`, with noise",
    "by units": 'unless the owner says `units = "none"`',
    "scores": "unless `--metrics none`",
    "by --metrics": "only with `--metrics all`",
    "shares": "only with `--disclose statistics`, where scores are sent",
    "charged": "only with `--metrics all`, or with noise (`noisy`)",
    "noisy": "with noise",
    "masked": "masked, in a sum",
    "masked sum": "only with `--disclose masked-statistics` or `statistics`, masked",
}


def sent_words(decision: Mapping[str, Any], plan: Plan) -> str:
    """Return when a device sends something under this plan, by its decision in disclosed.toml."""
    privacy, of_order = plan.privacy or PrivacySettings(), all(field.startswith(OF_ORDERS) for field in decision["fields"])
    has_noise = privacy.on_devices or (privacy.on_server and not of_order)
    said, masked = (SENT_WORDS[decision[mode]].replace("`", "") for mode in ("noise" if has_noise else "usual", "secure"))
    if not plan.one_sum or masked == said:
        return said
    return f"in training: {masked}; in evaluations: {said}" if of_order else masked


TRY_AGAIN = "remove the cause, then start the server again: it tries the same step again"
FINISHED = "finished"  # state of a device that has evaluated the final model, and has left
SOON_S, LONG_LIFE_S = 14 * 86400.0, 90 * 86400.0


def warnings_of(status: Mapping[str, Any]) -> list[str]:
    """Return what is strange about the devices' data; an older saved status has none."""
    return [status[name] for name in ("classes_apart", "one_token") if status.get(name)]


def state_of(record: Record, connected: set[str], reported: set[str], policy: RoundSettings, *, served: bool) -> str:
    """Return waiting, training, aggregating, done or failed. Training that lacks devices for its quorum counts as waiting."""
    if record.phase is Phase.TRAINING:
        reachable = reported | (set(record.devices) & connected)
        waits = served and len(reachable & set(record.cohort)) < quorum_of(policy, record)
        return "waiting" if waits else "training"
    return "training" if record.phase is Phase.EVALUATING else str(record.phase)


def status(
    snapshot: Snapshot,
    reported: set[str],
    address: str | None = None,
    troubles: Sequence[str] = (),
    now: float = 0.0,
    standby: str = "",
) -> dict[str, Any]:
    """Return the object of `fedserver status --json`; docs/operations/monitoring.md lists its fields.

    Args:
        snapshot: The ledger's contents.
        reported: Devices that have answered the open orders.
        address: Address of the running server; None if none runs.
        troubles: Problems that keep the server from carrying out a step, which it retries by itself.
        now: Unix time.
        standby: What the process of this home waits for, while another one serves; empty: it does not wait.
    """
    settings = snapshot.settings
    record, devices = snapshot.record, snapshot.devices
    reported = reported | set(record.arrived)
    revoked = {device.name for device in devices if device.revoked}
    done, last = record.phase is Phase.DONE, settings.round.rounds
    # A finished run keeps its figures: who is revoked later stays in them.
    finishers = {row.client for row in snapshot.rows if done and row.work == "evaluate" and row.round >= last}
    rows = [row for row in snapshot.rows if row.client not in revoked or row.client in finishers]
    served = address is not None or bool(standby)
    connected = {device.name for device in devices if device.connected and served}
    final = [row for row in rows if row.work == "evaluate" and row.round >= last] if done else rows
    latest, reports = accuracies(final, settings.method.evaluate), latest_metrics(rows)
    constant, task = constants(rows), snapshot.plan.scored if snapshot.plan else "classes"
    verdicts, others = fleet_verdicts(reports), {row.client: row.others for row in rows if row.others}
    ends = {entry.name: entry for entry in sorted(snapshot.certificates, key=lambda entry: entry.not_after)}
    asking = record.phase in (Phase.TRAINING, Phase.EVALUATING)
    awaited = set(record.devices) - reported - set(record.excused) if asking else set()
    return {
        "state": state_of(record, connected, reported, settings.round, served=served),
        "phase": str(record.phase),
        "running": served,
        "address": address,
        "standby": standby or None,
        "run": snapshot.run or None,
        "auto": snapshot.race.report() if snapshot.race else None,
        "method": settings.method.name,
        "model": snapshot.plan.model.name if snapshot.plan else None,
        "round": record.round,
        "rounds": settings.round.rounds,
        "adapting": sorted(record.adapting),
        "min_clients": settings.round.min_clients,
        "clients": [
            _client(device, device.name in connected, awaited, reported, finishers)
            | {"variant": (snapshot.variants.get(device.name) or MAIN) if snapshot.variants else None}
            | ({"tag": tag_of(device, snapshot.tags) or None} if snapshot.tags else {})
            | {"certificate_ends": ends[device.name].not_after if device.name in ends else None}
            | {"accuracy": latest.get(device.name, (None,))[0]}
            | {"interval": interval_of(*latest[device.name], task) if device.name in latest else None}
            | {"probably": effect_of(verdicts, device.name)}
            | {"verdict": shown_verdict(reports.get(device.name, {}))}
            | {name: reports.get(device.name, {}).get(name) for name in METRICS}
            | ({"others": msgspec.to_builtins(others[device.name])} if device.name in others else {})
            for device in devices
        ],
        "awaited": [{"name": name, "since": _since(name, devices, record)} for name in sorted(awaited)],
        "standardisation": (standardisation(snapshot.plan) or None) if snapshot.plan else None,
        "closed_form": (closed_form_words(snapshot.plan) or None) if snapshot.plan else None,
        "score": (score_words(snapshot.plan) or None) if snapshot.plan else None,
        "classes_apart": classes_apart(_classes_of(devices)) or None,
        "one_token": one_token({device.name: device.token for device in devices if not device.revoked}) or None,
        "metric": SCORED[task].metric,
        "accuracy": over_all(latest),
        "constant": over_all({name: constant[name] for name in constant.keys() & latest.keys()}),
        "no_better_than_constant": without_use(rows, latest),
        "fleet": [verdict.report() for verdict in verdicts],
        "auroc": pooled_auroc(reports.values()),
        "privacy": privacy_facts(snapshot),
        "buffer": _buffer(record, rows, settings.round) if settings.round.mode == "buffered" else None,
        "paused": record.paused,
        "reason": record.reason or None,
        "setback": record.setback or None,
        "taken_back": list(record.taken_back),
        "todo": TRY_AGAIN if record.phase is Phase.FAILED else None,
        "troubles": list(troubles),
        "expiring": [
            {
                "name": name,
                "ends": entry.not_after,
                "expired": entry.not_after < now,
                "todo": _renewing(name, entry.not_after < now),
            }
            for name, entry in sorted(ends.items())
            if name not in revoked and expires_soon(entry, now)
        ],
        "refused": [asdict(entry) | {"todo": advice(entry.kind)} for entry in snapshot.refusals],
    }


def _classes_of(devices: Iterable[DeviceRecord]) -> dict[str, list[str]]:
    """Return the classes of each device, of which so many are kept that none is cut."""
    return {
        device.name: device.labels.split(", ")
        for device in devices
        if device.labels and len(device.labels) < KEPT_LABELS and not device.revoked
    }


def _buffer(record: Record, rows: Iterable[Report], policy: RoundSettings) -> dict[str, Any]:
    """Return the fill of the buffer, and how stale updates are: those of the last round, and what may come yet."""
    last = [row.staleness for row in rows if row.round == record.round and row.staleness is not None]
    open_orders = [number for name, number in record.begun.items() if name not in record.arrived]
    return {
        "size": policy.buffer,
        "filled": len(record.arrived),
        "training": len(open_orders),
        "staleness": sum(last) / len(last) if last else None,
        "oldest": max((record.round + 1 - number for number in open_orders), default=None),
        "discarded": record.discarded,
    }


def expires_soon(certificate: Certificate, now: float) -> bool:
    """Return whether a certificate is overdue for renewal. A connected device renews it after two thirds of its life."""
    life_s = certificate.not_after - certificate.issued_at if certificate.issued_at else LONG_LIFE_S
    return now > certificate.not_after - min(life_s / 4, SOON_S)


def _renewing(name: str, expired: bool) -> str:
    if expired:
        return f"`fedserver token --for {name}` makes a token with which {name} comes back under its name: --token-file"
    return f"start {name}, or look why it does not connect: it renews its certificate by itself when it does"


def _since(name: str, devices: Iterable[DeviceRecord], record: Record) -> float:
    """Return the unix time since when a device is awaited: when the order went out, or when it left after that."""
    left = next((device.since for device in devices if device.name == name and not device.connected), 0.0)
    return max(left, record.opened_at)


def _client(
    device: DeviceRecord, connected: bool, awaited: set[str], reported: set[str], finishers: set[str]
) -> dict[str, Any]:
    if device.revoked:
        state = "revoked"
    elif not connected:
        state = FINISHED if device.name in finishers else "disconnected"
    elif device.name in awaited:
        state = "working"
    else:
        state = "reported" if device.name in reported else "idle"
    return {
        "name": device.name,
        "state": state,
        "since": device.since,
        "progress": device.progress if state == "working" else None,
        "samples": device.samples,
        "note": device.note or None,
    }
