"""Run of one device from its home: it enrols if needed, then takes part over the network until the federation is over."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from attune.common import homes
from attune.common.aio import run_blocking
from attune.common.errors import NotEnrolled
from attune.common.supervisor import supervised
from attune.common.torch_state import plain_torch
from attune.fedclient.console import Console
from attune.fedclient.data import findings
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import load_shard
from attune.fedclient.device import Device
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, ShardRecord, check_name, local_token
from attune.fedclient.link.direct_route import DirectRoute
from attune.fedclient.link.enrol import enrol, stay_enrolled
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.options import DeviceOptions
from attune.fedclient.resource_limits import Allowance
from attune.fedclient.store import FolderStore
from attune.fedclient.work.worker import Worker


def run(options: DeviceOptions, console: Console, shard: LazyShard | None = None) -> Path:
    """Run one device until its federation is over, and return the path of the finished model.

    Args:
        options: The device's options.
        console: Console for its output.
        shard: Its data; None: those of the options.

    Raises:
        AttuneError: The error that ended it.
    """
    home = DeviceHome(options.home or homes.device_home(options.server.host, options.server.port, options.data))
    if shard is None and options.table.proposes:
        shard = LazyShard.on_disk(options.data, options.table, home.held_rows())
    shard = shard or LazyShard.in_memory(load_shard(options.data, options=options.table, held=home.held_rows()))
    with home.locked(), plain_torch(), Worker() as worker:
        return run_blocking(_supervised(live(options, shard, home, console, worker), console))


async def _supervised(life: Coroutine[Any, Any, Path], console: Console) -> Path:
    async with supervised(lambda: console.last_line):
        return await life


async def live(options: DeviceOptions, shard: LazyShard, home: DeviceHome, console: Console, worker: Worker) -> Path:
    """Run a device whose home is locked. Other devices may share the worker. Errors are those of `run`."""
    console.say(shard.read)
    changed = home.compare_shard(
        ShardRecord(shard.profile.samples + shard.profile.test_samples, shard.digest, list(shard.held_hashes))
    )
    for line in findings.lines({"": [*shard.warnings, *filter(None, [changed])]}):
        console.say(line)
    identity = await identity_of(options, home, console.say)
    home.remember(DeviceInfo(identity.name, str(options.server), str(options.data.expanduser().resolve())))
    allowance = Allowance(options.resources.bytes_per_s)
    route = DirectRoute(options.direct_hosts, console.say, proxy=options.server.proxy)
    link = GrpcLink(options.server, identity, home.keep, allowance, log=DisclosureLog(home.path), route=route)
    await Device(options, shard, FolderStore(home), link, console, worker).run()
    return home.model


async def identity_of(options: DeviceOptions, home: DeviceHome, say: Callable[[str], None]) -> Identity:
    """Return the device's identity, and enrol it if it has none.

    The first of these is taken: the identity in this home; the one that `join` stored; a new one, with the given token or the
    token that a server on this machine left. An enrolled device ignores the token, unless its certificate has expired.

    Raises:
        HomeMismatch: --name is not the home's device.
        NotEnrolled: There is no token.
        AttuneError: As in `enrol`.
    """
    address = options.server
    record = DeviceInfo(options.name or "", str(address), str(options.data.expanduser().resolve()))
    identity = home.identity()
    if identity is None and options.home is None and options.token is None:
        joined = DeviceHome(homes.joined_home(address.host, address.port))
        if (waiting := joined.identity()) is not None:
            check_name(joined, options.name, waiting)
        if home.adopt(joined, record):
            identity = home.identity()
    if identity is not None:
        check_name(home, options.name, identity)
        return await stay_enrolled(home, identity, address, options.token, options.connect_timeout_s, say)
    token = options.token or local_token(address)
    if token is None:
        raise NotEnrolled(
            f"this device is not enrolled with {address}: run `fedserver token` there, then here "
            f"`fedclient join --server {address} --token TOKEN`"
        )
    identity = await enrol(home, record, address, token, options.connect_timeout_s, say)
    say(f"enrolled as {identity.name}")
    return identity
