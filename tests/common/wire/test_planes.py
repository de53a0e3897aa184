"""zstd: every bit comes back, no tensor becomes larger, and no frame makes more bytes than its tensor has."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.exchange.encodings import decoded, encode
from attune.common.wire.header import TensorSpec
from attune.common.wire.malformed import Malformed
from attune.common.wire.planes import packed, unpacked
from attune.common.wire.tensors import Tensors, manifest_of, spec_of

zstandard = pytest.importorskip("zstandard")
FLOATS = {"F64": (torch.int64, 64), "F32": (torch.int32, 32), "F16": (torch.int16, 16), "BF16": (torch.int16, 16)}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@given(st.data(), st.sampled_from(sorted(FLOATS)), st.booleans())
def test_every_bit_comes_back(data: st.DataObject, dtype: str, based: bool) -> None:
    """Use any bits: NaN with any payload, both zeros, subnormal and infinite numbers."""
    whole, size = FLOATS[dtype]
    pattern = st.integers(-(1 << (size - 1)), (1 << (size - 1)) - 1)
    few = data.draw(st.lists(st.tuples(pattern, pattern), min_size=1, max_size=20))
    tensor, base = (
        torch.tensor([pair[i] for pair in few] * 20, dtype=whole).view(DTYPES[dtype]).view(-1, 2, len(few)) for i in (0, 1)
    )
    held = base if based else None
    found = packed(tensor, held)
    spec = spec_of("w", tensor)
    if found.dtype is torch.uint8:
        assert found.nbytes < tensor.nbytes
        found = unpacked(found, spec, held, "kiel")
    assert spec_of("w", found) == spec and torch.equal(bits(found), bits(tensor))


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_what_has_moved_little_takes_fewer_bytes() -> None:
    base = weights()
    sizes = [packed(weights() * (1 + change), base).nbytes / base.nbytes for change in (1e-1, 1e-3, 1e-5, 0.0)]
    alone = packed(base, None).nbytes / base.nbytes
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.02
    assert 0.8 < alone < 0.95, "sign and exponent of numbers without an order, and 3 bytes of noise"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randint(-(1 << 31), (1 << 31) - 1, (512,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).view(
            torch.float32
        ),
        torch.zeros(0, 4),
        torch.tensor(1.0),
        torch.zeros(100, dtype=torch.int64),
        torch.zeros(100, dtype=torch.uint8),
        torch.zeros(100, dtype=torch.bool),
    ],
    ids=["noise", "empty", "scalar", "integers", "bytes", "booleans"],
)
def test_what_does_not_become_smaller_is_written_as_it_is(tensor: torch.Tensor) -> None:
    assert packed(tensor, None) is tensor


def through(tensors: Tensors, base: Tensors | None) -> Tensors:
    written = encode(tensors, "zstd", base).tensors
    return dict(decoded(written, manifest_of(written), "zstd", manifest_of(tensors), base, "kiel"))


@pytest.mark.parametrize("based", [True, False])
def test_a_whole_part_comes_back(based: bool) -> None:
    tensors = {"w": weights(), "n": torch.tensor([3]), "bytes": torch.zeros(50, dtype=torch.uint8), "none": torch.zeros(0)}
    base = {name: tensor * 0.9 if name == "w" else tensor for name, tensor in tensors.items()} if based else None
    found = through(tensors, base)
    assert all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in tensors.items())
    assert manifest_of(found) == manifest_of(tensors)


def frames(*each: bytes) -> torch.Tensor:
    data = b"".join(len(frame).to_bytes(4, "little") for frame in each) + b"".join(each)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def compressed(count: int, said: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=said).compress(bytes(count))


def understated() -> bytes:
    """Return a frame of 1 MiB that claims to have 256 bytes."""
    frame = bytearray(compressed(1 << 20))
    assert frame[4] & 0xE0 == 0xA0, "four bytes of size, behind the descriptor"
    frame[5:9] = (256).to_bytes(4, "little")
    return bytes(frame)


GOOD, SPEC = compressed(256), TensorSpec("F32", (256,))


WRONG: dict[str, Callable[[], torch.Tensor]] = {
    "bomb": lambda: frames(GOOD, GOOD, GOOD, compressed(1 << 26)),
    "unsaid": lambda: frames(GOOD, GOOD, GOOD, compressed(1 << 20, said=False)),
    "understated": lambda: frames(GOOD, GOOD, GOOD, understated()),
    "short": lambda: frames(GOOD, GOOD, GOOD, compressed(255)),
    "two-frames": lambda: frames(GOOD, GOOD, GOOD, GOOD + GOOD),
    "cut": lambda: frames(GOOD, GOOD, GOOD, GOOD[:-1]),
    "no-frame": lambda: frames(GOOD, GOOD, GOOD, b""),
    "three": lambda: frames(GOOD, GOOD, GOOD),
    "more-bytes": lambda: torch.cat([frames(GOOD, GOOD, GOOD, GOOD), torch.zeros(1, dtype=torch.uint8)]),
    "huge-lengths": lambda: torch.full((16,), 255, dtype=torch.uint8),
    "tiny": lambda: torch.zeros(3, dtype=torch.uint8),
    "nothing": lambda: torch.zeros(0, dtype=torch.uint8),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_frame_that_holds_something_else_is_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(Malformed) as caught:
        unpacked(make(), SPEC, None, "kiel")
    assert caught.value.kind == "bad-frame" and str(caught.value).startswith("kiel: ")


@given(st.binary(max_size=200), st.binary(max_size=64))
def test_whatever_comes_it_is_a_tensor_or_refused(noise: bytes, tail: bytes) -> None:
    """Use any bytes, and any bytes after three right frames."""
    lengths = b"".join(len(each).to_bytes(4, "little") for each in (GOOD, GOOD, GOOD, tail))
    for data in (noise, lengths + GOOD * 3 + tail):
        try:
            found = unpacked(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), SPEC, None, "kiel")
        except Malformed as refused:
            assert refused.kind == "bad-frame"
        else:
            assert spec_of("w", found) == SPEC


def test_bytes_that_are_no_fewer_than_the_tensor_has_are_no_packed_tensor() -> None:
    tensors = {"w": weights()}
    for wrong in (torch.zeros(weights().nbytes, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(Malformed) as caught:
            list(decoded({"w": wrong}, manifest_of({"w": wrong}), "zstd", manifest_of(tensors), None, "kiel").values())
        assert caught.value.kind == "wrong-dtype"
