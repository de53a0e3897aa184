"""Attacks on direct transfers: what a device, or somebody who has its address of S3, can do with it."""

import hashlib
import http.client
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load, save

from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests import engines
from tests.e2e.hand import CALL_S, Hand, Stream, kind_of, moved
from tests.e2e.harness import Federation, Server, until

pytestmark = pytest.mark.engines
FLAGS = ("--method", "fedavg", "--model", "mlr", "--rounds", "3", "--min-clients", "2")
DIRECT = ("--set", "server.transfer=direct", "--set", "server.inline_bytes=0", "--set", "round.quorum=1")


@dataclass
class Scene:
    """A federation with direct transfers, whose devices have an order each."""

    federation: Federation
    server: Server
    devices: dict[str, Hand] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    orders: dict[str, pb.Order] = field(default_factory=dict)

    def enter(self, *names: str) -> None:
        for name in names:
            self.devices[name] = Hand(self.server.port, self.server.join_token, name)
            self.streams[name] = self.devices[name].connect()
        for name in names:
            assert self.streams[name].next("welcome").direct == engines.weed().address
            self.orders[name] = self.streams[name].next("order")

    def data(self, name: str) -> bytes:
        """Return a good answer of a device."""
        [ref] = self.orders[name].downloads
        return save(moved(load(fetched(self.download_url(name, ref.digest))), 1.0))

    def download_url(self, name: str, digest: str) -> str:
        return str(self.devices[name].blobs.DownloadUrl(pb.DownloadRequest(digest=digest), timeout=CALL_S).url)

    def ask(self, name: str, data: bytes, order: str = "", size: int = 0, digests: tuple[bytes, ...] = ()) -> pb.SignedUrl:
        target = pb.UploadTarget(
            order_id=order or self.orders[name].id, part="shared", digest=digest_of(data), size=size or len(data)
        )
        asked = pb.DirectUpload(target=target, part_digests=digests or (hashlib.sha256(data).digest(),))
        reply: pb.SignedUrl = self.devices[name].blobs.UploadUrl(asked, timeout=CALL_S)
        return reply

    def submit(self, name: str, data: bytes) -> pb.Receipt:
        ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
        return self.devices[name].submit(self.orders[name].id, [ref], loss=0.5, accuracy_before=0.5, accuracy_after=0.7)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    words = engines.remote_words()
    federation = Federation(tmp_path)
    yield Scene(federation, federation.server(*FLAGS, *DIRECT, *words))
    for process in federation.processes:
        if process.popen.poll() is None:
            process.kill()


def request(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Return status and body of an answer of the store; status 0 if it hung up."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def fetched(url: str) -> bytes:
    status, body = request("GET", url)
    assert status == 200, body
    return body


def written(url: str, data: bytes, checksum_of: bytes | None = None) -> int:
    checksum = b64encode(hashlib.sha256(data if checksum_of is None else checksum_of).digest()).decode()
    return request("PUT", url, data, **{"x-amz-checksum-sha256": checksum})[0]


def test_an_address_is_good_for_one_blob_of_one_device(scene: Scene) -> None:
    scene.enter("ada", "eve")
    good = scene.data("ada")
    place = scene.ask("ada", good)
    other = bytes([good[0] ^ 1]) + good[1:]
    assert place.offset == 0
    assert written(place.url, other) == 403
    assert written(place.url, other, checksum_of=good) == 400
    assert written(place.url, good + b"x", checksum_of=good) == 403
    assert written(place.url, good[:-1], checksum_of=good) == 403
    assert written(place.url.replace("X-Amz-Expires=60", "X-Amz-Expires=6000"), good) == 403
    assert written(place.url.replace("partNumber=1", "partNumber=2"), good) == 403
    assert request("GET", place.url)[0] == 403
    assert request("DELETE", place.url)[0] == 403
    assert request("PUT", place.url, iter([b"x" * (1 << 20)] * 64))[0] in (0, 403), "an endless body"
    assert scene.ask("ada", good).url, "nothing of that has arrived"
    assert written(place.url, good) == 200, "somebody who has the address can write what its device was to write"
    done = scene.ask("ada", good)
    assert (done.url, done.offset) == ("", len(good))
    assert written(place.url, good) == 404, "it is void once the blob is whole"
    assert scene.submit("ada", good).status == pb.Receipt.STATUS_ACCEPTED
    assert "X-Amz" not in scene.server.text
    assert "credentials" not in scene.server.text, "botocore would write what it signs"


def test_an_address_is_given_only_for_what_the_order_asks(scene: Scene) -> None:
    scene.enter("ada", "eve")
    data = scene.data("eve")
    assert kind_of(lambda: scene.download_url("eve", digest_of(b"of another"))) == "unknown-blob"
    assert kind_of(lambda: scene.ask("eve", data, order=scene.orders["ada"].id)) == "update-refused"
    assert kind_of(lambda: scene.ask("eve", data, order="train-7-eve")) == "order-closed"
    assert kind_of(lambda: scene.ask("eve", data, size=1 << 40, digests=(bytes(32),) * 99)) == "limit-exceeded"
    assert kind_of(lambda: scene.ask("eve", data, digests=(bytes(32),) * 2)) == "update-refused"
    assert kind_of(lambda: scene.ask("eve", data, digests=(bytes(32),))) == "update-refused"
    assert kind_of(lambda: scene.ask("eve", data, digests=(b"short",))) == "update-refused"
    assert kind_of(lambda: scene.submit("eve", data)) == "unknown-blob"
    [ref] = scene.orders["eve"].downloads
    url = scene.download_url("eve", ref.digest)
    assert digest_of(fetched(url)) == ref.digest
    assert request("PUT", url, b"poison")[0] == 403
    assert request("GET", url.replace("/blobs/", "/blobs/x"))[0] == 403


def test_a_revoked_device_has_an_address_that_is_void_and_gets_no_receipt(scene: Scene) -> None:
    scene.enter("ada", "mallory")
    data = scene.data("mallory")
    place = scene.ask("mallory", data)
    scene.federation.command("fedserver", "revoke", "mallory")
    until(lambda: written(place.url, data) == 404, "its address to be void")
    assert kind_of(lambda: scene.ask("mallory", data)) == "certificate-refused"
    assert kind_of(lambda: scene.download_url("mallory", digest_of(data))) == "certificate-refused"
    assert kind_of(lambda: scene.submit("mallory", data)) == "certificate-refused"
    assert len(objects(scene)) == 1, "only the state"


def test_an_address_ends_with_its_order(scene: Scene) -> None:
    scene.enter("ada", "eve")
    data, other = scene.data("eve"), scene.data("ada")
    place = scene.ask("eve", data)
    for name in ("ada", "eve"):
        ref = scene.devices[name].send(scene.orders[name].id, "shared", load(other))
        scene.devices[name].submit(scene.orders[name].id, [ref], loss=0.5)
    assert scene.streams["eve"].next("order").round == 2
    until(lambda: written(place.url, data) == 404, "the address to be void")
    assert kind_of(lambda: scene.ask("eve", data)) == "order-closed"
    assert scene.submit("eve", data).status == pb.Receipt.STATUS_LATE


def test_what_a_killed_server_had_begun_goes_at_the_next_start(scene: Scene) -> None:
    scene.enter("ada", "eve")
    data = scene.data("eve")
    place = scene.ask("eve", data)
    scene.server.kill()
    assert written(place.url, data) == 200
    scene.federation.server(*FLAGS, *DIRECT)
    assert written(place.url, data) == 404
    assert len(objects(scene)) == 1


def test_a_device_that_dies_after_it_has_written_goes_on_from_there(scene: Scene) -> None:
    scene.enter("ada", "eve")
    data = scene.data("eve")
    assert written(scene.ask("eve", data).url, data) == 200
    scene.streams["eve"].hang_up()
    scene.streams["eve"] = scene.devices["eve"].connect()
    scene.orders["eve"] = scene.streams["eve"].next("order")
    assert scene.ask("eve", data).offset == len(data), "nothing is written again"
    assert scene.submit("eve", data).status == pb.Receipt.STATUS_ACCEPTED


def objects(scene: Scene) -> list[str]:
    from attune.fedserver.home import ServerHome

    storage: Any = ServerHome(scene.federation.home).open()
    return list(storage.blobs._objects.keys("blobs/"))
