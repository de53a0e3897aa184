"""What a method adds to any loss, as gradients."""

from __future__ import annotations

import torch

from attune.fedclient.work.own_loop import Context


def add_penalty(context: Context) -> None:
    """Adds the gradient of the method's term to those that the loss has left in the parameters."""
    penalty = context.penalty()
    if penalty.requires_grad:
        torch.autograd.backward(penalty)
