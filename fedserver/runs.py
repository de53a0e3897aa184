"""Several runs, one after the other, over one enrolled fleet: the home is the present run, `runs/NAME` holds those before it.

A run is over before the next begins. Then its ledger and state are put aside as a folder that can be looked at like a home,
without keys, tokens and certificates, and the home's own ledger begins anew for the same members.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from attune.common.config import merge
from attune.common.durable import PRIVATE, disk_errors, sync
from attune.common.errors import HomeMismatch, SettingError
from attune.common.identity.names import check_name
from attune.common.plan import FIRST_RUN, run_name
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase
from attune.fedserver.home import Home
from attune.fedserver.identity.desk import flat
from attune.fedserver.ports.blobs import STATE
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.stores.folder import AREAS
from attune.fedserver.stores.tables import Tables

KEPT_SECTIONS = ("server", "data")  # settings that belong to the fleet and not to a run
ENDED: Mapping[str, Any] = {
    "phase": Phase.DONE, "devices": (), "cohort": (), "excused": (), "replaced": (), "adapting": {}, "paused": False,
    "reason": "",
}  # fmt: skip


def begin(home: Home, name: str, given: Mapping[str, Any], by: str) -> str:
    """The next run, under `name`, with these settings; the one before is put aside. Where that one lies, or nothing.

    Errors: HomeMismatch if the present run is not over, SettingError for the name or a setting, HomeBusy while a server runs.
    """
    home.require()
    with home.locked(), _tables(home) as tables:
        found = tables.snapshot()
        if found.leaving:
            _remove_blobs(home, tables)
        _check_over(found)
        _check_new(home, found, name)
        kept = {key: value for key, value in (found.overrides or {}).items() if key in KEPT_SECTIONS}
        settings = merge(kept, given)
        planning.resolve(settings)
        place = _put_aside(home, found) if found.plan is not None else None
        home.audit.write("run begun", by, run=name, before=run_name(found.run), settings=flat(settings))
        tables.begin_run(name, settings)
        _remove_blobs(home, tables)
        return str(place or "")


def stop(home: Home, by: str) -> int:
    """Ends the present run after the rounds that are closed; how many these are. Its devices get their models as ever.

    Errors: HomeMismatch if no round is closed, or the run is over already; HomeBusy while a server runs.
    """
    home.require()
    with home.locked(), _tables(home) as tables:
        found = tables.snapshot()
        record = found.record
        if record.revive().phase is Phase.DONE:
            raise HomeMismatch(f"the run {run_name(found.run)} is over already: `fedserver run new` begins the next")
        if not record.round:
            raise HomeMismatch(f"no round of the run {run_name(found.run)} is closed, so there is nothing to end")
        home.audit.write("run stopped", by, run=run_name(found.run), rounds=record.round)
        settings = merge(found.overrides or {}, {"round": {"rounds": record.round}})
        tables.end_run(msgspec.structs.replace(record, **ENDED), settings)
        return record.round


def tidy(home: Home) -> None:
    """The blobs of a run that was put aside go: a `begin` that was killed has left them. For whoever has locked the home."""
    with _tables(home) as tables:
        _remove_blobs(home, tables)


def _remove_blobs(home: Home, tables: Tables) -> None:
    for area in AREAS:
        shutil.rmtree(home.path / area, ignore_errors=True)
    home.create()
    tables.left()


@contextlib.contextmanager
def _tables(home: Home) -> Iterator[Tables]:
    tables = Tables(home.database)
    try:
        yield tables
    finally:
        tables.close()


def _check_over(found: Snapshot) -> None:
    if found.plan is not None and found.record.phase not in (Phase.DONE, Phase.FAILED):
        raise HomeMismatch(
            f"the run {run_name(found.run)} is not over (round {found.record.round}): end it first with `fedserver run stop`"
        )


def _check_new(home: Home, found: Snapshot, name: str) -> None:
    check_name(name, "a run", "Choose another.")
    if name in (FIRST_RUN, found.run) or (home.runs / name).exists():
        raise SettingError(f"there is a run {name} already; choose another name (`fedserver run list`)")


def _put_aside(home: Home, found: Snapshot) -> Path:
    """The present run as a folder of its own. A killed process leaves the home as it is, and at most a folder to replace."""
    place = home.runs / run_name(found.run)
    filling = home.runs / f".{place.name}.filling"
    for left in (filling, place):  # the home's run has this name, so what lies there was not finished
        shutil.rmtree(left, ignore_errors=True)
    with disk_errors(place):
        (filling / STATE).mkdir(mode=0o700, parents=True)
        _copy_ledger(home.database, filling / home.database.name)
        for path in home.state.iterdir():
            shutil.copyfile(path, filling / STATE / path.name)
            sync(filling / STATE / path.name)
        for folder in (filling / STATE, filling):
            sync(folder)
        filling.rename(place)
        sync(home.runs)
    return place


def _copy_ledger(source: Path, copy: Path) -> None:
    with contextlib.closing(sqlite3.connect(source)) as own, contextlib.closing(sqlite3.connect(copy)) as other:
        own.backup(other)
        for table in ("certificates", "tokens", "refusals"):  # they stay with the home
            other.execute(f"DELETE FROM {table}")  # noqa: S608 - names of tables
        other.execute("UPDATE devices SET connected = 0")
        other.commit()
        other.execute("VACUUM")
    copy.chmod(PRIVATE)
    sync(copy)
