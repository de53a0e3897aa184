"""Text as arrays: a file as windows with the next token as label of every position.

N samples, T tokens of each: characters, or those of a tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from attune.common.errors import ShardError
from attune.fedclient.data.files import plain_suffix, read_text
from attune.fedclient.data.makers.alphabets import alphabet_of
from attune.fedclient.data.makers.options import MakeOptions
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.source import Source


def recognises(path: Path) -> bool:
    return path.is_file() and plain_suffix(path) == ".txt"


def read(path: Path, options: MakeOptions) -> Source:
    """x (N, T) and y (N, T), the token that follows each; what does not fill a window is left out.

    Errors: ShardError; SettingError for a tokenizer that cannot be.
    """
    alphabet, length = alphabet_of(options.tokenizer), options.length
    tokens_L = alphabet.stream(read_text(path))
    count = (len(tokens_L) - 1) // length
    if count < 1:
        what = "tokens" if options.tokenizer else "characters"
        raise ShardError(f"{path} holds {len(tokens_L)} {what}, fewer than a window of {length} and the one that follows")
    x = tokens_L[: count * length].reshape(count, length)
    y = tokens_L[1 : count * length + 1].reshape(count, length)
    return Source((x, y), None, Meta(classes=list(range(alphabet.size)), kind="tokens", vocabulary=alphabet.size))
