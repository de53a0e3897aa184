"""Findings: what is strange about data that were read. One list, in one form, for every command that reads data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import click

from attune.common.text import clean

_SHOWN, _MOST = 3, 12  # sites that a line names, and lines
_LONGEST = 2000  # characters of a line
_heard: ContextVar[list[str] | None] = ContextVar("findings", default=None)


def lines(findings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each finding, once for all sites that have it.

    Args:
        findings: By the site's name; "" if there is one site, which needs no name. Only of several sites are they cut.
    """
    about: dict[str, list[str]] = {}
    for name, texts in findings.items():
        for text in dict.fromkeys(texts):
            about.setdefault(text, []).append(name)
    shown = [f"warning: {clean(_by(names) + text, _LONGEST)}" for text, names in about.items()]
    if "" in findings or len(shown) <= _MOST:
        return shown
    return [*shown[:_MOST], f"warning: {len(shown) - _MOST} more; fedclient doctor --data names them"]


def _by(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{' and others' if len(names) > _SHOWN else ''}: " if names[0] else ""


def show(findings: Mapping[str, Sequence[str]], err: bool = False) -> None:
    """Print the lines; `err`: on stderr, because stdout may be for machines."""
    for line in lines(findings):
        click.echo(line, err=err)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the findings of all shards that are read in this block, for a command that does not see the shards."""
    strange: list[str] = []
    token = _heard.set(strange)
    try:
        yield strange
    finally:
        _heard.reset(token)


def tell(texts: Sequence[str]) -> None:
    """Add findings of a shard for the block of `heard` around the call, if there is one."""
    strange = _heard.get()
    if strange is not None:
        strange += texts
