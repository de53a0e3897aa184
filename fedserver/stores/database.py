"""A connection to a database as the tables need it, and the JSON values of its table `meta`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import msgspec

from attune.common.text import from_json


class Rows(Protocol):
    """Rows that a statement returns."""

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Any: ...


class Database(Protocol):
    """Connection to a database. Its errors pass through."""

    strings: ClassVar[str]  # a query of the strings of a JSON array, which is its parameter

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Rows:
        """Run one statement with parameters in the places of `?` or `:name`. One that changes something is a transaction."""

    def transaction(self) -> AbstractContextManager[None]:
        """Make the changes of a block true together, or none of them. Those of other connections come before or after it."""

    def moment(self) -> AbstractContextManager[None]:
        """Let all reads of a block see the same moment."""

    def synced(self) -> AbstractContextManager[None]:
        """Make the commits of a block durable, so that a power cut loses nothing of them."""

    def settle(self) -> None:
        """Move what is committed to where it stays for good."""

    def close(self) -> None:
        """Close the connection."""


def put_value(db: Database, key: str, value: Any) -> None:
    """Write a JSON value of the table `meta`."""
    db.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, msgspec.json.encode(value)),
    )


def value_in(db: Database, key: str, kind: type[Any]) -> Any:
    """Return a JSON value of the table `meta`, or None."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return from_json(row[0], kind) if row else None


def begins(beginning: str) -> str:
    """Return the condition that a key of `meta` has this beginning, a constant of this program."""
    return f"SUBSTR(key, 1, {len(beginning)}) = '{beginning}'"


def words_in(db: Database, beginning: str) -> dict[str, str]:
    """Return the words that `meta` has under keys of this beginning, by what follows it."""
    rows = db.execute(f"SELECT key, value FROM meta WHERE {begins(beginning)} ORDER BY key")  # noqa: S608 - a constant
    return {key.removeprefix(beginning): from_json(value, str) for key, value in rows}
