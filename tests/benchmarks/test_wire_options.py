"""Claims of the benchmarks of the wire: each way differs by what it names, and sizes are those of the bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest
import torch

from benchmarks import encoding_speed, encodings, wire_options
from benchmarks.round import Case


def test_larger_frames_are_options_of_both_sides(monkeypatch):
    made = []
    monkeypatch.setattr(grpc.aio, "server", lambda *given, options, **named: made.append(options))
    monkeypatch.setattr(grpc.aio, "secure_channel", lambda target, credentials, options: made.append(options))
    exec(wire_options.WAYS["larger frames"], {})  # noqa: S102 - as sitecustomize does
    grpc.aio.server(options=[("own", 1)])
    grpc.aio.secure_channel("here", None, [("own", 1)])
    larger = [("grpc.http2.max_frame_size", 4 << 20), ("grpc.http2.write_buffer_size", 4 << 20)]
    assert made == [[("own", 1), *larger]] * 2


def test_uvloop_is_installed_by_its_way(monkeypatch):
    installed = []
    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(install=lambda: installed.append(True)))
    exec(wire_options.WAYS["uvloop"], {})  # noqa: S102 - as sitecustomize does
    assert installed == [True]


@pytest.mark.parametrize("way", wire_options.WAYS)
def test_all_processes_of_a_way_load_it(way, monkeypatch, tmp_path):
    seen = []

    def measure(case):
        folder, uvloop, rest = os.environ["PYTHONPATH"].split(os.pathsep, 2)
        seen.append(((Path(folder) / "sitecustomize.py").read_text(), uvloop, rest))
        return {"median_s": 0.25, "cpu_server_s": 0.5, "cpu_devices_s": 0.125}

    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(wire_options, "measure", measure)
    assert wire_options.run(Case(1, 10, 2, 1), way, tmp_path) == {"wall_s": 0.25, "processor_s": 0.625}
    assert seen == [(wire_options.WAYS[way], str(tmp_path), "before")]
    assert os.environ["PYTHONPATH"] == "before"


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
