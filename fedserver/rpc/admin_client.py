"""Calls of this home's commands to its running server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from attune.common.errors import Unreachable
from attune.common.grpc_errors import from_rpc
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential
from attune.common.text import from_json
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.registrar import OPERATOR
from attune.fedserver.pb.admin_pb2 import PauseRequest, StatisticsQuestion, TroublesRequest, WakeRequest
from attune.fedserver.pb.admin_pb2_grpc import AdminStub
from attune.fedserver.surveys.fleet_statistics import FleetStatistics

TIMEOUT_S = 10.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104


def wake(home: ServerHome) -> int:
    """Let the server read its database again, and return the number of connected devices.

    Raises:
        Unreachable: The server does not answer.
    """
    return int(_call(home, lambda admin: admin.Wake(WakeRequest(), timeout=TIMEOUT_S)).connected)


def troubles(home: ServerHome) -> list[str]:
    """Return a line for each step that the running server cannot carry out now.

    Raises:
        Unreachable: The server does not answer.
    """
    return list(_call(home, lambda admin: admin.Troubles(TroublesRequest(), timeout=TIMEOUT_S)).troubles)


def pause(home: ServerHome, on: bool) -> tuple[str, int]:
    """Hold back further rounds, or let them open. Return the phase that goes on, and how many rounds are closed.

    Raises:
        Unreachable: The server does not answer.
    """
    reply = _call(home, lambda admin: admin.Pause(PauseRequest(paused=on), timeout=TIMEOUT_S))
    return str(reply.phase), int(reply.round)


def statistics(home: ServerHome, columns: Sequence[str], patience_s: float) -> FleetStatistics:
    """Return statistics of the data of the connected devices.

    Args:
        home: The server's home.
        columns: Names of the columns that are meant; empty: all.
        patience_s: For how long each of the two passes, or each exchange of a masked sum, waits for devices.

    Raises:
        Unreachable: The server does not answer, or refuses with a reason.
    """
    question = StatisticsQuestion(columns=columns, patience_s=patience_s)
    reply = _call(home, lambda admin: admin.Statistics(question, timeout=7 * patience_s + TIMEOUT_S))
    return from_json(reply.statistics_json, FleetStatistics)


def _call(home: ServerHome, call: Callable[[AdminStub], Any]) -> Any:
    address = home.address()
    if address is None:
        raise Unreachable(f"{home.path} is locked by a server that has not said where it listens yet: try again in a moment")
    if address.waits:
        raise Unreachable(f"the server on {home.path} is a standby: run this on the machine of the server that serves")
    root = (home.authority / "ca.pem").read_bytes()
    credentials = channel_credentials(root, Credential.load(home.operator, OPERATOR))
    target = f"{ANYWHERE.get(address.host, address.host)}:{address.port}"
    with grpc.secure_channel(target, credentials, options=channel_options(root)) as channel:
        try:
            return call(AdminStub(channel))
        except grpc.RpcError as error:
            if (named := from_rpc(error)) is not None:
                raise named from None
            raise Unreachable(
                f"the server at {target} did not answer; what was changed counts from its next start: {error}"
            ) from None
