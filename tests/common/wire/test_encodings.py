"""Lossy encodings: the tensors that they change, and the error of a value, against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.exchange.encodings import encode, encoded_manifest
from attune.common.protocol import ENCODINGS
from attune.common.wire.tensors import manifest_of

LARGEST_BF16 = Fraction(255, 128) * 2**127


def sent(value: float) -> float:
    return float(encode({"x": torch.tensor([value], dtype=torch.float32)}, "bf16").tensors["x"].float()[0])


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_value_arrives_within_the_bound(value: float) -> None:
    arrived = sent(value)
    if math.isinf(arrived):
        assert abs(Fraction(value)) > LARGEST_BF16
        return
    error = abs(Fraction(arrived) - Fraction(value))
    assert error <= max(abs(Fraction(value)) / 2**8, Fraction(1, 2**134))


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # half way between 1 and 1 + 2^-7: rounded to even
        (1 + 3 * 2**-8, 1 + 2**-6),
        (-(1 + 2**-8 + 2**-16), -(1 + 2**-7)),
        (float(np.float32(3.4028235e38)), math.inf),
    ],
)
def test_values_are_rounded_to_the_nearest(value: float, arrives: float) -> None:
    assert sent(value) == arrives


def test_only_float32_is_changed() -> None:
    tensors = {
        "w": torch.tensor([1.0, 2.0]),
        "d": torch.tensor([0.1], dtype=torch.float64),
        "n": torch.tensor([7]),
        "h": torch.tensor([0.1], dtype=torch.float16),
    }
    written = encode(tensors, "bf16").tensors
    assert manifest_of(written) == encoded_manifest(manifest_of(tensors), "bf16")
    assert {name for name in tensors if written[name] is not tensors[name]} == {"w"}
    assert written["w"].dtype is torch.bfloat16
    assert all(one is tensors[name] for name, one in encode(tensors, "").tensors.items())


def test_every_name_of_the_protocol_is_an_encoding() -> None:
    for encoding in ENCODINGS:
        assert encode({}, encoding).tensors == encoded_manifest({}, encoding) == {}
    with pytest.raises(KeyError):
        encode({"w": torch.ones(1)}, "int4")
