"""Where a simulated federation lies: in memory, or in one folder from which it goes on after an interruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from attune.common.durable import PUBLIC, write_file
from attune.common.errors import HomeMismatch, NoModel
from attune.fedclient.home import Home
from attune.fedclient.store import FolderStore, MemoryStore, Store
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.memory import MemoryStorage
from attune.simulation.executor_names import SEQUENTIAL

if TYPE_CHECKING:
    from attune.fedclient.model.artifact import Model


class World(Protocol):
    """The server's storage, and the store of each device."""

    @property
    def storage(self) -> Storage: ...

    @property
    def stores(self) -> Mapping[str, Store]:
        """The store of each device, by its name."""
        ...

    def model(self, name: str) -> Model:
        """Return a device's finished model.

        Raises:
            NoModel: The federation has not come to its end.
        """
        ...


class InMemory:
    """A world without files."""

    def __init__(self, names: Iterable[str]) -> None:
        self.storage = MemoryStorage()
        self.stores = {name: MemoryStore() for name in names}

    def __repr__(self) -> str:
        return f"InMemory({len(self.stores)} devices)"

    def model(self, name: str) -> Model:
        from attune.fedclient.model.artifact import Model

        if (found := self.stores[name].model) is None:
            raise NoModel(f"{name} has no finished model: the federation has not come to its end")
        return Model(*found)


@dataclass(frozen=True)
class InFolder:
    """The same homes as over the network: `server`, and `devices/NAME`; without keys, for nobody calls."""

    storage: Storage
    homes: Mapping[str, Home]

    @property
    def stores(self) -> Mapping[str, Store]:
        return {name: FolderStore(home) for name, home in self.homes.items()}

    def model(self, name: str) -> Model:
        from attune.fedclient.model.artifact import Model

        return Model.load(self.homes[name].model)


class Kept(msgspec.Struct, frozen=True):
    """simulation.json: what this folder was begun with, beside the settings that the ledger has."""

    executor: str
    why: str = ""  # of one that was tried: what it came to


def reconciled(folder: Path, executor: str | None) -> str:
    """The executor of the simulation in `folder`: as recorded, else this one, else one device after the other.

    Errors: HomeMismatch, if another one is recorded.
    """
    path = folder / "simulation.json"
    if not path.exists():
        return executor or SEQUENTIAL
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"{path} is damaged ({error}); restore it, or use a new home") from None
    if executor not in (None, kept.executor):
        raise HomeMismatch(f"the simulation in {folder} was begun with the executor {kept.executor!r}, not {executor!r}")
    return kept.executor


def begun(folder: Path) -> bool:
    """Whether the executor of the simulation in `folder` is recorded."""
    return (folder / "simulation.json").exists()


def record(folder: Path, executor: str, why: str = "") -> None:
    """Written once the folder is this process's own."""
    write_file(folder / "simulation.json", msgspec.json.encode(Kept(executor, why)), PUBLIC)


@contextmanager
def world(names: Iterable[str], folder: Path | None) -> Iterator[World]:
    """In memory without a folder. A folder is locked while it is used. Errors: HomeBusy, HomeMismatch."""
    if folder is None:
        yield InMemory(names)
        return
    from attune.fedserver.home import ServerHome

    server = ServerHome(folder / "server")
    homes = {name: Home(folder / "devices" / name) for name in names}
    with ExitStack() as held:
        held.enter_context(server.locked())
        server.create()
        for home in homes.values():
            held.enter_context(home.locked())
        storage = server.open()
        storage.check_ledger()
        storage.blobs.sweep()
        yield InFolder(storage, homes)
