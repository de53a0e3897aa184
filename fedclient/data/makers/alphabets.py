"""Alphabets of text: its characters, or the tokens of a tokenizer that belongs to a model.

N samples, T tokens of each, L tokens of a whole text.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError
from attune.common.homes import place_of
from attune.fedclient.data.arrays import Array

CHARACTERS = string.printable  # 100 characters; a token is an index in this string
_OTHER = CHARACTERS.index("?")
_TOKEN = {character: token for token, character in enumerate(CHARACTERS)}


def encode(text: str) -> npt.NDArray[np.uint8]:
    """Return the tokens of a text's characters, (L,).

    Accents are dropped. Other characters outside printable ASCII become question marks.
    """
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return np.fromiter((_TOKEN.get(character, _OTHER) for character in text), dtype=np.uint8, count=len(text))


LOST_SHARE = 0.05


def lost_characters(texts: Iterable[str], where: str) -> list[str]:
    """Return a warning about the characters that become question marks or lose an accent; empty if all are kept.

    Raises:
        SettingError: More than LOST_SHARE of the characters become question marks, so that texts are no longer told apart.
    """
    lost: Counter[str] = Counter()
    count = changed = 0
    for text in texts:
        count += len(text)
        if not text.isascii():
            plain = unicodedata.normalize("NFKD", text)
            lost.update(c for c in plain if c not in _TOKEN and not unicodedata.combining(c))
            changed += sum(unicodedata.combining(c) > 0 for c in plain)
    total = sum(lost.values())
    if not total and not changed:
        return []
    examples = " ".join(character for character, _ in lost.most_common(8))
    said = (
        f"{where} holds {total} characters of {count} that become question marks ({examples})"
        if total
        else f"letters of {where}"
    )
    if total > LOST_SHARE * count:
        raise SettingError(f"{said}, since only printable ASCII is known: say --tokenizer, or write the text in Latin letters")
    accents = f"{' and ' if total else ' '}{changed} accents are left out" if changed else ""
    return [f"{said}{accents}; --tokenizer keeps them"]


PADDING = ("[PAD]", "<pad>", "<|pad|>")  # usual padding tokens, for tokenizers that do not name theirs


class Alphabet(Protocol):
    """Tokens of a text."""

    @property
    def size(self) -> int:
        """Number of different tokens."""
        ...

    def stream(self, text: str) -> Array:
        """Return the tokens of a whole text, (L,)."""
        ...

    def rows(self, texts: Sequence[str], length: int) -> Array:
        """Return the first T = `length` tokens of each text, (N, T), padded if the text is shorter."""
        ...


class Characters:
    """Alphabet of printable characters.

    A short text is padded with spaces at its beginning, since this project's models read the last position.
    """

    size = len(CHARACTERS)

    def stream(self, text: str) -> Array:
        return encode(text).astype(np.int64)

    def rows(self, texts: Sequence[str], length: int) -> Array:
        x = np.full((len(texts), length), CHARACTERS.index(" "), dtype=np.int64)
        for row, text in zip(x, texts, strict=True):
            tokens = encode(text[:length])[:length]
            row[length - len(tokens) :] = tokens
        return x


class TokenizerAlphabet:
    """Alphabet of a tokenizer.json of Hugging Face.

    Rows have the special tokens that the tokenizer adds around a text, and are padded at the end.

    Args:
        where: The file, or the folder that holds it: a path, or "package:folder" for one in an installed package.

    Raises:
        SettingError: The tokenizer cannot be read, or has no padding token.
    """

    def __init__(self, where: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise SettingError("--tokenizer needs tokenizers: pip install 'attune-fl[huggingface]'") from None
        self._where = where
        try:
            path = place_of(where)
            self._tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        except ModuleNotFoundError as error:
            raise SettingError(f"no tokenizer at {where}: {error}") from None
        except Exception as error:  # the library raises only this class
            raise SettingError(
                f"the tokenizer at {where} cannot be read: {error}. Give its tokenizer.json, or the folder that holds it"
            ) from None
        self._tokenizer.no_truncation()
        self._pad = self._padding()
        self._tokenizer.no_padding()

    def _padding(self) -> int:
        if self._tokenizer.padding:
            return int(self._tokenizer.padding["pad_id"])
        usual = (self._tokenizer.token_to_id(token) for token in PADDING)
        pad = next((token_id for token_id in usual if token_id is not None), None)
        if pad is None:
            raise SettingError(f"the tokenizer at {self._where} has no token to pad short texts with ({', '.join(PADDING)})")
        return int(pad)

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def stream(self, text: str) -> Array:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def rows(self, texts: Sequence[str], length: int) -> Array:
        self._tokenizer.enable_truncation(length)
        x = np.full((len(texts), length), self._pad, dtype=np.int64)
        for row, encoded in zip(x, self._tokenizer.encode_batch(list(texts)), strict=True):
            row[: len(encoded.ids)] = encoded.ids
        self._tokenizer.no_truncation()
        return x


def alphabet_of(tokenizer: str) -> Alphabet:
    """Return the alphabet of the tokenizer at this path, or of characters if the path is empty.

    Raises:
        SettingError: As in `TokenizerAlphabet`.
    """
    return TokenizerAlphabet(tokenizer) if tokenizer else Characters()
