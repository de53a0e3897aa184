"""A home's identity, its enrolment, and whether it may take part under a plan."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from attune.common import homes
from attune.common.errors import HomeMismatch, NotEnrolled, SettingError
from attune.common.identity.names import default_name
from attune.common.plan import Plan
from attune.fedclient.home import DeviceInfo, Home, Identity, check_name, local_token
from attune.fedclient.link.enrol import enrol, stay_enrolled
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.port import Link
from attune.fedclient.options import Options


async def identity_of(options: Options, shard_name: str, home: Home, say: Callable[[str], None]) -> Identity:
    """The enrolled identity; else what `join` left; else a new one by the token given, or by that of a server on this machine.

    Errors: HomeMismatch if --name contradicts it, NotEnrolled without any token, and those of `enrol`. An enrolled device
    ignores the token, unless its certificate has expired.
    """
    address = options.server
    name = options.name or default_name(socket.gethostname(), options.label or shard_name)
    record = DeviceInfo(name, str(address), str(options.data.expanduser().resolve()))
    identity = home.identity()
    if identity is None and options.home is None and options.token is None:
        joined = Home(homes.joined_home(address.host, address.port))
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


async def link_of(options: Options, shard_name: str, home: Home, say: Callable[[str], None]) -> Link:
    """The way to the server over the network, for the device that this home is, or becomes. Errors: those of `identity_of`."""
    identity = await identity_of(options, shard_name, home, say)
    home.remember(DeviceInfo(identity.name, str(options.server), str(options.data.expanduser().resolve())))
    return GrpcLink(options.server, identity, home.keep)


def check_plan(plan: Plan, home: Home, allow_models: tuple[str, ...]) -> None:
    """Errors: HomeMismatch if the home is bound to another federation; SettingError for code that is not allowed here."""
    if home.plan.exists():
        try:
            stored = msgspec.json.decode(home.plan.read_bytes(), type=Plan)
        except msgspec.DecodeError as error:
            raise HomeMismatch(f"{home.plan} is damaged ({error}); restore it, or use another --home") from None
        if stored.federation != plan.federation:
            raise HomeMismatch(f"{home.path} holds the state of another federation; use another --home for this one")
        if stored != plan:
            raise HomeMismatch(
                f"the server's plan differs from the one this device trained under ({home.plan}); use another --home"
            )
    if ":" in plan.model.name and plan.model.name not in allow_models:
        raise SettingError(
            f"the federation's model is code of its own, {plan.model.name}: if you trust it and it is installed here, "
            f"start with --allow-model {plan.model.name}"
        )
