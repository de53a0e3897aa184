"""Choice of the executor of a simulation, by name or from the record of an earlier start."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attune.common.errors import SettingError, nearest
from attune.fedclient.work.executor import AUTO, EXECUTORS, STACKED, Executor
from attune.fedclient.work.processes.remote_executor import REMOTE_EXECUTORS
from attune.fedclient.work.stacked.stacked_executor import Advice, StackedExecutor
from attune.simulation.simulation_state import has_record, reconcile_executor, write_record


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
    if isinstance(given, str) and given not in EXECUTORS:
        raise SettingError(f"unknown executor {given!r}{nearest(given, EXECUTORS)}")
    if folder is not None:
        if name != AUTO:
            name = reconcile_executor(folder, name)
            if not has_record(folder):
                write_record(folder, name)
        elif has_record(folder):
            name = reconcile_executor(folder, None)
        if given in (None, AUTO) and name not in EXECUTORS:
            raise SettingError(f"the simulation in {folder} was begun with an executor of its own, {name}: hand it over again")
    if given is not None and not isinstance(given, str):
        return given
    if name == AUTO:
        return StackedExecutor("auto", partial(_record_advice, folder))
    if name is not None and name in REMOTE_EXECUTORS:
        return REMOTE_EXECUTORS[name](workers)
    return StackedExecutor() if name == STACKED else None


def importable(model: object) -> bool:
    """Return whether devices in other processes can import this model."""
    from attune.simulation.own_models import model_name

    try:
        return model is None or bool(model_name(model, durable=False, spread=True))  # type: ignore[arg-type]
    except SettingError:
        return False


def _record_advice(folder: Path | None, advice: Advice) -> None:
    if folder is not None:
        write_record(folder, advice.executor, str(advice))
