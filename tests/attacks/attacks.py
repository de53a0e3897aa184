"""Messages that an enrolled device, the holder of a token or a stranger can send to a server that speaks the protocol."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from safetensors.numpy import save

from attune.common.identity.certificates import subject
from attune.common.identity.client_tls import channel_options
from attune.common.identity.credential import Credential, csr_der, load_certificate, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.authority import Authority
from attune.fedserver.pb import admin_pb2
from attune.fedserver.pb.admin_pb2_grpc import AdminStub
from tests.attacks.conftest import Victim
from tests.attacks.table import answer_to, attack, attacks
from tests.e2e.hand import CALL_S, PROFILE, Caller, Hand, Stream
from tests.e2e.harness import until

PARTS = ("", "..", "../shared", "/etc/x", "shared/../../x", "private", "attended", "shared\0")
ORDERS = ("", "train", "train-1", "../../ca", "../train-1-eve", "train-x-eve", "train-1-ada", "train-²-eve", "x" * 5000)
Tensors = dict[str, np.ndarray]
OUTSIDE = "sha256:" + "0" * 64
PROFILE_JSON = msgspec.json.encode(PROFILE)
ENDLESS = (1 << 64) - 1
ENTRY = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
ENDLESS_ENTRY = ENTRY.replace("[1]", f"[{1 << 40}, {1 << 40}]")


def eve(victim: Victim) -> Hand:
    return victim.devices["eve"]


def order(victim: Victim) -> str:
    return victim.orders["eve"].id


def good(victim: Victim) -> Tensors:
    return eve(victim).served(victim.orders["eve"])["shared"]


def largest(tensors: Tensors) -> str:
    return max(tensors, key=lambda name: tensors[name].size)


def changed(own: Tensors, change: Callable[[np.ndarray], np.ndarray]) -> Tensors:
    """Return the tensors with another largest one."""
    return own | {largest(own): change(own[largest(own)])}


def last_is_nan(tensor: np.ndarray) -> np.ndarray:
    tensor.flat[-1] = np.nan
    return tensor


def handing_in(victim: Victim, spoil: Callable[[Tensors], Tensors]) -> str:
    """Return the server's answer to an update with these tensors."""
    ref = eve(victim).send(order(victim), "shared", spoil(good(victim)))
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


def handing_in_bytes(victim: Victim, data: bytes) -> str:
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
    eve(victim).upload(order(victim), "shared", [data], ref.digest, ref.size)
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


def with_header(header: str, body: bytes = b"") -> bytes:
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def claiming(victim: Victim, claims: dict[str, Any]) -> str:
    """Return the server's answer to right tensors with these claims."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    return answer_to(lambda: eve(victim).submit(order(victim), [ref], **claims))


def reporting(victim: Victim, metrics_json: bytes) -> str:
    ref = eve(victim).send(order(victim), "shared", good(victim))
    update = pb.Update(order_id=order(victim), parts=[ref], samples=20, metrics_json=metrics_json)
    return answer_to(lambda: eve(victim).federation.Submit(update, timeout=CALL_S))


def naming(victim: Victim, parts: Callable[[pb.BlobRef], list[pb.BlobRef]]) -> str:
    """Return the server's answer to an update that names these parts, when right tensors were uploaded."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    return answer_to(lambda: eve(victim).submit(order(victim), parts(ref)))


def elsewhere(ref: pb.BlobRef, **other: Any) -> pb.BlobRef:
    return pb.BlobRef(**({"part": ref.part, "digest": ref.digest, "size": ref.size} | other))


def answering(victim: Victim, order_id: str) -> str:
    return answer_to(lambda: eve(victim).submit(order_id))


def announcing(victim: Victim, said: dict[str, Any]) -> str:
    """Return the server's answer to an upload of one byte that says this, and to a question where such an upload stands."""
    target = pb.UploadTarget(**({"order_id": order(victim), "part": "shared", "digest": OUTSIDE, "size": 1} | said))
    answer = answer_to(lambda: eve(victim).upload(target.order_id, target.part, [b"x"], target.digest, target.size))
    assert "size" in said or answer_to(lambda: eve(victim).blobs.UploadOffset(target, timeout=CALL_S)) == answer
    return answer


def uploading(victim: Victim, frames: Callable[[bytes], list[bytes]]) -> str:
    """Return the server's answer to an upload of these frames in place of the tensors that are announced.

    Every number of them is moved, so no other attack has uploaded the right bytes before.
    """
    data = save({name: tensor + np.float32(0.123) for name, tensor in good(victim).items()})
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", frames(data), digest_of(data), len(data)))


def downloading(victim: Victim, wanted: tuple[str, int]) -> str:
    """Return the server's answer to a download of this blob, or of the one of the order, from this byte on."""
    return answer_to(lambda: eve(victim).download(wanted[0] or victim.orders["eve"].downloads[0].digest, wanted[1]))


def as_an_operator(victim: Victim, call: Callable[[AdminStub], Any]) -> str:
    return answer_to(lambda: call(AdminStub(eve(victim).channel)))


def greeting(victim: Victim, first: pb.DeviceMessage) -> str:
    device = victim.stranger()
    answer = answer_to(Stream(device, first).end)
    assert victim.federation.client(device.name).get("state", "disconnected") == "disconnected"
    return answer


def hello(**said: Any) -> pb.DeviceMessage:
    usual = {"protocol": 1, "software": "x", "profile_json": PROFILE_JSON}
    return pb.DeviceMessage(hello=pb.Hello(**(usual | said)))


def profile(**said: Any) -> pb.DeviceMessage:
    return hello(profile_json=msgspec.json.encode(msgspec.to_builtins(PROFILE) | said))


def within(data: bytes, digest: str) -> pb.BlobRef:
    return pb.BlobRef(part="shared", digest=digest, size=len(data), data=data)


def holder(victim: Victim) -> Caller:
    """Return a caller that holds a token and is not enrolled."""
    token = JoinToken.parse(victim.server.join_token)
    return Caller(victim.server.port, token.trust_anchor_pem(), token.bootstrap())


def enrolling(victim: Victim, asked: tuple[str, bytes]) -> str:
    request = pb.EnrolRequest(name=asked[0], csr_der=asked[1])
    return answer_to(lambda: holder(victim).federation.Enrol(request, timeout=CALL_S))


def raw(victim: Victim, call: tuple[str, bytes]) -> str:
    method, data = call
    return answer_to(lambda: eve(victim).channel.unary_unary(f"/attune.v1.Federation/{method}")(data, timeout=CALL_S))


def submitting_nothing(channel: grpc.Channel) -> str:
    return answer_to(lambda: channel.unary_unary("/attune.v1.Federation/Submit")(b"", timeout=CALL_S))


# --- what an update holds

attacks(
    handing_in,
    {
        "a transposed tensor": ("wrong-shape", lambda own: changed(own, lambda tensor: tensor.T.copy())),
        "wider numbers": ("wrong-dtype", lambda own: changed(own, lambda tensor: tensor.astype(np.float64))),
        "one NaN": ("not-finite", lambda own: changed(own, last_is_nan)),
        "infinity": ("not-finite", lambda own: {name: np.full_like(tensor, np.inf) for name, tensor in own.items()}),
        "a part of a part": ("missing-tensor", lambda own: {name: own[name] for name in own if name != largest(own)}),
        "nothing at all": ("missing-tensor", lambda own: {}),
        "something more": ("unexpected-tensor", lambda own: own | {"extra": np.zeros(1, "f4")}),
        "a name that is a path": ("unexpected-tensor", lambda own: own | {"../../state.sqlite": np.zeros(1, "f4")}),
    },
)
attacks(
    handing_in_bytes,
    {
        "an empty blob": ("header-truncated", b""),
        "random text": ("header-too-large", b"not tensors at all, but quite some bytes"),
        "a header longer than its blob": ("header-truncated", (1 << 14).to_bytes(8, "little") + b"{}      "),
        "a deep header": ("header-too-deep", with_header("{" * 2000)),
        "a pickle, which would run code if it were loaded": ("header-not-json", (8).to_bytes(8, "little") + b"\x80\x04N.    "),
        "one name twice": ("duplicate-key", with_header(f'{{"x": {ENTRY}, "x": {ENTRY}}}', bytes(4))),
        "tensors one upon the other": ("overlap", with_header(f'{{"x": {ENTRY}, "y": {ENTRY}}}', bytes(4))),
        "a shape that overflows every counter": ("shape-too-large", with_header(f'{{"x": {ENDLESS_ENTRY}}}', bytes(4))),
        "a stowaway after the last tensor": ("trailing-bytes", with_header(f'{{"x": {ENTRY}}}', bytes(40))),
    },
)

# --- what is said beside it

attacks(
    claiming,
    {
        "more samples than declared": ("update-refused", {"samples": 20_000}),
        "samples without end": ("update-refused", {"samples": ENDLESS}),
        "an accuracy of two": ("update-refused", {"accuracy_before": 2.0}),
        "a loss without end": ("update-refused", {"loss": float("inf")}),
        "a loss that is infinite as soon as it is added up": ("update-refused", {"loss": 1.7e308}),
        "seconds that are infinite as soon as they are added up": ("update-refused", {"seconds": 1.7e308}),
    },
)
attacks(
    reporting,
    {
        "metrics that are no JSON": ("update-refused", b"\xff\xfe\x00{"),
        "metrics that are no UTF-8": ("update-refused", b'{"kept": "\xff"}'),
        "metrics as deep as a message allows": ("update-refused", b'{"loss": ' + b"[" * 1_000_000),
        "a number of a million digits": ("update-refused", b'{"seconds": 1' + b"0" * 1_000_000 + b"}"),
    },
)
attacks(
    naming,
    {
        "a part that the method does not have": ("update-refused", lambda ref: [elsewhere(ref, part="generated")]),
        "a part beside the right one that leads out": ("update-refused", lambda ref: [ref, elsewhere(ref, part="../shared")]),
        "no part": ("update-refused", lambda ref: []),
        "another encoding": ("update-refused", lambda ref: [elsewhere(ref, encoding="bf16")]),
        "a megabyte within the update": ("limit-exceeded", lambda ref: [within(bytes(1 << 20), digest_of(bytes(1 << 20)))]),
        "bytes within the update under a false digest": ("digest-mismatch", lambda ref: [within(bytes(ref.size), OUTSIDE)]),
    },
)

# --- whose order it is

attacks(
    answering,
    {
        **{f"the order {order_id[:20]!r}": ("update-refused", order_id) for order_id in ORDERS},
        "a message that is too large": ("RESOURCE_EXHAUSTED", "x" * (5 << 20)),
        "a kilobyte of quotes and newlines": ("update-refused", json.dumps('\n"' * 500)),
    },
)


@attack("late")
def an_order_of_the_future(victim: Victim) -> str:
    """Answer an order that was not given yet."""
    receipt = eve(victim).submit("train-99-eve")
    return {pb.Receipt.STATUS_LATE: "late"}.get(receipt.status, "accepted")


# --- bytes

attacks(
    announcing,
    {
        "a blob larger than the model": ("limit-exceeded", {"size": 1 << 62}),
        "a digest that is a path": ("bad-digest", {"digest": "../../ca/ca.pem"}),
        **{f"an upload of the part {part!r}": ("update-refused", {"part": part}) for part in PARTS},
        **{f"an upload for the order {order_id[:20]!r}": ("update-refused", {"order_id": order_id}) for order_id in ORDERS},
    },
)
attacks(
    uploading,
    {
        "other bytes than announced": ("digest-mismatch", lambda data: [data[::-1]]),
        "more bytes than announced": ("limit-exceeded", lambda data: [data, b"more"]),
        "a frame above a megabyte": ("limit-exceeded", lambda data: [bytes((1 << 20) + 1)]),
    },
)
attacks(
    downloading,
    {
        "a file of the server": ("unknown-blob", ("../ca/ca-key.pem", 0)),
        "a blob that was not offered": ("unknown-blob", (OUTSIDE, 0)),
        "bytes past the end": ("bad-offset", ("", 1 << 40)),
        "an offset that is negative if it is read with a sign": ("bad-offset", ("", (1 << 63) + 1)),
    },
)


@attack("update-refused")
def an_upload_that_begins_past_its_end(victim: Victim) -> str:
    """Continue an upload at a byte beyond its end."""
    data = save(good(victim)) + b" "
    size = len(data) - 1
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [b"x"], digest_of(data), size, offset=size - 1))


@attack("update-refused")
def an_upload_of_nothing_in_particular(victim: Victim) -> str:
    """Upload without saying which part it is."""
    call = eve(victim).channel.stream_unary("/attune.v1.Blobs/Upload", request_serializer=None)
    return answer_to(lambda: call(iter([b"x"]), timeout=CALL_S))


# --- the stream

attacks(
    greeting,
    {
        "a stream that begins with progress": (
            "setting",
            pb.DeviceMessage(progress=pb.Progress(order_id="train-1-ada", done=1.0)),
        ),
        "another protocol": ("setting", hello(protocol=99)),
        "a profile that is no JSON": ("setting", hello(profile_json=b"\xff\xfe{")),
        "a label that is no UTF-8": ("setting", hello(profile_json=PROFILE_JSON.replace(b'"tabular"', b'"\xff"'))),
        "a profile as deep as a message allows": ("setting", hello(profile_json=b"[" * 100_000)),
        "a profile of other data": ("shape-mismatch", profile(shape=[4])),
        "a label that is not in the plan": ("undeclared-labels", profile(labels=[0, 1, 2])),
        "a stream on which nothing is said": ("setting", pb.DeviceMessage()),
        "no profile": ("setting", hello(profile_json=b"")),
        "a profile with a word for a number": ("setting", profile(samples="many")),
        "a profile of an unknown kind": ("setting", profile(kind="smells")),
        "a profile of fewer than no samples": ("setting", profile(samples=-1)),
        "a profile of samples without end": ("setting", profile(samples=1 << 63)),
        "a profile of another kind": ("shape-mismatch", profile(kind="images", shape=[8, 8, 1])),
    },
)


@attack("nothing")
def words_about_another_s_order(victim: Victim) -> str:
    """Report progress and trouble for Ada's order, and progress that is not a number."""
    stream = victim.streams["eve"]
    stream.say(trouble=pb.Trouble(order_id=victim.orders["ada"].id, reason="not mine"))
    stream.say(progress=pb.Progress(order_id=victim.orders["ada"].id, done=1.0))
    for done in (float("nan"), float("inf"), -1e300, 0.5):
        stream.say(progress=pb.Progress(order_id=order(victim), done=done))
    home = ServerHome(victim.federation.home)

    def heard() -> bool:
        return any(each.name == "eve" and each.progress == 0.5 for each in home.snapshot().devices)

    until(heard, "what comes after them to be heard")
    return "nothing"


# --- who it is

attacks(
    enrolling,
    {
        "Ada's name with another key": ("name-taken", ("ada", csr_der(new_key(), "ada"))),
        "a name that is a path of the server": ("setting", ("../ada", csr_der(new_key(), "x"))),
        "a name that would clear the operator's screen": ("setting", ("a\x1b[2J", csr_der(new_key(), "x"))),
        "a request of random bytes": ("request-refused", ("mallory", b"0" * 5000)),
    },
)


@attack("request-refused")
def a_renewal_of_random_bytes(victim: Victim) -> str:
    return answer_to(lambda: eve(victim).federation.Renew(pb.RenewRequest(csr_der=b"0" * 5000), timeout=CALL_S))


@attack("request-refused")
def a_request_for_another_kind_of_key(victim: Victim) -> str:
    """Send a certificate request for an RSA key of 16,384 bits or fewer."""
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder(subject("mallory")).sign(key, hashes.SHA256())
    return enrolling(victim, ("mallory", request.public_bytes(Encoding.DER)))


@attack("request-refused")
def a_request_that_nobody_signed(victim: Victim) -> str:
    """Send a certificate request whose signature is wrong."""
    data = bytearray(csr_der(new_key(), "mallory"))
    data[-1] ^= 1
    return enrolling(victim, ("mallory", bytes(data)))


@attack("eve")
def a_renewal_in_ada_s_name(victim: Victim) -> str:
    """Renew with a request that says Ada; the certificate is in the device's own name all the same."""
    device = victim.stranger()
    answer = device.federation.Renew(pb.RenewRequest(csr_der=csr_der(new_key(), "ada")), timeout=CALL_S)
    named = load_certificate(answer.certificate_pem).subject.rfc4514_string()
    return "eve" if named == f"CN={device.name}" else named


@attack("UNAVAILABLE")
def a_certificate_of_another_authority(victim: Victim) -> str:
    """Come as Ada with a certificate of the attacker's own authority."""
    key = new_key()
    foreign = Authority.create(victim.scratch()).issue_device(csr_der(key, "ada"), "ada", 1.0)
    caller = Caller(victim.server.port, eve(victim).ca_pem, Credential(key, foreign))
    return answer_to(lambda: caller.federation.Submit(pb.Update(order_id=victim.orders["ada"].id), timeout=CALL_S))


@attack("UNAVAILABLE")
def no_certificate(victim: Victim) -> str:
    """Connect without a certificate."""
    root = eve(victim).ca_pem
    where = f"127.0.0.1:{victim.server.port}"
    with grpc.secure_channel(where, grpc.ssl_channel_credentials(root), channel_options(root)) as channel:
        return submitting_nothing(channel)


@attack("UNAVAILABLE")
def no_encryption(victim: Victim) -> str:
    """Connect without TLS."""
    with grpc.insecure_channel(f"127.0.0.1:{victim.server.port}") as channel:
        return submitting_nothing(channel)


@attack("token-refused")
def an_update_with_a_token_alone(victim: Victim) -> str:
    """Answer Ada's order with only a token."""
    return answer_to(lambda: holder(victim).federation.Submit(pb.Update(order_id="train-1-ada"), timeout=CALL_S))


@attack("token-refused")
def a_download_with_a_token_alone(victim: Victim) -> str:
    """Download the model with only a token."""
    call = holder(victim).channel.unary_stream("/attune.v1.Blobs/Download", pb.DownloadRequest.SerializeToString, None)
    digest = victim.orders["ada"].downloads[0].digest
    return answer_to(lambda: list(call(pb.DownloadRequest(digest=digest), timeout=CALL_S)))


attacks(
    as_an_operator,
    {
        "a revocation by a device": ("forbidden", lambda admin: admin.Revoke(admin_pb2.RevokeRequest(), timeout=CALL_S)),
        "a token made by a device": ("forbidden", lambda admin: admin.NewToken(admin_pb2.NewTokenRequest(), timeout=CALL_S)),
    },
)
attacks(
    raw,
    {
        "a call that does not exist": ("UNIMPLEMENTED", ("Shutdown", b"")),
        "random bytes in place of an update": ("wire", ("Submit", b"\xff" * 100)),
    },
)
