"""Objects of an S3 store whose answers say what is missing."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from attune.common.errors import LedgerBusy

pytest.importorskip("obstore")

from attune.features.remote.s3_objects import S3Objects


class Missing(BaseHTTPRequestHandler):
    """Store that answers each request as S3 does if the key, or the whole bucket, is not there."""

    code, status = "NoSuchBucket", 404

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>It is not there</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET = _answer  # noqa: N815 (names that http.server calls)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def objects() -> Iterator[S3Objects]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "c", "AWS_ALLOW_HTTP": "true"}
        yield S3Objects("s3://bucked/x", keys | {"AWS_ENDPOINT": f"http://127.0.0.1:{server.server_port}"})
        server.shutdown()


def test_a_bucket_that_does_not_exist_is_named(objects: S3Objects) -> None:
    for call in (lambda: objects.write("owner", b"me"), lambda: objects.read("owner")):
        with pytest.raises(LedgerBusy, match=r"s3://bucked/x: there is no such bucket: create it, or correct --blobs"):
            call()


def test_a_refusal_is_told_in_words_and_not_in_xml(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Missing, "code", "ExpiredToken")
    monkeypatch.setattr(Missing, "status", 403)
    with pytest.raises(LedgerBusy) as refused:
        objects.read("owner")
    assert str(refused.value) == "s3://bucked/x cannot be used now (ExpiredToken: It is not there)"
    assert refused.value.store == "blobs"


def test_an_object_that_does_not_exist_is_no_trouble_of_the_store(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Missing, "code", "NoSuchKey")
    with pytest.raises(KeyError):
        objects.read("owner")
