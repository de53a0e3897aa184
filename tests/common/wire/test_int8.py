"""int8 with error feedback: the error of a value, by hand and against float64, alone and over many rounds."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.exchange.encodings import decoded, encode, encoded_manifest
from attune.common.wire import int8
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.malformed import Malformed
from attune.common.wire.tensors import Tensors, manifest_of

LARGE = 2.0**100
numbers = st.lists(st.floats(-LARGE, LARGE, width=32), min_size=1, max_size=2 * int8.BLOCK + 3)


def arrived(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return each value as it arrives, and the scale of its block, in float64."""
    q_N, scale_K = int8.quantised(torch.tensor(values, dtype=torch.float32))
    assert q_N.dtype is torch.int8 and len(q_N) == len(values) and len(scale_K) == math.ceil(len(values) / int8.BLOCK)
    scales = scale_K.double().repeat_interleave(int8.BLOCK)[: len(values)]
    return int8.restored(q_N, scale_K).double().numpy(), scales.numpy()


@given(numbers)
def test_a_value_arrives_within_half_a_scale(values: list[float]) -> None:
    found, scales = arrived(values)
    error = np.abs(found - np.array(values, dtype=np.float32).astype(np.float64))
    assert np.all(error <= scales * (0.5 + 2.0**-15) + 2.0**-143)


def test_by_hand() -> None:
    """Use 254 as the largest, so that the scale is 2: halves go to the even number, and 127 is reached on both sides."""
    found, scales = arrived([254.0, -254.0, 3.0, 5.0, -1.0, 0.9, 0.0])
    assert scales.tolist() == [2.0] * 7
    assert found.tolist() == [254.0, -254.0, 4.0, 4.0, 0.0, 0.0, 0.0]


def test_blocks_have_scales_of_their_own() -> None:
    found, scales = arrived([1000.0] * int8.BLOCK + [0.001] * int8.BLOCK + [0.0])
    assert set(scales.tolist()) == {float(torch.tensor(1000.0) / 127), float(torch.tensor(0.001) / 127), 0.0}
    np.testing.assert_allclose(found, [1000.0] * int8.BLOCK + [0.001] * int8.BLOCK + [0.0], rtol=1e-6)


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.floats(-100, 100, width=32)), min_size=1, max_size=12))
def test_with_feedback_all_that_arrived_lacks_no_more_than_the_last_error(changes: list[tuple[float, float]]) -> None:
    """Compare sums: what was read = what should have been + the error of the last update, which is within half a scale.

    Without feedback the errors of 12 rounds may add up to 12 half scales.
    """
    owed: Tensors = {}
    meant, read, largest = np.zeros(2), np.zeros(2), 0.0
    for change in changes:
        tensors = {"w": torch.tensor(change, dtype=torch.float32)}
        written = encode(tensors, "int8", None, owed)
        meant += tensors["w"].double().numpy()
        read += int8.restored(written.tensors["w"], written.tensors[int8.SCALES]).double().numpy()
        largest = max(largest, float(written.tensors[int8.SCALES].max()))
        owed = written.errors
    rounding = 2.0**-21 * 200 * len(changes)
    assert np.all(np.abs(meant - read - owed["w"].double().numpy()) <= rounding)
    assert np.all(np.abs(meant - read) <= largest * (0.5 + 2.0**-15) + rounding)


def on_file(tmp_path: Path, tensors: Tensors) -> TensorFile:
    write_tensors(tmp_path / "blob.safetensors", tensors)
    return TensorFile(tmp_path / "blob.safetensors")


def some(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "z": torch.randn(30, 20, generator=generator),
        "a": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
        "one": torch.randn((), generator=generator),
        "n": torch.tensor([seed]),
        "d": torch.randn(3, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("based", [True, False])
def test_the_reader_has_what_the_writer_says_that_arrives(tmp_path: Path, based: bool) -> None:
    """Compare the writer's kept error with the difference to the reader's value, number by number."""
    tensors, base = some(1), some(2) if based else None
    written = encode(tensors, "int8", base)
    assert manifest_of(written.tensors) == encoded_manifest(manifest_of(tensors), "int8")
    with on_file(tmp_path, written.tensors) as file:
        found = dict(decoded(file, file.manifest, "int8", manifest_of(tensors), base, "kiel"))
    assert manifest_of(found).items() == manifest_of(tensors).items()
    assert torch.equal(found["n"], tensors["n"]) and torch.equal(found["d"], tensors["d"])
    assert written.errors.keys() == {"z", "a", "empty", "one"}
    for name, error in written.errors.items():
        assert torch.equal(tensors[name] - found[name], error)


def test_an_update_that_is_not_finite_spoils_none_that_follow() -> None:
    written = encode({"w": torch.tensor([math.inf, 1.0, math.nan])}, "int8")
    assert not written.tensors[int8.SCALES].isfinite().all()
    assert written.errors["w"].isfinite().all()


def test_a_model_with_a_tensor_of_that_name_is_refused() -> None:
    with pytest.raises(Malformed, match="give it another name"):
        encoded_manifest(manifest_of({int8.SCALES: torch.ones(1)}), "int8")
