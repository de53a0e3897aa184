"""Bounds on what a peer makes the server write: lines of the log and rows of the database, for every kind of message."""

import contextlib
import time
from collections.abc import Callable, Iterator

import grpc
import msgspec
import numpy as np
import pytest

from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.fedserver.pb import admin_pb2
from tests.attacks.conftest import Victim, begun
from tests.e2e.hand import CALL_S, PROFILE, Caller, Hand, Stream, kind_of, moved
from tests.e2e.harness import until

MOST_BYTES = 100_000  # that one device may make the server write within a minute, in the log and in the database
TIMES = 600
LONG = "x" * 500


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Run a federation of two silent devices and Eve, whose messages do not change another test's victim."""
    with begun(tmp_path_factory.mktemp("flooded"), "ada", "bob", "eve") as victim:
        yield victim


def written(victim: Victim) -> dict[str, int]:
    """Return the bytes of the log, of the audit log and of the database, without its write-ahead log, which is used again."""
    files = ("audit.jsonl", "state.sqlite")
    return {"log": len(victim.server.text)} | {name: (victim.federation.home / name).stat().st_size for name in files}


def says(victim: Victim, message: Callable[[int], pb.DeviceMessage]) -> None:
    """Send so many messages on Eve's stream, and wait until the server has read the last one."""
    eve = victim.devices["eve"]
    stream = eve.connect()
    stream.next("welcome")
    for number in range(TIMES):
        stream.say(**{name.name: value for name, value in message(number).ListFields()})
    stream.say(trouble=pb.Trouble(reason="the last one"))
    stream.end_of_input()
    with contextlib.suppress(grpc.RpcError):
        stream.end()


def trouble_without_an_order(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(trouble=pb.Trouble(reason=f"{number} {LONG}")))


def trouble_with_an_order(victim: Victim) -> None:
    order = victim.orders["eve"].id
    says(victim, lambda number: pb.DeviceMessage(trouble=pb.Trouble(order_id=order, reason=f"{number} {LONG}")))


def progress_back_and_forth(victim: Victim) -> None:
    order = victim.orders["eve"].id
    says(victim, lambda number: pb.DeviceMessage(progress=pb.Progress(order_id=order, done=number % 4 / 4)))


def come_and_go(victim: Victim) -> None:
    for _ in range(TIMES // 6):
        stream = victim.devices["eve"].connect()
        stream.next("welcome")
        stream.hang_up()


def come_with_another_shape(victim: Victim) -> None:
    for _ in range(TIMES // 6):
        stream = victim.devices["eve"].connect(msgspec.structs.replace(PROFILE, shape=(9,)))
        assert kind_of(stream.end) == "shape-mismatch"


def come_with_long_words(victim: Victim) -> None:
    for number in range(TIMES // 6):
        first = pb.Hello(protocol=1, software=f"{number} {LONG * 2000}", profile_json=msgspec.json.encode(PROFILE))
        stream = Stream(victim.devices["eve"], pb.DeviceMessage(hello=first))
        with contextlib.suppress(grpc.RpcError):
            stream.next("welcome")
        stream.hang_up()


def come_with_a_message_that_is_too_large(victim: Victim) -> None:
    """Send messages of few bytes that are too large once they are unpacked."""
    eve, path = victim.devices["eve"], "/attune.v1.Federation/"
    options = [*channel_options(eve.ca_pem), ("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(f"127.0.0.1:{eve.port}", channel_credentials(eve.ca_pem, eve.credential), options) as channel:
        for number in range(TIMES // 12):
            with contextlib.suppress(grpc.RpcError):
                call = (
                    channel.stream_stream(f"{path}Connect") if number % 2 else channel.stream_unary("/attune.v1.Blobs/Upload")
                )
                answer = call(iter([bytes(8 << 20)]), compression=grpc.Compression.Gzip, timeout=CALL_S)
                raise AssertionError(f"{list(answer)} was answered")


def hello_again_and_again(victim: Victim) -> None:
    profile = msgspec.json.encode(PROFILE)
    says(victim, lambda number: pb.DeviceMessage(hello=pb.Hello(protocol=number, software=LONG, profile_json=profile)))


def progress_of_others(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(progress=pb.Progress(order_id=f"train-1-{number}{LONG}", done=0.5)))


def updates_full_of_nan(victim: Victim) -> None:
    eve, order = victim.devices["eve"], victim.orders["eve"]
    served = eve.served(order)
    for _ in range(TIMES // 6):
        parts = [eve.send(order.id, part.part, moved(served[part.part], np.nan)) for part in order.returns]
        assert kind_of(lambda parts=parts: eve.submit(order.id, parts)) == "not-finite"


def updates_for_orders_that_do_not_exist(victim: Victim) -> None:
    for number in range(TIMES):
        with contextlib.suppress(grpc.RpcError):
            assert victim.devices["eve"].submit(f"train-{number}-eve").status != pb.Receipt.STATUS_ACCEPTED


def answers_in_secure_aggregation(victim: Victim) -> None:
    order, members = victim.orders["eve"].id, [pb.SecureMember(name=f"n{number}") for number in range(300)]
    says(victim, lambda number: pb.DeviceMessage(secure=pb.SecureMessage(
        order_id=(order, f"train-{number}-eve", f"statistics-{number}")[number % 3], attempt=number % 3, exchange=number % 7,
        members=members, refused=f"{number} {LONG}" if number % 5 else "",
    )))  # fmt: skip


def statistics_that_nobody_asked_for(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(statistics=pb.StatisticsReport(
        id=f"{number}", report_json=b"{" * 1000, refused=f"{number} {LONG}" if number % 2 else "", masked=b"m" * 1000,
    )))  # fmt: skip


def words_on_units(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(units=pb.UnitReport(verdicts={
        "age" if number % 2 else f"{number} {LONG}": ("differs", "fits", LONG)[number % 3]
    })))  # fmt: skip


def descriptions_of_data(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(description=pb.Description(moments=[
        (np.nan, np.inf, 1e30, 0.5)[number % 4]] * (0, 1, 128, 4096)[number % 4 - 1]
    )))  # fmt: skip


def beats(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(beat=pb.Beat(every_s=number)))


def enrolments_with_a_used_up_token(victim: Victim) -> None:
    made = victim.federation.command("fedserver", "token", "--home", str(victim.federation.home)).stdout.strip()
    Hand(victim.server.port, made, f"first{time.time_ns()}")
    token, request = JoinToken.parse(made), csr_der(new_key(), "x")
    caller = Caller(victim.server.port, token.trust_anchor_pem(), token.bootstrap())
    for number in range(TIMES):
        name = f"n{number}-{'z' * 40}"
        with contextlib.suppress(grpc.RpcError):
            caller.federation.Enrol(pb.EnrolRequest(name=name, csr_der=request), timeout=CALL_S)
            raise AssertionError("a used-up token was taken")


def enrolments_that_cannot_be(victim: Victim) -> None:
    token = JoinToken.parse(victim.server.join_token)
    caller = Caller(victim.server.port, token.trust_anchor_pem(), token.bootstrap())
    for number in range(TIMES):
        with contextlib.suppress(grpc.RpcError):
            caller.federation.Enrol(pb.EnrolRequest(name=f"n{number}", csr_der=bytes([number % 256]) * 4000), timeout=CALL_S)


def renewals(victim: Victim) -> None:
    eve = victim.devices["eve"]
    for number in range(TIMES):
        request = csr_der(new_key(), "x") if number < 20 else bytes([number % 256]) * 4000
        with contextlib.suppress(grpc.RpcError):
            eve.federation.Renew(pb.RenewRequest(csr_der=request), timeout=CALL_S)


def downloads(victim: Victim) -> None:
    eve, digest = victim.devices["eve"], victim.orders["eve"].downloads[0].digest
    for number in range(TIMES):
        with contextlib.suppress(grpc.RpcError):
            eve.download(digest if number % 2 else f"sha256:{number:064x}", number % 3 << 40)


def uploads_and_their_offsets(victim: Victim) -> None:
    eve, order = victim.devices["eve"], victim.orders["eve"].id
    ask = eve.channel.unary_unary("/attune.v1.Blobs/UploadOffset", request_serializer=pb.UploadTarget.SerializeToString)
    for number in range(TIMES):
        where = (order if number % 2 else f"train-{number}-eve", "shared", f"sha256:{number:064x}")
        with contextlib.suppress(grpc.RpcError):
            eve.upload(where[0], where[1], [b"x" * 100], where[2], 100)
        with contextlib.suppress(grpc.RpcError):
            ask(pb.UploadTarget(order_id=where[0], part=where[1], digest=where[2], size=100), timeout=CALL_S)


def calls_of_operators(victim: Victim) -> None:
    eve = victim.devices["eve"]
    for number in range(TIMES):
        call = eve.channel.unary_unary(f"/attune.v1.Admin/{ADMIN[number % len(ADMIN)]}")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=CALL_S)
            raise AssertionError("a device called as an operator")


def calls_that_do_not_exist(victim: Victim) -> None:
    eve = victim.devices["eve"]
    for number in range(TIMES):
        with contextlib.suppress(grpc.RpcError):
            eve.channel.unary_unary(f"/attune.v1.Federation/Call{number}{LONG}")(b"\xff", timeout=CALL_S)


ADMIN = sorted(method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)
Flood = Callable[[Victim], None]
# Every kind of message that a peer can send, with what floods the server by it. A new kind needs an entry.
FLOODS: dict[str, tuple[Flood, ...]] = {
    "Federation.Enrol": (enrolments_with_a_used_up_token, enrolments_that_cannot_be),
    "Federation.Renew": (renewals,),
    "Federation.Connect": (come_and_go, come_with_another_shape, come_with_long_words),
    "Federation.Submit": (updates_full_of_nan, updates_for_orders_that_do_not_exist),
    "Blobs.Download": (downloads,),
    "Blobs.Upload": (uploads_and_their_offsets,),
    "Blobs.UploadOffset": (uploads_and_their_offsets,),
    "hello": (come_with_another_shape, come_with_a_message_that_is_too_large, hello_again_and_again),
    "progress": (progress_back_and_forth, progress_of_others),
    "trouble": (trouble_without_an_order, trouble_with_an_order),
    "beat": (beats,),
    "secure": (answers_in_secure_aggregation,),
    "statistics": (statistics_that_nobody_asked_for,),
    "units": (words_on_units,),
    "description": (descriptions_of_data,),
    **{f"Admin.{name}": (calls_of_operators,) for name in ADMIN},
    "no such call": (calls_that_do_not_exist,),
}


def test_every_kind_of_message_has_a_flood() -> None:
    services = [*pb.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values()]
    calls = {f"{service.name}.{method.name}" for service in services for method in service.methods}
    said = {field.name for field in pb.DeviceMessage.DESCRIPTOR.oneofs_by_name["message"].fields}
    assert FLOODS.keys() == calls | said | {"no such call"}


@pytest.mark.parametrize("attack", sorted({flood for floods in FLOODS.values() for flood in floods}, key=lambda f: f.__name__))
def test_one_device_makes_the_server_write_little(flooded: Victim, attack: Flood) -> None:
    """Expect fewer bytes than a device may cause within a minute, although it says all this within seconds."""
    before = written(flooded)
    attack(flooded)
    until(lambda: flooded.federation.status()["state"] != "done", "the server to answer")
    now = written(flooded)
    grown = {name: now[name] - before[name] for name in now}
    assert sum(grown.values()) < MOST_BYTES, grown
    assert flooded.server.popen.poll() is None
    assert "Traceback" not in flooded.server.text
