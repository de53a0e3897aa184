"""`fedserver --lab ray` on Ray clusters of this machine: `make ray`. Skipped if Ray is not installed."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.features.cluster.server import RayLab, prepare_ray
from attune.features.cluster.worker_pool import PoolCall, WorkerPool
from attune.fedserver.home import ServerHome
from benchmarks.rough import Proxy
from tests import engines
from tests.e2e.harness import Federation, digit_shards, run_to_the_end, until
from tests.features.cluster import counted_server
from tests.features.cluster.conftest import KINDS, Played, rounds
from tests.features.cluster.ray_head import Head, descendants, free_port
from tests.features.cluster.test_store_round import InStore
from tests.plugins.installed import NAME, install, with_package

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make ray")
CPUS = 4
prepare_ray()
SMALL = (
    "--rounds",
    "3",
    *(f"--set={each}" for each in ("train.local_epochs=1", "model.width=8", "model.depth=2", "model.heads=2")),
)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    found = Head(tmp_path_factory.mktemp("head"), CPUS)
    yield found
    found.stop()


@pytest.fixture
def pool(head: Head, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Make the pool of the test: two workers in a cluster of their own, four on a cluster's node, others from outside of it."""
    workers = request.param
    if workers == 4:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.port}")
    from attune.features.cluster.ray_cluster import connect

    found = connect(RayLab("ray" if workers in (2, 4) else head.address, workers), threads=1)
    yield found
    found.close()


def pids_of(pool: WorkerPool) -> list[int]:
    return [int(member.worker.call("versions").result().pid) for member in pool.members]


@pytest.mark.parametrize("pool", [1, 2, 3, 4], indirect=True)
def test_any_number_of_ray_workers_gives_the_bits_of_one_process(pool: WorkerPool) -> None:
    assert len({*pids_of(pool), os.getpid()}) == 1 + len(pool.members)
    for name, kind in KINDS.items():
        alone, spread = Played(*kind), Played(*kind, pool)
        for number, samples in enumerate(rounds()):
            assert spread.play(number, samples) == alone.play(number, samples), name
            assert spread.commit() == alone.commit(), name
    assert pool.usable


@pytest.mark.engines
@pytest.mark.parametrize("pool", [2, 3], indirect=True)
def test_ray_workers_read_and_write_s3_by_themselves(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the keys to this process alone: the workers began before, and know S3 by their calls only."""
    storage = engines.remote_storage(tmp_path)
    storage.create()
    monkeypatch.setattr(storage.blobs._cache, "_fetched", lambda *_: pytest.fail("the server fetches an object"))
    for name, kind in KINDS.items():
        alone, spread = Played(*kind), InStore(storage, *kind, pool)
        for number, samples in enumerate(rounds()[:2]):
            assert spread.play(number, samples) == alone.play(number, samples), name
            assert spread.commit() == alone.commit(), name
        storage.blobs.remove([*storage.blobs.names("state/"), *storage.blobs.names("inbox/")])
    assert pool.usable
    aio.run(storage.close())


@pytest.mark.parametrize("pool", [2, 3], indirect=True)
@pytest.mark.parametrize("method", ["partial", "apply"])
def test_a_worker_that_is_killed_in_a_step_is_replaced(
    pool: WorkerPool, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pids = dict(zip(pool.members, pids_of(pool), strict=True))
    killed: list[int] = []
    start = PoolCall._start

    def started(call: PoolCall) -> None:
        """Start a call, and kill its worker, while the call is on its way or in progress."""
        start(call)
        if call._method == method and not killed:
            killed.append(pids[call._member])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(PoolCall, "_start", started)
    alone, spread = Played("attention", {}), Played("attention", {}, pool)
    for number, samples in enumerate(rounds()):
        spread.play(number, samples)
        alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert pool.usable and killed
    assert "is replaced, and its step done again" in caplog.text
    assert len(set(pids.values()) & set(pids_of(pool))) == len(pids) - 1 and killed[0] not in pids_of(pool)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_worker_that_is_silent_counts_as_dead(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from attune.features.cluster import ray_cluster

    alone, spread = Played("attention", {}), Played("attention", {}, pool)
    monkeypatch.setattr(ray_cluster, "SILENT_S", 10.0)
    for member in pool.members:
        until(lambda worker=member.worker: worker.check_heartbeat() or worker._patience_s == 10, "a first heartbeat")
    silent = pids_of(pool)[0]
    os.kill(silent, signal.SIGSTOP)
    for each in (alone, spread):
        each.play(0, rounds()[0])
    assert spread.commit() == alone.commit()
    assert pool.usable and silent not in pids_of(pool) and "no sign of life for 10 s" in caplog.text


def digests(federation: Federation) -> dict[str, str]:
    return {f"{slot.part}/{slot.key}": slot.digest for slot in ServerHome(federation.home).snapshot().slots}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("digits"), 3, 24, 8)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, shards: list[Path]) -> dict[str, dict[str, str]]:
    """Return the slots of federations whose server computes everything itself."""
    found = {}
    for method in METHODS:
        federation = Federation(tmp_path_factory.mktemp("alone"))
        run_to_the_end(federation, shards, "--method", method, *SMALL)
        found[method] = digests(federation)
    return found


METHODS = ("fedmcsa", "fedtp+mcsa")


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_over_mutual_tls_has_the_same_slots_on_a_cluster(
    method: str, head: Head, shards: list[Path], expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    federation = Federation(tmp_path)
    try:
        server, _ = run_to_the_end(federation, shards, "--method", method, "--lab", head.address, "--lab-workers", "3", *SMALL)
        assert "rounds are carried out by 3 workers" in server.text
        assert "is not used any more" not in server.text
        assert digests(federation) == expected[method]
    finally:
        federation.close()


def test_a_federation_by_another_package_has_the_same_slots_on_a_cluster(shards: list[Path], tmp_path: Path) -> None:
    site, slots = install(tmp_path / "plugin"), []
    for name, lab in {"alone": (), "workers": ("--lab", "ray", "--lab-workers", "2")}.items():
        federation = Federation(tmp_path / name)
        federation.environment = with_package(federation.environment, site)
        try:
            flags = ("--method", "fedadam", "--model", "mlr", *lab, "--rounds", "2", "--set", "train.local_epochs=1")
            server, _ = run_to_the_end(federation, shards, *flags, device_flags=("--allow-plugin", NAME))
            assert "is not used any more" not in server.text
            slots.append(digests(federation))
        finally:
            federation.close()
    assert slots[0] == slots[1]


@pytest.mark.engines
def test_with_s3_the_bytes_of_a_federation_pass_the_server_by(shards: list[Path], tmp_path: Path) -> None:
    """Train two devices that reach S3 themselves, as workers do: the server reads updates to check them, and no more."""
    pytest.importorskip("botocore")
    from attune.features.remote.object_source import HEAD_BYTES

    flags = (
        "--method",
        "fedmcsa",
        "--rounds",
        "3",
        "--model",
        "dnn",
        "--set",
        "model.hidden=[3000]",
        "--set",
        "server.threads=1",
    )
    alone = Federation(tmp_path / "alone")
    run_to_the_end(alone, shards[:2], *flags)
    words = engines.remote_words()
    spread, counts = Federation(tmp_path / "spread"), tmp_path / "counts.json"
    spread.environment[counted_server.VARIABLE] = str(counts)
    words += ["--lab", "ray", "--lab-workers", "2", "--set", "server.transfer=direct", "--min-clients", "2"]
    try:
        server = spread.server("--exit-when-done", *words, *flags, entry=f"{counted_server.__name__}:main")
        with closing(Proxy(server.port)) as port:
            spread.port = port.port
            reach = ("--direct-host", engines.weed().address, "--token-file", str(spread.home / "local-token"))
            devices = spread.devices(shards[:2], *reach)
            assert [process.code() for process in (*devices, server)] == [0] * 3, server.text
            passed = sum(port.passed.values())
        assert "rounds are carried out by 2 workers" in server.text and "is not used any more" not in server.text
        assert digests(spread) == digests(alone)
    finally:
        spread.close()
        alone.close()
    by_itself, rows = json.loads(counts.read_text()), ServerHome(spread.home).snapshot().rows
    size = max(slot.size for slot in ServerHome(spread.home).snapshot().slots)
    assert sum(row.bytes_up for row in rows) == 6 * size > 5_000_000
    assert passed < 100_000, "orders and receipts"
    assert by_itself["written"] < size + (1 << 16), "the first state, and what is small"
    assert by_itself["whole"] == (6 + 4) * size, "each update, and in rounds 2 and 3 the value that it began from"
    assert by_itself["ranges"] <= 12 * HEAD_BYTES


def test_a_server_with_a_cluster_of_its_own_goes_on_when_workers_are_killed(
    shards: list[Path], expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    federation = Federation(tmp_path)
    try:
        flags = ("--lab", "ray", "--lab-workers", "2", "--min-clients", str(len(shards)), "--method", "fedmcsa", *SMALL)
        server = federation.server("--exit-when-done", *flags)
        workers = [pid for pid in descendants(server.popen.pid) if "ray::RayClusterWorker" in name_of(pid)]
        assert len(workers) == 2
        for pid in workers:  # the model is so small that one worker has all of it
            os.kill(pid, signal.SIGKILL)
        devices = federation.devices(shards)
        assert [process.code() for process in (*devices, server)] == [0] * 4, server.text
        assert "is replaced, and its step done again" in server.text
        assert digests(federation) == expected["fedmcsa"]
        until(lambda: not any(map(alive, workers)), "its cluster to end with the server")
    finally:
        federation.close()


def test_where_the_cluster_ends_in_mid_run_the_server_goes_on_by_itself(
    shards: list[Path], expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    head, federation = Head(tmp_path / "head", 2), Federation(tmp_path / "federation")
    try:
        flags = ("--lab", head.address, "--min-clients", str(len(shards)), "--method", "fedmcsa", *SMALL)
        server = federation.server("--exit-when-done", *flags)
        federation.devices(shards[1:])
        head.stop()
        federation.device(shards[0])
        assert server.code() == 0, server.text
        assert "is not used any more" in server.text and "nothing is lost" in server.text
        assert digests(federation) == expected["fedmcsa"]
    finally:
        head.stop()
        federation.close()


def test_an_address_where_no_cluster_is_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attune.features.cluster.ray_cluster import connect

    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    with pytest.raises(SettingError, match=r"no Ray cluster could be used at ray://127\.0\.0\.1:\d+ .*ray status"):
        connect(RayLab(f"ray://127.0.0.1:{free_port()}"), threads=1)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def alive(pid: int) -> Any:
    return Path(f"/proc/{pid}/cmdline").exists() and name_of(pid)
