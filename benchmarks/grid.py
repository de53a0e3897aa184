"""The grid from which every method's settings are chosen: the same training settings for all, and each method's own settings.

A method may not have other training settings to choose from than its rivals; otherwise the grid would decide, not the method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Literal

import msgspec

from attune.common.config import Count, parse_assignment
from attune.common.errors import SettingError

EVERY_METHOD = "*"
MOST_TRIALS = 8
SHARED = ("train.lr", "train.momentum", "train.batch_size")  # settings that only `train` of a grid may contain
FIGURES = {"over clients": "validation_accuracy", "over samples": "validation_over_samples"}

Settings = tuple[str, ...]


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trials of each method: every choice of `train` with every one of its own alternatives. All are lists of settings."""

    rounds: Count
    seed: int
    train: list[list[str]]  # the same for every method
    own: dict[str, list[list[str]]] = {}  # own choices by method; EVERY_METHOD has those of methods that are not named
    judged: Literal["over clients", "over samples"] = "over clients"  # the accuracy on validation parts that decides
    share: float = 0.25  # share of each client's training samples that is used for validation


def alternatives(grid: Grid, method: str) -> list[Settings]:
    """Return the settings of each trial of a method.

    Raises:
        SettingError: There are more than MOST_TRIALS, or training settings that other methods have not.
    """
    own = grid.own.get(method, grid.own.get(EVERY_METHOD, [[]]))
    if unequal := {_key(each) for settings in own for each in settings} & set(SHARED):
        raise SettingError(f"the grid of {method} sets {', '.join(sorted(unequal))}, which `train` sets for every method alike")
    found = [(*train, *settings) for train, settings in product(grid.train, own)]
    if len(found) > MOST_TRIALS:
        raise SettingError(f"the grid of {method} has {len(found)} trials; at most {MOST_TRIALS}")
    return found


def chosen(rows: Iterable[Mapping[str, str]], grid: Grid, task: str, method: str) -> Settings:
    """Return the settings of this grid with the best accuracy on validation parts; of equal ones, the first in its order.

    Raises:
        SettingError: None of them was tried.
    """
    order = [" ".join(settings) for settings in alternatives(grid, method)]
    tried = {row["settings"]: float(row[FIGURES[grid.judged]]) for row in rows if _is_trial(row, grid, task, method, order)}
    if not tried:
        raise SettingError(f"no trial of {method} on {task} is known")
    best = max(tried, key=lambda settings: (tried[settings], -order.index(settings)))
    return tuple(best.split())


def _is_trial(row: Mapping[str, str], grid: Grid, task: str, method: str, order: Collection[str]) -> bool:
    same = (row["task"], row["method"], row["rounds"], row["seed"]) == (task, method, str(grid.rounds), str(grid.seed))
    return same and row["settings"] in order


def _key(assignment: str) -> str:
    return ".".join(parse_assignment(assignment)[0])
