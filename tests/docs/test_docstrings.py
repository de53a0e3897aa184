"""The first word of each docstring of the product: an imperative verb, or no word that must be decoded.

Ruff's rules of docstrings are checked by `make check`. Both leave out the folders that pyproject.toml says are not clean yet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks import measure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def expanded(pattern: str) -> Iterator[str]:
    """Yield the patterns that a pattern with {alternatives} stands for."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    for word in match[1].split(","):
        yield from expanded(pattern[: match.start()] + word + pattern[match.end() :])


def pending(root: Path) -> list[str]:
    """Return the patterns of files in which all rules of docstrings are off."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    ignored = settings["per-file-ignores"].items()
    return [single for pattern, codes in ignored if "D" in codes for single in expanded(pattern)]


@pytest.fixture(scope="module")
def verbs(root: Path) -> frozenset[str]:
    return measure.read_verbs(root / measure.VERBS)


def test_every_docstring_begins_with_a_word_that_tells_what_it_is(root: Path, verbs: frozenset[str]) -> None:
    patterns = pending(root)
    clean = [source for source in measure.sources(root) if not any(fnmatch(str(source.path), pattern) for pattern in patterns)]
    assert clean
    assert [line for source in clean for line in measure.bad_first_words(source, verbs)] == []


def test_the_verbs_are_sorted_and_imperative(root: Path, verbs: frozenset[str]) -> None:
    lines = (root / measure.VERBS).read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert not verbs & measure.NO_FIRST_WORDS
    assert [verb for verb in verbs if f"{verb}s" in verbs or f"{verb}es" in verbs] == []
