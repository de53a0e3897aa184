"""The documents as data: headings, tables, code blocks and links of a Markdown page."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.measure import Source

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^`\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """Text without its code blocks."""
        return FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        return [code for found, code in FENCE.findall(self.text) if found == language]

    def links(self) -> list[str]:
        return LINK.findall(self.prose)

    def headings(self) -> list[str]:
        return [line for line in self.prose.splitlines() if line.startswith("#")]

    def anchors(self) -> set[str]:
        """Anchors as GitHub makes them: lower case, punctuation dropped, spaces as hyphens."""
        titles = (heading.lstrip("# ").lower() for heading in self.headings())
        return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}

    def section(self, heading: str) -> str:
        """Return the text from a heading to the next one of any level."""
        _, found, rest = self.text.partition(f"\n{heading}\n")
        assert found, f"{self.path} has no heading {heading!r}"
        return rest.split("\n#", 1)[0]

    def table(self, heading: str) -> list[list[str]]:
        """Return the rows of all tables of a section, as cells, without their heads."""
        rows = [line for line in self.section(heading).splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in CELL.split(row)[1:-1]] for row in rows]
        rules = [number for number, row in enumerate(cells) if set(row[0]) == {"-"}]
        heads = {number - 1 for number in rules}
        return [row for number, row in enumerate(cells) if number not in heads and number not in rules]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def product(root: Path) -> list[Source]:
    """Return the product's files, parsed once for all tests of a process."""
    return measure.sources(root)


@pytest.fixture(scope="session")
def page() -> Callable[[str], Page]:
    """Return a reader of pages by their path from the repository's root."""

    @cache
    def open_page(path: str) -> Page:
        return Page(ROOT / path)

    return open_page
