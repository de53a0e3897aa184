"""A user's own training and scores: functions that are called in place of the built-in ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from attune.common.errors import SettingError

# train(model, data, context) -> the loss, {"loss": ...} or None. evaluate(model, data) -> the score of each sample, 0 to 1.
Train = Callable[[Any, Any, Any], Any]
Evaluate = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Hooks:
    """train(model, data, context) and evaluate(model, data): docs/own-training.md. None: the built-in one."""

    train: Train | None = None
    evaluate: Evaluate | None = None

    @classmethod
    def of_module(cls, name: str) -> Self:
        """Return `train` and `evaluate` of a module, or the one that it has.

        Raises:
            SettingError: The module cannot be imported, or has neither.
        """
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise SettingError(f"the module {name!r} of --hooks cannot be imported: {error}") from None
        functions = {key: getattr(module, key, None) for key in ("train", "evaluate")}
        if not any(map(callable, functions.values())):
            raise SettingError(f"the module {name!r} of --hooks has neither a function train nor a function evaluate")
        return cls(**{key: function if callable(function) else None for key, function in functions.items()})


NONE = Hooks()
