"""One device's life in its home: enrols if it must, then takes part over the network until the federation is done."""

from __future__ import annotations

from pathlib import Path

from attune.common import homes
from attune.common.aio import run_blocking
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import load_shard
from attune.fedclient.device import Device
from attune.fedclient.home import DeviceHome
from attune.fedclient.membership import link_of
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import FolderStore
from attune.fedclient.work.worker import Worker


def run(options: DeviceOptions, console: Console, shard: LazyShard | None = None) -> Path:
    """One device's life; returns where the finished model lies. shard: its data, if not those of the options.

    Errors: AttuneError of the kind that ended it.
    """
    shard = shard or LazyShard.in_memory(load_shard(options.data, options=options.table))
    home = DeviceHome(options.home or homes.device_home(options.server.host, options.server.port, options.data))
    with home.locked(), Worker() as worker:
        return run_blocking(live(options, shard, home, console, worker))


async def live(options: DeviceOptions, shard: LazyShard, home: DeviceHome, console: Console, worker: Worker) -> Path:
    """The life of a device whose home is locked; other devices may share the worker. Errors: as `run`."""
    for warning in shard.warnings:
        console.say(f"warning: {warning}")
    link = await link_of(options, shard.name, home, console.say)
    await Device(options, shard, FolderStore(home), link, console, worker).run()
    return home.model
