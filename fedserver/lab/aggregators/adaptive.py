"""The server's optimisers for shared parts: a round is one step along the mean change of the cohort.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm 2
(Adam, Yogi, Adagrad); Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (momentum). delta is the cohort's mean minus x, and eta, beta1, beta2 and tau are settings:

    momentum:  m <- beta1 m + delta                 x <- x + eta m
    the rest:  m <- beta1 m + (1 - beta1) delta     x <- x + eta m / (sqrt(v) + tau)
    Adagrad:   v <- v + delta^2
    Adam:      v <- beta2 v + (1 - beta2) delta^2
    Yogi:      v <- v - (1 - beta2) delta^2 sign(v - delta^2)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attune.common.methods.settings.aggregators import MeanSettings, SharedOptimiser
from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.tensors import DTYPES
from attune.fedserver.lab.aggregators.base import Tensors

VALUE, FIRST, SECOND = "value", "first-moment", "second-moment"  # keys of the vault


def moments(optimiser: SharedOptimiser) -> tuple[str, ...]:
    """Return the vault keys of the optimiser's running tensors."""
    return {"none": (), "momentum": (FIRST,)}.get(optimiser, (FIRST, SECOND))


def manifest_of_moments(known: Manifest) -> Manifest:
    """Return dtype and shape of the running tensors. Integers have none; numbers in half precision have float32."""
    wide = {name: spec for name, spec in known.items() if DTYPES[spec.dtype].is_floating_point}
    half = {name for name, spec in wide.items() if DTYPES[spec.dtype].itemsize < torch.float32.itemsize}
    return {name: TensorSpec("F32", spec.shape) if name in half else spec for name, spec in wide.items()}


def at_start(settings: MeanSettings, initial: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return the running tensors before round 1, by vault key: m = 0 and v = tau^2, the smallest that the paper allows."""
    begin = {FIRST: 0.0, SECOND: settings.shared_adaptivity**2}
    floating = {name: tensor.to(_wide(tensor)) for name, tensor in initial.items() if tensor.is_floating_point()}
    return {
        key: {name: torch.full_like(tensor, begin[key]) for name, tensor in floating.items()}
        for key in moments(settings.shared_optimiser)
    }


def stepped(settings: MeanSettings, state: Tensors, mean: torch.Tensor) -> Tensors:
    """Return the next value of a tensor and of its moments, by vault key. Integers take the cohort's mean.

    Args:
        settings: The optimiser and its numbers.
        state: The present value and moments by vault key.
        mean: The cohort's mean of this tensor.
    """
    value = state[VALUE]
    if not value.is_floating_point():
        return {VALUE: mean}
    x = value.to(_wide(value))
    delta = mean.to(x.dtype) - x
    if settings.shared_optimiser == "momentum":
        first = settings.momentum * state[FIRST] + delta
        return {VALUE: (x + settings.step * first).to(value.dtype), FIRST: first}
    first = settings.momentum * state[FIRST] + (1 - settings.momentum) * delta
    second, square = state[SECOND], delta.square()
    if settings.shared_optimiser == "adagrad":
        second = second + square
    elif settings.shared_optimiser == "adam":
        second = settings.shared_beta2 * second + (1 - settings.shared_beta2) * square
    else:
        second = second - (1 - settings.shared_beta2) * square * torch.sign(second - square)
    x = x + settings.step * first / (second.sqrt() + settings.shared_adaptivity)
    return {VALUE: x.to(value.dtype), FIRST: first, SECOND: second}


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
