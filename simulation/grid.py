"""Grids from which the settings of methods are chosen: the tables of the papers and `fedserver simulate --grid` use this code.

A method may not have other training settings to choose from than its rivals; otherwise the grid would decide, not the method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product

from attune.common.config import parse_assignment
from attune.common.errors import SettingError
from attune.common.methods.method import setting_names
from attune.common.methods.registry import get

SHARED = ("train.lr", "train.momentum", "train.batch_size")  # settings that must be the same for every method
_COMMA = re.compile(r",(?![^\[]*\])")  # a comma that is not within brackets

TrialSettings = tuple[str, ...]  # each as section.key=value


def trials(
    method: str, train: Sequence[Sequence[str]], alternatives: Sequence[Sequence[str]], most: int | None = None
) -> list[TrialSettings]:
    """Return the settings of each trial of a method: every choice of training with every alternative of the method.

    Args:
        method: Name of the method, for errors.
        train: Choices of training settings, the same for every method.
        alternatives: Choices of the method's settings.
        most: The largest number of trials; None for any number.

    Raises:
        SettingError: There are more, or an alternative has settings in SHARED.
    """
    if unequal := {_key(text) for settings in alternatives for text in settings} & set(SHARED):
        raise SettingError(f"the grid of {method} sets {', '.join(sorted(unequal))}, which `train` sets for every method alike")
    listed = [(*choice, *settings) for choice, settings in product(train, alternatives)]
    if most is not None and len(listed) > most:
        raise SettingError(f"the grid of {method} has {len(listed)} trials; at most {most}")
    return listed


def best(scores: Mapping[TrialSettings, float]) -> TrialSettings:
    """Return the settings with the best score on validation parts; of equal ones, the first."""
    return max(scores, key=lambda settings: scores[settings])


def parse_grid(texts: Sequence[str], methods: Sequence[str]) -> dict[str, list[TrialSettings]]:
    """Return the trials of each method from `--grid section.key=VALUE,VALUE`. A method has the keys that it knows.

    Args:
        texts: The values of each key.
        methods: Names of the methods.

    Raises:
        SettingError: It is no such text, a key comes twice, or no method has a setting of this name.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        if not equals or "." not in key or ":" in key:
            raise SettingError(f"--grid takes section.key=VALUE,VALUE, for all methods that have the key; not {text!r}")
        if key in values:
            raise SettingError(f"--grid {key} comes twice: give all its values in one")
        values[key] = [f"{key}={value.strip()}" for value in dict.fromkeys(_COMMA.split(listed))]
    known = {name: {f"method.{key}" for key in setting_names(get(name))} for name in methods}
    for key in values:
        if key.startswith("method.") and not any(key in names for names in known.values()):
            raise SettingError(f"--grid {key}: none of {', '.join(methods)} has this setting")
    common = [values[key] for key in values if not key.startswith("method.")]
    return {
        name: trials(name, list(product(*common)), list(product(*(values[key] for key in values if key in names))))
        for name, names in known.items()
    }


def _key(assignment: str) -> str:
    return ".".join(parse_assignment(assignment)[0])
