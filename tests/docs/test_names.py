"""One name for one thing in the product, names of tests that can be read, and files of a readable length."""

from __future__ import annotations

from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Source


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
