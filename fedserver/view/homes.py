"""Status of a server's home, as an object and as text, and the list of its runs: the present one and earlier ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attune.common.methods.private_training import with_orders
from attune.common.plan import run_name
from attune.common.privacy.accountant import mode_of, visible_of
from attune.common.task import described
from attune.fedserver.core.accuracy import accuracies, over_all
from attune.fedserver.core.tags import by_tag
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import TokenView
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.view.status import (
    asked,
    clipping,
    guarantee,
    planned_epsilons,
    privacy_lines,
    spent_epsilons,
    status,
    warnings_of,
)

AUROCS = {"auroc_kept": "AUROC kept", "auroc_low": "its 95 %", "auroc_alone": "AUROC alone", "auroc_p_alone": "AUROC p"}
COMPARED = ("kept", "alone", "local", "common", "constant")  # scores with a column, if some device has reported one
SHOWN_REFUSALS = 5  # the latest; --json has them all
WIDE = 500  # columns off a terminal: nothing is cut or wrapped


def share(value: float | None) -> str:
    """Return an accuracy with four digits, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def text_of(*parts: str | Table) -> str:
    """Return lines and tables as text, as wide as the terminal if stdout is one; else nothing is cut or wrapped."""
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().rstrip("\n")


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]], wrapped: str = "") -> Table:
    """Return a table without lines; only the column `wrapped` may be wrapped."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=head != wrapped)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def render_status(status: dict[str, Any]) -> str:
    """Return the status as text."""
    return text_of(*_parts(status))


def _parts(status: dict[str, Any]) -> Iterator[str | Table]:
    running = f"serving {status['address']}" if status["running"] else "not running"
    if status.get("standby"):  # a saved status of an earlier version has none
        running = f"a standby: {status['standby']}"
    yield f"{status['state']}: round {status['round']}/{status['rounds']} of {status['method']}, server {running}"
    if buffer := status["buffer"]:
        stale = "" if buffer["staleness"] is None else f", mean staleness of the last round {buffer['staleness']:.1f}"
        fill = f"{buffer['filled']} of {buffer['size']} updates are in, {buffer['training']} devices train"
        yield f"buffered rounds: {fill}{stale}, {buffer['discarded']} updates discarded"
    if race := status.get("auto"):
        yield from race["words"]
    if status["paused"]:
        yield "paused: no further round opens before `fedserver resume`"
    if status["reason"]:
        yield f"failed: {status['reason']}"
    if status["setback"]:
        yield f"set back: {status['setback']}"
    for trouble in status["troubles"]:
        yield f"trouble: {trouble}"
    if status["todo"]:
        yield f"what to do: {status['todo']}"
    for expiring in status["expiring"]:
        when = datetime.fromtimestamp(expiring["ends"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        what = f"expired on {when}" if expiring["expired"] else f"expires on {when}"
        yield f"certificate of {expiring['name']} {what}: {expiring['todo']}"
    for refused in status["refused"][:SHOWN_REFUSALS]:
        ago = f"{max(0.0, time.time() - refused['at']):.0f} s ago"
        yield f"refused: {refused['who']}, {refused['count']} times, last {ago}: {refused['text']}"
        yield f"  what to do: {refused['todo']}"
    for awaited in status["awaited"]:
        yield f"awaited: {awaited['name']}, for {time.time() - awaited['since']:.0f} s"
    if status["adapting"]:
        yield f"newcomers in rounds of their own: {', '.join(status['adapting'])}"
    elif status["state"] == "waiting":
        connected = sum(client["state"] not in ("disconnected", "revoked") for client in status["clients"])
        yield f"waiting: {connected} of at least {status['min_clients']} devices are connected"
    yield _table(status["clients"], status["metric"])
    for group in by_tag(status["clients"]):
        yield f"{group['tag']}: {group['devices']} devices, mean {status['metric']} {share(group['accuracy'])}"
    if status["accuracy"]:
        yield f"{described(status['metric'])}: {_averages(status['accuracy'])}"
    if status["privacy"]:
        yield from privacy_lines(status["privacy"])
    for verdict in status["fleet"]:
        yield f"what devices keep {verdict['words']}"
    if over := status.get("auroc"):  # an older saved status has none
        yield f"what devices keep, {over['words']}"
    if status["accuracy"] and status["constant"]:
        yield f"a constant answer: {_averages(status['constant'])}"
    yield from _no_better(status)
    if status["standardisation"]:
        yield status["standardisation"]
    yield from filter(None, map(status.get, ("closed_form", "score")))  # an older saved status has none
    yield from (f"warning: {text}" for text in warnings_of(status))


def _averages(averages: dict[str, float]) -> str:
    return f"{averages['mean_over_clients']:.4f} mean over clients, {averages['over_samples']:.4f} over samples"


def _no_better(status: dict[str, Any]) -> Iterator[str]:
    """Yield warnings that the models are no better than a constant answer, on average or on some devices."""
    names = {"mean_over_clients": "over clients", "over_samples": "over samples"}
    known = status["accuracy"] and status["constant"]
    beaten = [name for key, name in names.items() if known and status["accuracy"][key] <= status["constant"][key]]
    if beaten:
        yield f"no better than a constant answer {' and '.join(beaten)}: these models have learned nothing useful"
    if count := len(status["no_better_than_constant"]):
        yield f"on {count} of {len(status['clients'])} devices the model is no better than a constant answer"


def _table(clients: list[dict[str, Any]], metric: str) -> Table:
    compared = [name for name in COMPARED if any(client.get(f"accuracy_{name}") is not None for client in clients)]
    ranked = [key for key in AUROCS if any(client.get(key) is not None for client in clients)]
    areas = (AUROCS[key] for key in ranked)
    varied = [name for name in ("variant", "tag") if any(client.get(name) for client in clients)]
    clients = sorted(clients, key=lambda client: client.get("tag") or "\uffff")  # the others in their order by name
    judged = ("verdict", "probably", "keeps mostly", *varied, "note")
    heads = ("device", "state", "samples", metric, "95 %", *compared, *areas, *judged)
    scores = [*(f"accuracy_{name}" for name in compared), *ranked]
    return text_table(heads, (_cells(client, scores, varied) for client in clients), "note")


def _cells(client: dict[str, Any], scores: Sequence[str], varied: Sequence[str]) -> tuple[str, ...]:
    progress = "" if client["progress"] is None else f" {client['progress']:.0%}"
    ends = {
        "interval": client["interval"],
        "auroc_low": (low, client["auroc_high"]) if (low := client.get("auroc_low")) else None,
    }
    between = {name: "-" if end is None else "{:.3f}-{:.3f}".format(*end) for name, end in ends.items()}
    accuracy, interval, *others = (between.get(key) or share(client.get(key)) for key in ("accuracy", "interval", *scores))
    numbers = (client["name"], client["state"] + progress, str(client["samples"] or "-"), accuracy, interval, *others)
    words = (client.get(key) or "-" for key in ("verdict", "probably", "kept", *varied))
    return (*numbers, *words, client["note"] or "")


def render_tokens(tokens: Iterable[TokenView]) -> str:
    """Return the join tokens as text, a line for each, the newest last."""
    heads = ("token", "state", "uses left", "made by", "expires", "for", "devices")
    return text_of(text_table(heads, map(_token_cells, tokens), "devices"))


def minute(at: float) -> str:
    """Return a unix time for people, in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _token_cells(token: TokenView) -> tuple[str, ...]:
    left, devices = f"{token.uses_left} of {token.uses}", ", ".join(token.devices) or "-"
    return token.id, token.state, left, token.origin, minute(token.expires_at), token.only_for or "-", devices


def status_of(home: ServerHome, troubles: Sequence[str] = ()) -> dict[str, Any]:
    """Return the object of `fedserver status --json` for a home; `troubles`: what the running server says of itself.

    Raises:
        HomeMismatch: There is no federation, or its ledger is damaged.
        LedgerBusy: The ledger cannot be read now.
    """
    snapshot = home.snapshot()
    reported = Inbox(home.open().blobs).names(*snapshot.record.open_orders)
    return status(snapshot, reported, home.served_at(), troubles, time.time(), home.standby())


def privacy_of(home: ServerHome) -> dict[str, Any]:
    """Return the object of `fedserver privacy --json`: the guarantee of the present run, and what was spent.

    "planned" has what all orders will have cost each device's data, "spent" what each one reports for all runs; "released" what
    the server's noisy sums have cost, None without them. "earlier" has what was spent in the earlier runs.

    Raises:
        HomeMismatch: There is no federation, or its ledger is damaged.
        LedgerBusy: The ledger cannot be read now.
    """
    snapshot = home.snapshot()
    privacy = with_orders(asked(snapshot), snapshot.settings.round.rounds)
    spent, fallen = spent_epsilons(snapshot.rows)
    return {
        "unit": privacy.unit,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "clip": privacy.clip,
        "orders": privacy.orders,
        "secure_aggregation": privacy.secure_aggregation,
        "mode": mode_of(privacy),
        "visible": visible_of(privacy),
        "clipping": clipping(snapshot),
        "planned": planned_epsilons(snapshot),
        "spent": {device.name: spent.get(device.name) for device in snapshot.devices},
        "fallen": fallen,
        "released": guarantee(snapshot),
        "earlier": [ledger for name, earlier in _earlier(home) if (ledger := _spent_in(name, earlier.snapshot()))],
    }


def _spent_in(name: str, snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what an earlier run has spent; None without privacy.

    "spent" has what devices reported for all runs until its end, "released" is as in `privacy_of`.
    """
    mode = mode_of(asked(snapshot))
    if not mode:
        return None
    return {
        "run": name,
        "mode": mode,
        "spent": spent_epsilons(snapshot.rows)[0],
        "released": guarantee(snapshot),
    }


def _earlier(home: ServerHome) -> Iterator[tuple[str, ServerHome]]:
    """Yield the earlier runs by name."""
    for path in sorted(home.runs.glob("[!.]*")):
        earlier = ServerHome(path)
        if earlier.exists():
            yield path.name, earlier


class ListedRun(msgspec.Struct, frozen=True):
    """Figures of one run in the list. accuracy: mean over devices; None: none was reported."""

    name: str
    present: bool
    path: str
    method: str
    model: str | None
    round: int
    rounds: int
    phase: str
    devices: int  # that have taken part
    accuracy: float | None


def listed(home: ServerHome) -> Iterator[ListedRun]:
    """Yield the earlier runs by name, then the present one.

    Raises:
        HomeMismatch: There is no home.
    """
    home.require()
    for name, earlier in _earlier(home):
        yield _listed(earlier, name)
    yield _listed(home, None)


def _listed(home: ServerHome, name: str | None) -> ListedRun:
    snapshot = home.snapshot()
    settings = snapshot.settings
    average = over_all(accuracies(snapshot.rows, settings.method.evaluate))
    return ListedRun(
        name=name or run_name(snapshot.run),
        present=name is None,
        path=str(home.path),
        method=settings.method.name,
        model=snapshot.plan.model.name if snapshot.plan else None,
        round=snapshot.record.round,
        rounds=settings.round.rounds,
        phase=str(snapshot.record.phase),
        devices=sum(device.contributed > 0 for device in snapshot.devices),
        accuracy=average["mean_over_clients"] if average else None,
    )


def render(runs: Iterable[ListedRun]) -> str:
    """Return the list of runs as text."""
    heads = ("run", "", "method", "model", "rounds", "state", "devices", "accuracy")
    return text_of(text_table(heads, map(_cells_of, runs)))


def _cells_of(run: ListedRun) -> tuple[str, ...]:
    present, rounds = "present" if run.present else "", f"{run.round}/{run.rounds}"
    return run.name, present, run.method, run.model or "-", rounds, run.phase, str(run.devices), share(run.accuracy)
