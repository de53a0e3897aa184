"""Federations whose devices or server add noise: what is refused, that a seed repeats it, and the ledger of what was spent."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from torch import nn

import attune
from attune.common import aio
from attune.common.config import PrivacySettings
from attune.common.errors import AttuneError, FederationFailed, LimitExceeded, SettingError, ShardError
from attune.common.methods.fit import check_no_batch_statistics
from attune.common.plan import Profile
from attune.common.privacy.accountant import NoisySteps, epsilon_of
from attune.features.web.facts import PageFacts
from attune.features.web.parts import parts
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.prepare import prepare
from attune.fedclient.gate import Gate, PrivacyLimits
from attune.fedclient.options import DeviceOptions
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.cli.root import cli
from attune.fedserver.core.messages import Record
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.state import Round
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.blobs import NOISE_SECRET
from attune.fedserver.view.backup import back_up, restore_to
from attune.fedserver.view.export import export_home
from attune.simulation.federation import NOWHERE

RANGE = {"unit": "example", "epsilon": 4.0, "insecure_seed": 1, "ranges": [[-3, 3]]}


def shards(count: int = 3, samples: int = 60) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draws = np.random.default_rng(0)
    weights = draws.normal(size=(6, 3))
    made = {}
    for number in range(count):
        x = draws.normal(size=(samples + number, 6)).clip(-3, 3).astype("float32")
        made[f"device{number}"] = (x, (x @ weights).argmax(1))
    return made


def simulated(method: str = "fedper", privacy: dict[str, Any] = RANGE, **given: Any) -> Any:
    rounds = given.pop("rounds", 2)
    settings = {"train": {"local_epochs": 1, **given.pop("train", {})}, "privacy": privacy}
    loop = given.pop("loop", None)
    return attune.simulate(
        shards(), method=method, model="dnn", rounds=rounds, settings=settings, progress=False, train=loop, **given
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "ditto", "fedrep", "mr-mtl", "fedbabu", "fedmcsa", "pfedhn"])
def test_a_seed_repeats_the_noise_in_both_executors(method: str) -> None:
    one, same, stacked = (simulated(method, executor=executor) for executor in ("sequential", "sequential", "stacked"))
    assert one.digests == same.digests
    for row, other in zip(one.table(), stacked.table(), strict=True):
        assert row.accuracy == pytest.approx(other.accuracy, abs=0.06)


def test_without_a_seed_every_simulation_has_other_noise() -> None:
    privacy = {key: value for key, value in RANGE.items() if key != "insecure_seed"}
    assert simulated(privacy=privacy).digests != simulated(privacy=privacy).digests


@pytest.mark.parametrize(
    ("method", "train", "privacy", "answer"),
    [
        ("per-fedavg", {}, RANGE, "per-fedavg cannot train with privacy.unit = .*uses the samples of two batches"),
        ("pfedme", {}, RANGE, "pfedme cannot train .*several steps on the samples of each batch"),
        ("fedrod", {}, RANGE, "fedrod cannot train .*frequency of each class"),
        ("pfedgp", {}, RANGE, "pfedgp cannot train .*Gaussian processes"),
        ("fedavg", {"mixed_precision": "bf16"}, RANGE, 'train.mixed_precision = "bf16" is too coarse'),
        ("fedavg", {}, {"unit": "example"}, "needs privacy.epsilon or privacy.noise"),
        ("fedavg", {}, {**RANGE, "ranges": [[3, -3]]}, r"the range \[3, -3\] is none"),
        ("fedavg", {}, {**RANGE, "ranges": [[-3, 3]] * 2}, "has 2 ranges, and the data have 6 columns"),
        ("fedavg", {}, {**RANGE, "unit": "group"}, "data name none: say which column is the group"),
    ],
)
def test_what_cannot_be_private_is_refused_by_name(method: str, train: Any, privacy: Any, answer: str) -> None:
    with pytest.raises(SettingError, match=answer):
        simulated(method, privacy, train=train)


def test_scaling_by_own_statistics_is_refused() -> None:
    with pytest.raises(ShardError, match=r"is standardised by its own statistics.*Let its operator set privacy.ranges"):
        simulated(privacy={"unit": "example", "epsilon": 4.0})


def test_a_loop_of_the_users_own_is_refused() -> None:
    with pytest.raises(SettingError, match="does not clip the gradients of single samples"):
        simulated("fedavg", loop=lambda model, data, context: None)


def test_layers_with_statistics_over_a_batch_are_refused() -> None:
    for layer in (nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)):
        with pytest.raises(SettingError, match=rf"1 \({type(layer).__name__}\) has statistics over a batch"):
            check_no_batch_statistics(nn.Sequential(nn.Linear(4, 4), layer), "x")
    check_no_batch_statistics(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)), "x")


def test_the_owner_of_a_device_decides() -> None:
    settings = {"method": {"name": "fedavg"}, "round": {"rounds": 7}}
    profile = Profile("tabular", (6,), [0, 1], 60, 20)
    open_plan = make_plan(resolve(settings), {"a": profile}, "f")
    private = make_plan(resolve({**settings, "privacy": RANGE}), {"a": profile}, "f")
    assert private.privacy == PrivacySettings("example", 4.0, orders=7, ranges=[(-3, 3)], insecure_seed=1)
    assert private.scale is not None and private.scale.std == [3.0] * 6
    plain = msgspec.structs.replace(private, privacy=None)
    # With so large a delta, one of 60 samples may be shown as it is, whatever epsilon is.
    careless = make_plan(resolve({**settings, "privacy": {**RANGE, "delta": 0.02}}), {"a": profile}, "f")
    for limits, plan, answer in (
        (PrivacyLimits(epsilon=3), private, r"privacy.epsilon = 4; this device allows 3 \(--max-epsilon\)"),
        (PrivacyLimits(delta=1e-6), private, r"privacy.delta = 1e-05; this device allows 1e-06 \(--max-delta\)"),
        (PrivacyLimits(epsilon=8), open_plan, "train without noise"),
        (PrivacyLimits(epsilon=8), careless, r"privacy.delta = 0.02; this device allows 0.0167 \(--max-delta\)"),
        (PrivacyLimits(samples=61), open_plan, r"60 training samples; it takes part from 61 on \(--min-samples\)"),
    ):
        with pytest.raises(LimitExceeded, match=answer) as refused:
            limits.check_plan(plan, 60)
        assert refused.value.kind == "limit-exceeded"
    PrivacyLimits(epsilon=4, delta=1e-5, samples=60).check_plan(private, 60)
    PrivacyLimits(epsilon=4, delta=0.02).check_plan(careless, 60)
    options = [DeviceOptions(Path(), NOWHERE, privacy=PrivacyLimits(metrics=said)) for said in (None, "none", "all")]
    tells = [Gate(one, plan).tells_scores for one in options for plan in (private, plain)]
    assert tells == [False, True, False, False, True, True]
    assert issubclass(LimitExceeded, AttuneError)


def test_a_device_whose_budget_is_spent_is_excused_and_evaluates(caplog: pytest.LogCaptureFixture) -> None:
    noise = {**RANGE, "noise": 3.0}  # a device with fewer samples spends more in an order
    data = {**shards(), "small": tuple(part[:20] for part in shards()["device0"])}
    settings = {"train": {"local_epochs": 2, "batch_size": 8}, "privacy": noise, "round": {"min_clients": 2}}
    result = attune.simulate(data, method="fedavg", model="dnn", rounds=8, settings=settings, progress=False)
    assert all(row.accuracy is not None for row in result.table())
    assert "small: its privacy budget is spent" in caplog.text
    spent = [report["epsilon"] for report in result.reports.values()]
    assert all(0 < epsilon <= 4 for epsilon in spent) and len(spent) == 4


def test_what_trains_without_noise_makes_no_order_fail() -> None:
    """Let fine-tuning diverge: it follows from the samples, and the server is told of each order that fails."""
    settings = {"method": {"alpha": 1e30}, "privacy": RANGE}
    with pytest.raises(FederationFailed, match="not finite any more"):
        attune.simulate(
            shards(), method="fedavg+ft", model="dnn", rounds=2, settings={"method": {"alpha": 1e30}}, progress=False
        )
    result = attune.simulate(shards(), method="fedavg+ft", model="dnn", rounds=2, settings=settings, progress=False)
    assert result.status["state"] == "done" and len(result.reports) == 3
    assert all(tensor.isfinite().all() for name in result.devices for tensor in result.model(name).tensors.values())


def test_too_few_devices_with_a_budget_end_a_simulation() -> None:
    with pytest.raises(FederationFailed, match=r"device.: its privacy budget is spent"):
        simulated("fedavg", {**RANGE, "orders": 2}, rounds=4)


def test_the_label_of_one_sample_does_not_decide_which_others_are_trained_on() -> None:
    x, y = shards()["device0"]
    settings = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}}
    profile = Profile("tabular", (6,), [0, 1, 2], 60, 20)
    trained = {}
    for private in (True, False):
        plan = make_plan(resolve({**settings, "privacy": RANGE if private else {}}), {"a": profile}, "f")
        parts = [prepare(shard_of("a", (x, labels)).load(), plan).train_x for labels in (y, np.roll(y, 7))]
        trained[private] = parts[0].equal(parts[1])
    assert trained == {True: True, False: False}


def test_numbers_to_predict_are_scaled_by_public_ranges_or_not_at_all() -> None:
    x, _ = shards()["device0"]
    settings = {"method": {"name": "fedavg"}, "model": {"name": "mlr"}}
    profile = Profile("tabular", (6,), ["dose"], 60, 20, task="regression")
    shard = shard_of("a", (x, 10 * x[:, :1]), ReadOptions(task="regression")).load()
    raw = None
    for ranges, mean, half in (([], 0.0, 1.0), ([[-40, 60]], 10.0, 50.0)):
        plan = make_plan(resolve({**settings, "privacy": {**RANGE, "target_ranges": ranges}}), {"a": profile}, "f")
        assert plan.targets is not None and (plan.targets.mean, plan.targets.std) == ([mean], [half])
        scaled = prepare(shard, msgspec.structs.replace(plan, classes=shard.labels)).train_y
        raw = scaled if raw is None else raw
        assert np.allclose(scaled * half + mean, raw, atol=1e-4)
    with pytest.raises(ShardError, match="scaled by their own statistics"):
        prepare(shard, msgspec.structs.replace(plan, classes=shard.labels, targets=None))


def test_fine_tuning_needs_no_noise_and_changes_nothing_that_leaves_a_device() -> None:
    """With a small budget what is exchanged is poor; what a device keeps was trained for itself alone, without noise."""
    small, tuning = RANGE | {"epsilon": 0.5}, {"name": "fedavg+ft", "tune_epochs": 20}
    plain, tuned = (simulated(method, small, train={"lr": 0.1, "local_epochs": 2}) for method in ("fedavg", tuning))
    assert tuned.digests == plain.digests
    guarantee = tuned.model("device0").info.privacy
    assert (guarantee.unit, guarantee.delta, guarantee.finished) == ("example", 1e-5, ["personalized"])
    assert (guarantee.mode, "one example is replaced by nothing" in guarantee.adjacency) == ("noise on the devices", True)
    facts = tuned.status["privacy"]
    wanted = ("noise on the devices", "example", 0.5, 1e-5, guarantee.epsilon)
    assert tuple(facts[key] for key in ("mode", "unit", "epsilon", "delta", "spent")) == wanted
    assert "updates that were trained with noise" in facts["visible"] and facts["adjacency"] == guarantee.adjacency
    assert (guarantee.planned, guarantee.visible) == (0.5, facts["visible"])
    assert tuned.table().mean("kept") > plain.table().mean("kept") + 0.1


OF_CLIENTS = {"unit": "client", "devices": 12, "noise": 0.8, "delta": 0.04, "insecure_seed": 3}
ROUNDS, DRAWN = 3, 2


def released(method: str = "fedavg", privacy: dict[str, Any] = OF_CLIENTS, **given: Any) -> Any:
    settings = {
        "privacy": privacy, "train.local_epochs": 2, "round.clients": given.pop("drawn", DRAWN), "data.classes": [0, 1, 2]
    }  # fmt: skip
    return attune.simulate(
        shards(12, 40), method=method, model="dnn", rounds=ROUNDS, settings=settings, progress=False, **given
    )


@pytest.mark.parametrize("method", ["fedper", "mr-mtl"])
def test_a_seed_repeats_noise_and_cohorts(method: str) -> None:
    assert released(method).digests == released(method).digests


def test_without_a_seed_the_servers_noise_is_another_each_time() -> None:
    privacy = {key: value for key, value in OF_CLIENTS.items() if key != "insecure_seed"}
    assert released(privacy=privacy, drawn=0).digests != released(privacy=privacy, drawn=0).digests


def test_what_was_spent_is_in_the_ledger_and_in_what_is_exported(tmp_path: Path) -> None:
    released(home=tmp_path / "home")
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
    result = released("fedper", {**OF_CLIENTS, "noise": None, "epsilon": 9.0})
    guarantee, facts = result.model("device0").info.privacy, result.status["privacy"]
    assert (guarantee.unit, guarantee.epsilon, guarantee.delta) == ("client", 9.0, 0.04)
    assert (guarantee.mode, guarantee.finished) == ("noise on the server", ["personalized"])
    assert "one device is replaced by nothing" in guarantee.adjacency == facts["adjacency"]
    assert (facts["mode"], facts["unit"], facts["epsilon"]) == ("noise on the server", "client", 9.0)
    assert 0 < facts["spent"] <= 9 and "is trusted" in facts["visible"]
    assert parts(PageFacts("simulation", result.status, []))["run"]["privacy"] == facts
    assert released("fedper", {"unit": "none"}).status["privacy"] is None


def test_rounds_that_draw_no_device_release_noise_alone(tmp_path: Path) -> None:
    privacy = {**OF_CLIENTS, "devices": 10**6}
    released(privacy=privacy, drawn=1, home=tmp_path / "home")
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
