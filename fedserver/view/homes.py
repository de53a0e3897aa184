"""Status of a server's home, and the list of its runs: the present one and the earlier ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from attune.common.methods.private_training import with_orders
from attune.common.plan import run_name
from attune.common.privacy.statement import mode_of, visible_of
from attune.fedserver.core.accuracy import accuracies, over_all
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.inbox import Inbox
from attune.fedserver.view.guarantee import asked, clipping, guarantee, planned_epsilons, spent_epsilons
from attune.fedserver.view.status import status
from attune.fedserver.view.status_text import share, text_of, text_table


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
    return text_of(text_table(heads, map(_cells, runs)))


def _cells(run: ListedRun) -> tuple[str, ...]:
    present, rounds = "present" if run.present else "", f"{run.round}/{run.rounds}"
    return run.name, present, run.method, run.model or "-", rounds, run.phase, str(run.devices), share(run.accuracy)
