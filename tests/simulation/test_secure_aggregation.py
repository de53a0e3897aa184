"""Secure aggregation in whole federations: the plain result, from sums of which no summand can be read."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import attune
from attune.common.config import PrivacySettings
from attune.common.errors import AttuneError, SettingError
from attune.common.metrics import Metrics, metrics_of
from attune.common.plan import Columns, Plan, Profile
from attune.common.protocol import SPOKEN
from attune.common.text import from_json
from attune.common.wire.files import read_tensors
from attune.fedserver.core.messages import SummedChanges
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import AcceptedUpdate
from attune.fedserver.core.secure_policy import check_profile
from attune.fedserver.home import ServerHome
from attune.fedserver.view.homes import render_status
from tests.simulation.test_simulate import QUICK, cloud

DEVICES = {f"site{n}": cloud(n, 40 + 15 * n) for n in range(6)}
SECURE = QUICK | {"privacy.secure_aggregation": True}
PLAIN = QUICK | {"method.bound_change": 0.0, "method.bound_samples": 0.0, "round.take_back": 0.0}
CLIP = 1.0


def common(home: Path) -> dict[str, torch.Tensor]:
    """Return the shared values at the end of a simulation."""
    path = max((home / "server" / "state").glob("shared.value.*.safetensors"))
    return read_tensors(path)


def simulated(home: Path, settings: dict[str, Any], method: str = "fedavg", rounds: int = 1, **more: Any) -> Any:
    return attune.simulate(DEVICES, method, rounds=rounds, settings=settings, home=home, **more)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", {"method.uniform": True, "method.server_mix": 0.5}),
        ("fedper", {"model.name": "dnn"}),
        ("pfedme", {}),
        ("feddbe", {"model.name": "dnn"}),
        ("fedavg", {"round.clients": 5}),
    ],
)
def test_a_round_gives_the_plain_values_to_1e_5_of_the_clipping_bound(tmp_path, method: str, settings: dict[str, Any]) -> None:
    simulated(tmp_path / "plain", PLAIN | settings, method)
    shown = simulated(tmp_path / "secure", SECURE | settings, method).status["privacy"]
    assert (shown["mode"], shown["epsilon"]) == ("secure aggregation", None) and "sums of at least 5" in shown["visible"]
    plain, secure = common(tmp_path / "plain"), common(tmp_path / "secure")
    assert plain.keys() == secure.keys()
    assert any(not torch.equal(plain[name], secure[name]) for name in plain), "rounded, so never quite equal"
    for name, values in plain.items():
        torch.testing.assert_close(secure[name], values, atol=1e-5 * CLIP, rtol=0)


@pytest.mark.parametrize("executor", ["stacked", "processes"])
def test_every_executor_hands_in_masked_updates(tmp_path: Path, executor: Any) -> None:
    simulated(tmp_path / "one", SECURE)
    simulated(tmp_path / "other", SECURE, executor=executor)
    one, other = common(tmp_path / "one"), common(tmp_path / "other")
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_bits_whatever_the_masks(tmp_path: Path) -> None:
    results = [simulated(tmp_path / name, SECURE, rounds=3) for name in ("one", "other")]
    assert results[0].digests == results[1].digests
    blobs = [sorted((tmp_path / name / "server" / "inbox").rglob("*.safetensors")) for name in ("one", "other")]
    assert len(blobs[0]) == 6
    assert all(one.read_bytes() != other.read_bytes() for one, other in zip(*blobs, strict=True))


def test_the_server_has_no_single_update_and_no_single_loss(tmp_path: Path) -> None:
    simulated(tmp_path, SECURE)
    committed = {row.client: row for row in ServerHome(tmp_path / "server").snapshot().rows if row.work == "train"}
    entries = sorted((tmp_path / "server" / "inbox").glob("train-1-*"))
    assert len(entries) == 6
    for folder in entries:
        entry = from_json((folder / "update.json").read_bytes(), AcceptedUpdate)
        assert entry.row.samples == 0
        assert metrics_of(entry.row) == Metrics(bytes_up=entry.row.bytes_up)
        [path] = folder.glob("*.safetensors")
        assert entry.row.bytes_up == committed[entry.row.client].bytes_up == path.stat().st_size, "what is masked was sent"
        masked = read_tensors(path)
        assert {tensor.dtype for tensor in masked.values()} == {torch.int32}
        numbers = torch.cat([tensor.reshape(-1).double() for tensor in masked.values()])
        assert float(numbers.abs().mean()) > 2**29, "far from the small numbers of an update: uniform in 32 bits"


@pytest.mark.parametrize(("clip", "clipped"), [(1e-4, 6), (100.0, 0)])
def test_status_record_and_log_say_how_many_devices_clipped_their_update(tmp_path, caplog, clip: float, clipped: int) -> None:
    with caplog.at_level("INFO", "fedserver"):
        status = simulated(tmp_path, SECURE | {"privacy.secure_clip": clip}, rounds=2).status
    shown = status["privacy"]["clipping"]
    assert (shown["round"], shown["devices"], shown["clipped"]) == (2, 6, clipped)
    told = f"{clipped} of 6 devices clipped their update in round 2; privacy.secure_clip = {clip:g}"
    assert shown["told"].startswith(told) and told in render_status(status)
    assert [told.replace("round 2", f"round {number}") in caplog.text for number in (1, 2)] == [True, True]
    assert ServerHome(tmp_path / "server").snapshot().record.summed == SummedChanges(2, 6, {"shared": (clipped,) * 7})


def test_a_damaged_state_is_made_again_from_the_sum(tmp_path: Path) -> None:
    result = simulated(tmp_path, SECURE)
    path = max((tmp_path / "server" / "state").glob("shared.value.*.safetensors"))
    before = path.read_bytes()
    path.write_bytes(b"damaged")
    again = simulated(tmp_path, SECURE)
    assert path.read_bytes() == before
    assert again.digests == result.digests


WRONG = {
    "method.name=fedmcsa": "attended parts that are no means",
    "method.name=fedtp": "parts that are no means",
    "method.name=local": "shares nothing",
    "method.robust=median": "method.robust",
    "method.robust=multi-krum": "method.robust",
    "method.bound_change=3.0": "secure-sum-4 and change-bound cannot be combined",
    "method.bound_samples=5.0": "secure-sum-4 and sample-bound cannot be combined",
    "server.max_update_norm=9.0": "secure-sum-4 and norm-limit cannot be combined",
    "round.encoding=bf16": "secure-sum-4 and bf16 cannot be combined",
    "round.encoding=int8": "secure-sum-4 and int8 cannot be combined",
    "round.take_back=10.0": "round.take_back",
    "round.train=all": 'round.train = "all"',
    "round.adapt_rounds=2": "round.adapt_rounds",
    "round.clients=4": "sums have 5 to 256 devices",
    "round.clients=257": "sums have 5 to 256 devices",
    "round.min_clients=4": "sums have at least 5 devices",
    "round.quorum=4": "sums have at least 5 devices",
    "privacy.secure_devices=2": "privacy.secure_devices",
    "privacy.secure_spare=0": "privacy.secure_spare",
    "privacy.secure_spare=3": "set privacy.secure_devices to 7 or more",
    "privacy.secure_clip=0": "privacy.secure_clip",
}


@pytest.mark.parametrize("assignment", WRONG)
def test_what_secure_aggregation_cannot_be_combined_with_is_refused_by_name(assignment: str) -> None:
    from attune.common.config import load_settings

    with pytest.raises(SettingError, match=WRONG[assignment]):
        resolve(load_settings(None, ["method.name=fedavg", "privacy.secure_aggregation=true", assignment], {}))


SHORT = {
    "server_mix=1e-30": "server_mix = 1e-30",
    "server_mix=0.099": "server_mix = 0.099 makes them 0.099 times as large",
    **{f"shared_optimiser={name},shared_lr=1e-30": "shared_lr = 1e-30" for name in ("momentum", "adam", "yogi", "adagrad")},
    "shared_optimiser=momentum,shared_lr=0.09": "shared_lr = 0.09",
    "shared_optimiser=adam,shared_lr=0.0029": "shared_lr = 0.0029",
    "shared_optimiser=yogi,shared_momentum=0.9999": "shared_momentum = 0.9999 makes them 0.001 times",
    "shared_optimiser=adagrad,shared_momentum=0.95": "shared_momentum = 0.95",
    "shared_optimiser=adam,shared_adaptivity=1e9": r"shared_adaptivity = 1e\+09",
    "name=fedtp,embedding=device,server_lr=1e-9": "server_lr = 1e-09",
}
ENOUGH = (
    "server_mix=0.1", "shared_optimiser=momentum,shared_lr=0.1", "shared_optimiser=adam,shared_lr=0.003",
    "shared_optimiser=adagrad,shared_momentum=0.9", "shared_optimiser=yogi,shared_adaptivity=0.01",
    "shared_optimiser=momentum,shared_momentum=0.99", "name=fedtp,embedding=device,server_lr=1e-4",
)  # fmt: skip


def resolved_with(assignments: str) -> None:
    from attune.common.config import load_settings

    method = [f"method.{assignment}" for assignment in assignments.split(",")]
    resolve(load_settings(None, ["method.name=fedavg", "privacy.secure_aggregation=true", *method], {}))


@pytest.mark.parametrize("assignments", SHORT)
def test_steps_below_a_tenth_of_the_usual_are_refused_by_name(assignments: str) -> None:
    """Sums of the same updates over ever other devices can be solved for each of them."""
    with pytest.raises(SettingError, match=rf"a tenth of the usual ones or more, and method\.{SHORT[assignments]}"):
        resolved_with(assignments)


@pytest.mark.parametrize("assignments", ENOUGH)
def test_a_tenth_of_the_usual_step_is_enough(assignments: str) -> None:
    resolved_with(assignments)


def test_the_transform_itself_is_no_setting() -> None:
    with pytest.raises(SettingError, match=r"secure-sum-4 is set by privacy\.secure_aggregation"):
        resolve({"transforms": {"secure-sum-4": {}}})


def test_an_older_device_is_refused_by_name_before_round_1() -> None:
    encodings = resolve({"method": {"name": "fedavg"}, "privacy": {"secure_aggregation": True}}).encodings
    encodings.check_device("kiel", (*SPOKEN, "transform:secure-sum-4"))
    for older in (SPOKEN, (*SPOKEN, "transform:secure-sum"), (*SPOKEN, "transform:secure-sum-aes")):  # none, and older forms
        with pytest.raises(SettingError, match="kiel does not have the transform secure-sum-4 of this federation: update"):
            encodings.check_device("kiel", older)


def test_a_method_without_secure_aggregation_keeps_its_bounds() -> None:
    assert resolve({}).configured.aggregators != resolve(
        {"privacy": {"secure_aggregation": True}, "method": {"name": "fedavg"}}
    )
    assert resolve({"method": {"name": "fedavg"}}).round.take_back == 10.0


def test_fewer_devices_than_a_sum_needs_make_no_federation() -> None:
    few = {name: DEVICES[name] for name in list(DEVICES)[:4]}
    with pytest.raises(AttuneError, match="at least 5 devices"):
        attune.simulate(few, "fedavg", rounds=1, settings=SECURE)


def test_a_device_with_few_samples_takes_no_part() -> None:
    with pytest.raises(AttuneError, match="secure_samples"):
        attune.simulate(DEVICES, "fedavg", rounds=1, settings=SECURE | {"privacy.secure_samples": 50})


def regression(count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        f"d{n}": (rng.normal(size=(30 + n, 3)).astype("f4"), (90 * rng.normal(size=30 + n) + 7).astype("f4"))
        for n in range(count)
    }


def plan_of(home: Path) -> Plan:
    """Return the plan of a simulation."""
    return from_json((home / "devices" / "d0" / "plan.json").read_bytes(), Plan)


def test_numbers_to_predict_are_scaled_by_a_masked_sum_as_by_the_plain_one(tmp_path: Path) -> None:
    for home, settings in (("plain", PLAIN), ("secure", SECURE)):
        attune.simulate(regression(5), "fedavg", rounds=1, settings=settings, task="regression", home=tmp_path / home)
    plain, secure = plan_of(tmp_path / "plain").targets, plan_of(tmp_path / "secure").targets
    assert plain is not None and secure is not None
    assert secure.mean == pytest.approx(plain.mean, rel=1e-13) and secure.std == pytest.approx(plain.std, rel=1e-13)
    first, second = common(tmp_path / "plain"), common(tmp_path / "secure")
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, atol=1e-5 * CLIP, rtol=0)


def test_features_are_scaled_over_the_federation_by_the_masked_sum_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(6):
        folder = tmp_path / "shards" / f"d{number}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({"standardise": "federation"}))
        x = (rng.normal(size=(40, 3)) * [1, 30, 1e-3] + [1e6, -4, 0.5 + number]).astype("f4")
        np.savez(folder / "train.npz", x=x, y=rng.integers(0, 2, 40))
        np.savez(folder / "test.npz", x=x[:5], y=rng.integers(0, 2, 5))
    for home, settings in (("plain", PLAIN), ("secure", SECURE)):
        attune.simulate(str(tmp_path / "shards" / "*"), "fedavg", rounds=1, settings=settings, home=tmp_path / home)
    plain, secure = plan_of(tmp_path / "plain").scale, plan_of(tmp_path / "secure").scale
    assert plain is not None and secure is not None
    assert secure.mean == pytest.approx(plain.mean, rel=1e-12)
    assert secure.std == pytest.approx(plain.std, rel=1e-9), "the first column has a mean of a million deviations"


def test_a_device_that_sends_sums_as_they_are_is_refused_by_name() -> None:
    privacy = PrivacySettings(secure_aggregation=True)
    profile = Profile("tabular", (3,), ["y"], 30, 9, task="regression", targets=Columns(30, [0.0], [1.0]))
    with pytest.raises(SettingError, match=r"kiel sends sums of its data.*--disclose masked-statistics"):
        check_profile(privacy, profile, "kiel")
    check_profile(privacy, msgspec.structs.replace(profile, targets=None), "kiel")
