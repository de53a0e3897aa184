"""State of a simulated federation: in memory, or in a folder from which it continues after an interruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from attune.common.durable import PUBLIC, write_file
from attune.common.errors import HomeMismatch, NoModel, SettingError, nearest
from attune.common.text import from_json
from attune.fedclient.home import DeviceHome
from attune.fedclient.store import FolderStore, MemoryStore, Store
from attune.fedclient.work.executor import EXECUTORS, SEQUENTIAL, STACKED, Executor, StackedExecutor
from attune.fedclient.work.processes.remote_executor import REMOTE_EXECUTORS
from attune.fedserver.ports.storage import Storage
from attune.simulation.memory import MemoryStorage

if TYPE_CHECKING:
    from attune.fedclient.model.artifact import Model


class SimulationState(Protocol):
    """Storage of the server, and the store of each device."""

    @property
    def storage(self) -> Storage: ...

    @property
    def stores(self) -> Mapping[str, Store]:
        """Store of each device, by its name."""
        ...

    def model(self, name: str) -> Model:
        """Return a device's finished model.

        Raises:
            NoModel: The federation has not come to its end.
        """
        ...


class MemoryState:
    """State without files."""

    def __init__(self, names: Iterable[str]) -> None:
        self.storage = MemoryStorage()
        self.stores = {name: MemoryStore() for name in names}

    def model(self, name: str) -> Model:
        from attune.fedclient.model.artifact import Model

        if (finished := self.stores[name].model) is None:
            raise NoModel(f"{name} has no finished model: the federation has not come to its end")
        return Model(*finished)


class FolderState(msgspec.Struct, frozen=True):
    """State in the homes `server` and `devices/NAME`, as over the network, but without keys."""

    storage: Storage
    homes: Mapping[str, DeviceHome]

    @property
    def stores(self) -> Mapping[str, Store]:
        return {name: FolderStore(home) for name, home in self.homes.items()}

    def model(self, name: str) -> Model:
        from attune.fedclient.model.artifact import Model
        from attune.fedclient.model.model_info import read_info

        folder = self.homes[name].model
        return Model.load(folder, allow_models=[read_info(folder).model.name])  # this simulation has just run it


class ExecutorRecord(msgspec.Struct, frozen=True):
    """Content of simulation.json: the executor of this folder's simulation, by its name. Its settings are in the ledger."""

    executor: str


def reconcile_executor(folder: Path, executor: str | None) -> str:
    """Return the recorded executor of the simulation in `folder`, or else record the given one, or else "sequential".

    Call it while this process has the folder's lock.

    Raises:
        HomeMismatch: Another executor is recorded than the given one, or the record is damaged.
    """
    path = folder / "simulation.json"
    if not path.exists():
        record = ExecutorRecord(executor or SEQUENTIAL)
        write_file(path, msgspec.json.encode(record), PUBLIC)
        return record.executor
    try:
        recorded = from_json(path.read_bytes(), ExecutorRecord)
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"{path} is damaged ({error}); restore it, or use a new home") from None
    if executor not in (None, recorded.executor):
        raise HomeMismatch(
            f"the simulation in {folder} was begun with the executor {recorded.executor!r}, not {executor!r}: leave it out"
        )
    return recorded.executor


@contextmanager
def open_state(names: Iterable[str], folder: Path) -> Iterator[SimulationState]:
    """Open the state of the devices with these names in a folder, which is locked during the block.

    Raises:
        HomeBusy: Another process uses the folder.
        HomeMismatch: The folder is damaged.
    """
    from attune.fedserver.home import ServerHome

    server = ServerHome(folder / "server")
    homes = {name: DeviceHome(folder / "devices" / name) for name in names}
    with ExitStack() as locks:
        locks.enter_context(server.locked())
        server.create()
        for home in homes.values():
            locks.enter_context(home.locked())
        storage = server.open()
        storage.check_ledger()
        storage.blobs.sweep()
        yield FolderState(storage, homes)


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
        name = reconcile_executor(folder, name)
        if given is None and name not in EXECUTORS:
            raise SettingError(f"the simulation in {folder} was begun with an executor of its own, {name}: hand it over again")
    if given is not None and not isinstance(given, str):
        return given
    if name is not None and name in REMOTE_EXECUTORS:
        return REMOTE_EXECUTORS[name](workers)
    return StackedExecutor() if name == STACKED else None
