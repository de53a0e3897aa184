"""How the devices of a simulation are computed, which a simulation with a home stays with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from attune.common.durable import PUBLIC, write_file
from attune.common.errors import HomeMismatch, SettingError
from attune.fedclient.work.together import Executor

FILE = "executor.json"
KINDS = ("sequential", "stacked", "auto")


class Record(msgspec.Struct, frozen=True):
    """What is in the file."""

    executor: Literal["sequential", "stacked"]
    why: str = ""  # what a trial came to


@dataclass(frozen=True)
class Choice:
    """executor: what to begin with; "auto" is settled by a trial, which `settle` hears of. home: where it is recorded."""

    executor: Executor
    home: Path | None

    def settle(self, executor: Literal["sequential", "stacked"], why: str = "") -> None:
        """From here on. Errors: DiskFull."""
        if self.home is not None:
            write_file(self.home / FILE, msgspec.json.format(msgspec.json.encode(Record(executor, why))), PUBLIC)


def choose(given: Executor | None, home: Path | None) -> Choice:
    """What was given, or what this home was begun with, or one by one.

    Errors: SettingError for a word that is none, or for another one than the home was begun with; HomeMismatch.
    """
    if given is not None and given not in KINDS:
        raise SettingError(f"executor is one of {', '.join(KINDS)}, not {given!r}")
    recorded = _recorded(home)
    if recorded is not None:
        if given not in (None, "auto", recorded.executor):
            raise SettingError(
                f"this simulation was begun with executor={recorded.executor!r}, and {given!r} agrees only to rounding: "
                "leave the argument out, or take another home"
            )
        return Choice(recorded.executor, None)
    return Choice(given or "sequential", home)


def _recorded(home: Path | None) -> Record | None:
    path = home / FILE if home is not None else None
    if path is None or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise HomeMismatch(f"{path} is damaged ({error}): restore it from a backup, or take another home") from None
