"""Encoding int8: a delta as whole numbers from -127 to 127, with a scale for each block of numbers.

A block of BLOCK numbers has the scale s = (its largest magnitude) / 127 in float32. A number x is written as q, the nearest
whole number to x / s, and read as q s. Its error is at most s / 2, plus float32's rounding of at most s 2^-15 (2^-143 if s is
subnormal). A block of zeros has the scale 0. With error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML
2019) a device adds the error of one round to the delta of the next. Then the sum over any number of rounds has only the last
round's error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from attune.common.wire.header import Manifest, TensorSpec
from attune.common.wire.malformed import Malformed

BLOCK = 256  # numbers per scale, which adds 1/64 to their bytes
SCALES = "#scales"  # the tensor of all scales, in the order of the names of the float32 tensors, block by block
_MOST = 127


def manifest_as_written(manifest: Mapping[str, TensorSpec]) -> Manifest:
    """Return the manifest of the encoded tensors.

    Raises:
        Malformed: bad-name, if a tensor of the model is called SCALES.
    """
    if SCALES in manifest:
        raise Malformed("bad-name", f"a tensor of the model is called {SCALES!r}, which int8 needs: give it another name")
    count = sum(blocks_of(spec) for spec in manifest.values() if spec.dtype == "F32")
    written = {name: TensorSpec("I8", spec.shape) if spec.dtype == "F32" else spec for name, spec in manifest.items()}
    return written | ({SCALES: TensorSpec("F32", (count,))} if count else {})


def blocks_of(spec: TensorSpec) -> int:
    """Return how many scales a tensor has."""
    return -(-math.prod(spec.shape) // BLOCK)


def quantised(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 numbers, a float32 scale per block) of N float32 numbers.

    A block with a value that is not finite has a scale that is not finite.
    """
    x_KB = _in_blocks(x_N)
    scale_K = x_KB.abs().amax(1) / _MOST
    q_KB = (x_KB / scale_K[:, None]).round_().nan_to_num_(0.0).clamp_(-_MOST, _MOST)
    return q_KB.to(torch.int8).view(-1)[: len(x_N)], scale_K


def restored(q_N: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
    """Return the N float32 numbers that these numbers and scales stand for."""
    return (_in_blocks(q_N.float()) * scale_K[:, None]).view(-1)[: len(q_N)]


def check_scales(scale_K: torch.Tensor, who: str) -> None:
    """Check that all scales are finite and not negative.

    Raises:
        Malformed: bad-scale.
    """
    wrong = int((~scale_K.isfinite() | (scale_K < 0)).sum())
    if wrong:
        raise Malformed(
            "bad-scale",
            f"{who}: {wrong} of {len(scale_K)} scales of int8 are NaN, infinite or negative; lower the learning rate or clip",
        )


def _in_blocks(x_N: torch.Tensor) -> torch.Tensor:
    """Return K rows of BLOCK numbers. The last row is filled up with zeros."""
    return torch.nn.functional.pad(x_N, (0, -len(x_N) % BLOCK)).view(-1, BLOCK)
