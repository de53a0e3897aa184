"""Names of devices, for people. A name proves nothing; the identity is the certificate's fingerprint."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import lru_cache

from attune.common.errors import SettingError

MAX_LENGTH = 64
MAX_BYTES = 192  # in UTF-8: with a suffix, a name of a file
_BASE = ("Lu", "Ll", "Lt", "Lm", "Lo", "Nd")  # Unicode categories: letters and digits of all alphabets
_MARKS = ("Mn", "Mc")  # accents and vowel signs, which follow a letter


def check_name(name: str, what: str = "a device", remedy: str = "Choose another with --name.") -> str:
    """Return `name` if it is allowed. Names become file names and arguments of commands.

    Args:
        name: The name to check.
        what: The thing to be named, for the error.
        remedy: What to do about a refused name, for the error.

    Raises:
        SettingError: The name has other characters, or is too long.
    """
    fits = 1 <= len(name) <= MAX_LENGTH and has_letters_of_names(name) and len(name.encode()) <= MAX_BYTES
    if not fits or _plain(name) != name:
        raise SettingError(
            f"{name!r} cannot name {what}: use 1 to {MAX_LENGTH} letters (in the Unicode form NFC), digits, '.', '_' and '-', "
            f"starting with neither '.' nor '-'. {remedy}"
        )
    return name


def has_letters_of_names(text: str) -> bool:
    """Return whether text holds letters and digits of any alphabet, '.', '_' and '-' alone."""
    return all(map(_allowed, text))


@lru_cache(maxsize=1 << 12)
def _allowed(letter: str) -> bool:
    return letter in "._-" or unicodedata.category(letter) in (*_BASE, *_MARKS)


def _plain(text: str) -> str:
    """Return text in the form NFC, without what names cannot begin with."""
    composed = unicodedata.normalize("NFC", text)
    start = next(
        (at for at, letter in enumerate(composed) if letter == "_" or unicodedata.category(letter) in _BASE), len(composed)
    )
    return composed[start:]


def joined_name(first: str, shard_name: str) -> str:
    """Return FIRST-SHARD with all characters that names cannot have replaced by '-'.

    A name of more than 64 characters ends in a digest of the whole name, so that two long names with the same beginning
    stay different.
    """
    parts = [_with_hyphens(part) for part in (first, shard_name)]
    name = "-".join(part for part in parts if part) or "device"
    if len(name) > MAX_LENGTH or len(name.encode()) > MAX_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        short = name[: MAX_LENGTH - 9].encode()[: MAX_BYTES - 9].decode(errors="ignore")
        name = f"{short}-{digest}"
    return check_name(name)


def _with_hyphens(text: str) -> str:
    letters = unicodedata.normalize("NFC", text)
    words = re.split("\0+", "".join(letter if _allowed(letter) else "\0" for letter in letters))
    return _plain("-".join(words).strip(".-")).strip(".-")
