"""Choice of the executor of a simulation, by name or from the record of an earlier start."""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import SettingError, nearest
from attune.fedclient.work.executor import EXECUTORS, STACKED, Executor, StackedExecutor
from attune.fedclient.work.processes.remote_executor import REMOTE_EXECUTORS
from attune.simulation.simulation_state import reconcile_executor


def executor_of(given: str | Executor | None, folder: Path | None, workers: int | None = None) -> Executor | None:
    """Return the executor of cohorts, or None for one device after the other.

    Args:
        given: Name of an executor, or an executor.
        folder: Folder of the simulation, if it has one; it keeps the choice.
        workers: Number of processes of a RemoteExecutor, which the caller must close. None: one for each processor.

    Raises:
        SettingError: The name is unknown, or the simulation in `folder` needs an executor that must be handed over again.
        HomeMismatch: The simulation in `folder` was begun with another executor.
    """
    name = given if isinstance(given, str) or given is None else type(given).__name__
    if given == "auto":  # in earlier versions
        raise SettingError(
            "there is no executor 'auto' any more: it chose by the time that a trial took. Give 'stacked', which is faster for "
            "small models, or 'sequential'; a simulation that was begun with it goes on without this argument"
        )
    if isinstance(given, str) and given not in EXECUTORS:
        raise SettingError(f"unknown executor {given!r}{nearest(given, EXECUTORS)}")
    if folder is not None:
        name = reconcile_executor(folder, name)
        if given is None and name not in EXECUTORS:
            raise SettingError(f"the simulation in {folder} was begun with an executor of its own, {name}: hand it over again")
    if given is not None and not isinstance(given, str):
        return given
    if name is not None and name in REMOTE_EXECUTORS:
        return REMOTE_EXECUTORS[name](workers)
    return StackedExecutor() if name == STACKED else None
