"""Runs that a device leaves and takes up again: a kill at any step mixes the orders of no two runs, and loses none."""

from __future__ import annotations

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
from attune.common.plan import ModelSpec, Plan
from attune.fedclient import home as homes
from attune.fedclient.home import DeviceHome
from attune.fedclient.store import FolderStore

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
    before = store.plan()
    if before is not None and msgspec.json.decode(before, type=Plan) != plan:
        store.put_aside(msgspec.json.decode(before, type=Plan).run, 1 if state(home) else 0)
    store.take_back(plan)
    kept()
    store.keep_plan(msgspec.json.encode(plan))


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
