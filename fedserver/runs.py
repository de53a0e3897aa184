"""Several runs over one enrolled fleet, one after the other: the home is the present run, `runs/NAME` holds earlier ones.

A run is over before the next begins. Then its ledger and state are copied into a folder that can be read like a home, without
keys, tokens and certificates, and the home's ledger begins anew for the same members.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from attune.common import aio
from attune.common.config import merge
from attune.common.durable import disk_errors, sync
from attune.common.errors import HomeMismatch, SettingError
from attune.common.faults import SERVER, fail_at
from attune.common.identity.names import check_name
from attune.common.plan import FIRST_RUN, Plan, run_name
from attune.common.privacy.accountant import mode_of
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import flat
from attune.fedserver.identity.bound_secrets import NOISE
from attune.fedserver.ports.blobs import STATE
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.ports.storage import HomeStorage
from attune.fedserver.stores.folder import FolderBlobs
from attune.fedserver.stores.transfer import copy_blobs

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
        HomeMismatch: The present run has closed rounds, and is not over.
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
        planning.check_one_sum(snapshot.plan, planning.resolve(settings).transforms)
        place = _put_aside(home, storage, snapshot) if snapshot.plan is not None else None
        await storage.ledger.note("run begun", by, run=name, before=run_name(snapshot.run), settings=flat(settings))
        await storage.ledger.set_race(None)  # before the run: a race that is over would take its winner's run back
        await storage.ledger.begin_run(name, settings)
        # A lost noise secret may be replaced now.
        known = snapshot.commitments
        await storage.ledger.set_commitments({secret: known[secret] for secret in known if secret != NOISE})
        await tidy(storage, await storage.ledger.snapshot())
        return str(place or "")


async def switch(home: ServerHome, storage: HomeStorage, name: str, settings: Mapping[str, Any], by: str) -> None:
    """Make `name` the present run: as it was put aside, or else a new one with these settings. The home is locked.

    A process that is killed on the way does it again: the home's ledger names the present run, and a run stays put aside until
    it is whole in the home.

    Args:
        home: The home.
        storage: Its storage.
        name: The run.
        settings: The settings of a new run.
        by: Who does it, for the audit log.

    Raises:
        DiskFull: There is no space for the copies.
    """
    snapshot = await storage.ledger.snapshot()
    await tidy(storage, snapshot)
    place = home.runs / name
    if snapshot.run != name:
        if snapshot.record.round:
            _put_aside(home, storage, snapshot)
        fail_at(SERVER, snapshot.record.round, "run-put-aside")
        await storage.ledger.note("run begun", by, run=name, before=run_name(snapshot.run), settings=flat(settings))
        await storage.ledger.begin_run(name, settings)
        fail_at(SERVER, snapshot.record.round, "run-switched")
        await tidy(storage, await storage.ledger.snapshot())
    if place.exists():
        if (await storage.ledger.snapshot()).plan is None:
            await _take_back(storage, ServerHome(place))
        shutil.rmtree(place)


async def _take_back(storage: HomeStorage, kept: ServerHome) -> None:
    """Copy a run that was put aside into the present one, which is new. Devices keep what has become of them since."""
    before = kept.snapshot()
    await asyncio.to_thread(lambda: list(copy_blobs(FolderBlobs(kept.path), storage.blobs, [STATE])))
    fail_at(SERVER, before.record.round, "blobs-taken-back")
    then = {device.name: device for device in before.devices}
    marks = {}
    for device in (await storage.ledger.snapshot()).devices:
        known = then.get(device.name)
        marks[device.name] = {
            "founder": int(known.founder if known else not before.record.round),
            "contributed": known.contributed if known else 0,
            "fetched": known.fetched if known else -1,
        }
    await storage.ledger.set_overrides(before.overrides or {})
    record = msgspec.structs.replace(before.record, paused=(await storage.ledger.snapshot()).record.paused)
    await storage.ledger.commit_round(record, before.slots, before.rows, marks, before.plan)
    fail_at(SERVER, before.record.round, "run-taken-back")


def stop(home: ServerHome, by: str) -> int:
    """End the present run after the rounds that are closed, and return their number. Its devices get their models as ever.

    A race of methods that is under way is given up: the present candidate's run stays, even without a closed round.

    Raises:
        HomeMismatch: No round is closed and no race is under way, or the run is over already.
        HomeBusy: A server runs on the home.
    """
    home.require()
    with home.locked():
        return aio.run(_stop(home, by))


async def _stop(home: ServerHome, by: str) -> int:
    async with home.open() as storage:
        snapshot = await storage.ledger.snapshot()
        record = snapshot.record
        racing = snapshot.race is not None and not snapshot.race.is_over
        if record.revive().phase is Phase.DONE and not racing:
            raise HomeMismatch(f"the run {run_name(snapshot.run)} is over already: `fedserver run new` begins the next")
        if not (record.round or racing):
            raise HomeMismatch(f"no round of the run {run_name(snapshot.run)} is closed: `fedserver run new` begins the next")
        await storage.ledger.note("run stopped", by, run=run_name(snapshot.run), rounds=record.round)
        await storage.ledger.set_race(None if racing else snapshot.race)
        if record.round:
            settings = merge(snapshot.overrides or {}, {"round": {"rounds": record.round}})
            await storage.ledger.end_run(msgspec.structs.replace(record, **ENDED), settings)
        return record.round


async def tidy(storage: HomeStorage, snapshot: Snapshot) -> None:
    """Remove the blobs of a run that was put aside, where a `begin` that was killed has left them. The home is locked."""
    if snapshot.leaving:
        storage.clear_blobs()
        await storage.ledger.end_cleanup()


def _check_over(snapshot: Snapshot) -> None:
    """Check that the run is over, or has no closed round: then there is nothing to end."""
    if snapshot.race is not None and not snapshot.race.is_over:
        raise HomeMismatch("a race of methods is under way (--method auto): give it up first with `fedserver run stop`")
    if snapshot.record.round and snapshot.record.phase not in (Phase.DONE, Phase.FAILED):
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


def check_shareable(plan: Plan) -> None:
    """Check that the networks of a run's devices may be shared.

    Raises:
        SettingError: They stay at their site.
    """
    if plan.privacy is not None and (mode := mode_of(plan.privacy)):
        raise SettingError(f"--matrix: in this run networks stay at their site ({mode}), so none may be shared")
