"""Text as tokens: one for each character."""

from __future__ import annotations

import string
import unicodedata

import numpy as np
import numpy.typing as npt

CHARACTERS = string.printable  # the 100 characters that text is made of; a token is a place in it
_OTHER = CHARACTERS.index("?")
_TOKEN = {character: token for token, character in enumerate(CHARACTERS)}


def encode(text: str) -> npt.NDArray[np.uint8]:
    """(L,) tokens. Accents are dropped; what is no printable ASCII character even then becomes a question mark."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return np.fromiter((_TOKEN.get(character, _OTHER) for character in text), dtype=np.uint8, count=len(text))
