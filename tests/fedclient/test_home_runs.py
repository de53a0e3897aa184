"""A device's home: runs that it leaves and takes up again, versions of its files, and changed bytes that are noticed."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.config import TrainSettings
from attune.common.errors import HomeMismatch
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.plan import ModelSpec, Plan
from attune.fedclient import home as homes
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, ShardRecord
from attune.fedclient.store import FolderStore
from attune.fedserver.identity.authority import Authority

RUNS = ("local", "fedavg", "fedper")
STEPS = 12  # more than a change of runs has


class Killed(BaseException):
    pass


def plan_of(run: str) -> Plan:
    return Plan("federation", 7, ModelSpec("mlr", "tabular", (4,), 2), [0, 1], run, {}, TrainSettings(), run=run)


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Kill the process before this step on the disk within the block, if it has so many."""
    steps = 0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any, **more: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == step:
                raise Killed
            return work(*arguments, **more)

        return one

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(homes, "write_file", counted(homes.write_file))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


def enter(home: DeviceHome, run: str, kept: Callable[[], None] = lambda: None) -> None:
    """Go on with this run, as `Device._prepare` does."""
    store, plan = FolderStore(home), plan_of(run)
    before = store.kept("plan")
    if before is not None and msgspec.json.decode(before, type=Plan) != plan:
        store.put_aside(msgspec.json.decode(before, type=Plan).run, 1 if state(home) else 0)
    store.take_back(plan)
    kept()
    store.keep("plan", msgspec.json.encode(plan))


def work(home: DeviceHome, run: str, done: int) -> None:
    home.orders.mkdir(exist_ok=True)
    (home.orders / "state").write_text(f"{run} {done}")


def state(home: DeviceHome) -> str:
    path = home.orders / "state"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_step_mixes_no_runs_and_loses_none(tmp_path: Path, seed: int) -> None:
    rng, home, done = random.Random(seed), DeviceHome(tmp_path / "home"), dict[str, str]()
    for number in range(8):
        for _ in range(rng.randrange(3)):  # the server has gone on with another run before the device is back
            with killed_at(rng.randint(1, STEPS)), home.locked():
                enter(home, rng.choice(RUNS))
        run = rng.choice(RUNS)
        with home.locked():
            enter(home, run)
            assert state(home) == done.get(run, "")
            assert FolderStore(home).spent() == len(done.keys() - {run})
            work(home, run, number)
        done[run] = f"{run} {number}"
    shutil.rmtree(tmp_path)


NOW = ShardRecord(40, "38e47090c3fde5e733b0", ["1f", "2e"])


@pytest.fixture
def home(tmp_path: Path) -> DeviceHome:
    home = DeviceHome(tmp_path / "home")
    with home.locked():
        home.compare_shard(NOW)
    return home


def test_a_home_of_a_newer_format_is_refused_in_one_line(home: DeviceHome) -> None:
    assert (home.path / "format").read_text() == "1\n"
    (home.path / "format").write_text("2\n")
    with pytest.raises(HomeMismatch, match="update it") as refused, home.locked():
        pass
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [None, "", "x", "\x00"])
def test_a_home_without_a_readable_format_is_taken_over(home: DeviceHome, text: str | None) -> None:
    path = home.path / "format"
    path.unlink() if text is None else path.write_text(text)
    with home.locked():
        assert path.read_text() == "1\n"


def test_a_changed_byte_of_the_data_that_were_held_out_is_noticed(home: DeviceHome) -> None:
    path = home.path / "shard.json"
    path.write_bytes(path.read_bytes().replace(b'"1f"', b'"1e"'))
    with pytest.raises(HomeMismatch, match=r"shard\.json is damaged"):
        home.held_rows()


def test_a_record_of_an_older_version_or_with_more_fields_is_read(home: DeviceHome) -> None:
    path = home.path / "shard.json"
    path.write_bytes(b'{"samples":40,"digest":"38e47090c3fde5e733b0","held":["1f"]}')
    assert home.held_rows() == ["1f"]


def test_a_changed_name_is_noticed(home: DeviceHome, tmp_path: Path) -> None:
    authority, key = Authority.create(tmp_path / "ca"), new_key()
    home.keep(
        Identity("kiel", Credential(key, authority.issue_device(csr_der(key, "kiel"), "kiel", 9)), authority.certificate_pem)
    )
    home.remember(DeviceInfo("kiel", "host:1"))
    assert home.identity() is not None
    path = home.path / "device.json"
    path.write_bytes(path.read_bytes().replace(b"kiel", b"kiem"))
    with pytest.raises(HomeMismatch, match="names 'kiem'"):
        home.identity()
