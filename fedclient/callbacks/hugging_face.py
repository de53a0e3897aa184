"""Hugging Face `Trainer(callbacks=[federated(context)])` inside a `train(model, data, context)`."""

from __future__ import annotations

from typing import Any

from attune.common.errors import SettingError
from attune.fedclient.callbacks.penalty import add_penalty
from attune.fedclient.work.own_loop import Context


def federated(context: Context) -> Any:
    """A callback that adds the gradient of what the method adds to any loss, says how far training is, and ends it if it was
    replaced. Errors: SettingError without transformers."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise SettingError("the callback needs transformers: pip install 'attune-fl[huggingface]' accelerate") from None

    class Federated(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            add_penalty(context)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            context.progress(state.global_step / state.max_steps if state.max_steps else 0.0)

    return Federated()
