"""Receiving into memory: one buffer, and every promise of the peer checked; tensors against the expected ones."""

import pytest
import safetensors.torch
import torch

from attune.common.errors import LimitExceeded
from attune.common.wire import malformed as bad
from attune.common.wire.digest import digest_of
from attune.common.wire.header import TensorSpec, check_manifest
from attune.common.wire.tensors import check_finite, manifest_of
from attune.fedclient.link.transfer import ReceiveBuffer
from tests.raising import malformed


def received(data: bytes, frame_bytes: int = 100) -> ReceiveBuffer:
    buffer = ReceiveBuffer(len(data), digest_of(data), len(data), "device kiel")
    for start in range(0, len(data), frame_bytes):
        buffer.write(data[start : start + frame_bytes])
    return buffer


@pytest.mark.parametrize("frame_bytes", [1, 100, 1 << 20])
def test_frames_become_views_of_one_buffer(zoo, same_bits, frame_bytes):
    tensors = received(safetensors.torch.save(zoo), frame_bytes).finish(manifest_of(zoo))
    same_bits(tensors, zoo)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}) == 1


def test_announcements_are_checked_before_anything_is_allocated():
    digest = digest_of(b"")
    for size in (101, 1 << 62, -1):
        with pytest.raises(LimitExceeded, match="device kiel"):
            ReceiveBuffer(size, digest, 100, "device kiel")
    for wrong in ("", digest.upper(), digest + "0", "../../../etc/passwd", digest[:63] + "\n"):
        with malformed("bad-digest"):
            ReceiveBuffer(10, wrong, 100)


def test_a_frame_too_many_is_refused_and_changes_nothing():
    data = safetensors.torch.save({"w": torch.ones(2)})
    buffer = received(data)
    with pytest.raises(LimitExceeded, match=f"{len(data) + 1} bytes after it had announced {len(data)}"):
        buffer.write(b"x")
    assert buffer.finish()["w"].tolist() == [1.0, 1.0]


def test_a_missing_end_and_a_flipped_bit():
    data = safetensors.torch.save({"w": torch.ones(2)})
    buffer = ReceiveBuffer(len(data), digest_of(data), 1000)
    buffer.write(data[:-1])
    with pytest.raises(bad.Truncated, match=f"go on at offset {len(data) - 1}"):
        buffer.finish()
    buffer.write(bytes([data[-1] ^ 1]))
    with pytest.raises(bad.DigestMismatch):
        buffer.finish()


def test_a_right_digest_does_not_make_a_right_blob():
    with malformed("header-too-large"):
        received(b"\xff" * 50).finish()
    with malformed("wrong-dtype", match="device kiel: 'w' is F32; F64 was expected"):
        received(safetensors.torch.save({"w": torch.ones(2)})).finish({"w": TensorSpec("F64", (2,))})
    data = safetensors.torch.save({"flags": torch.tensor([True, False])})
    with malformed("not-boolean"):
        received(data[:-1] + b"\x02").finish()


@pytest.mark.parametrize(
    ("kind", "actual", "match"),
    [
        ("missing-tensor", {"a": TensorSpec("F32", (2,))}, "'b' is missing"),
        ("missing-tensor", {}, "'a' and 1 more are missing"),
        (
            "unexpected-tensor",
            {"a": TensorSpec("F32", (2,)), "b": TensorSpec("I64", ()), "c": TensorSpec("U8", ())},
            "'c' is not",
        ),
        ("wrong-dtype", {"a": TensorSpec("F16", (2,)), "b": TensorSpec("I64", ())}, "'a' is F16; F32"),
        ("wrong-shape", {"a": TensorSpec("F32", (2,)), "b": TensorSpec("I64", (1,))}, r"'b' has shape \[1\]; \[\]"),
    ],
)
def test_manifests_are_compared_by_name(kind, actual, match):
    expected = {"a": TensorSpec("F32", (2,)), "b": TensorSpec("I64", ())}
    with malformed(kind, match=f"device kiel: {match}"):
        check_manifest(actual, expected, "device kiel")
    check_manifest(dict(reversed(expected.items())), expected, "device kiel")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_non_finite_values_are_counted(dtype):
    tensor = torch.zeros(10, 60_000, dtype=dtype)
    tensor[0] = torch.finfo(dtype).max
    check_finite("w", tensor, "device kiel")
    tensor[9, 5] = -torch.inf
    with malformed("not-finite", match="device kiel: 'w' has 0 NaN and 1 infinite of 600000 values"):
        check_finite("w", tensor, "device kiel")
    tensor[0, 3] = tensor[9, 59_999] = torch.nan
    with malformed("not-finite", match="2 NaN and 1 infinite"):
        check_finite("w", tensor.T, "device kiel")
    check_finite("n", torch.tensor([1]), "x")
    check_finite("none", torch.empty(0, dtype=dtype), "x")
    with malformed("not-finite"):
        check_finite("scalar", torch.tensor(torch.nan, dtype=dtype), "x")
