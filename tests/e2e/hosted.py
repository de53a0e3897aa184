"""A whole federation over gRPC and mutual TLS in this process: a server on a thread, and a hosted fleet."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from attune.common import aio
from attune.common.config import merge
from attune.fedclient import fleet, shards
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.options import Baseline
from attune.fedclient.options import DeviceOptions as DeviceOptions
from attune.fedserver import app
from attune.fedserver.home import ServerHome
from tests.e2e.harness import until


class Quiet(Console):
    def say(self, text: str) -> None:
        """No-op."""


@dataclass(frozen=True)
class Hosted:
    """Finished federation. Its folder must be $ATTUNE_HOME, so that devices find the server's token."""

    folder: Path

    @property
    def home(self) -> ServerHome:
        return ServerHome(self.folder / "server")

    def model(self, name: str) -> Path:
        return self.folder / "devices" / name / "model"

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the server's slots, by part and key."""
        return {f"{slot.part}/{slot.key}": slot.digest for slot in self.home.snapshot().slots}


def host(
    folder: Path,
    members: Mapping[str, Path],
    settings: Mapping[str, Any],
    keep: Literal["best", "personalized"] = "best",
    executor: str = "sequential",
    allow_models: tuple[str, ...] = (),
    baseline: Baseline | None = None,
    disclose: tuple[str, ...] = ("statistics", "sums"),  # as in a simulation
    serve: Callable[[Path], object] | None = None,
) -> Hosted:
    """Run a device for each shard, by name, to the end. `settings` has the shape of a federation.toml.

    `serve` serves the home in place of a server with these settings.
    """
    hosted, fixed = Hosted(folder), {"round": {"min_clients": len(members)}, "server": {"threads": 1, "device": "cpu"}}
    options = app.ServerOptions(hosted.home.path, "127.0.0.1", 0, True, lambda line: None)
    usual = lambda home: aio.run(app.run(options, merge(settings, fixed)))  # noqa: E731
    server = threading.Thread(target=serve or usual, args=(hosted.home.path,))
    server.start()
    until(lambda: hosted.home.address() or not server.is_alive(), "the server to listen")
    address = hosted.home.address()
    assert address is not None
    common = DeviceOptions(
        Path(),
        ServerAddress("localhost", address.port),
        folder / "devices",
        device="cpu",
        keep=keep,
        allow_models=allow_models,
        baseline=baseline,
        disclose=disclose,
    )
    listed = shards.members(list(members.values()), common)
    named = [
        replace(each, name=name, label=name, home=folder / "devices" / name) for each, name in zip(listed, members, strict=True)
    ]
    outcomes = fleet.run(named, Quiet(), executor)
    server.join(60)
    assert not server.is_alive() and not fleet.failures(outcomes), fleet.failures(outcomes)
    return hosted
