"""Scores in the output of a model: a tensor, or an object with `.logits`, as Hugging Face models return."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attune.common.errors import SettingError


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """Return the scores (B, ..., C) in a model's output.

    Raises:
        SettingError: The output has no scores; the message says what the model returned.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    what = type(output).__name__
    inside = f" of {', '.join(type(item).__name__ for item in output[:4])}" if isinstance(output, (tuple, list)) else ""
    raise SettingError(
        f"the model {type(model).__name__} returned {what}{inside}, which has no logits: its forward must return a tensor of "
        "scores (B, classes), or an object that has it as .logits"
    )
