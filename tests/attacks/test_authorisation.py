"""Authorisation: every call of every service of the server, by every kind of caller, as one table.

The calls are read from the descriptors of the services. A new call fails here until it has a row.
"""

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attune.common.identity.client_tls import channel_options
from attune.common.identity.credential import Credential
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2
from attune.fedserver.pb import admin_pb2
from tests.e2e.hand import CALL_S, Caller, Hand
from tests.e2e.harness import Federation, FederationAt

CALLERS = ("anonymous", "bootstrap", "device", "revoked", "operator")
NO_TLS, TOKEN, FORBIDDEN, REVOKED, IN = "UNAVAILABLE", "token-refused", "forbidden", "certificate-refused", "let in"
OF_DEVICES = (NO_TLS, TOKEN, IN, REVOKED, FORBIDDEN)
OF_BOTH = (NO_TLS, TOKEN, IN, REVOKED, IN)
OF_OPERATORS = (NO_TLS, TOKEN, FORBIDDEN, REVOKED, IN)
TABLE = {  # answers to CALLERS, in their order
    "attune.v1.Federation/Enrol": (NO_TLS, IN, FORBIDDEN, REVOKED, FORBIDDEN),
    "attune.v1.Federation/Renew": OF_DEVICES,
    "attune.v1.Federation/Connect": OF_DEVICES,
    "attune.v1.Federation/Submit": OF_DEVICES,
    "attune.v1.Blobs/Download": OF_DEVICES,
    "attune.v1.Blobs/Upload": OF_DEVICES,
    "attune.v1.Blobs/UploadOffset": OF_DEVICES,
    "attune.v1.Admin/Wake": OF_OPERATORS,
    "attune.v1.Admin/Troubles": OF_OPERATORS,
    "attune.v1.Admin/Pause": OF_OPERATORS,
    "attune.v1.Admin/NewToken": OF_OPERATORS,
    "attune.v1.Admin/Tokens": OF_OPERATORS,
    "attune.v1.Admin/RevokeToken": OF_OPERATORS,
    "attune.v1.Admin/Revoke": OF_OPERATORS,
    "attune.v1.Admin/Statistics": OF_OPERATORS,
    "grpc.health.v1.Health/Check": OF_BOTH,
    "grpc.health.v1.Health/List": OF_BOTH,
    "grpc.health.v1.Health/Watch": OF_BOTH,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OF_OPERATORS,
}


def calls() -> dict[str, MethodDescriptor]:
    """Return the description of every call of every service, by SERVICE/METHOD."""
    files = (federation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    return {f"{service.full_name}/{method.name}": method for service in services for method in service.methods}


@dataclass
class Scene:
    federation: Federation
    channels: dict[str, grpc.Channel]


@pytest.fixture(scope="module")
def scene(federation_at: FederationAt) -> Scene:
    federation = federation_at("authorisation")
    server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9")
    device, gone = (Hand(server.port, server.join_token, name) for name in ("ada", "mallory"))
    federation.command("fedserver", "revoke", "mallory")
    token, root = JoinToken.parse(server.join_token), device.ca_pem
    return Scene(
        federation,
        {
            "anonymous": grpc.secure_channel(
                f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials(root), channel_options(root)
            ),
            "bootstrap": Caller(server.port, token.trust_anchor_pem(), token.bootstrap()).channel,
            "device": device.channel,
            "revoked": gone.channel,
            "operator": Caller(server.port, root, Credential.load(federation.home / "operator", "operator")).channel,
        },
    )


def answer(channel: grpc.Channel, name: str, method: MethodDescriptor) -> str:
    """Return the answer to a message without any field: the refusal of the caller, or that the caller was let in."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(f"/{name}")
    said: Any = iter([b""]) if method.client_streaming else b""
    try:
        found = call(said, timeout=CALL_S)
        if method.server_streaming:
            next(found, None)
            found.cancel()
    except grpc.RpcError as error:
        known: Any = error
        refused = dict(known.trailing_metadata() or ()).get("attune-error", known.code().name)
        return str(refused) if refused in (NO_TLS, TOKEN, FORBIDDEN, REVOKED) else IN
    return IN


def test_every_call_has_a_row() -> None:
    assert calls().keys() == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_each_caller_gets_its_answer(scene: Scene, name: str) -> None:
    found = tuple(answer(scene.channels[caller], name, calls()[name]) for caller in CALLERS)
    assert dict(zip(CALLERS, found, strict=True)) == dict(zip(CALLERS, TABLE[name], strict=True))


def test_what_the_server_offers_is_what_is_in_the_table(scene: Scene) -> None:
    """Ask the server itself: a service that is registered, but in none of the files above, would be missed otherwise."""
    call = scene.channels["operator"].stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    [reply] = call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=CALL_S)
    offered = {service.name for service in reply.list_services_response.service}
    assert offered == {name.partition("/")[0] for name in TABLE}
