"""What text is made of: characters, or the tokens of a tokenizer that belongs to a model.

N samples, T tokens of each, L tokens of a whole text.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError
from attune.common.homes import place_of
from attune.fedclient.data.arrays import Array

CHARACTERS = string.printable  # the 100 characters that text is made of; a token is a place in it
_OTHER = CHARACTERS.index("?")
_TOKEN = {character: token for token, character in enumerate(CHARACTERS)}


def encode(text: str) -> npt.NDArray[np.uint8]:
    """(L,) tokens. Accents are dropped; what is no printable ASCII character even then becomes a question mark."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return np.fromiter((_TOKEN.get(character, _OTHER) for character in text), dtype=np.uint8, count=len(text))


PADDING = ("[PAD]", "<pad>", "<|pad|>")  # what tokenizers call it that do not say how they pad


class Alphabet(Protocol):
    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    def stream(self, text: str) -> Array:
        """(L,) tokens of a whole text."""
        ...

    def rows(self, texts: Sequence[str], length: int) -> Array:
        """(N, T) tokens of the beginning of each text, filled up to T."""
        ...


class Characters:
    """Short texts begin with spaces: this project's models read the last position."""

    size = len(CHARACTERS)

    def stream(self, text: str) -> Array:
        return encode(text).astype(np.int64)

    def rows(self, texts: Sequence[str], length: int) -> Array:
        x = np.full((len(texts), length), CHARACTERS.index(" "), dtype=np.int64)
        for row, text in zip(x, texts, strict=True):
            tokens = encode(text[:length])[:length]
            row[length - len(tokens) :] = tokens
        return x


class Words:
    """The tokens of a tokenizer.json of Hugging Face, with the marks that its model wants around a text, and padding behind it.

    where: the file, or the folder that holds it; a path, or "package:folder" for one that an installed package carries.
    Errors: SettingError where it cannot be read, or knows no token to pad with.
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
        except Exception as error:  # the library raises no other class
            raise SettingError(
                f"the tokenizer at {where} cannot be read: {error}. Give its tokenizer.json, or the folder that holds it"
            ) from None
        self._tokenizer.no_truncation()
        self._pad = self._padding()
        self._tokenizer.no_padding()

    def _padding(self) -> int:
        if self._tokenizer.padding:
            return int(self._tokenizer.padding["pad_id"])
        found = (self._tokenizer.token_to_id(token) for token in PADDING)
        pad = next((each for each in found if each is not None), None)
        if pad is None:
            raise SettingError(f"the tokenizer at {self._where} knows no token to pad short texts with ({', '.join(PADDING)})")
        return int(pad)

    def __repr__(self) -> str:
        return f"Words({self._where}, {self.size} tokens)"

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def stream(self, text: str) -> Array:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def rows(self, texts: Sequence[str], length: int) -> Array:
        self._tokenizer.enable_truncation(length)
        x = np.full((len(texts), length), self._pad, dtype=np.int64)
        for row, found in zip(x, self._tokenizer.encode_batch(list(texts)), strict=True):
            row[: len(found.ids)] = found.ids
        self._tokenizer.no_truncation()
        return x


def alphabet_of(tokenizer: str) -> Alphabet:
    """Of a tokenizer's place; characters where there is none. Errors: SettingError."""
    return Words(tokenizer) if tokenizer else Characters()
