"""Small federations: shards on disk, and the same federation over the network, server and hosted fleet in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attune.common.config import merge
from attune.fedclient import fleet, shards
from attune.fedclient.address import Address
from attune.fedclient.console import Console
from attune.fedclient.model.artifact import read_info
from attune.fedclient.options import Options as DeviceOptions
from attune.fedclient.work.together import How
from attune.fedserver import app
from attune.fedserver.home import Home
from attune.fedserver.view.beside import snapshot
from tests.e2e.harness import digit_shards, tabular_shard, until

Digests = tuple[dict[str, str], dict[str, Mapping[str, str]]]  # of the server's slots; of each device's model, by file


@pytest.fixture(scope="session")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four tables, unequal in size."""
    folder = tmp_path_factory.mktemp("clouds")
    return {f"site-{n}": tabular_shard(folder / str(n), seed=n, samples=24 + 8 * n) for n in range(4)}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four shards of images."""
    return {f"site-{path.name}": path for path in digit_shards(tmp_path_factory.mktemp("digits"), 4, 30, 10)}


class Quiet(Console):
    def say(self, text: str) -> None:
        """Nobody reads it."""


@pytest.fixture
def over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Digests]:
    """A federation over gRPC with mutual TLS: `settings` in the shape of a federation.toml."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "attune"))

    def run(members: Mapping[str, Path], settings: Mapping[str, Any], executor: How = "sequential") -> Digests:
        home = Home(tmp_path / "attune" / "server")
        fixed = {"round": {"min_clients": len(members)}, "server": {"threads": 1}}
        options = app.Options(home.path, "127.0.0.1", 0, True, lambda line: None)
        server = threading.Thread(target=lambda: asyncio.run(app.run(options, merge(settings, fixed))))
        server.start()
        until(lambda: home.address() or not server.is_alive(), "the server to listen")
        address = home.address()
        assert address is not None
        common = DeviceOptions(Path(), Address("localhost", address.port), tmp_path / "devices", device="cpu")
        listed = shards.members(list(members.values()), common)
        named = [_named(options, name, tmp_path) for options, name in zip(listed, members, strict=True)]
        outcomes = fleet.run(named, Quiet(), executor)
        server.join(60)
        assert not server.is_alive() and not fleet.failures(outcomes), fleet.failures(outcomes)
        slots = {f"{slot.part}/{slot.key}": slot.digest for slot in snapshot(home).slots}
        models = {name: read_info(tmp_path / "devices" / name / "model").files for name in members}
        return slots, models

    return run


def _named(options: DeviceOptions, name: str, folder: Path) -> DeviceOptions:
    from dataclasses import replace

    return replace(options, name=name, label=name, home=folder / "devices" / name)
