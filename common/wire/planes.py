"""Encoding zstd: the bytes of a tensor, grouped by their place in the numbers, each group compressed separately; lossless.

The first bytes of all numbers are similar (sign and exponent), and the last ones are noise, so the first ones compress well
when they are separate. If the reader has an older value of the tensor, the differences of the numbers' bits are written, as
integers modulo their size, with the sign in the last bit (0, -1, 1, -2 ... become 0, 1, 2, 3 ...). The less a number has moved,
the more of its bytes are 0. Integers, and tensors that do not become smaller, are written unchanged.

A packed tensor has dtype U8. It holds the frames' lengths, 4 bytes each, little-endian, then a zstd frame for each place,
beginning with the last byte of the numbers. The tensor's shape limits the bytes of a frame before it is unpacked.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from attune.common.wire.header import ITEM_BYTES, TensorSpec
from attune.common.wire.malformed import Malformed
from attune.common.wire.tensors import DTYPES

LENGTH_BYTES = 4
LEVEL = 1  # of zstd; higher ones gain nothing on noise
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def packed(tensor: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return the packed tensor, or the tensor itself if packing would not make it smaller.

    Args:
        tensor: Values of any shape.
        base: The older value that the reader has, of the same dtype and shape, or None.
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return tensor
    places = tensor.element_size()
    number_N = _bits(tensor.detach().cpu())
    if base is not None:
        difference_N = number_N - _bits(base.cpu())
        number_N = (difference_N << 1) ^ (difference_N >> (8 * places - 1))
    planes_PN = number_N.view(torch.uint8).view(-1, places).T.contiguous()
    compressor = _zstandard().ZstdCompressor(level=LEVEL)
    frames = [compressor.compress(plane_N.numpy().data) for plane_N in planes_PN]
    lengths = b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") for frame in frames)
    data = lengths + b"".join(frames)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) < tensor.nbytes else tensor


def is_packed(actual: TensorSpec, expected: TensorSpec) -> bool:
    """Return whether a tensor with this spec can be the packed form of one with the spec `expected`."""
    if not (DTYPES[expected.dtype].is_floating_point and actual.dtype == "U8" and len(actual.shape) == 1):
        return False
    return actual.shape[0] < expected.size_bytes


def unpacked(packed_B: torch.Tensor, spec: TensorSpec, base: torch.Tensor | None, who: str) -> torch.Tensor:
    """Return the tensor that `packed` was given.

    Raises:
        Malformed: bad-frame, before more bytes are allocated than `spec` has.
    """
    places, count = ITEM_BYTES[spec.dtype], math.prod(spec.shape)
    planes_PN = torch.empty((places, count), dtype=torch.uint8)
    data = packed_B.numpy().tobytes()
    start = places * LENGTH_BYTES
    for place in range(places):
        length = int.from_bytes(data[place * LENGTH_BYTES : (place + 1) * LENGTH_BYTES], "little")
        planes_PN[place] = torch.frombuffer(_bytes_of(data[start : start + length], count, who), dtype=torch.uint8)
        start += length
    if start != len(data):
        raise Malformed("bad-frame", f"{who}: the lengths of frames of zstd say {start} bytes; there are {len(data)}")
    number_N = planes_PN.T.contiguous().view(-1).view(_INTEGERS[places])
    if base is not None:
        number_N = _bits(base) + _unfolded(number_N)
    return number_N.view(DTYPES[spec.dtype]).view(spec.shape)


def _bytes_of(frame: bytes, count: int, who: str) -> bytearray:
    """Return the `count` bytes in a frame. The frame must declare this number before it is unpacked."""
    zstandard = _zstandard()
    try:
        if (size := zstandard.frame_content_size(frame)) != count:
            raise Malformed("bad-frame", f"{who}: a frame of zstd says that it holds {size} bytes; {count} were expected")
        return bytearray(zstandard.ZstdDecompressor().decompress(frame, max_output_size=count, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise Malformed("bad-frame", f"{who}: a frame of zstd cannot be read ({error}); send it again") from None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the N numbers of a tensor as integers of the same size."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def _unfolded(folded_N: torch.Tensor) -> torch.Tensor:
    """Return the differences that `_folded` was given. The mask removes the sign bits that the shift copies."""
    most = torch.iinfo(folded_N.dtype).max
    return ((folded_N >> 1) & most) ^ -(folded_N & 1)


def _zstandard() -> Any:
    """Import zstandard, an extra. Peers without it do not offer the encoding (attune.common.protocol.ENCODINGS)."""
    return importlib.import_module("zstandard")
