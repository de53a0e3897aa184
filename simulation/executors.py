"""Executors by name, and which one a simulation goes on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attune.common.errors import SettingError, nearest
from attune.fedclient.work.inline import Executor
from attune.fedclient.work.processes.pool import POOLS, Pool
from attune.fedclient.work.together import SideBySide
from attune.simulation.executor_names import AUTO, NAMES, STACKED
from attune.simulation.worlds import begun, reconciled, record

if TYPE_CHECKING:
    from attune.fedclient.work.stacked.advice import Advice


def executor_of(given: str | Executor | None, folder: Path | None, workers: int | None = None) -> Executor | Pool | None:
    """What carries cohorts out; None: one device after the other. The choice is kept in `folder`, if there is one.

    workers: processes of a pool, which the caller must close; None: one for each processor.
    Errors: SettingError for an unknown name; HomeMismatch if the simulation in `folder` was begun with another one.
    """
    name = given if isinstance(given, str) or given is None else type(given).__name__
    if isinstance(given, str) and given not in NAMES:
        raise SettingError(f"unknown executor {given!r}{nearest(given, NAMES)}")
    if folder is not None:
        if name != AUTO:
            name = reconciled(folder, name)
            if not begun(folder):
                record(folder, name)
        elif begun(folder):
            name = reconciled(folder, None)
        if given in (None, AUTO) and name not in NAMES:
            raise SettingError(f"the simulation in {folder} was begun with an executor of its own, {name}: hand it over again")
    if given is not None and not isinstance(given, str):
        return given
    if name == AUTO:
        return SideBySide("auto", partial(_settled, folder))
    if name is not None and name in POOLS:
        return POOLS[name](workers)
    return SideBySide() if name == STACKED else None


def importable(model: object) -> bool:
    """Whether devices in other processes can find this model."""
    from attune.simulation.own_models import name_of

    try:
        return model is None or bool(name_of(model, durable=False, spread=True))  # type: ignore[arg-type]
    except SettingError:
        return False


def _settled(folder: Path | None, advice: Advice) -> None:
    if folder is not None:
        record(folder, advice.executor, str(advice))
