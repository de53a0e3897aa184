"""Words of the product: the first one of each docstring, one name for one thing, and files of a readable length."""

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


def test_no_class_or_type_alias_has_the_name_of_another_class(product: list[Source]) -> None:
    assert measure.duplicate_classes(product) == {}


def test_a_module_name_stands_once_in_a_package(product: list[Source]) -> None:
    assert measure.duplicate_modules(product) == {}


def test_variables_have_names_that_say_something(product: list[Source]) -> None:
    places = [line for source in product for line in measure.vague_variables(source)]
    assert places == []


def test_no_file_of_the_product_is_long(product: list[Source]) -> None:
    assert [str(source.path) for source in product if source.lines > measure.MAX_FILE_LINES] == []


def test_names_of_tests_are_short(root: Path) -> None:
    assert measure.long_test_names(measure.sources(root, ["tests"])) == []
