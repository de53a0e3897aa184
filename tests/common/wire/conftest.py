"""Fixtures: every dtype with random bits, files of raw headers, and the bytes that the safetensors package writes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attune.common.wire.tensors import DTYPES

Parse = Callable[[bytes], Any]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return any bit pattern of the dtype, including NaN payloads."""
    generator = torch.Generator().manual_seed(seed)
    item = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * item,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.fixture(scope="session")
def zoo() -> dict[str, torch.Tensor]:
    """Return every dtype, as vector, matrix, scalar and empty; names that need escaping; another order than the file's."""
    tensors = {}
    for place, (name, dtype) in enumerate(DTYPES.items()):
        for shape in [(3,), (2, 5), (), (0,), (4, 0, 2)]:
            tensors[f"{name}.{'x'.join(map(str, shape)) or 'scalar'}"] = random_tensor(dtype, shape, place)
    tensors['quote"back\\slash/é'] = torch.arange(6.0).reshape(2, 3)
    tensors["a"] = torch.tensor(7)
    return tensors


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]:
    """Return a function that asserts equal names, dtypes, shapes and bits (NaN equals the same NaN)."""

    def check(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
        assert left.keys() == right.keys()
        for name, expected in right.items():
            actual = left[name]
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
            assert actual.contiguous().reshape(-1).view(torch.uint8).equal(expected.contiguous().reshape(-1).view(torch.uint8))

    return check


@pytest.fixture(scope="session")
def blob_of() -> Callable[..., bytes]:
    """Return a function that makes a blob with any header, valid or not: a JSON value or raw text, then `data` zero bytes."""

    def build(header: Any, data: int = 0) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + bytes(data)

    return build


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "peer.safetensors"
        path.write_bytes(data)
        return path

    return write
