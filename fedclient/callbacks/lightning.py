"""PyTorch Lightning: `Trainer(callbacks=[federated(context)])` inside a `train(model, data, context)`."""

from __future__ import annotations

from typing import Any

from attune.common.errors import SettingError
from attune.fedclient.callbacks.penalty import add_penalty
from attune.fedclient.work.own_loop import Context


def federated(context: Context) -> Any:
    """A callback that adds the gradient of what the method adds to any loss, says how far training is, and ends it if it was
    replaced. Errors: SettingError without Lightning."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise SettingError("the callback for Lightning needs it: pip install lightning") from None

    class Federated(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            add_penalty(context)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            total = trainer.estimated_stepping_batches
            context.progress(trainer.global_step / total if total and total > 0 else 0.0)

    return Federated()
