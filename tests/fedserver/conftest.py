"""Fixtures for tests of the server: its state in memory or on disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.storage import Storage
from attune.fedserver.stores.disk import DiskStorage
from attune.simulation.memory import MemoryStorage


@dataclass
class World:
    """State that a process leaves behind, and the next one finds."""

    opened: Callable[[], Storage]
    storage: Storage

    @property
    def blobs(self) -> Blobs:
        return self.storage.blobs


@pytest.fixture(params=["memory", "disk"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Return a state in memory, for which no file may be opened, or one on disk."""
    if request.param == "memory":

        def refuse(*arguments: Any, **more: Any) -> Any:
            raise AssertionError(f"opened in a world that is in memory: {arguments}")

        import attune.fedserver.lab.engine  # noqa: F401 (imports open files, also those of torch when it makes its first model)
        from attune.common.models.registry import build, default_spec

        build(default_spec("tabular", (3,), 2, 0, "mlr", {}), seed=0)
        storage = MemoryStorage()  # its tables are SQLite's, in memory
        for target in ("sqlite3.connect", "builtins.open", "io.open", "os.open", "pathlib.Path.open"):
            monkeypatch.setattr(target, refuse)
        return World(lambda: storage, storage)
    return world_on_disk(tmp_path)


def world_on_disk(folder: Path) -> World:
    return World(lambda: DiskStorage(folder), DiskStorage(folder))
