"""The grid from which every method's settings are chosen: the same training settings for all, and each method's own settings.

A method may not have other training settings to choose from than its rivals; otherwise the grid would decide, not the method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from attune.common.config import Count
from attune.common.errors import SettingError
from attune.simulation.grid_search import SHARE, TrialSettings, best, trials

EVERY_METHOD = "*"
MOST_TRIALS = 8
FIGURES = {"over clients": "validation_accuracy", "over samples": "validation_over_samples"}


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials of each method: every choice of `train` with every one of its own alternatives. All are lists of settings."""

    rounds: Count
    seed: int
    train: list[list[str]]  # the same for every method
    own: dict[str, list[list[str]]] = {}  # own choices by method; EVERY_METHOD has those of methods that are not named
    judged: Literal["over clients", "over samples"] = "over clients"  # the accuracy on validation parts that decides
    share: float = SHARE  # share of each client's training samples that is used for validation


def alternatives(grid: Grid, method: str) -> list[TrialSettings]:
    """Return the settings of each trial of a method.

    Raises:
        SettingError: There are more than MOST_TRIALS, or training settings that other methods have not.
    """
    return trials(method, grid.train, grid.own.get(method, grid.own.get(EVERY_METHOD, [[]])), MOST_TRIALS)


def chosen(rows: Iterable[Mapping[str, str]], grid: Grid, task: str, method: str) -> TrialSettings:
    """Return the settings of this grid with the best accuracy on validation parts; of equal ones, the first in its order.

    Raises:
        SettingError: None of them was tried.
    """
    by_text = {" ".join(settings): settings for settings in alternatives(grid, method)}
    listed = [row for row in rows if _is_trial(row, grid, task, method, by_text)]
    tried = {row["settings"]: float(row[FIGURES[grid.judged]]) for row in listed}
    if not tried:
        raise SettingError(f"no trial of {method} on {task} is known")
    return best({settings: tried[text] for text, settings in by_text.items() if text in tried})


def _is_trial(row: Mapping[str, str], grid: Grid, task: str, method: str, order: Collection[str]) -> bool:
    same = (row["task"], row["method"], row["rounds"], row["seed"]) == (task, method, str(grid.rounds), str(grid.seed))
    return same and row["settings"] in order
