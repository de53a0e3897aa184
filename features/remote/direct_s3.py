"""Addresses of S3 that are signed for one blob, and uploads in parts, by botocore: obstore signs neither headers nor parts.

A device writes a blob as a multipart upload. The server begins it under a key of its own and completes it. Each part's address
is signed with the part's length and SHA-256. So a device can write nothing else, nothing longer, and nothing after the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from attune.common.errors import LedgerBusy
from attune.common.wire.blobs import Blob
from attune.features.remote.direct_transfers import LIFETIME_S, DirectObject
from attune.features.remote.s3 import S3Blobs
from attune.features.remote.s3_objects import S3Objects
from attune.fedserver.stores.checked_blobs import OBJECTS, new_key

T = TypeVar("T")
logging.getLogger("botocore").setLevel(logging.WARNING)  # below that it writes what it signs
GONE = ("NoSuchUpload", "NoSuchKey", "404")


class DirectS3:
    """The store of direct transfers. Several threads may use it. Its addresses are secrets: errors and logs never have them.

    Each call may raise LedgerBusy: the store cannot be used now.

    Args:
        objects: The objects of the same bucket and prefix.
        blobs: The blobs that names hold.
        public_url: Address of the store as devices reach it; empty: as this server does.
    """

    def __init__(self, objects: S3Objects, blobs: S3Blobs, public_url: str) -> None:
        self._objects, self._blobs = objects, blobs
        self._bucket, _, prefix = objects.url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        session = Session()
        self._client = _client(session, None)
        self._signer = _client(session, public_url) if public_url else self._client
        parts = urlsplit(self._signed("head_bucket", {"Bucket": self._bucket}))
        # Scheme and host of all signed addresses, such as https://s3.example.
        self.address = f"{parts.scheme}://{parts.netloc}"

    def download_url(self, blob: Blob) -> str:
        """Return a signed address to read the blob; empty if its bytes are not in the store."""
        key = self._blobs.object_of(blob)
        return self._signed("get_object", self._place(key)) if key else ""

    def begin(self, digest: str) -> DirectObject:
        """Begin an object."""
        key = new_key(digest)
        return DirectObject(
            key,
            self._do(lambda: self._client.create_multipart_upload(**self._place(key), ChecksumAlgorithm="SHA256"))["UploadId"],
        )

    def arrived(self, begun: DirectObject) -> set[int]:
        """Return the numbers of the parts that are whole in the store, from 1.

        Raises:
            KeyError: The object was given up.
        """
        return set(self._etags(begun))

    def part_url(self, begun: DirectObject, number: int, size: int, digest: bytes) -> str:
        """Return a signed address to write one part: of exactly this size and SHA-256."""
        of_part = {"PartNumber": number, "ContentLength": size, "ChecksumSHA256": b64encode(digest).decode()}
        return self._signed("upload_part", self._upload(begun) | of_part)

    def complete(self, begun: DirectObject, digests: Sequence[bytes]) -> None:
        """Make one object of the parts, whose SHA-256 these are. From now on nobody can write to it.

        Raises:
            KeyError: The object was given up.
        """
        etags = self._etags(begun)
        parts = [
            {"PartNumber": number, "ETag": etags[number], "ChecksumSHA256": b64encode(digest).decode()}
            for number, digest in enumerate(digests, 1)
        ]
        self._do(lambda: self._client.complete_multipart_upload(**self._upload(begun), MultipartUpload={"Parts": parts}))

    def pieces(self, begun: DirectObject) -> Iterator[memoryview]:
        """Yield the bytes of a complete object, as they are in the store."""
        return self._objects.pieces(begun.key)

    def hold(self, blob: Blob, begun: DirectObject) -> None:
        """Remember that a sealed upload has its bytes in the store, so that `Blobs.keep` need not write them again."""
        self._blobs.beside[blob.name] = begun.key

    def release(self, blob: Blob) -> None:
        """Forget it. The object goes, unless a name has it meanwhile."""
        if key := self._blobs.beside.pop(blob.name, ""):
            self._blobs.drop_unnamed({key})

    def abandon(self, begun: DirectObject) -> None:
        """Give an object up, complete or not. Its signed addresses are void from now on."""
        with contextlib.suppress(KeyError):  # it is complete, or was given up before
            self._do(lambda: self._client.abort_multipart_upload(**self._upload(begun)))
        self._blobs.drop_unnamed({begun.key})

    def sweep(self) -> None:
        """Give up what earlier processes began and left, at start."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{OBJECTS}"
        )
        for page in self._do(lambda: list(pages)):
            for upload in page.get("Uploads", ()):
                self.abandon(DirectObject(upload["Key"].removeprefix(self._prefix), upload["UploadId"]))

    def _etags(self, begun: DirectObject) -> dict[int, str]:
        pages = self._client.get_paginator("list_parts").paginate(**self._upload(begun))
        return {part["PartNumber"]: part["ETag"] for page in self._do(lambda: list(pages)) for part in page.get("Parts", ())}

    def _place(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}{key}"}

    def _upload(self, begun: DirectObject) -> dict[str, Any]:
        return self._place(begun.key) | {"UploadId": begun.upload}

    def _signed(self, call: str, params: dict[str, Any]) -> str:
        return str(self._do(lambda: self._signer.generate_presigned_url(call, Params=params, ExpiresIn=LIFETIME_S)))

    def _do(self, work: Callable[[], T]) -> T:
        """Run a call of the store.

        Raises:
            KeyError: What it names is gone.
            LedgerBusy: The store cannot be used now.
        """
        try:
            return work()
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in GONE:
                raise KeyError(self._objects.url) from None
            raise LedgerBusy(f"{self._objects.url} refuses a call of direct transfers ({code})", "blobs") from None
        except BotoCoreError as error:  # its text may have an address
            raise LedgerBusy(f"{self._objects.url} cannot be used now ({type(error).__name__})", "blobs") from None


def _client(session: Session, endpoint: str | None) -> Any:
    hosted = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "") == "true"  # as obstore reads it
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "virtual" if hosted else "path"},
        connect_timeout=3,
        read_timeout=30,
        retries={"max_attempts": 3},
        request_checksum_calculation="when_required",
    )
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
