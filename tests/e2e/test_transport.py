"""How parts travel, in real processes: within messages or by themselves, as they are or in half the bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Federation, run_to_the_end, tabular_shard

FLAGS = ("--method", "fedavg", "--model", "dnn", "--rounds", "2", "--seed", "3")
Ended = tuple[dict[str, bytes], list[dict[str, str]]]


@pytest.fixture(scope="module")
def ended(federation_at: Callable[[str], Federation], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """(every file of the export, the rows of the metrics) of a federation of two devices with these flags."""
    folder = tmp_path_factory.mktemp("shards")
    shards = [tabular_shard(folder / name, seed) for seed, name in enumerate(("ada", "bob"))]

    def run(*flags: str) -> Ended:
        federation = federation_at("transport")
        run_to_the_end(federation, shards, *FLAGS, *flags)
        return federation.export(), federation.metrics()

    return run


@pytest.fixture(scope="module")
def usual(ended: Callable[..., Ended]) -> Ended:
    return ended()


def test_what_travels_within_messages_gives_the_same_bits(ended: Callable[..., Ended], usual: Ended) -> None:
    inline, _ = usual
    apart, _ = ended("--set", "server.inline_bytes=0")
    tensors = sorted(name for name in inline if name.endswith(".safetensors"))
    assert tensors
    assert {name: inline[name] for name in tensors} == {name: apart[name] for name in tensors}


def test_half_the_bytes_go_up_if_parts_are_handed_in_as_bfloat16(ended: Callable[..., Ended], usual: Ended) -> None:
    _, half = ended("--set", "round.encoding=bf16")
    up = [{int(row["bytes_up"]) for row in rows if row["work"] == "train"} for rows in (usual[1], half)]
    [[exact], [lossy]] = up
    assert 0.5 < lossy / exact < 0.65, "half the numbers, and the same names and shapes"
