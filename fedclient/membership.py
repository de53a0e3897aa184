"""A home's identity and its enrolment."""

from __future__ import annotations

import socket
from collections.abc import Callable

from attune.common import homes
from attune.common.errors import NotEnrolled
from attune.common.identity.names import default_name
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, check_name, local_token
from attune.fedclient.link.enrol import enrol, stay_enrolled
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.resource_limits import Allowance


async def identity_of(options: DeviceOptions, shard_name: str, home: DeviceHome, say: Callable[[str], None]) -> Identity:
    """The enrolled identity; else what `join` left; else a new one by the token given, or by that of a server on this machine.

    Errors: HomeMismatch if --name contradicts it, NotEnrolled without any token, and those of `enrol`. An enrolled device
    ignores the token, unless its certificate has expired.
    """
    address = options.server
    name = options.name or default_name(socket.gethostname(), options.label or shard_name)
    record = DeviceInfo(name, str(address), str(options.data.expanduser().resolve()))
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


async def link_of(options: DeviceOptions, shard_name: str, home: DeviceHome, say: Callable[[str], None]) -> Link:
    """The way to the server over the network, for the device that this home is, or becomes. Errors: those of `identity_of`."""
    identity = await identity_of(options, shard_name, home, say)
    home.remember(DeviceInfo(identity.name, str(options.server), str(options.data.expanduser().resolve())))
    return GrpcLink(options.server, identity, home.keep, Allowance(options.resources.bytes_per_s))
