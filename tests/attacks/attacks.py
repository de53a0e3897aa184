"""Messages that an enrolled device, the holder of a token or a stranger can send to a server that speaks the protocol."""

from __future__ import annotations

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
from tests.attacks.table import answer_to, attack
from tests.e2e.hand import CALL_S, PROFILE, Caller, Hand, Stream
from tests.e2e.harness import until

Tensors = dict[str, np.ndarray]
OUTSIDE = "sha256:" + "0" * 64
ENDLESS = (1 << 64) - 1


def eve(victim: Victim) -> Hand:
    return victim.devices["eve"]


def order(victim: Victim) -> str:
    return victim.orders["eve"].id


def good(victim: Victim) -> Tensors:
    return eve(victim).served(victim.orders["eve"])["shared"]


def largest(tensors: Tensors) -> str:
    return max(tensors, key=lambda name: tensors[name].size)


def handing_in(victim: Victim, spoil: Callable[[Tensors], Tensors]) -> str:
    """Return the server's answer to an update with these tensors."""
    ref = eve(victim).send(order(victim), "shared", spoil(good(victim)))
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


def handing_in_bytes(victim: Victim, data: bytes) -> str:
    eve(victim).upload(order(victim), "shared", [data], digest_of(data), len(data))
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


def with_header(header: str, body: bytes = b"") -> bytes:
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def claiming(victim: Victim, **claims: Any) -> str:
    """Return the server's answer to right tensors with these claims."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    return answer_to(lambda: eve(victim).submit(order(victim), [ref], **claims))


def reporting(victim: Victim, metrics_json: bytes) -> str:
    ref = eve(victim).send(order(victim), "shared", good(victim))
    update = pb.Update(order_id=order(victim), parts=[ref], samples=20, metrics_json=metrics_json)
    return answer_to(lambda: eve(victim).federation.Submit(update, timeout=CALL_S))


def greeting(victim: Victim, first: pb.DeviceMessage) -> str:
    return answer_to(Stream(victim.stranger(), first).end)


def hello(**said: Any) -> pb.DeviceMessage:
    usual = {"protocol": 1, "software": "x", "profile_json": msgspec.json.encode(PROFILE)}
    return pb.DeviceMessage(hello=pb.Hello(**(usual | said)))


def holder(victim: Victim) -> Caller:
    """Return a caller that holds a token and is not enrolled."""
    token = JoinToken.parse(victim.server.join_token)
    return Caller(victim.server.port, token.trust_anchor_pem(), token.bootstrap())


def enrolling(victim: Victim, name: str, request: bytes) -> str:
    asked = pb.EnrolRequest(name=name, csr_der=request)
    return answer_to(lambda: holder(victim).federation.Enrol(asked, timeout=CALL_S))


def raw(caller: Caller, method: str, data: bytes) -> str:
    return answer_to(lambda: caller.channel.unary_unary(method)(data, timeout=CALL_S))


# --- what an update holds


@attack("wrong-shape")
def a_transposed_tensor(victim: Victim) -> str:
    """Hand in a tensor with the right number of values in another shape."""
    return handing_in(victim, lambda own: own | {largest(own): own[largest(own)].T.copy()})


@attack("wrong-dtype")
def wider_numbers(victim: Victim) -> str:
    """Hand in a tensor in float64 in place of float32."""
    return handing_in(victim, lambda own: own | {largest(own): own[largest(own)].astype(np.float64)})


@attack("not-finite")
def one_nan(victim: Victim) -> str:
    """Hand in a single NaN among all numbers."""

    def spoil(own: Tensors) -> Tensors:
        own[largest(own)].flat[-1] = np.nan
        return own

    return handing_in(victim, spoil)


@attack("not-finite")
def infinity(victim: Victim) -> str:
    """Hand in infinity in every number."""
    return handing_in(victim, lambda own: {name: np.full_like(tensor, np.inf) for name, tensor in own.items()})


@attack("missing-tensor")
def a_part_of_a_part(victim: Victim) -> str:
    """Hand in an update that lacks a tensor."""
    return handing_in(victim, lambda own: {name: tensor for name, tensor in own.items() if name != largest(own)})


@attack("missing-tensor")
def nothing_at_all(victim: Victim) -> str:
    """Hand in an update without any tensor."""
    return handing_in(victim, lambda own: {})


@attack("unexpected-tensor")
def something_more(victim: Victim) -> str:
    """Hand in a tensor that the model does not have."""
    return handing_in(victim, lambda own: own | {"extra": np.zeros(1, "f4")})


@attack("unexpected-tensor")
def a_name_that_is_a_path(victim: Victim) -> str:
    """Hand in a tensor called ../../state.sqlite."""
    return handing_in(victim, lambda own: own | {"../../state.sqlite": np.zeros(1, "f4")})


# --- the header of a blob


@attack("header-truncated")
def an_empty_blob(victim: Victim) -> str:
    """Hand in a blob of no bytes."""
    return handing_in_bytes(victim, b"")


@attack("header-too-large")
def random_text(victim: Victim) -> str:
    """Hand in text in place of tensors."""
    return handing_in_bytes(victim, b"not tensors at all, but quite some bytes")


@attack("header-truncated")
def a_header_longer_than_its_blob(victim: Victim) -> str:
    """Hand in a header that announces more bytes than there are."""
    return handing_in_bytes(victim, (1 << 14).to_bytes(8, "little") + b"{}      ")


@attack("header-too-deep")
def a_deep_header(victim: Victim) -> str:
    """Hand in JSON as deep as it is long."""
    return handing_in_bytes(victim, with_header("{" * 2000))


@attack("header-not-json")
def a_pickle(victim: Victim) -> str:
    """Hand in a pickle, which would run code if it were loaded."""
    return handing_in_bytes(victim, (8).to_bytes(8, "little") + b"\x80\x04N.    ")


@attack("duplicate-key")
def one_name_twice(victim: Victim) -> str:
    """Hand in a header in which a name has two meanings."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    return handing_in_bytes(victim, with_header(f'{{"x": {entry}, "x": {entry}}}', bytes(4)))


@attack("overlap")
def tensors_one_upon_the_other(victim: Victim) -> str:
    """Hand in two tensors in the same bytes."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    return handing_in_bytes(victim, with_header(f'{{"x": {entry}, "y": {entry}}}', bytes(4)))


@attack("shape-too-large")
def a_tensor_as_large_as_the_world(victim: Victim) -> str:
    """Hand in a shape whose product overflows every counter."""
    entry = f'{{"dtype": "F32", "shape": [{1 << 40}, {1 << 40}], "data_offsets": [0, 4]}}'
    return handing_in_bytes(victim, with_header(f'{{"x": {entry}}}', bytes(4)))


@attack("trailing-bytes")
def a_stowaway(victim: Victim) -> str:
    """Hand in bytes after the last tensor."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    return handing_in_bytes(victim, with_header(f'{{"x": {entry}}}', bytes(40)))


# --- what is said beside it


@attack("update-refused")
def more_samples_than_declared(victim: Victim) -> str:
    """Claim a weight of a thousand times the declared samples."""
    return claiming(victim, samples=20_000)


@attack("update-refused")
def samples_without_end(victim: Victim) -> str:
    """Claim a weight of 2^64 - 1 samples."""
    return claiming(victim, samples=ENDLESS)


@attack("update-refused")
def an_accuracy_of_two(victim: Victim) -> str:
    """Claim an accuracy above 1."""
    return claiming(victim, accuracy_before=2.0)


@attack("update-refused")
def a_loss_without_end(victim: Victim) -> str:
    """Claim an infinite loss."""
    return claiming(victim, loss=float("inf"))


@attack("update-refused")
def a_loss_that_is_infinite_as_soon_as_it_is_added_up(victim: Victim) -> str:
    """Claim a loss near the end of float64."""
    return claiming(victim, loss=1.7e308)


@attack("update-refused")
def seconds_that_are_infinite_as_soon_as_they_are_added_up(victim: Victim) -> str:
    """Claim seconds near the end of float64."""
    return claiming(victim, seconds=1.7e308)


@attack("update-refused")
def metrics_that_are_no_json(victim: Victim) -> str:
    """Send metrics of random bytes."""
    return reporting(victim, b"\xff\xfe\x00{")


@attack("update-refused")
def metrics_that_are_no_utf8(victim: Victim) -> str:
    """Send metrics with a word that is not UTF-8."""
    return reporting(victim, b'{"kept": "\xff"}')


@attack("update-refused")
def metrics_as_deep_as_a_message_allows(victim: Victim) -> str:
    """Send metrics of a million brackets."""
    return reporting(victim, b'{"loss": ' + b"[" * 1_000_000)


@attack("update-refused")
def a_number_of_a_million_digits(victim: Victim) -> str:
    """Send metrics with a number of a million digits."""
    return reporting(victim, b'{"seconds": 1' + b"0" * 1_000_000 + b"}")


@attack("update-refused")
def another_part(victim: Victim) -> str:
    """Hand in a part that the method does not have."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    return answer_to(
        lambda: eve(victim).submit(order(victim), [pb.BlobRef(part="generated", digest=ref.digest, size=ref.size)])
    )


@attack("update-refused")
def one_part_many_times(victim: Victim) -> str:
    """Hand in the part that was asked for, and one beside it whose name leads out of the folder."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    return answer_to(
        lambda: eve(victim).submit(order(victim), [ref, pb.BlobRef(part="../shared", digest=ref.digest, size=ref.size)])
    )


@attack("update-refused")
def no_part(victim: Victim) -> str:
    """Send an empty answer."""
    return answer_to(lambda: eve(victim).submit(order(victim)))


@attack("update-refused")
def another_encoding(victim: Victim) -> str:
    """Hand in a part in an encoding that the order does not ask for."""
    ref = eve(victim).send(order(victim), "shared", good(victim))
    ref.encoding = "bf16"
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


@attack("limit-exceeded")
def a_blob_within_the_update_that_is_too_large(victim: Victim) -> str:
    """Send a megabyte within the update."""
    data = bytes(1 << 20)
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data), data=data)
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


@attack("digest-mismatch")
def a_blob_within_the_update_under_a_false_digest(victim: Victim) -> str:
    """Send bytes within the update that are not those of their digest."""
    data = save(good(victim))
    ref = pb.BlobRef(part="shared", digest=OUTSIDE, size=len(data), data=data)
    return answer_to(lambda: eve(victim).submit(order(victim), [ref]))


# --- whose order it is


@attack("update-refused")
def somebody_else_s_order(victim: Victim) -> str:
    """Answer Ada's order."""
    return answer_to(lambda: eve(victim).submit(victim.orders["ada"].id))


@attack("update-refused")
def an_order_that_is_a_path(victim: Victim) -> str:
    """Answer the order ../../ca."""
    return answer_to(lambda: eve(victim).submit("../../ca"))


@attack("late")
def an_order_of_the_future(victim: Victim) -> str:
    """Answer an order that was not given yet."""
    receipt = eve(victim).submit("train-99-eve")
    return {pb.Receipt.STATUS_LATE: "late"}.get(receipt.status, "accepted")


# --- bytes


@attack("limit-exceeded")
def a_blob_larger_than_the_model(victim: Victim) -> str:
    """Announce an upload of 2^62 bytes."""
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [b"x"], OUTSIDE, 1 << 62))


@attack("limit-exceeded")
def more_bytes_than_announced(victim: Victim) -> str:
    """Send more bytes than announced."""
    data = save(good(victim))
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [data, b"more"], digest_of(data), len(data)))


@attack("limit-exceeded")
def a_frame_that_is_too_large(victim: Victim) -> str:
    """Send a frame above a megabyte."""
    data = save(good(victim))
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [bytes((1 << 20) + 1)], digest_of(data), len(data)))


@attack("RESOURCE_EXHAUSTED")
def a_message_that_is_too_large(victim: Victim) -> str:
    """Send a message of five megabytes."""
    return answer_to(lambda: eve(victim).submit("x" * (5 << 20)))


@attack("digest-mismatch")
def other_bytes_than_announced(victim: Victim) -> str:
    """Send other bytes than those of the digest, which no other attack has uploaded before."""
    data = save({name: tensor + np.float32(0.123) for name, tensor in good(victim).items()})
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [data[::-1]], digest_of(data), len(data)))


@attack("bad-digest")
def a_digest_that_is_a_path(victim: Victim) -> str:
    """Upload to ../../ca/ca.pem."""
    return answer_to(lambda: eve(victim).upload(order(victim), "shared", [b"x"], "../../ca/ca.pem", 1))


@attack("update-refused")
def an_upload_to_a_path(victim: Victim) -> str:
    """Upload the part shared/../../x."""
    return answer_to(lambda: eve(victim).upload(order(victim), "shared/../../x", [b"x"], OUTSIDE, 1))


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


@attack("unknown-blob")
def a_file_of_the_server(victim: Victim) -> str:
    """Download ../ca/ca-key.pem."""
    return answer_to(lambda: eve(victim).download("../ca/ca-key.pem"))


@attack("unknown-blob")
def a_blob_that_was_not_offered(victim: Victim) -> str:
    """Download by a digest that was never offered."""
    return answer_to(lambda: eve(victim).download(OUTSIDE))


@attack("bad-offset")
def bytes_past_the_end(victim: Victim) -> str:
    """Download from byte 2^40 on."""
    return answer_to(lambda: eve(victim).download(victim.orders["eve"].downloads[0].digest, 1 << 40))


@attack("bad-offset")
def a_negative_offset(victim: Victim) -> str:
    """Download from a byte that is negative if it is read with a sign."""
    return answer_to(lambda: eve(victim).download(victim.orders["eve"].downloads[0].digest, (1 << 63) + 1))


# --- the stream


@attack("setting")
def a_stream_that_begins_with_progress(victim: Victim) -> str:
    """Report progress before saying hello."""
    return greeting(victim, pb.DeviceMessage(progress=pb.Progress(order_id="train-1-ada", done=1.0)))


@attack("setting")
def another_protocol(victim: Victim) -> str:
    """Speak protocol 99."""
    return greeting(victim, hello(protocol=99))


@attack("setting")
def a_profile_that_is_no_json(victim: Victim) -> str:
    """Send a profile of random bytes."""
    return greeting(victim, hello(profile_json=b"\xff\xfe{"))


@attack("setting")
def a_label_that_is_no_utf8(victim: Victim) -> str:
    """Send a profile with a label that is not UTF-8."""
    return greeting(victim, hello(profile_json=msgspec.json.encode(PROFILE).replace(b'"tabular"', b'"\xff"')))


@attack("setting")
def a_profile_as_deep_as_a_message_allows(victim: Victim) -> str:
    """Send a profile of a hundred thousand brackets."""
    return greeting(victim, hello(profile_json=b"[" * 100_000))


@attack("shape-mismatch")
def a_profile_of_other_data(victim: Victim) -> str:
    """Declare data of another shape than the federation's."""
    return greeting(victim, hello(profile_json=msgspec.json.encode(msgspec.structs.replace(PROFILE, shape=(4,)))))


@attack("undeclared-labels")
def a_label_that_is_not_in_the_plan(victim: Victim) -> str:
    """Declare a class that the plan does not have."""
    return greeting(victim, hello(profile_json=msgspec.json.encode(msgspec.structs.replace(PROFILE, labels=[0, 1, 2]))))


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


@attack("name-taken")
def ada_s_name_with_another_key(victim: Victim) -> str:
    """Enrol as Ada."""
    return enrolling(victim, "ada", csr_der(new_key(), "ada"))


@attack("setting")
def a_name_that_is_a_path_of_the_server(victim: Victim) -> str:
    """Enrol as ../ada."""
    return enrolling(victim, "../ada", csr_der(new_key(), "x"))


@attack("setting")
def a_name_with_an_escape_sequence(victim: Victim) -> str:
    """Enrol under a name that would clear the operator's screen."""
    return enrolling(victim, "a\x1b[2J", csr_der(new_key(), "x"))


@attack("request-refused")
def a_request_that_is_none(victim: Victim) -> str:
    """Send a certificate request of random bytes."""
    return enrolling(victim, "mallory", b"0" * 5000)


@attack("request-refused")
def a_request_for_another_kind_of_key(victim: Victim) -> str:
    """Send a certificate request for an RSA key of 16,384 bits or fewer."""
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder(subject("mallory")).sign(key, hashes.SHA256())
    return enrolling(victim, "mallory", request.public_bytes(Encoding.DER))


@attack("request-refused")
def a_request_that_nobody_signed(victim: Victim) -> str:
    """Send a certificate request whose signature is wrong."""
    data = bytearray(csr_der(new_key(), "mallory"))
    data[-1] ^= 1
    return enrolling(victim, "mallory", bytes(data))


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
        return answer_to(lambda: channel.unary_unary("/attune.v1.Federation/Submit")(b"", timeout=CALL_S))


@attack("UNAVAILABLE")
def no_encryption(victim: Victim) -> str:
    """Connect without TLS."""
    with grpc.insecure_channel(f"127.0.0.1:{victim.server.port}") as channel:
        return answer_to(lambda: channel.unary_unary("/attune.v1.Federation/Submit")(b"", timeout=CALL_S))


@attack("token-refused")
def an_update_with_a_token_alone(victim: Victim) -> str:
    """Answer Ada's order with only a token."""
    return answer_to(lambda: holder(victim).federation.Submit(pb.Update(order_id=victim.orders["ada"].id), timeout=CALL_S))


@attack("token-refused")
def a_download_with_a_token_alone(victim: Victim) -> str:
    """Download the model with only a token."""
    call = holder(victim).channel.unary_stream("/attune.v1.Blobs/Download", pb.DownloadRequest.SerializeToString, None)
    digest = victim.orders["ada"].downloads[0].digest
    return answer_to(lambda: list(call(pb.DownloadRequest(digest=digest), timeout=CALL_S)))


@attack("forbidden")
def a_revocation_by_a_device(victim: Victim) -> str:
    """Revoke Ada."""
    admin = AdminStub(eve(victim).channel)
    return answer_to(lambda: admin.Revoke(admin_pb2.RevokeRequest(), timeout=CALL_S))


@attack("forbidden")
def a_token_made_by_a_device(victim: Victim) -> str:
    """Make a join token."""
    admin = AdminStub(eve(victim).channel)
    return answer_to(lambda: admin.NewToken(admin_pb2.NewTokenRequest(), timeout=CALL_S))


@attack("UNIMPLEMENTED")
def a_call_that_does_not_exist(victim: Victim) -> str:
    """Call a method that does not exist."""
    return raw(eve(victim), "/attune.v1.Federation/Shutdown", b"")


@attack("wire")
def a_message_that_is_none(victim: Victim) -> str:
    """Send random bytes in place of an update."""
    return raw(eve(victim), "/attune.v1.Federation/Submit", b"\xff" * 100)


@attack("update-refused")
def json_in_place_of_protobuf(victim: Victim) -> str:
    """Send an update whose order is a kilobyte of quotes and newlines."""
    return answer_to(lambda: eve(victim).submit(json.dumps('\n"' * 500)))
