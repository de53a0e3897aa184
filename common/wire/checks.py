"""Checks of tensors: expected names, dtypes and shapes, finite values, and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from attune.common.wire.header import TensorSpec
from attune.common.wire.malformed import Malformed

_BLOCK = 1 << 18  # elements at a time, so that a check needs no second copy of a large tensor


def check_manifest(actual: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], who: str) -> None:
    """Check that two manifests agree. The order of names does not count.

    Raises:
        Malformed: missing-tensor, unexpected-tensor, wrong-dtype or wrong-shape; the message names `who` and the first tensor.
    """
    if missing := sorted(expected.keys() - actual.keys()):
        raise Malformed("missing-tensor", f"{who}: {_first(missing)} missing; both sides must run the same model")
    if unexpected := sorted(actual.keys() - expected.keys()):
        raise Malformed("unexpected-tensor", f"{who}: {_first(unexpected)} not expected; both sides must run the same model")
    for name, spec in sorted(expected.items()):
        check_spec(name, actual[name], spec, who)


def check_spec(name: str, actual: TensorSpec, expected: TensorSpec, who: str) -> None:
    """Check the dtype and the shape of one tensor.

    Raises:
        Malformed: wrong-dtype or wrong-shape.
    """
    if actual.dtype != expected.dtype:
        raise Malformed("wrong-dtype", f"{who}: {name!r} is {actual.dtype}; {expected.dtype} was expected")
    if actual.shape != expected.shape:
        raise Malformed("wrong-shape", f"{who}: {name!r} has shape {list(actual.shape)}; {list(expected.shape)} was expected")


def _first(names: list[str]) -> str:
    return f"{names[0][:80]!a} is" if len(names) == 1 else f"{names[0][:80]!a} and {len(names) - 1} more are"


def check_finite(name: str, tensor: torch.Tensor, who: str) -> None:
    """Check that all values are finite. Integers and empty tensors pass.

    Raises:
        Malformed: not-finite, with the numbers of NaN and infinite values.
    """
    if is_finite(tensor):
        return
    nans = infinite = 0
    for block in _blocks(tensor):
        nans += int(block.isnan().sum())
        infinite += int(block.isinf().sum())
    raise Malformed(
        "not-finite",
        f"{who}: {name!r} has {nans} NaN and {infinite} infinite of {tensor.numel()} values; lower the learning rate or clip",
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a temporary tensor. Integers and empty tensors are finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())  # both are NaN if any value is
    return math.isfinite(low) and math.isfinite(high)


def squared_norm(tensor: torch.Tensor) -> float:
    """Sum of squares, accumulated in float64 block by block (L2 norm of an update: sqrt of the sum over its tensors)."""
    total = 0.0
    for block in _blocks(tensor):
        wide = block.to(torch.float64)
        total += float(wide @ wide)
    return total


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat_N = tensor.detach().reshape(-1)
    return (flat_N,) if flat_N.shape[0] <= _BLOCK else torch.split(flat_N, _BLOCK)
