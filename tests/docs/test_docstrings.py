"""The first word of each docstring of the product: an imperative verb, or no word that must be decoded.

Ruff's rules of docstrings are checked by `make check`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Source


@pytest.fixture(scope="module")
def verbs(root: Path) -> frozenset[str]:
    return measure.read_verbs(root / measure.VERBS)


def test_every_docstring_begins_with_a_word_that_tells_what_it_is(product: list[Source], verbs: frozenset[str]) -> None:
    assert product
    assert [line for source in product for line in measure.bad_first_words(source, verbs)] == []


def test_the_verbs_are_sorted_and_imperative(root: Path, verbs: frozenset[str]) -> None:
    lines = (root / measure.VERBS).read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert not verbs & measure.NO_FIRST_WORDS
    assert [verb for verb in verbs if f"{verb}s" in verbs or f"{verb}es" in verbs] == []
