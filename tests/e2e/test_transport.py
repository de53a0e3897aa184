"""How parts travel, in real processes: within messages or by themselves, as they are or in half the bytes."""

from __future__ import annotations

from tests.e2e.harness import Federation, run_to_the_end, tabular_shard

FLAGS = ("--method", "fedavg", "--model", "dnn", "--rounds", "2", "--seed", "3")


def ended(tmp_path, which: str, *flags: str) -> tuple[dict[str, bytes], list[dict[str, str]]]:
    """(every file of the export, the rows of the metrics) of a federation of two devices."""
    with_shards = [tabular_shard(tmp_path / which / name, seed) for seed, name in enumerate(("ada", "bob"))]
    federation = Federation(tmp_path / which / "homes")
    try:
        run_to_the_end(federation, with_shards, *FLAGS, *flags)
        return federation.export(), federation.metrics()
    finally:
        federation.close()


def test_what_travels_within_messages_gives_the_same_bits(tmp_path) -> None:
    inline, _ = ended(tmp_path, "inline")
    apart, _ = ended(tmp_path, "apart", "--set", "server.inline_bytes=0")
    tensors = sorted(name for name in inline if name.endswith(".safetensors"))
    assert tensors
    assert {name: inline[name] for name in tensors} == {name: apart[name] for name in tensors}


def test_half_the_bytes_go_up_if_parts_are_handed_in_as_bfloat16(tmp_path) -> None:
    _, whole = ended(tmp_path, "whole")
    _, half = ended(tmp_path, "half", "--set", "round.encoding=bf16")
    up = [{int(row["bytes_up"]) for row in rows if row["work"] == "train"} for rows in (whole, half)]
    [[exact], [lossy]] = up
    assert 0.5 < lossy / exact < 0.65, "half the numbers, and the same names and shapes"
