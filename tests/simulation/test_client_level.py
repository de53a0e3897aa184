"""Federations with client-level privacy from the first round to the ledger of what was spent, and after a restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common import aio
from attune.common.plan import Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.fedserver.cli.root import cli
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.state import Round
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.blobs import NOISE_SECRET
from attune.fedserver.view.backup import back_up, restore_to
from attune.fedserver.view.export import export_home
from attune.fedserver.web.facts import PageFacts
from attune.fedserver.web.parts import parts

PRIVACY = {"unit": "client", "devices": 12, "noise": 0.8, "delta": 0.04, "insecure_seed": 3}
ROUNDS, DRAWN = 5, 2


def shards(count: int = 12, samples: int = 40) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draws = np.random.default_rng(0)
    weights = draws.normal(size=(6, 3))
    made = {}
    for number in range(count):
        x = draws.normal(size=(samples, 6)).clip(-3, 3).astype("float32")
        made[f"device{number:02}"] = (x, (x @ weights).argmax(1))
    return made


def simulated(method: str = "fedavg", privacy: dict[str, Any] = PRIVACY, **given: Any) -> Any:
    settings = {
        "privacy": privacy, "train.local_epochs": 2, "round.clients": given.pop("drawn", DRAWN), "data.classes": [0, 1, 2]
    }  # fmt: skip
    return attune.simulate(shards(), method=method, model="dnn", rounds=ROUNDS, settings=settings, progress=False, **given)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "mr-mtl"])
def test_a_seed_repeats_noise_and_cohorts(method: str) -> None:
    assert simulated(method).digests == simulated(method).digests


def test_without_a_seed_every_simulation_has_other_noise() -> None:
    privacy = {key: value for key, value in PRIVACY.items() if key != "insecure_seed"}
    assert simulated(privacy=privacy, drawn=0).digests != simulated(privacy=privacy, drawn=0).digests


def test_what_was_spent_is_in_the_ledger_and_in_what_is_exported(tmp_path: Path) -> None:
    simulated(home=tmp_path / "home")
    report = CliRunner().invoke(cli, ["privacy", "--home", str(tmp_path / "home/server"), "--json"])
    assert report.exit_code == 0, report.output
    shown = json.loads(report.output)
    facts = shown["released"]
    assert (facts["unit"], facts["releases"], facts["rate"]) == ("client", ROUNDS, DRAWN / 12)
    assert facts["spent"] == pytest.approx(epsilon_of([NoisySteps(DRAWN / 12, 0.8, ROUNDS)], 0.04))
    lines = CliRunner().invoke(cli, ["privacy", "--home", str(tmp_path / "home/server")]).output
    assert f"epsilon = {facts['spent']:.3g} spent on {ROUNDS} released sums, with no budget at delta 0.04" in lines
    assert "noise comes from a seed, so it protects nobody" in lines
    home = ServerHome(tmp_path / "home/server")
    export_home(home, tmp_path / "out")
    assert json.loads((tmp_path / "out/status.json").read_text())["privacy"] == facts | {
        key: shown[key] for key in ("mode", "visible", "clipping")
    }
    assert shown["mode"] == "noise on the server" and shown["visible"] in lines
    planned = CliRunner().invoke(
        cli, ["privacy", "plan", "--unit", "client", "--devices", "12", "--per-round", str(DRAWN), "--rounds", str(ROUNDS),
              "--noise", "0.8", "--delta", "0.04", "--json"]
    )  # fmt: skip
    assert json.loads(planned.output)["epsilon"] == pytest.approx(facts["spent"])


def test_a_finished_model_and_the_status_say_what_is_promised() -> None:
    result = simulated("fedper", {**PRIVACY, "noise": None, "epsilon": 9.0})
    guarantee, facts = result.model("device00").info.privacy, result.status["privacy"]
    assert (guarantee.unit, guarantee.epsilon, guarantee.delta) == ("client", 9.0, 0.04)
    assert (guarantee.mode, guarantee.finished) == ("noise on the server", ["personalized"])
    assert "one device is replaced by nothing" in guarantee.adjacency == facts["adjacency"]
    assert (facts["mode"], facts["unit"], facts["epsilon"]) == ("noise on the server", "client", 9.0)
    assert 0 < facts["spent"] <= 9 and "is trusted" in facts["visible"]
    assert parts(PageFacts("simulation", result.status, []))["run"]["privacy"] == facts
    assert simulated("fedper", {"unit": "none"}).status["privacy"] is None


def test_rounds_that_draw_no_device_release_noise_alone(tmp_path: Path) -> None:
    privacy = {**PRIVACY, "devices": 10**6}
    simulated(privacy=privacy, drawn=1, home=tmp_path / "home")
    snapshot = ServerHome(tmp_path / "home/server").snapshot()
    assert snapshot.record.releases == ROUNDS and not any(row.work == "train" for row in snapshot.rows)
    assert {slot.file for slot in snapshot.slots} == {f"shared.value.{ROUNDS}.safetensors"}


def test_a_restored_home_is_charged_for_what_the_lost_one_may_have_released(tmp_path: Path) -> None:
    given = {
        "method": {"name": "fedavg"}, "model": {"name": "mlr"}, "data": {"classes": [0, 1]},
        "round": {"rounds": 10, "clients": 2}, "privacy": {"unit": "client", "devices": 20, "epsilon": 8.0, "delta": 0.02},
    }  # fmt: skip
    home, restored = ServerHome(tmp_path / "home"), ServerHome(tmp_path / "restored")

    async def rounds() -> bytes:
        home.create()
        async with home.open() as storage:
            plan = make_plan(resolve(given), {"a": Profile("tabular", (3,), [0, 1], 10, 4)}, "f")
            await storage.ledger.set_overrides(given)
            await storage.ledger.commit_round(Record(round=4, releases=4), [], [], {}, plan)
            storage.blobs.put(NOISE_SECRET, bytes(32))
            return storage.blobs.get(NOISE_SECRET)

    secret = aio.run(rounds())
    list(back_up(home, tmp_path / "backup"))
    said = list(restore_to(tmp_path / "backup", restored, None, ()))
    assert any("6 rounds after the backup are charged to the privacy ledger" in line for line in said)
    snapshot = restored.snapshot()
    assert snapshot.record == msgspec.structs.replace(home.snapshot().record, releases=10)
    assert restored.open().blobs.get(NOISE_SECRET) == secret
    assert "privacy.epsilon is spent" in snapshot.settings.rules.policy.refuses(Round(snapshot.record))
