"""Device against a store that redirects, stalls, cuts, lies or may not be used: the stream takes over, no secret is told."""

import hashlib
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common import aio
from attune.common.errors import SettingError
from attune.common.exchange.messages import DirectUpload, SignedUrl, UploadTarget
from attune.common.identity.credential import key_pem
from attune.common.protocol import DIRECT_PART_BYTES
from attune.common.wire.blobs import Buffer
from attune.features.remote import device
from attune.features.remote.device import REST_S, DirectRoute, part_digests
from attune.fedclient.address import Proxy, store_origin
from attune.fedclient.link.port import Broken

DATA = bytes(range(256)) * 2000
SECRET = "/bucket/key?X-Amz-Signature=secret"
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Store:
    """A small HTTP server. `answers`: how it answers each request in turn; the last one for all that follow."""

    answers: list[Answer]
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    address: str = ""
    server: Any = None

    def next(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append((handler.command, dict(handler.headers), body))
        (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(handler)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(device.StoreRequest.__init__, "__defaults__", (None, 1.0, 1.0))  # a stall is over after a second
    made = Store([])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.next(self)

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *words: object) -> None:
            """No-op."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    made.server = server
    made.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield made
    server.shutdown()
    server.server_close()


def ranged(count: int | None = None, lie: bytes = DATA) -> Answer:
    """Answer as S3 does; hang up after `count` bytes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        offset = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        rest = lie[offset:]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {offset}-{len(lie) - 1}/{len(lie)}")
        handler.send_header("Content-Length", str(len(rest)))
        handler.end_headers()
        handler.wfile.write(rest[:count])
        if count is not None:
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)

    return answer


def status(code: int, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def silent(handler: BaseHTTPRequestHandler) -> None:
    threading.Event().wait(3)


def trickling(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(DATA)))
    handler.end_headers()
    for _ in range(20):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        threading.Event().wait(0.15)


class Phone:
    """A device's route, its clock and its lines, and what it has of a blob."""

    def __init__(self, store: Store, *allowed: str, proxy: Proxy | None = None) -> None:
        self.lines: list[str] = []
        self.now, self.here, self.asked = 0.0, bytearray(), 0
        self.url = f"{store.address}{SECRET}"
        self.route = DirectRoute(
            [store_origin(one) for one in allowed or (store.address,)], self.lines.append, proxy, lambda: self.now
        )
        self.route.offer(store.address)

    async def ask(self, asked: DirectUpload | None = None) -> SignedUrl:
        self.asked += 1
        return SignedUrl(self.url)

    def download(self) -> bool:
        async def moved(count: int) -> None:
            """No-op."""

        return aio.run(self.route.download(self.ask, len(self.here), len(DATA), self.here.extend, moved))

    def broken(self) -> str:
        with pytest.raises(Broken) as caught:
            self.download()
        return str(caught.value)


def test_a_download_that_is_cut_goes_on_by_range(store: Store) -> None:
    store.answers = [ranged(100_000), ranged(50_000), ranged()]
    phone = Phone(store)
    for _ in range(2):
        assert "secret" not in phone.broken()
    assert phone.download()
    assert bytes(phone.here) == DATA
    assert [headers["Range"] for _, headers, _ in store.requests] == ["bytes=0-", *(f"bytes={n}-" for n in (100_000, 150_000))]
    assert phone.lines == []


def test_a_store_that_cuts_again_and_again_is_left_alone_for_a_while(store: Store) -> None:
    store.answers = [ranged(10)]
    phone = Phone(store)
    for _ in range(3):
        phone.broken()
    assert phone.download() is False, "the stream goes on where the store stopped"
    assert (len(phone.here), phone.asked, len(phone.lines)) == (30, 3, 1)
    assert "blobs go through the server for 15 minutes" in phone.lines[0]
    phone.now += REST_S
    store.answers = [ranged()]
    assert phone.download()
    assert bytes(phone.here) == DATA


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(302, Location="http://169.254.169.254/latest/meta-data"), r"answered 302 \(a redirect\)"),
        (silent, "does not answer"),
        (trickling, "does not answer"),
    ],
)
def test_the_stream_takes_over_at_once(store: Store, answer: Answer, said: str) -> None:
    store.answers = [answer]
    phone = Phone(store)
    assert "secret" not in phone.broken()
    assert phone.download() is False
    assert len(store.requests) == 1
    [line] = phone.lines
    assert re.search(said, line) and "secret" not in line


@pytest.mark.parametrize("code", [200, 403, 404, 416, 500])
def test_an_answer_that_is_not_the_wanted_piece_is_not_taken(store: Store, code: int) -> None:
    store.answers = [status(code)]
    phone = Phone(store)
    phone.here += DATA[:10]
    phone.broken()
    assert bytes(phone.here) == DATA[:10]


def test_a_store_sends_no_more_than_the_blob_has(store: Store) -> None:
    store.answers = [ranged(lie=DATA * 3)]
    phone = Phone(store)
    assert phone.download()
    assert len(phone.here) == len(DATA)


@pytest.mark.parametrize(
    "where", ["http://{inside}/x?secret", "http://{store}@{inside}/secret", "http://{inside}#@{store}/secret"]
)
def test_a_server_cannot_send_a_device_to_another_host(store: Store, where: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inside:  # a service of the site's own network
        inside.settimeout(0.3)
        phone = Phone(store)
        phone.url = where.format(store=store.address.removeprefix("http://"), inside=f"127.0.0.1:{inside.getsockname()[1]}")
        assert "secret" not in phone.broken()
        with pytest.raises(TimeoutError):
            inside.accept()
    assert store.requests == []
    assert phone.download() is False, "such a server is not asked again soon"


def test_an_address_that_http_does_not_allow_is_not_repeated_in_the_error(store: Store) -> None:
    phone = Phone(store)
    phone.url = f"{store.address}/key with spaces?secret"
    assert "secret" not in phone.broken()
    assert store.requests == []


@pytest.mark.parametrize("where", ["file:///etc/secret", "gopher", "", "https://"])
def test_an_address_that_is_none_is_not_used(store: Store, where: str) -> None:
    phone = Phone(store)
    phone.url = where
    if where:
        assert "secret" not in phone.broken()
    assert phone.download() is False


def test_without_the_owners_word_nothing_is_asked_and_one_line_says_so(store: Store) -> None:
    phone = Phone(store, "s3.example.org")
    phone.route.offer(store.address)
    assert phone.download() is False
    assert (phone.asked, store.requests) == (0, [])
    assert phone.lines == [f"the server would let this device use the store {store.address} itself; --direct-host allows it"]


def certified(folder: Path) -> Path:
    """Write a key and a certificate for `localhost`, signed by itself, into one file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "store")])
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    path = folder / "store.pem"
    path.write_bytes(key_pem(key) + builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


def test_a_store_is_trusted_by_the_systems_certificates_and_under_its_own_name_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = certified(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    store.server.socket = context.wrap_socket(store.server.socket, server_side=True)
    store.answers, port = [ranged()], store.address.rpartition(":")[2]
    for trusted, host in ((False, "localhost"), (True, "127.0.0.1"), (True, "localhost")):
        monkeypatch.setenv("SSL_CERT_FILE", str(pem) if trusted else os.devnull)
        store.address = f"https://{host}:{port}"
        phone = Phone(store)
        if trusted and host == "localhost":
            assert phone.download()
            assert bytes(phone.here) == DATA
        else:
            assert "no certificate that is trusted here" in phone.broken()
            assert phone.download() is False
            assert store.requests == []


def test_an_upload_goes_part_by_part_with_its_checksums_and_no_credentials(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "DIRECT_PART_BYTES", 4 * device.PIECE_BYTES)
    monkeypatch.setattr(device, "FRAME_BYTES", 4 * device.PIECE_BYTES)
    monkeypatch.setattr(device, "read_frames", small_frames)
    store.answers = [status(200)]
    phone, data, missing = Phone(store), DATA * 2, [4 * device.PIECE_BYTES, 0]

    async def ask(asked: DirectUpload) -> SignedUrl:
        return SignedUrl(phone.url, missing.pop()) if missing else SignedUrl(offset=len(data))

    async def moved(count: int) -> None:
        """No-op."""

    target = UploadTarget("train-1-kiel", "shared", f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
    assert aio.run(phone.route.upload(ask, target, lambda: Buffer("blob", data), moved))
    assert b"".join(body for _, _, body in store.requests) == data
    assert {name.lower() for _, headers, _ in store.requests for name in headers} == {
        "host", "content-length", "x-amz-checksum-sha256",
    }  # fmt: skip


def small_frames(source: Any, offset: int, frame_bytes: Any = None) -> Iterator[bytes]:
    size = frame_bytes() if frame_bytes else 4 * device.PIECE_BYTES
    while frame := source.read(offset, size):
        yield frame
        offset += len(frame)


def test_a_server_that_asks_for_the_same_part_for_ever_is_given_up(store: Store) -> None:
    store.answers = [status(200)]
    phone = Phone(store)

    async def moved(count: int) -> None:
        """No-op."""

    target = UploadTarget("train-1-kiel", "shared", f"sha256:{hashlib.sha256(DATA).hexdigest()}", len(DATA))
    with pytest.raises(Broken, match="that was written"):
        aio.run(phone.route.upload(phone.ask, target, lambda: Buffer("blob", DATA), moved))
    assert len(store.requests) == 1


def test_the_parts_of_a_blob_have_their_own_digests() -> None:
    data = b"\1" * DIRECT_PART_BYTES + b"\2" * 10
    expected = (hashlib.sha256(b"\1" * DIRECT_PART_BYTES).digest(), hashlib.sha256(b"\2" * 10).digest())
    assert part_digests(lambda: Buffer("blob", data)) == expected


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("s3.example.org", "https://s3.example.org:443"),
        ("S3.example.org:8443", "https://s3.example.org:8443"),
        ("http://10.0.0.5:8333", "http://10.0.0.5:8333"),
        ("https://[2001:db8::1]/bucket/key?x=1", "https://[2001:db8::1]:443"),
    ],
)
def test_a_store_is_a_scheme_a_host_and_a_port(text: str, origin: str) -> None:
    assert store_origin(text) == origin


@pytest.mark.parametrize(
    "text", ["", "ftp://host", "https://user:secret@host", "https://", "host:port", "https://h st/secret", "https://hö.example"]
)
def test_what_is_no_store_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        store_origin(text)
    assert "secret" not in str(caught.value)
