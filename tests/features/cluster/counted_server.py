"""A fedserver that writes how many bytes of blobs it has read from S3 and written there itself, at its end."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "ATTUNE_TEST_COUNTS"  # path of the file


def main() -> None:
    from attune.features.remote.s3_objects import S3Objects
    from attune.fedserver.cli import main as fedserver

    passed: Counter[str] = Counter()
    read, pieces, write = S3Objects.range, S3Objects.pieces, S3Objects.write

    def counted_read(self: S3Objects, key: str, start: int, length: int) -> memoryview:
        passed["ranges"] += length
        return read(self, key, start, length)

    def counted_pieces(self: S3Objects, key: str) -> Iterator[memoryview]:
        for piece in pieces(self, key):
            passed["whole"] += len(piece)
            yield piece

    def counted_write(self: S3Objects, key: str, content: bytes | Path) -> bool:
        passed["written"] += content.stat().st_size if isinstance(content, Path) else len(content)
        return write(self, key, content)

    S3Objects.range, S3Objects.pieces, S3Objects.write = counted_read, counted_pieces, counted_write  # type: ignore[method-assign]
    try:
        fedserver()
    finally:
        Path(os.environ[VARIABLE]).write_text(json.dumps(passed))
