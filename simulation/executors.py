"""Executors by name, and which one a simulation goes on with."""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import SettingError, nearest
from attune.fedclient.work.inline import Executor
from attune.simulation.worlds import SEQUENTIAL, reconciled, record

NAMES = (SEQUENTIAL,)


def executor_of(given: str | Executor | None, folder: Path | None) -> Executor | None:
    """What carries cohorts out; None: one device after the other. The choice is kept in `folder`, if there is one.

    Errors: SettingError for an unknown name; HomeMismatch if the simulation in `folder` was begun with another one.
    """
    name = given if isinstance(given, str) or given is None else type(given).__name__
    if isinstance(given, str) and given not in NAMES:
        raise SettingError(f"unknown executor {given!r}{nearest(given, NAMES)}")
    if folder is not None:
        name = reconciled(folder, name)
        record(folder, name)
        if given is None and name not in NAMES:
            raise SettingError(f"the simulation in {folder} was begun with an executor of its own, {name}: hand it over again")
    return None if given is None or isinstance(given, str) else given
