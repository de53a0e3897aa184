"""Options of `fedclient shard`."""

from __future__ import annotations

import re

import msgspec

from attune.common.errors import SettingError
from attune.fedclient.read_options import ReadOptions

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
LENGTH = 128


class MakeOptions(msgspec.Struct, frozen=True):
    """Options of `fedclient shard`, checked.

    Attributes:
        table: How the columns of a table or dataset are read.
        text: Name of the column with text, if any.
        length: Characters or tokens of a sample of text.
        size: (H, W) of all images; None if they have one size already.
        grey: Whether images become grey, with one channel.
        classes: All classes that may occur in the federation, if declared.
        tokenizer: Path of the tokenizer; empty for characters.
    """

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
        """Parse the options as they were typed.

        Raises:
            SettingError: `size` is not a height and width.
        """
        match = _SIZE.fullmatch(size)
        if size and match is None:
            raise SettingError(f"--size takes height and width such as 32x32, not {size!r}")
        sides = (int(match[1]), int(match[2])) if match else None
        listed = tuple(name.strip() for name in classes.split(",")) if classes else ()
        return cls(table, text, length, sides, grey, listed, tokenizer)
