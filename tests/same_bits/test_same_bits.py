"""Comparison of `make same-bits`: a changed number, a missing file and a failed case are named."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from attune.common.methods.registry import names
from tests.same_bits.__main__ import compare
from tests.same_bits.driver import METHODS, NEWER, OVER_THE_NETWORK, VARIANTS, of_json, of_tensors


def test_every_method_is_run() -> None:
    assert sorted([*METHODS, *NEWER]) == names()
    assert {*OVER_THE_NETWORK, *(method for method, _, _ in VARIANTS.values())} <= set(METHODS)


def test_equal_digests_are_no_difference() -> None:
    assert compare({"case": "a", "digests": {"x": "1"}}, {"case": "a", "digests": {"x": "1"}}, "r") == []


@pytest.mark.parametrize(
    ("now", "then", "said"),
    [
        ({"digests": {"x": "1", "y": "1"}}, {"digests": {"x": "1", "y": "2"}}, ["differs: y"]),
        ({"digests": {"x": "1"}}, {"digests": {"x": "1", "y": "2"}}, ["only in r: y"]),
        ({"digests": {"x": "1", "y": "2"}}, {"digests": {"x": "1"}}, ["only in the working tree: y"]),
        ({"digests": {}}, {"digests": {}}, ["nothing to compare: the case has left no digests"]),
        ({"failed": "b"}, {"digests": {"x": "1"}}, ["the working tree failed: b"]),
        ({"failed": "b"}, {"failed": "b"}, ["the working tree failed: b", "r failed: b"]),
    ],
)
def test_what_differs_is_named(now: dict[str, object], then: dict[str, object], said: list[str]) -> None:
    assert compare(now, then, "r") == said


def test_the_digest_of_tensors_knows_values_names_shapes_and_types_alone(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.float32)
    written = [
        {"a": value, "b": value},
        {"a": value, "b": np.nextafter(value, np.float32(9))},
        {"a": value, "c": value},
        {"a": value, "b": value.reshape(2, 3)},
        {"a": value, "b": value.view(np.int32)},
    ]
    for number, tensors in enumerate(written):
        save_file(tensors, tmp_path / str(number))
    save_file(written[0], tmp_path / "described", {"made": "later"})
    assert of_tensors(tmp_path / "described") == of_tensors(tmp_path / "0")
    assert len({of_tensors(tmp_path / str(number)) for number in range(len(written))}) == len(written)


def test_times_in_json_are_no_difference_and_numbers_are() -> None:
    plain, later, other = ({"loss": loss, "seconds": seconds} for loss, seconds in ((1.0, 2.0), (1.0, 3.0), (1.5, 2.0)))
    assert of_json(json.dumps(plain).encode()) == of_json(json.dumps(later).encode())
    assert of_json(json.dumps(plain).encode()) != of_json(json.dumps(other).encode())
