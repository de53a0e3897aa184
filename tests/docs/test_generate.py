"""Generated regions of the documents agree with the code and the result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate


@pytest.mark.parametrize("path", generate.pages(), ids=lambda path: str(path.relative_to(generate.ROOT)))
def test_generated_regions_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.filled(text) == text, "run: python -m docs.generate"


def test_every_region_stands_in_one_page() -> None:
    named = [match["name"] for path in generate.pages() for match in generate.REGION.finditer(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(generate.REGIONS)


def test_a_region_is_replaced_and_the_text_around_it_stays() -> None:
    page = "before\n<!-- generated: packages -->\nthis is old\n<!-- end generated -->\nafter"
    made = generate.filled(page)
    assert made.startswith("before\n<!-- generated: packages -->\n\n| package | its job |")
    assert "| `common/wire` |" in made
    assert "this is old" not in made
    assert made.endswith("<!-- end generated -->\nafter")
