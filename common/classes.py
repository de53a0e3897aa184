"""Labels of classes as text: one written form for all sites, and classes that people would take for one another."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from string import ascii_lowercase

INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
BOOLEANS = ("false", "true")
# Words of yes/no, in small letters; sites may use different ones
NO = frozenset({"no", "false", "0", "n", "nein", "non", "nee", "falsch", "faux", "falso", "f"})
YES = frozenset({"yes", "true", "1", "y", "ja", "j", "oui", "si", "sí", "sì", "wahr", "vrai", "vero", "verdadero", "t"})
_LIMIT = 1 << 63
_SPACE = re.compile(r"\s+")
_UNSEEN = ("Cf", "Cc")  # Unicode categories
_VARIANTS = "\ufe0e\ufe0f"
_NUMBER = re.compile(r"[-+]?([0-9]+[.,]?[0-9]*|[.,][0-9]+|[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?)(e[-+]?[0-9]{1,3})?")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_BETWEEN = re.compile(r"[_\s]+|(?<=[^\W\d_])-(?=[^\W\d_])")
# Letters of other alphabets that have the shape of a Latin one, dashes, and quotation marks
_LIKE = str.maketrans(
    "АВЕЗКМНОРСТУХІЈЅԌԚԜаеорсухіјѕһԁԛԝкмтΑΒΕΖΗΙΚΜΝΟΡΤΥΧαοινκρτυχıȷɑɡӀӏօսոհյ‐‑‒–—―−’‘‛ʼ´`“”„«»",
    "ABE3KMHOPCTYXIJSGQWaeopcyxijshdqwkmtABEZHIKMNOPTYXaoivkptuxijagIlounhj-------''''''\"\"\"\"\"",
)
_ONE_STROKE = str.maketrans("I1|", "lll")
_TRANSCRIBED = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "å": "aa", "ø": "oe"})
_WITHOUT_STROKE = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ħ": "h", "æ": "ae", "œ": "oe"})


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

    They differ by case, by letters or digits of other alphabets, by invisible characters, by space, or by the Unicode form. The
    digit 0 looks like the letter O. `true` stands for 1 and `false` for 0.
    """
    shown = _visible(label).casefold()
    if shown in BOOLEANS:
        return str(BOOLEANS.index(shown))
    return shown if INTEGER.fullmatch(shown) else shown.replace("0", "o")


def _visible(label: int | str) -> str:
    """Return a label with Latin letters and digits of the same shape or value, single spaces, and nothing that is not seen."""
    text = unicodedata.normalize("NFKC", str(label)).translate(_LIKE)
    seen = [
        letter for letter in text if letter.isspace() or not (unicodedata.category(letter) in _UNSEEN or letter in _VARIANTS)
    ]
    digits = "".join(str(unicodedata.decimal(letter, letter)) for letter in seen)
    return _SPACE.sub(" ", unicodedata.normalize("NFC", digits)).strip()


def _of_one_stroke(label: int | str) -> str:
    """Return the same text for labels that differ by I, l, 1 and |, which many fonts draw alike. Integers stay as they are."""
    text = _visible(label)
    return text if INTEGER.fullmatch(text) else text.translate(_ONE_STROKE)


def look_alikes(labels: Iterable[int | str]) -> list[list[str]]:
    """Return the groups of different labels that look alike, each sorted."""
    groups: dict[str, set[str]] = defaultdict(set)
    for label in labels:
        groups[look(label)].add(str(label))
        groups[f"one stroke: {_of_one_stroke(label)}"].add(str(label))
    return [list(group) for group in dict.fromkeys(tuple(sorted(group)) for group in groups.values() if len(group) > 1)]


def other_forms(label: int | str) -> set[str]:
    """Return the texts by which other sites may have written the label. Labels with a text in common may be one class.

    Numbers count by their value: 01, +1, 1.0 and 1 are alike, as are 1,5 and 1.50. Of words, marks around them, spaces, hyphens
    and underscores between them, and accents of Latin letters do not count.
    """
    text = _visible(label).casefold()
    if _NUMBER.fullmatch(text):
        plain = {text.replace(",", "")} if _GROUPED.fullmatch(text) else set()
        return {str(Decimal(number).normalize()) for number in {*plain, text.replace(",", ".", 1)} if number.count(".") < 2}
    words = _BETWEEN.sub(" ", text).strip(" '\"`.")
    return {words, _without_accents(words), _without_accents(words.translate(_TRANSCRIBED))}


def _without_accents(text: str) -> str:
    """Return text in which Latin letters have no accents. Marks of other alphabets make other letters, and stay."""
    letters: list[str] = []
    for letter in unicodedata.normalize("NFD", text.translate(_WITHOUT_STROKE)):
        if not (unicodedata.combining(letter) and letters and letters[-1] in ascii_lowercase):
            letters.append(letter)
    return unicodedata.normalize("NFC", "".join(letters))
