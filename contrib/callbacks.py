"""Callbacks that join the training loops of other libraries to a federation, inside a `train(model, data, context)`.

`lightning.pytorch.Trainer(callbacks=[lightning_callback(context)])`, and `transformers.Trainer(callbacks=[...])` with
`hugging_face_callback(context)`.
"""

from __future__ import annotations

from typing import Any

import torch

from attune.common.errors import SettingError
from attune.fedclient.work.own_loop import Context


def lightning_callback(context: Context) -> Any:
    """Return a callback for PyTorch Lightning.

    It adds the gradient of the method's penalty, reports progress, and ends training that was replaced.

    Raises:
        SettingError: Lightning is not installed.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise SettingError("the callback for Lightning needs it: pip install lightning") from None

    class LightningCallback(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            add_penalty(context)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            total = trainer.estimated_stepping_batches
            context.progress(trainer.global_step / total if total and total > 0 else 0.0)

    return LightningCallback()


def hugging_face_callback(context: Context) -> Any:
    """Return a callback for the Trainer of Hugging Face transformers. It works as the callback for Lightning.

    Raises:
        SettingError: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise SettingError("the callback needs transformers: pip install 'attune-fl[huggingface]' accelerate") from None

    class HuggingFaceCallback(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            add_penalty(context)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            context.progress(state.global_step / state.max_steps if state.max_steps else 0.0)

    return HuggingFaceCallback()


def add_penalty(context: Context) -> None:
    """Add the gradient of the method's term to the gradients that the loss has left in the parameters."""
    penalty = context.penalty()
    if penalty.requires_grad:
        torch.autograd.backward(penalty)
