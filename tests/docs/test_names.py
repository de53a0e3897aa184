"""One name for one thing in the product, names of tests that can be read, and files of a readable length."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Source

# Names that stand twice today. This list is to become empty, and then to go away.
PENDING_CLASSES = frozenset(
    """
    Model OwnModel OwnModelSettings TwoHeads TwoHeadsSettings
    """.split()  # noqa: SIM905
)
PENDING_MODULES = frozenset(
    """
    fedclient/own_model fedclient/two_heads
    """.split()  # noqa: SIM905
)
PENDING_VARIABLES = 300  # with names that say too little


@pytest.fixture(scope="module")
def product(root: Path) -> list[Source]:
    return measure.sources(root)


def test_a_class_name_is_defined_once_in_the_product(product: list[Source]) -> None:
    doubles = measure.duplicate_classes(product)
    assert {name: paths for name, paths in doubles.items() if name not in PENDING_CLASSES} == {}


def test_a_module_name_stands_once_in_a_package(product: list[Source]) -> None:
    doubles = measure.duplicate_modules(product)
    assert {name: paths for name, paths in doubles.items() if name not in PENDING_MODULES} == {}


def test_variables_have_names_that_say_something(product: list[Source]) -> None:
    places = [line for source in product for line in measure.vague_variables(source)]
    assert len(places) <= PENDING_VARIABLES, places


def test_no_file_of_the_product_is_long(product: list[Source]) -> None:
    assert [str(source.path) for source in product if source.lines > measure.MAX_FILE_LINES] == []


def test_names_of_tests_are_short(root: Path) -> None:
    assert measure.long_test_names(measure.sources(root, ["tests"])) == []
