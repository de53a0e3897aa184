"""Client side of mutual TLS: credentials and options of a channel to a federation's server."""

from __future__ import annotations

import grpc

from attune.common.identity.credential import Credential, server_name

MAX_MESSAGE_BYTES = 4 << 20
# gRPC's own pings wait behind bulk data, and gRPC counts only the answer to a ping as a sign of life. So they are the last
# resort, for calls outside a control stream and for abandoned connections. common.pulse decides whether a peer is alive.
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 60
MAX_RECONNECT_BACKOFF_S = 15


BOTH_SIDES = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # Current versions of gRPC's core use this timeout for every ping, also for pings that measure the link.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # The control stream is silent for most of a round.
    ("grpc.http2.max_pings_without_data", 0),
)  # options of channels and of the server


def channel_credentials(root_pem: bytes, credential: Credential) -> grpc.ChannelCredentials:
    """Return credentials that present `credential` and trust only servers under `root_pem`.

    Args:
        root_pem: The federation's ca.pem, or the trust anchor of a join token.
        credential: The client's key and certificate.
    """
    return grpc.ssl_channel_credentials(root_pem, credential.key_pem, credential.certificate_pem)


def channel_options(root_pem: bytes, proxy: str = "") -> list[tuple[str, int | str]]:
    """Return the options of `grpc.aio.secure_channel` for the server under `root_pem`.

    A message is a frame of at most 1 MiB or a small protobuf message. Larger data are streamed in frames.

    Args:
        root_pem: Same as for `channel_credentials`.
        proxy: Address of an HTTP proxy, through which the connection goes by CONNECT; empty: it goes straight to the server.
    """
    return [
        *BOTH_SIDES,
        ("grpc.ssl_target_name_override", server_name(root_pem)),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_S * 1000),
        # A new channel opens a new connection, and a renewed certificate is used from the next connection on.
        ("grpc.use_local_subchannel_pool", 1),
        # The diagnosis of a failure opens its own connection. It must take the same way as gRPC, whatever the environment says.
        ("grpc.enable_http_proxy", int(bool(proxy))),
        *([("grpc.http_proxy", proxy)] if proxy else []),
    ]
