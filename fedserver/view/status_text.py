"""The status as text for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attune.common.task import described
from attune.fedserver.identity.admin import TokenView

COMPARED = ("accuracy_common", "accuracy_local", "accuracy_constant")
SHOWN_REFUSALS = 5  # the latest; --json has them all
WIDE = 500  # columns off a terminal: nothing is cut or wrapped


def share(value: float | None) -> str:
    """Return an accuracy with four digits, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def render_status(status: dict[str, Any]) -> str:
    """Render the status: plain text, or colours on a terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    with console.capture() as capture:
        running = f"serving {status['address']}" if status["running"] else "not running"
        console.print(f"{status['state']}: round {status['round']}/{status['rounds']} of {status['method']}, server {running}")
        if status["paused"]:
            console.print("paused: no further round opens before `fedserver resume`", markup=False)
        if status["reason"]:
            console.print(f"failed: {status['reason']}", markup=False)
        if status["setback"]:
            console.print(f"set back: {status['setback']}", markup=False)
        for trouble in status["troubles"]:
            console.print(f"trouble: {trouble}", markup=False)
        if status["todo"]:
            console.print(f"what to do: {status['todo']}", markup=False)
        for expiring in status["expiring"]:
            when = datetime.fromtimestamp(expiring["ends"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
            what = f"expired on {when}" if expiring["expired"] else f"expires on {when}"
            console.print(f"certificate of {expiring['name']} {what}: {expiring['todo']}", markup=False)
        for refused in status["refused"][:SHOWN_REFUSALS]:
            ago = f"{max(0.0, time.time() - refused['at']):.0f} s ago"
            console.print(f"refused: {refused['who']}, {refused['count']} times, last {ago}: {refused['text']}", markup=False)
            console.print(f"  what to do: {refused['todo']}", markup=False)
        for awaited in status["awaited"]:
            console.print(f"awaited: {awaited['name']}, for {time.time() - awaited['since']:.0f} s", markup=False)
        if status["adapting"]:
            console.print(f"newcomers in rounds of their own: {', '.join(status['adapting'])}")
        elif status["state"] == "waiting":
            connected = sum(client["state"] not in ("disconnected", "revoked") for client in status["clients"])
            console.print(f"waiting: {connected} of at least {status['min_clients']} devices are connected")
        console.print(_table(status["clients"], status["metric"]))
        if status["accuracy"]:
            console.print(f"{described(status['metric'])}: {_averages(status['accuracy'])}")
        if status["accuracy"] and status["constant"]:
            console.print(f"a constant answer: {_averages(status['constant'])}")
            for line in _no_better(status):
                console.print(line, markup=False)
    return capture.get().rstrip("\n")


def _averages(averages: dict[str, float]) -> str:
    return f"{averages['mean_over_clients']:.4f} mean over clients, {averages['over_samples']:.4f} over samples"


def _no_better(status: dict[str, Any]) -> Iterator[str]:
    """Yield warnings that the models are no better than a constant answer, on average or on some devices."""
    names = {"mean_over_clients": "over clients", "over_samples": "over samples"}
    beaten = [name for key, name in names.items() if status["accuracy"][key] <= status["constant"][key]]
    if beaten:
        yield f"no better than a constant answer {' and '.join(beaten)}: these models have learned nothing that is worth having"
    if count := len(status["no_better_than_constant"]):
        yield f"on {count} of {len(status['clients'])} devices the model is no better than a constant answer"


def _table(clients: list[dict[str, Any]], metric: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("device", "state", "samples", metric, "95 %", "common", "local", "constant", "verdict", "keeps", "note"):
        table.add_column(column, no_wrap=column != "note")
    for client in clients:
        accuracy, *others = (_share(client[key]) for key in ("accuracy", *COMPARED))
        interval = "-" if client["interval"] is None else "{:.3f}-{:.3f}".format(*client["interval"])
        share = "" if client["progress"] is None else f" {client['progress']:.0%}"
        state, samples = client["state"] + share, str(client["samples"] or "-")
        row = (client["name"], state, samples, accuracy, interval, *others)
        row = (*row, client["verdict"] or "-", client["kept"] or "-", client["note"] or "")
        table.add_row(*(Text(cell) for cell in row))
    return table


def render_tokens(tokens: Sequence[TokenView]) -> str:
    """Render the join tokens, a line for each, the newest last."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    table = Table(box=None, pad_edge=False)
    for column in ("token", "state", "uses left", "made by", "expires", "for", "devices"):
        table.add_column(column, no_wrap=column != "devices")
    for token in tokens:
        expires = datetime.fromtimestamp(token.expires_at, timezone.utc).strftime("%Y-%m-%d %H:%M")
        left = f"{token.uses_left} of {token.uses}"
        row = (token.id, token.state, left, token.origin, expires, token.only_for or "-", ", ".join(token.devices) or "-")
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
