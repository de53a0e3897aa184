"""The runs of one home: the present one, and those before it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attune.common.plan import run_name
from attune.fedserver.core.accuracy import accuracies, over_all
from attune.fedserver.home import Home
from attune.fedserver.view.beside import snapshot
from attune.fedserver.view.compare_text import share
from attune.fedserver.view.status_text import WIDE


class Listed(msgspec.Struct, frozen=True):
    """One run. accuracy: mean over devices; None: nobody has reported one."""

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


def listed(home: Home) -> Iterator[Listed]:
    """The earlier ones by name, then the present one. Errors: HomeMismatch if there is no home."""
    home.require()
    for path in sorted(home.runs.glob("[!.]*")):
        earlier = Home(path)
        if earlier.exists():
            yield _listed(earlier, path.name)
    yield _listed(home, None)


def _listed(home: Home, name: str | None) -> Listed:
    found = snapshot(home)
    settings = found.settings
    average = over_all(accuracies(found.rows, settings.method.evaluate))
    return Listed(
        name=name or run_name(found.run),
        present=name is None,
        path=str(home.path),
        method=settings.method.name,
        model=found.plan.model.name if found.plan else None,
        round=found.record.round,
        rounds=settings.round.rounds,
        phase=str(found.record.phase),
        devices=sum(device.contributed > 0 for device in found.devices),
        accuracy=average["mean_over_clients"] if average else None,
    )


def render(runs: Iterable[Listed]) -> str:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    table = Table(box=None, pad_edge=False)
    for head in ("run", "", "method", "model", "rounds", "state", "devices", "accuracy"):
        table.add_column(head, no_wrap=True)
    for run in runs:
        now, rounds = "present" if run.present else "", f"{run.round}/{run.rounds}"
        cells = (run.name, now, run.method, run.model or "-", rounds, run.phase, str(run.devices), share(run.accuracy))
        table.add_row(*(Text(cell) for cell in cells))
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
