"""Labels of classes as text: one written form for all sites, and classes that people would take for one another."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
BOOLEANS = ("false", "true")
_LIMIT = 1 << 63
_SPACE = re.compile(r"\s+")
# Cyrillic and Greek letters that have the shape of a Latin one, dashes, and quotation marks
_LIKE = str.maketrans(
    "АВЕЗКМНОРСТУХІЈЅԌԚԜаеорсухіјѕһԁԛԝкмтΑΒΕΖΗΙΚΜΝΟΡΤΥΧαοινκρτυχ‐‑‒–—―−’‘‛ʼ´`“”„«»",
    "ABE3KMHOPCTYXIJSGQWaeopcyxijshdqwkmtABEZHIKMNOPTYXaoivkptux-------''''''\"\"\"\"\"",
)


def normal(text: str) -> str:
    """Return text in the Unicode form NFC, without surrounding space."""
    return unicodedata.normalize("NFC", text).strip()


def label_of_text(text: str) -> int | str:
    """Return the label that a text means: an integer of 64 bits if it is written as one, a boolean in one spelling, else text.

    `0117`, `1_2`, `1E30` and `+1` stay text, so that codes keep their characters. `1.0` is the integer 1.
    """
    text = normal(text)
    if INTEGER.fullmatch(text) and -_LIMIT <= (number := int(text.partition(".")[0])) < _LIMIT:
        return number
    folded = text.casefold()
    return folded if folded in BOOLEANS else text


def look(label: int | str) -> str:
    """Return the same text for labels that look alike.

    They differ by case, by letters of other alphabets with the same shape, by invisible characters, by space, or by the Unicode
    form. The digit 0 looks like the letter O. `true` stands for 1 and `false` for 0.
    """
    text = unicodedata.normalize("NFKC", str(label)).translate(_LIKE)
    visible = "".join(letter for letter in text if letter.isspace() or unicodedata.category(letter) not in ("Cf", "Cc"))
    shown = _SPACE.sub(" ", unicodedata.normalize("NFC", visible)).strip().casefold()
    if shown in BOOLEANS:
        return str(BOOLEANS.index(shown))
    return shown if INTEGER.fullmatch(shown) else shown.replace("0", "o")


def look_alikes(labels: Iterable[int | str]) -> list[list[str]]:
    """Return the groups of different labels that look alike, each sorted."""
    groups: dict[str, set[str]] = defaultdict(set)
    for label in labels:
        groups[look(label)].add(str(label))
    return [sorted(group) for group in groups.values() if len(group) > 1]


def without_zeros(label: int | str) -> str:
    """Return a code of digits without the zeros before it; other labels as they are. `01` becomes `1`."""
    text = str(label)
    return text.lstrip("0") or "0" if text.isascii() and text.isdigit() else text
