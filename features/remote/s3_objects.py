"""Objects of an S3 store below one prefix, and copies of them on this machine's disk, within a bound."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import S3Store

from attune.common.durable import disk_errors, sweep_files
from attune.common.errors import LedgerBusy
from attune.common.wire.blobs import Blob, LocalFile, LocalTarget, Readable, digest_in
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.checked_blobs import OBJECTS

T = TypeVar("T")
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


class S3Objects:
    """The objects below one prefix of a bucket. Calls are tried again for some seconds.

    Args:
        url: s3://BUCKET/PREFIX.
        variables: Settings and keys of the store, as the variables AWS_... name them.
    """

    def __init__(self, url: str, variables: Mapping[str, str] = os.environ) -> None:
        self.url, given = url.rstrip("/"), {name: variables[name] for name in VARIABLES if variables.get(name)}
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

    def read(self, key: str) -> bytes:
        """Return the bytes of a small object; of a large one, as of a store that does not end its answer, the first piece."""
        return bytes(next(self.pieces(key), b""))

    def has(self, key: str) -> bool:
        """Return whether there is such an object."""
        try:
            self._do(lambda: obstore.head(self._store, key))
        except KeyError:
            return False
        return True

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
        self._whole: set[str] = set()  # objects whose copy this process has written, or compared with the digest

    def fill(self, size: int) -> LocalTarget:
        """Return a file of `size` bytes to be written, which `take` makes the copy of an object."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalTarget(self._folder / f".{secrets.token_hex(8)}.new", size)

    def take(self, path: Path, key: str) -> None:
        """Make a file of this folder the copy of an object."""
        with disk_errors(path):
            path.replace(self._path(key))
        self._whole.add(key)
        self._bound_bytes()

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
            if key in self._whole or digest_in(source) == blob.digest:
                self._whole.add(key)
                return source
            source.close()
        return self._fetched(key, blob)

    def _fetched(self, key: str, blob: Blob) -> Readable:
        target, size = self.fill(blob.size), 0
        try:
            for piece in self._objects.pieces(key):
                if size + len(piece) > blob.size:
                    raise self._damaged(blob)
                target.write(piece, size)
                size += len(piece)
            source = LocalFile(target.path, blob.name)
            if digest_in(source) != blob.digest:
                source.close()
                raise self._damaged(blob)
        except BaseException:
            target.abort()
            raise
        target.finish(blob.digest, size)
        self.take(target.path, key)
        return source

    def _damaged(self, blob: Blob) -> Damaged:
        where = f"{blob.name} is damaged in {self._objects.url}"
        return Damaged(f"{where}, its bytes are not those that were written: restore it from a backup", blob.name)

    def drop(self, keys: Iterable[str]) -> None:
        """Remove copies. Whoever has one open goes on reading."""
        for key in keys:
            self._whole.discard(key)
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
                self.drop([OBJECTS + name])
                total -= size
