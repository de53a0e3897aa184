"""The picture of the README is the one that its script draws."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks import idea


def test_the_picture_is_drawn_by_its_script() -> None:
    assert idea.OUT.read_text(encoding="utf-8") == idea.svg()
    assert ElementTree.fromstring(idea.svg()).tag.endswith("svg")  # noqa: S314
