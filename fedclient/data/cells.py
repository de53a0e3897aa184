"""Cells: the one definition of a missing value, of a number, and of a label.

CSV, Parquet and arrays use it alike, for labels, groups, keys, features and thresholds; in training, evaluation and prediction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.classes import BOOLEANS, INTEGER, NO, YES, label_of_text, normal

# Words of pandas, in lower case, and four that people write
USUAL_WORDS = (
    *(
        "#n/a",
        "#n/a n/a",
        "#na",
        "-1.#ind",
        "-1.#qnan",
        "-nan",
        "1.#ind",
        "1.#qnan",
        "<na>",
        "n/a",
        "na",
        "nan",
        "none",
        "null",
    ),
    *("-", ".", "?", "n.a."),
)
USUAL = "usual"  # in --missing-words: all of them
REMEDY = "--missing-words says which words mean a missing value"
COMMAS = (
    "holds numbers with a comma: if it stands before a fraction, say --decimal comma; if it parts thousands, save the table "
    "without it"
)
_NUMBER = re.compile(r"[-+]?(?:([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE)
_FRACTION = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
_SIDE = r"(?:[<>]=?|[≤≥])\s*"
_DECIMAL_COMMA = re.compile(rf"(?:{_SIDE})?[-+]?(?:[0-9]{{1,3}}(\.?[0-9]{{3}})*|[0-9]+),[0-9]+")
_LIMIT = re.compile(rf"{_SIDE}([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)", re.IGNORECASE)
EXACT = 1 << 53  # integers above it have lost digits when they became floats

Words = frozenset[str]


def words_of(given: Iterable[str]) -> Words:
    """Return the words for missing values. `usual` stands for the usual ones. An empty cell is always missing."""
    words: set[str] = set()
    for word in given:
        text = normal(word).casefold()
        words.update(USUAL_WORDS if text == USUAL else [_plain(text)])
    return frozenset(words - {""})


WORDS = words_of([USUAL])


def is_missing(cell: Any, words: Words = WORDS) -> bool:
    """Return whether a cell holds nothing: None, NaN, a masked value, an empty text, or one of the words."""
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", "replace")
    if isinstance(cell, str):
        text = cell.strip()
        return not text or text.casefold() in words or (text[-1] in "0123456789" and _plain(text) in words)
    if cell is None or cell is np.ma.masked or cell != cell:  # only NaN and NaT differ from themselves
        return True
    if isinstance(cell, Decimal):
        return _plain(written(cell)) in words
    return isinstance(cell, (int, float, np.number, date)) and written(cell) in words


def _plain(text: str) -> str:
    """Return a number as it is compared with words: without zeros at the end of its fraction. Other text stays as it is."""
    text = str(label_of_text(text))
    return text.rstrip("0") if _FRACTION.fullmatch(text) else text


def label_of(cell: Any) -> int | str:
    """Return the label in a cell that is not missing: an integer of 64 bits, or text.

    Raises:
        ValueError: It can be neither. The message says why.
    """
    if isinstance(cell, (float, np.floating)) and math.isfinite(cell) and abs(cell) >= exact_below(type(cell)):
        raise ValueError(f"the float {cell!s}, of which the last digits are lost: save the column as whole numbers or text")
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, bool):
        return BOOLEANS[cell]
    if isinstance(cell, bytes):
        try:
            cell = cell.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("binary data that are no UTF-8 text") from None
    if isinstance(cell, (list, dict, tuple, set, np.ndarray)):
        raise ValueError("several values in one cell")
    return label_of_text(written(cell))


def exact_below(form: npt.DTypeLike) -> int:
    """Return the integer from which floats of this type skip whole numbers, so that codes may have lost digits."""
    return EXACT if form is float else 1 << (np.finfo(np.dtype(form)).nmant + 1)


def number_of(cell: Any) -> float:
    """Return the number in a cell that is not missing. Booleans are 0 and 1.

    Raises:
        ValueError: It holds no number.
    """
    if isinstance(cell, str):
        text = cell.strip()
        if _NUMBER.fullmatch(text):
            return float(text)
        return float(BOOLEANS.index(text.casefold()))  # ValueError: it is none
    if isinstance(cell, (bool, int, float, np.number, np.bool_, Decimal)):
        try:
            return float(cell)
        except OverflowError:
            return math.inf
    raise ValueError("it is no number")


def flag_of(cell: Any) -> float:
    """Return the number in a cell that says yes or no: 1 and 0 for their words.

    Raises:
        ValueError: It is neither such a word nor a number.
    """
    word = cell.strip().casefold() if isinstance(cell, str) else ""
    return 1.0 if word in YES else 0.0 if word in NO else number_of(cell)


def exact_number(cell: Any) -> int | float:
    """Return the number in a cell; an integer does not pass through a float.

    Raises:
        ValueError: It holds no number.
    """
    number = number_of(cell)
    if isinstance(cell, (bool, int)):
        return int(cell)
    text = written(cell)
    return int(text.partition(".")[0]) if INTEGER.fullmatch(text) else number


def has_decimal_comma(cell: Any) -> bool:
    """Return whether a text is a number with a comma before its fraction."""
    return isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell.strip()) is not None


def limit_of(cell: Any) -> float:
    """Return the number in a cell such as `<0.1` or `> 90`: a value beyond a limit.

    Raises:
        ValueError: It is none.
    """
    match = _LIMIT.fullmatch(cell.strip()) if isinstance(cell, str) else None
    if match is None:
        raise ValueError("it is no limit")
    return number_of(match[1])


def labels_of(cells: Sequence[Any]) -> npt.NDArray[Any]:
    """Return labels, (N,): int64 if every label is an integer, else text.

    Raises:
        ValueError: As in `label_of`. Its second argument is the place of the cell.
    """
    values: list[int | str] = []
    for at, cell in enumerate(cells):
        try:
            values.append(label_of(cell))
        except ValueError as error:
            raise ValueError(str(error), at) from None
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([str(value) for value in values])


def numbers_in(words: Iterable[str]) -> list[float]:
    """Return the numbers among the words for missing values."""
    return [float(word) for word in words if _NUMBER.fullmatch(word) and math.isfinite(float(word))]


def hidden_in(values: Any) -> tuple[int, int]:
    """Return how many values a masked array hides, and how many it has; likewise of masked arrays in a list."""
    parts = values if isinstance(values, list | tuple) else [values]
    masks = [np.ma.getmaskarray(part) for part in parts if isinstance(part, np.ma.MaskedArray)]
    return sum(int(mask.sum()) for mask in masks), sum(mask.size for mask in masks)


def unmasked(values: Any) -> Any:
    """Return a masked array with NaN (or None, if it holds no floats) where it is masked; other values as they are.

    So it does with masked arrays in a list.
    """
    if isinstance(values, list | tuple) and any(isinstance(value, np.ma.MaskedArray) for value in values):
        return [unmasked(value) for value in values]
    if not isinstance(values, np.ma.MaskedArray) or not np.ma.is_masked(values):
        return np.asarray(values) if isinstance(values, np.ma.MaskedArray) else values
    if values.dtype.kind in "f":
        return values.filled(np.nan)
    plain = values.astype(object)
    plain[np.ma.getmaskarray(values)] = None
    return np.asarray(plain)


def written(cell: Any) -> str:
    """Return a cell as a CSV file has it: days without a time, whole numbers without a fraction."""
    if isinstance(cell, datetime) and cell.time() == time() and cell.tzinfo is None:
        return cell.date().isoformat()  # as CSV files have days
    if isinstance(cell, (float, np.floating)):
        number = float(cell) if isinstance(cell, float) else float(str(cell))  # narrow floats have the digits of their text
        return str(int(number)) if number.is_integer() and abs(number) < EXACT else repr(number)
    return format(cell, "f") if isinstance(cell, Decimal) else normal(str(cell))
