"""The client's side of mutual TLS: credentials and options of a channel to a federation's server."""

from __future__ import annotations

import grpc

from attune.common.identity.credential import Credential, server_name

MAX_MESSAGE_BYTES = 4 << 20
# gRPC's own pings wait behind bulk data, and their answer is all that they count: they are the last resort, for calls outside
# a control stream and for connections that were given up. Who is there is known by common.pulse.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 60
MAX_RECONNECT_BACKOFF_S = 15


def channel_credentials(root_pem: bytes, credential: Credential) -> grpc.ChannelCredentials:
    """Trusts servers under `root_pem` alone (ca.pem, or a token's trust anchor) and presents `credential`."""
    return grpc.ssl_channel_credentials(root_pem, credential.key_pem, credential.certificate_pem)


def channel_options(
    root_pem: bytes,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keepalive_s: float = KEEPALIVE_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> list[tuple[str, int | str]]:
    """Options for `grpc.aio.secure_channel` to the server under `root_pem`.

    A message is a frame of at most 1 MiB or a small protobuf; bulk is streamed.
    """
    return [
        ("grpc.ssl_target_name_override", server_name(root_pem)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_timeout_s * 1000)),
        # What counts in today's core, for every ping, those that measure the link included.
        ("grpc.http2.ping_timeout_ms", round(keepalive_timeout_s * 1000)),
        # The control stream is silent for most of a round.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_S * 1000),
        # A new channel is a new connection: that is how a renewed certificate comes into use.
        ("grpc.use_local_subchannel_pool", 1),
        # The diagnosis of a failure opens a connection of its own, and it must take the way that gRPC took.
        ("grpc.enable_http_proxy", 0),
    ]
