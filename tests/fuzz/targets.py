"""Targets of fuzzers: each does with bytes what server and device do with a message of a peer.

A target may raise an error of the project, which names the fault for its reader; any other error is a finding. The asserts
check that accepted input is what it seems to be.
"""

import contextlib
from collections.abc import Callable
from datetime import datetime
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError, Message

from attune.common.errors import AttuneError
from attune.common.exchange.messages import read_profile
from attune.common.exchange.protobuf import TO_DEVICE, TO_SERVER, UPDATE
from attune.common.identity.certificates import authority_certificate
from attune.common.identity.credential import load_key, new_key
from attune.common.identity.names import check_name
from attune.common.identity.token import JoinToken
from attune.common.metrics import read_metrics
from attune.common.pb import federation_pb2 as pb
from attune.common.text import LONGEST, clean
from attune.common.wire.digest import check_digest
from attune.common.wire.header import Limits, layout_in
from attune.fedserver.core import data_form
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.federation.members import quarter_of
from attune.fedserver.federation.updates import row_of
from attune.fedserver.identity.authority import Authority, request_key
from attune.fedserver.pb import admin_pb2

Target = Callable[[bytes], None]
WHO = "mallory"
LIMITS = Limits(max_blob_bytes=1 << 20, max_header_bytes=1 << 16, max_tensors=256)
_KEY = load_key(new_key())
AUTHORITY = Authority(authority_certificate(_KEY.public_key(), _KEY).public_bytes(Encoding.PEM), _KEY)
NOW = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
DEVICE = DeviceRecord(WHO, "", samples=20)


def header(data: bytes) -> None:
    """Read a blob of tensors."""
    layout = layout_in(memoryview(data), LIMITS, WHO)
    assert layout.size == len(data) and layout.spans.keys() == layout.manifest.keys()
    end = layout.data_start
    for name, (start, stop) in sorted(layout.spans.items(), key=lambda item: item[1]):
        assert start == end and stop - start == layout.manifest[name].size_bytes, "no overlap and no gap"
        end = stop
    assert end == len(data)


def token(data: bytes) -> None:
    """Read a join token, as a person pastes it."""
    text = data.decode("latin-1")
    parsed = JoinToken.parse(text)
    assert parsed.encode() == text.strip()
    parsed.trust_anchor_pem()


def csr(data: bytes) -> None:
    """Read a certificate request."""
    key = request_key(data)
    assert key.curve.name == "secp256r1"
    AUTHORITY.issue_device(data, WHO, 1.0, NOW)


def _plain(text: str) -> None:
    assert len(text) <= LONGEST and (not text or text.isprintable())


def _hello(hello: pb.Hello) -> None:
    _plain(clean(hello.software))
    profile = read_profile(hello.profile_json, WHO)
    data_form.check_possible(profile, WHO)
    data_form.agree({WHO: profile, "ada": profile})


def _device_message(message: pb.DeviceMessage) -> None:
    TO_SERVER.read(message.SerializeToString())
    match message.WhichOneof("message"):
        case "hello":
            _hello(message.hello)
        case "progress":
            quarter = quarter_of(message.progress.done)
            assert quarter is None or quarter in (0.0, 0.25, 0.5, 0.75, 1.0)
        case "trouble":
            _plain(clean(message.trouble.reason))


def _update(message: pb.Update) -> None:
    update = UPDATE.read(message.SerializeToString())
    for ref in update.parts:
        check_digest(ref.digest, WHO)
    read_metrics(update.metrics_json, WHO)
    row_of(OrderId.parse(update.order_id, WHO), update, DEVICE)


def _upload(message: pb.UploadTarget) -> None:
    OrderId.parse(message.order_id, WHO)
    check_digest(message.digest, WHO)


def _enrol(message: pb.EnrolRequest) -> None:
    check_name(message.name)
    csr(message.csr_der)


def _server_message(message: pb.ServerMessage) -> None:
    TO_DEVICE.read(message.SerializeToString())
    if message.HasField("notice"):
        _plain(clean(message.notice.text))


def _nothing(message: Message) -> None:
    """No-op for messages that are only parsed."""


MESSAGES: tuple[tuple[type[Message], Callable[[Any], None]], ...] = (
    (pb.DeviceMessage, _device_message),
    (pb.Update, _update),
    (pb.UploadTarget, _upload),
    (pb.EnrolRequest, _enrol),
    (pb.RenewRequest, lambda message: csr(message.csr_der)),
    (pb.DownloadRequest, lambda message: check_digest(message.digest, WHO)),
    (pb.Hello, _hello),
    (pb.ServerMessage, _server_message),
    (pb.Certificate, _nothing),
    (pb.Receipt, lambda message: _plain(clean(message.message))),
    (pb.UploadReply, _nothing),
    (admin_pb2.NewTokenRequest, _nothing),
    (admin_pb2.RevokeRequest, lambda message: check_name(message.name)),
)


def message(data: bytes) -> None:
    """Read the message that the first byte chooses, and handle it as its receiver does."""
    kind, use = MESSAGES[data[0] % len(MESSAGES)] if data else MESSAGES[0]
    with contextlib.suppress(DecodeError):
        use(kind.FromString(data[1:]))


TARGETS: dict[str, Target] = {each.__name__: each for each in (header, token, csr, message)}


def throw(name: str, data: bytes) -> None:
    """Give one input to one target. Raise findings; a refusal by name is not a finding."""
    with contextlib.suppress(AttuneError):
        TARGETS[name](data)
