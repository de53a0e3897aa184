"""Transport of parts in real processes: within messages or as blobs, as they are or encoded in fewer bytes."""

import csv
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import attune
from attune.common.config import load_settings
from attune.common.protocol import ENCODINGS
from tests.e2e.harness import FederationAt, run_to_the_end, tabular_shard

FLAGS = ("--method", "fedavg", "--model", "dnn", "--rounds", "2", "--seed", "3")
Ended = tuple[dict[str, bytes], list[dict[str, str]]]


@pytest.fixture(scope="module")
def ended(federation_at: FederationAt, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Run a federation of two devices with these flags. Return the files of its export, and the rows of its metrics."""
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


def simulated(folder: Path, shards: list[Path], *settings: str) -> Ended:
    """Simulate the federation without faults. Return the files of its export, and the rows of its metrics."""
    result = attune.simulate({shard.name: shard for shard in shards}, settings=load_settings(None, settings, {}))
    saved = result.save(folder)
    files = {str(path.relative_to(saved)): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    rows = list(csv.DictReader(files["metrics.csv"].decode().splitlines()))
    return {name: data for name, data in files.items() if not name.startswith("models/")}, rows


def test_what_travels_within_messages_gives_the_same_bits(ended: Callable[..., Ended], usual: Ended) -> None:
    inline, _ = usual
    apart, _ = ended("--set", "server.inline_bytes=0")
    tensors = sorted(name for name in inline if name.endswith(".safetensors"))
    assert tensors
    assert {name: inline[name] for name in tensors} == {name: apart[name] for name in tensors}


@pytest.mark.parametrize(("encoding", "share"), [("bf16", 0.5), ("int8", 0.25)])
def test_fewer_bytes_go_up_in_an_encoding(ended: Callable[..., Ended], usual: Ended, encoding: str, share: float) -> None:
    ways = [usual[1], ended("--set", f"round.encoding={encoding}")[1]]
    [[exact], [lossy]] = [{int(row["bytes_up"]) for row in rows if row["work"] == "train"} for rows in ways]
    assert share < lossy / exact < share + 0.2, "fewer numbers, and the same names and shapes"


def test_what_rounding_lost_is_made_up_for_once_whoever_is_killed(federation_at: FederationAt, tmp_path: Path) -> None:
    """Kill a device between commit and upload of its update, and the server between its commit and the receipt."""
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob"))]
    settings = ("method.name=fedavg", "model.name=dnn", "round.rounds=3", "seed=3", "round.encoding=int8")
    calm, _ = simulated(tmp_path / "calm", shards, *settings)
    flags = [word for setting in (*settings, "server.threads=1") for word in ("--set", setting)]
    killed = federation_at("killed")
    server = killed.server("--exit-when-done", "--min-clients", "2", *flags, fault="server:2:update-accepted=kill")
    ada = killed.device(shards[0], fault="ada:1:order-committed=kill")
    bob = killed.device(shards[1])
    assert ada.code() == -signal.SIGKILL
    ada = killed.device(shards[0])
    assert server.code() == -signal.SIGKILL
    server = killed.server("--exit-when-done")
    assert [process.code() for process in (ada, bob, server)] == [0, 0, 0], server.text
    ends = [{name: data for name, data in files.items() if name.endswith(".safetensors")} for files in (calm, killed.export())]
    assert ends[0] and ends[0] == ends[1]


needs_zstd = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")


@needs_zstd
@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_a_change_leads_to_the_same_bits_whoever_is_killed(method: str, federation_at: FederationAt, tmp_path: Path) -> None:
    """Kill the server when a state is committed and not announced; kill a device when it has fetched a change.

    One method has a common value; another one generates a value for each device, of which a restarted server has no older one.
    """
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob"))]
    settings = (f"method.name={method}", "model.name=dnn", "round.rounds=4", "seed=3", "model.hidden=[100]", "train.lr=0.003")
    calm, rows = simulated(tmp_path / "calm", shards, *settings)
    flags = [word for setting in (*settings, "server.threads=1") for word in ("--set", setting)]
    killed = federation_at("killed")
    changes = ("--set", "round.served=zstd", "--set", "server.inline_bytes=0")
    server = killed.server("--exit-when-done", "--min-clients", "2", *flags, *changes, fault="server:2:settled=kill")
    ada = killed.device(shards[0], fault="ada:4:order-fetched=kill")
    bob = killed.device(shards[1])
    assert server.code() == -signal.SIGKILL
    server = killed.server("--exit-when-done")
    assert ada.code() == -signal.SIGKILL
    ada = killed.device(shards[0])
    assert [process.code() for process in (ada, bob, server)] == [0, 0, 0], server.text
    ends = [{name: data for name, data in files.items() if name.endswith(".safetensors")} for files in (calm, killed.export())]
    assert ends[0] and ends[0] == ends[1]
    whole, fewer = (
        {row["round"]: int(row["bytes_down"]) for row in each if (row["client"], row["work"]) == ("bob", "train")}
        for each in (rows, killed.metrics())
    )
    assert fewer["2"] < 0.95 * fewer["1"] < fewer["1"] < whole["1"] == whole["2"], "a change, and all of it in fewer bytes"


@needs_zstd
def test_every_bit_arrives_in_fewer_bytes_both_ways(ended: Callable[..., Ended], usual: Ended) -> None:
    packed = ended("--set", "round.encoding=zstd")
    tensors = sorted(name for name in usual[0] if name.endswith(".safetensors"))
    assert tensors and {name: packed[0][name] for name in tensors} == {name: usual[0][name] for name in tensors}
    for way in ("bytes_up", "bytes_down"):
        plain, fewer = (sum(int(row[way]) for row in rows) for rows in (usual[1], packed[1]))
        assert 0.5 < fewer / plain < 0.97
