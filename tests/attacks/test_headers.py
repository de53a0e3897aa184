"""HTTP/2 headers and other frames without end: from the holder of a token, a device, a revoked one, and many at once."""

import contextlib
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest
from safetensors.numpy import save

from attune.common.identity.credential import Credential
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests.attacks.conftest import Victim
from tests.e2e.hand import PROFILE, Hand, moved
from tests.e2e.harness import Federation, Server, until

CUT_S = 60.0  # a flood must be cut within so long; how much it sends before depends on the load of the machine
MOST_GROWTH_KB = 400_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
linux = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not count bytes")


def frame(kind: int, stream: int, data: bytes, flags: int = 0) -> bytes:
    """Return a frame. Without flags, a block of headers goes on."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def field(name: bytes, value: bytes) -> bytes:
    """Return a literal header in HPACK, without a place in the table."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def more(stream: int) -> bytes:
    return b"".join(frame(CONTINUATION, stream, field(b"a" * 100, b"b" * 120) * 60) for _ in range(10))


FIRST_PATH = field(b":path", b"/attune.v1.Federation/Submit")
FIRST = b"\x83\x87" + FIRST_PATH + field(b"content-type", b"application/grpc")
FIRST += field(b":authority", b"x") + field(b"te", b"trailers")


def connect(port: int, credential: Credential, folder: Path) -> ssl.SSLSocket:
    folder.mkdir()
    (folder / "key.pem").write_bytes(credential.key_pem)
    (folder / "certificate.pem").write_bytes(credential.certificate_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    held = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=60))
    held.sendall(PREFACE + frame(SETTINGS, 0, b""))
    return held


def is_cut(held: ssl.SSLSocket, frames: Iterable[bytes]) -> bool:
    """Send frames until the server ends the connection, and return whether it did in time."""
    end = time.monotonic() + CUT_S
    try:
        for data in frames:
            held.sendall(data)
            if time.monotonic() > end:
                return False
    except TimeoutError:  # the server neither reads nor ends it
        return False
    except OSError:
        return True
    return False


def resident_kb(server: Server) -> int:
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(server.popen.pid)], capture_output=True, check=True).stdout)


@linux
@pytest.mark.parametrize("who", ["token", "device", "revoked device"])
def test_headers_without_end_are_cut_off(victim: Victim, who: str) -> None:
    if who == "token":
        credential = JoinToken.parse(victim.server.join_token).bootstrap()
    else:
        mallory = victim.stranger()
        credential = mallory.credential
        if who == "revoked device":
            victim.federation.command("fedserver", "revoke", mallory.name)
        mallory.close()
    before = resident_kb(victim.server)
    held = connect(victim.server.port, credential, victim.scratch())
    held.sendall(frame(HEADERS, 1, FIRST))
    assert is_cut(held, itertools.repeat(more(1)))
    held.close()
    assert resident_kb(victim.server) - before < MOST_GROWTH_KB


FRAMES = {
    "SETTINGS": frame(SETTINGS, 0, b"\0\4\0\1\0\0"),
    "PING": frame(6, 0, b"12345678"),
    "WINDOW_UPDATE": frame(8, 0, b"\0\0\0\1"),
    "PRIORITY": frame(2, 1, b"\0\0\0\0\1"),
}


def taken_back(stream: int) -> bytes:
    """Return a call that is taken back at once."""
    return frame(HEADERS, stream, FIRST, END_HEADERS) + frame(3, stream, b"\0\0\0\x08")


@linux
@pytest.mark.parametrize("kind", [*FRAMES, "RST_STREAM"])
def test_frames_without_end_of_a_revoked_device_are_cut_off(victim: Victim, kind: str) -> None:
    """Its answers are not read."""
    mallory = victim.stranger()
    victim.federation.command("fedserver", "revoke", mallory.name)
    mallory.close()
    before = resident_kb(victim.server)
    held = connect(victim.server.port, mallory.credential, victim.scratch())
    streams = range(1, 1 << 30, 2)
    assert is_cut(held, itertools.repeat(FRAMES[kind] * 500) if kind in FRAMES else map(taken_back, streams))
    held.close()
    assert resident_kb(victim.server) - before < MOST_GROWTH_KB


class Windowless(threading.Thread):
    """Call whose device answers pings and never makes room for a message. The thread ends with the connection."""

    def __init__(self, server: Server, credential: Credential, folder: Path, path: bytes, message: Message) -> None:
        super().__init__(daemon=True)
        self.held, data = connect(server.port, credential, folder), message.SerializeToString()
        headers = frame(HEADERS, 1, FIRST.replace(FIRST_PATH, field(b":path", path)), END_HEADERS)
        self.held.sendall(frame(SETTINGS, 0, b"\0\4\0\0\0\0") + headers)
        self.held.sendall(frame(DATA, 1, b"\0" + len(data).to_bytes(4, "big") + data))
        self.begun = False
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError), self.held.makefile("rb") as heard:
            while head := heard.read(9):
                data = heard.read(int.from_bytes(head[:3], "big"))
                self.begun |= head[3] == HEADERS
                if head[3] in (SETTINGS, PING) and not head[4]:
                    self.held.sendall(frame(head[3], 0, data if head[3] == PING else b"", 1))


@linux
def test_a_revoked_device_that_takes_no_message_holds_nothing(tmp_path: Path) -> None:
    """Its streams had begun before. Of the server's minute two seconds are left (`hasty_server`)."""
    with contextlib.closing(Federation(tmp_path)) as federation:
        flags = ("--method", "fedavg", "--model", "mlr", "--min-clients", "1", "--set", "server.inline_bytes=0")
        server = federation.server(*flags, entry="tests.forked:hasty_server")
        eve = Hand(server.port, server.join_token, "eve")
        digest = eve.connect().next("order").downloads[0].digest
        hello = pb.Hello(protocol=1, software="eve", profile_json=msgspec.json.encode(PROFILE))
        calls = {
            b"/attune.v1.Federation/Connect": pb.DeviceMessage(hello=hello),
            b"/attune.v1.Blobs/Download": pb.DownloadRequest(digest=digest),
            b"/grpc.health.v1.Health/Watch": HealthCheckRequest(),
        }
        held = [
            Windowless(server, eve.credential, tmp_path / path.decode()[-5:], path, message) for path, message in calls.items()
        ]
        until(lambda: all(connection.begun for connection in held), "the calls to be accepted")
        federation.command("fedserver", "revoke", "eve")
        for connection in held:
            connection.join(30)
        assert not any(connection.is_alive() for connection in held)
        assert "Traceback" not in server.text


DEVICES, FLOODS = 200, 20
FLAGS = ("--method", "fedavg", "--model", "dnn", "--min-clients", str(DEVICES), "--rounds", "1", "--join-uses", "999")
FLAGS += ("--set", "model.hidden=[20000]", "--set", "round.stall_s=0", "--set", "round.deadline_s=600")


class HalfUpload:
    """A device that sends the first half of its update, and the second half when it is told."""

    def __init__(self, server: Server, name: str) -> None:
        self.hand = Hand(server.port, server.join_token, name)
        self.stream = self.hand.connect()
        self.half_sent, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.received = 0

    def begin(self) -> None:
        self._order = self.stream.next("order")
        served = self.hand.served(self._order)
        self._part = self._order.returns[0].part
        self._data = save(moved(served[self._part], 1.0))
        self._thread.start()

    def _send(self) -> None:
        target = pb.UploadTarget(order_id=self._order.id, part=self._part, digest=digest_of(self._data), size=len(self._data))
        metadata = (("attune-upload-bin", target.SerializeToString()),)
        call = self.hand.channel.stream_unary("/attune.v1.Blobs/Upload", response_deserializer=pb.UploadReply.FromString)
        with contextlib.suppress(grpc.RpcError):
            self.received = int(call(self._halves(), metadata=metadata, timeout=600).received)

    def _halves(self) -> Iterator[bytes]:
        half = len(self._data) // 2
        yield self._data[:half]
        self.half_sent.set()
        self._go_on.wait()
        yield self._data[half:]

    def end(self) -> pb.Receipt:
        self._go_on.set()
        self._thread.join()
        assert self.received == len(self._data), "the upload was cut"
        ref = pb.BlobRef(part=self._part, digest=digest_of(self._data), size=len(self._data))
        return self.hand.submit(self._order.id, [ref], loss=0.5, accuracy_before=0.5, accuracy_after=0.75, test_samples=5)


def refused_then_headers(held: ssl.SSLSocket) -> bool:
    """Make a call that is refused, send headers without end, and return whether the connection is cut."""
    held.sendall(frame(HEADERS, 1, FIRST, END_HEADERS) + frame(DATA, 1, bytes(5), END_STREAM))
    heard = b""
    while b"token-refused" not in heard:
        piece = held.recv(1 << 16)
        if not piece:
            return True
        heard += piece
    return is_cut(held, itertools.chain([frame(HEADERS, 3, FIRST)], itertools.repeat(more(3))))


@linux
def test_headers_on_many_connections_are_cut_off_and_200_uploads_are_not(tmp_path: Path) -> None:
    """All come from one address, as behind a proxy. The bounds are in tests/fedserver/rpc/test_unread_bytes.py."""
    with contextlib.closing(Federation(tmp_path)) as federation:
        server = federation.server(*FLAGS)
        used_up = federation.command("fedserver", "token").stdout.strip()
        Hand(server.port, used_up, "first").close()
        devices = [HalfUpload(server, f"d{number}") for number in range(DEVICES)]
        for device in devices:
            device.begin()
        for device in devices:
            assert device.half_sent.wait(60)
        credential = JoinToken.parse(used_up).bootstrap()
        floods = [connect(server.port, credential, tmp_path / f"key{number}") for number in range(FLOODS)]
        with ThreadPoolExecutor(FLOODS) as pool:
            assert all(pool.map(refused_then_headers, floods))
        assert {device.end().status for device in devices} == {pb.Receipt.STATUS_ACCEPTED}
        federation.await_status(lambda status: status["round"] == 1)


AGAIN, ROUNDS = 60, 30
MOST_FLOODED_KB = 3_000_000  # without a pause 5,500,000 after 30 s, and devices had one answer in that time


@linux
def test_rounds_go_on_and_memory_is_bounded_while_60_connections_come_again(tmp_path: Path) -> None:
    """Two devices are connected when the holder of a token that is used up begins. It floods until the rounds are over."""
    federation, over, most = Federation(tmp_path), threading.Event(), 0
    try:
        server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", str(ROUNDS))
        hands = [Hand(server.port, server.join_token, name) for name in ("ada", "bob")]
        streams = [hand.connect() for hand in hands]
        used_up = federation.command("fedserver", "token").stdout.strip()
        Hand(server.port, used_up, "first").close()
        credential = JoinToken.parse(used_up).bootstrap()

        def flood(attacker: int) -> None:
            for number in itertools.count():
                if over.is_set():
                    return
                with contextlib.suppress(OSError):
                    held = connect(server.port, credential, tmp_path / f"key{attacker}-{number}")
                    with held:
                        refused_then_headers(held)

        with ThreadPoolExecutor(AGAIN) as pool:
            pool.map(flood, range(AGAIN))
            try:
                for _ in range(ROUNDS):
                    for hand, stream in zip(hands, streams, strict=True):
                        assert hand.answer(stream.next("order")).status == pb.Receipt.STATUS_ACCEPTED
                    most = max(most, resident_kb(server))
            finally:
                over.set()
        assert "new connections" in server.text
        assert most < MOST_FLOODED_KB
    finally:
        over.set()
        federation.close()
