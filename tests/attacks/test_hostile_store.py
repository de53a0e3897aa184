"""A store of objects that answers with other bytes, without end, with another object, or with the address of another host."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of

pytest.importorskip("obstore")

from attune.features.remote.s3_objects import ObjectCache, S3Objects
from attune.fedserver.ports.blobs import Damaged

GOOD = bytes(range(256)) * 40
BLOB = Blob("state/one", digest_of(GOOD), len(GOOD))
ENDLESS = 64 << 20  # bytes of an answer without end: the client must hang up before


class HostileStore(BaseHTTPRequestHandler):
    """Answers reads with `body`, repeated for ENDLESS bytes if `endless`, or with a redirect to `elsewhere`."""

    body, endless, elsewhere = b"", False, ""
    port = sent = 0
    asked: tuple[str, ...] = ()

    def do_GET(self) -> None:
        cls = type(self)
        cls.asked += (f"{self.headers['Host']}{self.path}",)
        if self.elsewhere and not self.elsewhere.endswith(cls.asked[-1]):
            self.send_response(307)
            self.send_header("Location", self.elsewhere)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(ENDLESS if self.endless else len(self.body)))
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.send_header("ETag", '"x"')
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(ENDLESS // len(self.body) if self.endless else 1):
                self.wfile.write(self.body)
                cls.sent += len(self.body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def store() -> Iterator[type[HostileStore]]:
    """Return the handler of a server of this machine."""

    class Handler(HostileStore):
        """The handler of one test, with attributes of its own."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Handler
        server.shutdown()


def objects_of(store: type[HostileStore]) -> S3Objects:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c", "AWS_ALLOW_HTTP": "true"}
    return S3Objects("s3://bucket/x", keys | {"AWS_ENDPOINT": f"http://127.0.0.1:{store.port}"})


def check_damaged(store: type[HostileStore], cache: Path) -> None:
    """Check that the object is refused, and that no copy stays."""
    with pytest.raises(Damaged, match="not those that were written"):
        ObjectCache(cache, objects_of(store)).open("blobs/one", BLOB)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("body", [GOOD[:-1] + b"!", GOOD[:-1], GOOD + b"!", b"an object of another bucket"])
def test_an_object_with_other_bytes_is_damaged_and_no_copy_stays(store: type[HostileStore], tmp_path, body: bytes) -> None:
    store.body = body
    check_damaged(store, tmp_path / "cache")


def test_an_object_without_end_is_not_read_to_its_end(store: type[HostileStore], tmp_path: Path) -> None:
    store.body, store.endless = bytes(1 << 16), True
    check_damaged(store, tmp_path / "cache")
    assert store.sent < ENDLESS // 2
    store.sent = 0
    assert len(objects_of(store).read("owner")) < ENDLESS // 8
    assert store.sent < ENDLESS // 2


def test_an_object_from_another_host_is_compared_too(store: type[HostileStore], tmp_path: Path) -> None:
    """The client follows redirects, and cannot be told not to."""
    store.body, store.elsewhere = b"a secret of the other host", f"http://localhost:{store.port}/other/secret"
    check_damaged(store, tmp_path / "cache")
    assert store.asked[-1].endswith("/other/secret")
