"""Accepted updates on disk: one folder an order, filled aside and renamed into place, so that it is there whole or not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attune.common.durable import PUBLIC, committed_folder, sweep, write_file
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import Row

UPDATE = "update.json"


@dataclass(frozen=True)
class Entry:
    """One accepted update: what was reported, and a safetensors file for each part handed in."""

    row: Row
    parts: Mapping[str, Path]


class Inbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)

    def accept(self, order: OrderId, row: Row, parts: Mapping[str, Path]) -> None:
        """Moves the (already durable) part files in and makes the whole durable. Accepting twice keeps the first.

        Errors: DiskFull.
        """
        final = self._folder / str(order)
        if final.exists():
            return
        with committed_folder(final) as filling:
            for part, path in parts.items():
                path.rename(filling / f"{part}.safetensors")
            write_file(filling / UPDATE, msgspec.json.encode(row), PUBLIC)

    def holds(self, order: OrderId) -> bool:
        return (self._folder / str(order)).is_dir()

    def entries(self, work: str, round_: int) -> dict[str, Entry]:
        """Accepted updates of one round by device name, in name order."""
        found = {}
        for folder in sorted(self._folder.glob(f"{work}-{round_}-*")):
            row = msgspec.json.decode((folder / UPDATE).read_bytes(), type=Row)
            found[row.client] = Entry(row, {path.stem: path for path in folder.glob("*.safetensors")})
        return dict(sorted(found.items()))

    def discard(self, order: OrderId) -> None:
        """One update that turned out to be late."""
        shutil.rmtree(self._folder / str(order), ignore_errors=True)

    def clear(self, work: str, round_: int) -> None:
        """After the commit that consumed a round."""
        for folder in self._folder.glob(f"{work}-{round_}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def clear_except(self, work: str, round_: int) -> None:
        """At start: what a process that was killed after its commit had no time to clear."""
        for folder in set(self._folder.iterdir()) - set(self._folder.glob(f"{work}-{round_}-*")):
            shutil.rmtree(folder, ignore_errors=True)


def reported_names(folder: Path, work: str, round_: int) -> set[str]:
    """Devices whose answer to these orders is in the inbox at `folder`; it is only looked at, beside a running server too."""
    prefix = f"{work}-{round_}-"
    return {path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
