"""Objects of an S3 store below one prefix, and copies of them on this machine's disk, within a bound.

Workers on other machines use it too, so nothing here knows the database.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import S3Store

from attune.common.durable import disk_errors, sweep_files
from attune.common.errors import LedgerBusy
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable
from attune.common.wire.digest import Digest
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.checked_blobs import OBJECTS

if TYPE_CHECKING:
    from torch import Tensor

    from attune.common.wire.blobs import Blob
    from attune.common.wire.header import Manifest

T = TypeVar("T")
CHUNK_BYTES = 1 << 16
_DIGEST_BYTES = hashlib.sha256().digest_size
NO_BUCKET = "NoSuchBucket"  # in the answer of a store, if it has a body: HEAD has none
LONGEST_REASON = 300  # characters
PART_BYTES = 16 << 20  # larger blobs go up in parts of this size
VARIABLES = (  # of the environment, which a store is reached with
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
)  # fmt: skip
RETRIES: Any = {
    "max_retries": 6, "retry_timeout": timedelta(seconds=15),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class S3Access:
    """The place of some objects, and the keys to it. It goes to workers with a call, and is shown and stored nowhere.

    Attributes:
        url: s3://BUCKET/PREFIX.
        variables: Settings and keys of the store, as the variables AWS_... name them.
    """

    url: str
    variables: Mapping[str, str]

    def __repr__(self) -> str:
        return f"S3Access({self.url})"

    @classmethod
    def of_process(cls, url: str) -> S3Access:
        """Return the access that this process has by its environment."""
        return cls(url.rstrip("/"), {name: os.environ[name] for name in VARIABLES if os.environ.get(name)})


class S3Objects:
    """The objects below one prefix of a bucket. Calls are tried again for some seconds."""

    def __init__(self, access: S3Access) -> None:
        self.url, self.access, given = access.url, access, dict(access.variables)
        options: Any = {"connect_timeout": "3s", "timeout": "60s"}
        options["allow_http"] = given.pop("AWS_ALLOW_HTTP", "") == "true"  # else these options hide the variable
        config: Any = given
        self._store = S3Store.from_url(self.url, config=config, client_options=options, retry_config=RETRIES)

    def _do(self, work: Callable[[], T]) -> T:
        """Run a call of the store.

        Raises:
            KeyError: There is no such object.
            LedgerBusy: The store cannot be used now, or has no such bucket.
        """
        try:
            return work()
        except (NotFoundError, FileNotFoundError) as error:
            if NO_BUCKET in str(error):
                raise LedgerBusy(f"{self.url}: there is no such bucket: create it, or correct --blobs", "blobs") from None
            raise KeyError(self.url) from None
        except BaseError as error:
            raise LedgerBusy(f"{self.url} cannot be used now ({_reason(str(error))})", "blobs") from error

    def write(self, key: str, content: bytes | Path) -> bool:
        """Write an object durably, unless it is there; return whether this call wrote it."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        try:
            if size <= PART_BYTES:
                self._do(lambda: obstore.put(self._store, key, content, mode="create", use_multipart=False))
            else:
                self._do(lambda: obstore.put(self._store, key, content, chunk_size=PART_BYTES, max_concurrency=4))
        except LedgerBusy as error:
            if isinstance(error.__cause__, AlreadyExistsError):
                return False
            raise
        return True

    def write_tensors(
        self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]], name_of: Callable[[str], str]
    ) -> tuple[Blob, bytes]:
        """Write tensors as one object; return its digest and size, and digests of its chunks.

        Until then the blob lies in a temporary folder.

        Args:
            manifest: Dtype and shape of each tensor.
            tensors: The tensors by name, one at a time.
            name_of: The object's name, by the digest.
        """
        from attune.common.wire.files import TensorWriter  # with torch, which quick commands do without

        with tempfile.TemporaryDirectory(prefix="attune-") as folder:
            path = Path(folder) / "blob"
            with TensorWriter(path, manifest) as writer:
                for name, tensor in tensors:
                    writer.put(name, tensor)
                blob = writer.close()
            chunks = chunks_of(path, blob)
            self.write(name_of(blob.digest), path)
        return blob, chunks

    def read(self, key: str) -> bytes:
        """Return the bytes of a small object; of a large one, as of a store that does not end its answer, the first piece."""
        return bytes(next(self.pieces(key), b""))

    def has(self, key: str) -> bool:
        """Return whether there is such an object."""
        try:
            self.size(key)
        except KeyError:
            return False
        return True

    def size(self, key: str) -> int:
        """Return how many bytes an object has."""
        return self._do(lambda: obstore.head(self._store, key)["size"])

    def range(self, key: str, start: int, length: int) -> memoryview:
        """Return `length` bytes of an object from `start` on, fewer only at its end."""
        return self._do(lambda: memoryview(obstore.get_range(self._store, key, start=start, length=length)))

    def pieces(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of an object in pieces."""
        pieces = iter(self._do(lambda: obstore.get(self._store, key).stream(min_chunk_size=1 << 20)))
        while (piece := self._do(lambda: next(pieces, None))) is not None:
            yield memoryview(piece)

    def keys(self, prefix: str) -> Iterator[str]:
        pages = iter(self._do(lambda: obstore.list(self._store, prefix)))
        while (page := self._do(lambda: next(pages, None))) is not None:
            yield from (entry["path"] for entry in page)

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            self._do(lambda: obstore.delete(self._store, list(keys)))


def _reason(text: str) -> str:
    """Return the words of a store's error for a person: of an answer in XML its code and message, else the first of them."""
    answer = re.search("<Code>([^<]*)</Code>.*?<Message>([^<]*)<", text, re.DOTALL)
    words = f"{answer[1]}: {answer[2]}" if answer else re.sub("<[^>]*>", " ", text)
    return " ".join(words.split())[:LONGEST_REASON]


class ObjectCache:
    """Copies of objects in a folder. With a bound, the least recently used go when there are more bytes."""

    def __init__(self, folder: Path, objects: S3Objects) -> None:
        self._folder, self._objects, self._bound = folder, objects, math.inf
        self._chunks: dict[str, bytes] = {}  # of each object that this process wrote or compared, the digests of its chunks

    def fill(self, size: int) -> LocalTarget:
        """Return a file of `size` bytes to be written, which `take` makes the copy of an object."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalTarget(self._folder / f".{secrets.token_hex(8)}.new", size)

    def take(self, path: Path, key: str, chunks: bytes) -> None:
        """Make a file of this folder the copy of an object, whose chunks have these digests."""
        with disk_errors(path):
            path.replace(self._path(key))
        self._chunks[key] = chunks
        self._bound_bytes()

    def learn(self, key: str, chunks: bytes) -> None:
        """Note the digests of the chunks of an object of which there is no copy."""
        self._chunks[key] = chunks

    def knows(self, key: str) -> bool:
        """Return whether this process has written or compared an object."""
        return key in self._chunks

    def chunks(self, key: str) -> bytes:
        """Return the digests of the chunks of an object.

        Raises:
            KeyError: This process has neither written nor compared it.
        """
        return self._chunks[key]

    def has(self, key: str) -> bool:
        """Return whether there is a copy that was compared with the digest."""
        return key in self._chunks and self._path(key).is_file()

    def open(self, key: str, blob: Blob) -> Readable:
        """Open the copy of an object, which is fetched if there is none that is whole.

        Raises:
            KeyError: There is no such object.
            Damaged: The object has other bytes.
            LedgerBusy: The store cannot be used now.
        """
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(key))
            source = LocalFile(self._path(key), blob.name)
            if key in self._chunks:
                return source
            digest, chunks = digests_in(source)
            if digest == blob.digest:
                self._chunks[key] = chunks
                return source
            source.close()
        return self._fetched(key, blob)

    def _fetched(self, key: str, blob: Blob) -> Readable:
        target, size = self.fill(blob.size), 0
        try:
            for piece in self._objects.pieces(key):
                if size + len(piece) > blob.size:
                    raise damaged(blob.name, self._objects.url)
                target.write(piece, size)
                size += len(piece)
            source = LocalFile(target.path, blob.name)
            digest, chunks = digests_in(source)
            if digest != blob.digest:
                source.close()
                raise damaged(blob.name, self._objects.url)
        except BaseException:
            target.abort()
            raise
        target.finish(blob.digest, size)
        self.take(target.path, key, chunks)
        return source

    def drop(self, keys: Iterable[str]) -> None:
        """Remove copies. Whoever has one open goes on reading."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove copies of objects that go, and what is known of them."""
        for key in keys:
            self._chunks.pop(key, None)
            self._path(key).unlink(missing_ok=True)

    def bound(self, most_bytes: int) -> None:
        """Keep at most so many bytes from now on."""
        self._bound = most_bytes
        if self._folder.is_dir():
            self._bound_bytes()

    def sweep(self) -> None:
        """Remove what a killed process left unfinished."""
        if self._folder.is_dir():
            sweep_files(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / key.removeprefix(OBJECTS)

    def _bound_bytes(self) -> None:
        copies = []
        with os.scandir(self._folder) as paths:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    copies.append((path.stat().st_mtime, path.stat().st_size, path.name))
        total = sum(size for _, size, _ in copies)
        for _, size, name in sorted(copies):
            if total <= self._bound:
                return
            if not name.startswith("."):
                self.drop([name])
                total -= size


def damaged(name: str, url: str) -> Damaged:
    """Return the error for a blob whose object has other bytes."""
    return Damaged(f"{name} is damaged in {url}, its bytes are not those that were written: restore it from a backup", name)


# --- digests of the chunks of a blob: with them a range of an object is checked without the rest. They are computed in one pass
# with the digest of the whole. A process keeps those of the objects that it wrote or compared: 32 bytes for each 64 KiB.


def digests_in(source: Readable) -> tuple[str, bytes]:
    """Return the digest of all bytes of a source, and the SHA-256 of each chunk, one after the other.

    Raises:
        Truncated: The source ends too early.
    """
    whole, chunks = Digest(), bytearray()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, source.size)))
    for start in range(0, source.size, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, source.size - start)]
        source.read_into(chunk, start)
        whole.update(chunk)
        chunks += hashlib.sha256(chunk).digest()
    return whole.text, bytes(chunks)


def chunks_of(path: Path, blob: Blob) -> bytes:
    """Return the SHA-256 of each chunk of a file that holds a blob.

    Raises:
        Damaged: It has other bytes by now.
    """
    with LocalFile(path, blob.name) as source:
        digest, chunks = digests_in(source)
    if digest != blob.digest:
        raise Damaged(f"{blob.name} is damaged on this machine: its bytes are not those that were written", blob.name)
    return chunks


def chunks_around(start: int, end: int, size: int) -> tuple[int, int]:
    """Return where the chunks begin and end that have the bytes [start, end) of a blob of `size` bytes."""
    return start // CHUNK_BYTES * CHUNK_BYTES, min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, size)


def fits(data: memoryview, start: int, chunks: bytes) -> bool:
    """Return whether `data`, which begins at the chunk boundary `start`, has the bytes that these digests are of."""
    first = start // CHUNK_BYTES
    expected = memoryview(chunks)[first * _DIGEST_BYTES :]
    return all(
        hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() == expected[number * _DIGEST_BYTES :][:_DIGEST_BYTES]
        for number, at in enumerate(range(0, len(data), CHUNK_BYTES))
    )
