"""A stranger without a certificate occupies the port, or a device with one opens more connections than it needs."""

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from attune.common.config import ServerSettings
from attune.common.pb import federation_pb2 as pb
from tests.attacks.conftest import Victim
from tests.e2e.hand import CALL_S, PROFILE, Caller, Hand, Stream, kind_of
from tests.e2e.harness import Federation, Server, tabular_shard, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "2", "--set", "server.handshake_s=2")
PROFILE_JSON = msgspec.json.encode(PROFILE)
linux = pytest.mark.skipif(sys.platform != "linux", reason="a process is started under another limit on Linux only")


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[tuple[Federation, Server]]:
    """Run a server that may have 256 descriptors."""
    federation = Federation(tmp_path)
    command = ["fedserver", "--host", "127.0.0.1", "--port", "0", "--join-uses", "9", *FLAGS]
    log, entry = tmp_path / "server.log", "tests.forked:narrow_server"
    server = Server(command, log, federation.environment, federation.home, entry=entry)
    federation.processes.append(server)
    federation.port = server.port
    yield federation, server
    federation.close()


def hold(port: int, number: int, source: str = "") -> list[socket.socket]:
    """Open this many silent connections from an address of this machine, or fewer if the server refuses."""
    held = []
    for _ in range(number):
        try:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=2, source_address=(source, 0)))
        except OSError:
            break
    return held


def goes_on(federation: Federation, server: Server) -> None:
    """Let two devices join, and close a round."""
    hands = [Hand(server.port, server.join_token, name) for name in ("ada", "bob")]
    streams = [hand.connect() for hand in hands]
    for hand, stream in zip(hands, streams, strict=True):
        assert hand.answer(stream.next("order")).status == pb.Receipt.STATUS_ACCEPTED
    federation.await_status(lambda status: status["round"] >= 1)


@linux
def test_235_silent_connections_do_not_stop_a_server_of_256_descriptors(narrow: tuple[Federation, Server]) -> None:
    federation, server = narrow
    held = hold(server.port, 235)
    assert len(held) > 100
    goes_on(federation, server)
    until(lambda: all(closed(each) for each in held), "every connection to be dropped", patience_s=30)
    [told] = [each for each in federation.status()["refused"] if each["kind"] == "handshake" and each["who"] == "127.0.0.1"]
    assert "handshake" in told["text"] and told["todo"]


@linux
def test_connections_that_come_again_and_again_do_not_stop_it_either(narrow: tuple[Federation, Server]) -> None:
    """Connect from another address than the devices', which try again as devices do."""
    federation, server = narrow
    over = threading.Event()

    def flood() -> None:
        while not over.wait(0.2):
            held = hold(server.port, 60, "127.0.0.2")
            for each in held[::2]:
                each.close()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: "127.0.0.2 was refused" in server.text, "the flood to be noticed")
        for seed, name in enumerate(("ada", "bob")):
            federation.device(tabular_shard(federation.folder / name, seed), name=name)
        federation.await_status(lambda status: status["state"] == "done")
        assert all(thread.is_alive() for thread in threads), "the flood has lasted"
    finally:
        over.set()
        for thread in threads:
            thread.join()


def closed(held: socket.socket) -> bool:
    held.setblocking(False)
    try:
        while data := held.recv(4096):
            assert data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_a_handshake_that_is_not_finished_in_its_time_ends(victim: Victim) -> None:
    """Start one handshake, and leave another connection silent. A connection with a finished call stays."""
    held = hold(victim.server.port, 2)
    held[0].sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the beginning of a ClientHello
    until(lambda: all(closed(each) for each in held), "the connections to be dropped")
    assert "SERVING" in victim.health(victim.devices["ada"])


def test_a_handshake_has_ten_seconds_unless_the_operator_says_otherwise() -> None:
    assert ServerSettings().handshake_s == 10


def test_a_device_makes_so_many_calls_at_a_time_and_no_more(victim: Victim) -> None:
    mallory = victim.stranger()
    waiting = [Stream(mallory) for _ in range(120)]  # some end at once, because their profile is refused
    kinds = []
    while waiting and "too-many" not in kinds:
        try:
            waiting.pop().end()
        except grpc.RpcError as error:
            kinds.append(dict(error.trailing_metadata())["attune-error"])
    assert "too-many" in kinds
    mallory.close()


def test_one_certificate_holds_few_connections(victim: Victim) -> None:
    mallory = victim.stranger()
    callers = [Caller(mallory.port, mallory.ca_pem, mallory.credential) for _ in range(20)]
    log = victim.new_log()
    for each in callers:
        assert kind_of(lambda each=each: each.federation.Submit(pb.Update(order_id="x"), timeout=CALL_S)) == "update-refused"
    until(lambda: "connections of one certificate were dropped" in log(), "the oldest to be dropped")
    for each in (mallory, *callers):
        each.close()


def test_watchers_of_the_health_are_few_and_one_that_does_not_read_holds_nobody_up(victim: Victim) -> None:
    mallory = victim.stranger()
    health = HealthStub(mallory.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest(service="x" * 1000)) for _ in range(2)]
    assert next(watches[0]).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    next(watches[1])
    assert kind_of(lambda: next(health.Watch(health_pb2.HealthCheckRequest()))) == "too-many"
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S).status == health_pb2.HealthCheckResponse.SERVING
    mallory.close()


@pytest.mark.parametrize("call", ["Renew", "Submit", "Connect", "Download", "UploadOffset"])
def test_a_message_that_cannot_be_read_is_one_line(victim: Victim, call: str) -> None:
    log, mallory = victim.new_log(), victim.stranger()
    service = "Blobs" if call in ("Download", "UploadOffset") else "Federation"
    path, data = f"/attune.v1.{service}/{call}", b"\xff" * 500
    match call:
        case "Connect":
            send = mallory.channel.stream_stream(path)
            assert kind_of(lambda: list(send(iter([data]), timeout=CALL_S))) == "wire"
        case "Download":
            assert kind_of(lambda: list(mallory.channel.unary_stream(path)(data, timeout=CALL_S))) == "wire"
        case _:
            assert kind_of(lambda: mallory.channel.unary_unary(path)(data, timeout=CALL_S)) == "wire"
    until(lambda: "cannot be read" in log(), "the refusal to be logged")
    assert len([line for line in log().splitlines() if "cannot be read" in line]) == 1
    mallory.close()


def test_a_second_message_that_cannot_be_read_ends_the_stream_with_its_name(victim: Victim) -> None:
    mallory, log = victim.stranger(), victim.new_log()
    stream = mallory.connect()
    stream.next("welcome")
    raw = mallory.channel.stream_stream("/attune.v1.Federation/Connect")
    hello = pb.DeviceMessage(hello=pb.Hello(protocol=1, software="x", profile_json=PROFILE_JSON)).SerializeToString()
    assert kind_of(lambda: list(raw(iter([hello, b"\xff" * 9]), timeout=CALL_S))) == "wire"
    assert "never retrieved" not in log()
    mallory.close()


def test_nothing_of_a_message_is_read_before_the_caller_may_call(victim: Victim) -> None:
    """Call the operator's methods with bytes that are not a message. They are refused for the caller, not for the bytes."""
    mallory = victim.stranger()
    for path in ("/attune.v1.Admin/Wake", "/attune.v1.Admin/Revoke", "/attune.v1.Federation/Enrol"):
        assert kind_of(lambda path=path: mallory.channel.unary_unary(path)(b"\xff" * 9, timeout=CALL_S)) == "forbidden"
    mallory.close()


@linux
@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_400_connections_to_the_dashboard_do_not_stop_a_server_of_256_descriptors(
    narrow: tuple[Federation, Server], begun: bytes
) -> None:
    federation, server = narrow
    [page] = re.findall(r"dashboard http://127\.0\.0\.1:(\d+)/", server.text)
    held = hold(int(page), 400)
    for connection in held:
        with contextlib.suppress(OSError):
            connection.sendall(begun)
    assert len(held) > 100
    goes_on(federation, server)
    assert federation.status()["troubles"] == []
    assert "Traceback" not in server.text
    assert len(server.text) < 20_000
