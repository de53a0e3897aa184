"""Metrics of a training order that leave the device with noise.

Each unit, a sample or a group, adds a number from 0 to 1 to each of three sums: its loss over MOST_LOSS, and its right answers
before and after training. So it moves the three sums by at most sqrt(3) together. Each gets noise of sqrt(3) times the
multiplier (the Gaussian mechanism). The number of units is public. Only the model that was trained with noise is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attune.common.errors import SettingError
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.hooks import Hooks
from attune.fedclient.work.private.order_noise import OrderNoise

MOST_LOSS = 4.0  # nats; a larger loss counts as this one
LogitsFunction = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # (tensors, x) -> logits


def check_countable(task: str, hooks: Hooks) -> None:
    """Check that scores are counts of right answers.

    Raises:
        SettingError: They are something else.
    """
    if task != "classes" or hooks.evaluate is not None:
        what = "a score of the user's own" if hooks.evaluate is not None else f"the task {task}"
        raise SettingError(f"--metrics noisy counts right answers of classes, and this device has {what}: say --metrics none")


def noisy_metrics(
    noise: OrderNoise | None,
    network: LogitsFunction,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    data: Prepared,
    scored: bool,
) -> Mapping[str, float]:
    """Return the metrics of a training order as the server may be told them; empty if they stay on the device.

    Args:
        noise: Noise of the order.
        network: The model as a function.
        before: The tensors from which training started.
        after: The trained ones.
        data: The samples of the device.
        scored: The accuracies are wanted.
    """
    if noise is None or not noise.metrics:
        return {}
    grouped = noise.groups is not None
    values = {"loss": _unit_means(_losses(network(after, data.train_x), data.train_y) / MOST_LOSS, noise.groups)}
    if scored and len(data.test_x):
        tested = torch.as_tensor(data.test_groups) if grouped and data.test_groups is not None else None
        for name, tensors in (("accuracy_before", before), ("accuracy_after", after)):
            values[name] = _unit_means(_right(network(tensors, data.test_x), data.test_y), tested)
    deviation, stream = math.sqrt(3) * noise.metrics, noise.stream("metrics")
    drawn = {name: float(stream.normal(1)) for name in ("loss", "accuracy_before", "accuracy_after")}
    shares = {name: (float(value_U.sum()) + deviation * drawn[name]) / len(value_U) for name, value_U in values.items()}
    return {name: min(1.0, max(0.0, share)) * (MOST_LOSS if name == "loss" else 1.0) for name, share in shares.items()}


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, cut to MOST_LOSS, (N,)."""
    loss_of_label = cross_entropy(logits.cpu().flatten(end_dim=-2).double(), y.cpu().flatten(), reduction="none")
    return loss_of_label.nan_to_num(MOST_LOSS).reshape(len(y), -1).mean(dim=1).clamp(max=MOST_LOSS)


def _right(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of right answers of each sample, (N,)."""
    return (logits.cpu().argmax(-1) == y.cpu()).double().reshape(len(y), -1).mean(dim=1)


def _unit_means(value_N: Tensor, units_N: Tensor | None) -> Tensor:
    """Return the mean of each unit, (U,); without units each sample is one."""
    if units_N is None:
        return value_N
    _, unit_N = torch.unique(units_N.cpu(), return_inverse=True)
    count_U = torch.bincount(unit_N).double()
    return torch.zeros_like(count_U).index_add_(0, unit_N, value_N) / count_U
