"""Markdown as text: tables, and links to other documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

PAGE = re.compile(r"docs/(?P<page>[\w/+-]+)\.md(?P<anchor>#[\w-]+)?")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def linked(text: str) -> str:
    """Return a text of the code in which names of documents are links, for a page in docs/."""
    return PAGE.sub(lambda match: f"[{match['page']}.md]({match['page']}.md{match['anchor'] or ''})", text)
