"""What a user says of files that are to become a shard."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attune.common.errors import SettingError
from attune.fedclient.read_options import ReadOptions

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
LENGTH = 128


@dataclass(frozen=True)
class MakeOptions:
    """table: of samples in columns. text: the column with text. length: characters of a sample of text, or tokens of the
    tokenizer, whose place this is. size: (H, W) to which images are brought; none: they are alike. grey: one channel. classes:
    all that may occur in the federation."""

    table: ReadOptions
    text: str = ""
    length: int = LENGTH
    size: tuple[int, int] | None = None
    grey: bool = False
    classes: tuple[str, ...] = ()
    tokenizer: str = ""

    @classmethod
    def of(
        cls, table: ReadOptions, text: str, length: int, size: str, grey: bool, classes: str, tokenizer: str = ""
    ) -> MakeOptions:
        """From what was typed. Errors: SettingError."""
        match = _SIZE.fullmatch(size)
        if size and match is None:
            raise SettingError(f"--size takes height and width such as 32x32, not {size!r}")
        sides = (int(match[1]), int(match[2])) if match else None
        listed = tuple(name.strip() for name in classes.split(",")) if classes else ()
        return cls(table, text, length, sides, grey, listed, tokenizer)
