"""Several runs over one enrolled fleet, one after the other: the home is the present run, `runs/NAME` holds earlier ones.

A run is over before the next begins. Then its ledger and state are copied into a folder that can be read like a home, without
keys, tokens and certificates, and the home's ledger begins anew for the same members.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from attune.common import aio
from attune.common.config import merge
from attune.common.durable import disk_errors, sync
from attune.common.errors import HomeMismatch, SettingError
from attune.common.identity.names import check_name
from attune.common.plan import FIRST_RUN, run_name
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import flat
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.ports.storage import HomeStorage

KEPT_SECTIONS = ("server", "data")  # settings that belong to the fleet and not to a run
ENDED: Mapping[str, Any] = {
    "phase": Phase.DONE, "devices": (), "cohort": (), "excused": (), "replaced": (), "adapting": {}, "paused": False,
    "reason": "",
}  # fmt: skip


def begin(home: ServerHome, name: str, given: Mapping[str, Any], by: str) -> str:
    """Begin the run `name` with the settings `given`, and put the run before it aside.

    Returns:
        The folder of the run before; empty if it had no plan, so that there was nothing to keep.

    Raises:
        HomeMismatch: The present run is not over.
        SettingError: The name or a setting cannot be.
        HomeBusy: A server runs on the home.
    """
    home.require()
    with home.locked():
        return aio.run(_begin(home, name, given, by))


async def _begin(home: ServerHome, name: str, given: Mapping[str, Any], by: str) -> str:
    async with home.open() as storage:
        snapshot = await storage.ledger.snapshot()
        await tidy(storage, snapshot)
        _check_over(snapshot)
        _check_new(home, snapshot, name)
        kept = {key: value for key, value in (snapshot.overrides or {}).items() if key in KEPT_SECTIONS}
        settings = merge(kept, given)
        planning.resolve(settings)
        place = _put_aside(home, storage, snapshot) if snapshot.plan is not None else None
        await storage.ledger.note("run begun", by, run=name, before=run_name(snapshot.run), settings=flat(settings))
        await storage.ledger.begin_run(name, settings)
        await tidy(storage, await storage.ledger.snapshot())
        return str(place or "")


def stop(home: ServerHome, by: str) -> int:
    """End the present run after the rounds that are closed, and return their number. Its devices get their models as ever.

    Raises:
        HomeMismatch: No round is closed, or the run is over already.
        HomeBusy: A server runs on the home.
    """
    home.require()
    with home.locked():
        return aio.run(_stop(home, by))


async def _stop(home: ServerHome, by: str) -> int:
    async with home.open() as storage:
        snapshot = await storage.ledger.snapshot()
        record = snapshot.record
        if record.revive().phase is Phase.DONE:
            raise HomeMismatch(f"the run {run_name(snapshot.run)} is over already: `fedserver run new` begins the next")
        if not record.round:
            raise HomeMismatch(f"no round of the run {run_name(snapshot.run)} is closed, so there is nothing to end")
        await storage.ledger.note("run stopped", by, run=run_name(snapshot.run), rounds=record.round)
        settings = merge(snapshot.overrides or {}, {"round": {"rounds": record.round}})
        await storage.ledger.end_run(msgspec.structs.replace(record, **ENDED), settings)
        return record.round


async def tidy(storage: HomeStorage, snapshot: Snapshot) -> None:
    """Remove the blobs of a run that was put aside, where a `begin` that was killed has left them. The home is locked."""
    if snapshot.leaving:
        storage.clear_blobs()
        await storage.ledger.end_cleanup()


def _check_over(snapshot: Snapshot) -> None:
    if snapshot.plan is not None and snapshot.record.phase not in (Phase.DONE, Phase.FAILED):
        raise HomeMismatch(
            f"the run {run_name(snapshot.run)} is not over (round {snapshot.record.round}): "
            "end it first with `fedserver run stop`"
        )


def _check_new(home: ServerHome, snapshot: Snapshot, name: str) -> None:
    check_name(name, "a run", "Choose another.")
    if name in (FIRST_RUN, snapshot.run) or (home.runs / name).exists():
        raise SettingError(f"there is a run {name} already; choose another name (`fedserver run list`)")


def _put_aside(home: ServerHome, storage: HomeStorage, snapshot: Snapshot) -> Path:
    """Copy the present run into a folder of its own; a killed process leaves at most a copy that the next try replaces."""
    place = home.runs / run_name(snapshot.run)
    filling = home.runs / f".{place.name}.filling"
    for left in (filling, place):  # the home's run has this name, so a folder of this name was not finished
        shutil.rmtree(left, ignore_errors=True)
    with disk_errors(place):
        storage.copy_run(filling)
        filling.rename(place)
        sync(home.runs)
    return place
