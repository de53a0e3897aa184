"""Text as arrays: a file as windows with the next character as label of every position, or a column with a class for each text.

N samples, T characters of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.characters import CHARACTERS, encode
from attune.fedclient.data.files import plain_suffix, read_text
from attune.fedclient.data.makers.options import MakeOptions
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.source import Source

VOCABULARY = len(CHARACTERS)


def recognises(path: Path) -> bool:
    return path.is_file() and plain_suffix(path) == ".txt"


def read(path: Path, options: MakeOptions) -> Source:
    """x (N, T) and y (N, T), the character that follows each; what does not fill a window is left out. Errors: ShardError."""
    tokens_L = encode(read_text(path)).astype(np.int64)
    length = options.length
    count = (len(tokens_L) - 1) // length
    if count < 1:
        raise ShardError(f"{path} holds {len(tokens_L)} characters, fewer than a window of {length} and the one that follows")
    x = tokens_L[: count * length].reshape(count, length)
    y = tokens_L[1 : count * length + 1].reshape(count, length)
    return Source((x, y), None, Meta(classes=list(range(VOCABULARY)), kind="tokens", vocabulary=VOCABULARY))


def tokens_of(texts: Sequence[str], length: int) -> Array:
    """(N, T) tokens of the first T characters of each. Short texts begin with spaces: models read the last position."""
    x = np.full((len(texts), length), CHARACTERS.index(" "), dtype=np.int64)
    for row, text in zip(x, texts, strict=True):
        tokens = encode(text[:length])[:length]
        row[length - len(tokens) :] = tokens
    return x
