"""The audit log as lines for people, or as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from attune.common.peer_text import clean
from attune.fedserver.stores.audit import Entry

LONGEST = 600  # characters of a line


def lines_of(found: Iterable[tuple[Entry, str]], as_json: bool) -> Iterator[str]:
    for entry, digest in found:
        if as_json:
            yield msgspec.json.encode(msgspec.structs.asdict(entry) | {"digest": digest}).decode()
        else:
            facts = " ".join(f"{key}={_value(value)}" for key, value in entry.facts.items() if value not in ("", None))
            yield clean(f"{entry.number} {entry.at[:19]}Z {entry.event}, by {entry.by}: {facts}", LONGEST)


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
