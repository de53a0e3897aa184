"""Benchmarks of encodings: sizes are those of the bytes, and rows that are there stay."""

from __future__ import annotations

import pytest
import torch

from benchmarks import encoding_speed, encodings


@pytest.mark.parametrize(("encoding", "share"), [("bf16", 0.5), ("int8", 0.25 * (1 + 1 / 64)), ("zstd", None)])
def test_the_bytes_of_an_encoding_are_a_share_of_the_plain_ones(encoding, share):
    draw = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(256, 256, generator=draw) * 0.05}
    tensors = {"w": base["w"] + 0.0005 * torch.randn(256, 256, generator=draw)}
    found = encoding_speed.measure(encoding, tensors, base)
    assert found["encoding"] == encoding and found["write_ms_per_mib"] >= 0 and found["read_ms_per_mib"] >= 0
    assert found["bytes"] == pytest.approx(share, abs=0.002) if share else 0.5 < found["bytes"] < 1.0


def test_rows_of_encodings_that_are_there_are_not_measured_again(tmp_path):
    out = tmp_path / "encodings.csv"
    assert encodings.done(out) == set()
    task = encodings.TASKS[1].name
    with encodings.table(out, encodings.COLUMNS, append=True) as write:
        write(dict.fromkeys(encodings.COLUMNS, 0) | {"task": task, "encoding": "int8 up, zstd down", "seed": 1})
    assert encodings.done(out) == {(task, "int8 up, zstd down", "1")}
