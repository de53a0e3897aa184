"""What a model returned, as scores: a tensor, or an object that has them as `.logits`, as Hugging Face models return."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attune.common.errors import SettingError


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """The scores, (B, ..., C). Errors: SettingError that says what the model returned instead."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    what = type(output).__name__
    held = f" of {', '.join(type(each).__name__ for each in output[:4])}" if isinstance(output, (tuple, list)) else ""
    raise SettingError(
        f"the model {type(model).__name__} returned {what}{held}, which has no logits: its forward must return a tensor of "
        "scores (B, classes), or an object that has it as .logits"
    )
