"""The server's optimisers, in place, for dense gradients and for gradients known only as an outer product of rank S.

Shapes: S clients, R rows (generated weights) of a head, H hidden units. The gradient of a head is G_SR^T F_SH; a whole one
would be as large as the head itself, so it is never made. Both give what torch.optim gives.

`moments` names the running tensors, of the parameter's own shape and starting at zero, that each step is given. `dense_` takes
step number `step` (from 1) on `value` and its moments, in place; `outer_` takes the same step for the gradient G_SR^T F_SH.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from attune.common.methods.settings.aggregators import HypernetworkSettings

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class ServerSgd:
    """SGD with momentum and weight decay; an outer product is added straight into momentum or weight."""

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self._lr, self._momentum, self._decay = lr, momentum, weight_decay
        self.moments: tuple[str, ...] = ("momentum",) if momentum else ()

    def dense_(self, value: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        if not moments:
            value.mul_(1 - self._lr * self._decay).add_(gradient, alpha=-self._lr)
            return
        moments[0].mul_(self._momentum).add_(gradient).add_(value, alpha=self._decay)
        value.add_(moments[0], alpha=-self._lr)

    def outer_(
        self, W_RH: torch.Tensor, G_SR: torch.Tensor, F_SH: torch.Tensor, moments: Sequence[torch.Tensor], step: int
    ) -> None:
        if not moments:
            W_RH.addmm_(G_SR.T, F_SH, beta=1 - self._lr * self._decay, alpha=-self._lr)
            return
        moments[0].addmm_(G_SR.T, F_SH, beta=self._momentum).add_(W_RH, alpha=self._decay)
        W_RH.add_(moments[0], alpha=-self._lr)


class ServerAdam:
    """Adam, weight decay added to the gradient. Squares are elementwise, so call `outer_` on a block of rows at a time."""

    moments: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def __init__(self, lr: float, weight_decay: float) -> None:
        self._lr, self._decay = lr, weight_decay

    def dense_(self, value: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        self._apply_(value, gradient.clone(), moments, step)

    def outer_(
        self, W_RH: torch.Tensor, G_SR: torch.Tensor, F_SH: torch.Tensor, moments: Sequence[torch.Tensor], step: int
    ) -> None:
        self._apply_(W_RH, G_SR.T @ F_SH, moments, step)

    def _apply_(self, value: torch.Tensor, scratch: torch.Tensor, moments: Sequence[torch.Tensor], step: int) -> None:
        """Apply Adam's step. `scratch` holds the gradient and is overwritten."""
        first, second = moments
        if self._decay:
            scratch.add_(value, alpha=self._decay)
        first.lerp_(scratch, 1 - BETA1)
        second.mul_(BETA2).addcmul_(scratch, scratch, value=1 - BETA2)
        torch.sqrt(second, out=scratch)
        scratch.div_(math.sqrt(1 - BETA2**step)).add_(EPSILON)
        value.addcdiv_(first, scratch, value=-self._lr / (1 - BETA1**step))


Optimiser = ServerSgd | ServerAdam


def optimiser_of(settings: HypernetworkSettings) -> Optimiser:
    """Return the optimiser that the settings name."""
    if settings.server_optimiser == "adam":
        return ServerAdam(settings.lr, settings.weight_decay)
    return ServerSgd(settings.lr, settings.server_momentum, settings.weight_decay)
