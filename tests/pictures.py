"""Reader of a page of pictures for tests."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image


class Page(HTMLParser):
    """Content of a page: tags, image sources, and the cells of its tables row by row."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str | None] = []
        self.rows: list[list[str]] = []
        self.heads: list[str] = []  # headings of sections
        self._cell = self._head = False
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        self._cell, self._head = tag in ("td", "th"), tag == "h2"
        if tag == "tr":
            self.rows.append([])
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")
        self._head = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data
        if self._head:
            self.heads.append(data)

    def row(self, first: str) -> list[str]:
        """Return the first row that begins with this cell."""
        return next(row for row in self.rows if row and row[0] == first)


def check_pictures(out: Path, names: set[str]) -> Page:
    """Check that all pictures are PNG files of a sensible size that are not blank, and that the page shows the same bytes."""
    assert {path.name for path in out.iterdir()} == {f"{name}.png" for name in names} | {"index.html"}
    page = Page(out / "index.html")
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?:|@import|url\(", page.text)
    shown = [base64.b64decode((source or "").removeprefix("data:image/png;base64,")) for source in page.sources]
    files = [(out / f"{name}.png").read_bytes() for name in names]
    assert sorted(shown) == sorted(files)
    for data in files:
        pixels = matplotlib.image.imread(io.BytesIO(data), format="png")
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 0.01
    return page
