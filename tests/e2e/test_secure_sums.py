"""Secure aggregation by real processes: killed on either side at each exchange, and without a device that never returns."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attune
from attune.common.config import load_settings
from attune.common.wire.files import read_tensors
from tests.common.secure.cohort import Authority
from tests.e2e.harness import Process, digit_shards

EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")
SETTINGS = (
    *("method.name=fedavg", "model.name=mlr", "train.local_epochs=1", "server.threads=1", "round.rounds=1"),
    "round.grace_s=2.0",
    *("privacy.secure_aggregation=true", "privacy.secure_devices=3"),
)


def flags(wait_s: float, clients: int) -> list[str]:
    settings = (*SETTINGS, f"privacy.secure_wait_s={wait_s}")
    return ["--min-clients", str(clients), *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digit_shards(tmp_path_factory.mktemp("shards") / "five", 5, 60, 20)


def shared(home: Path) -> dict[str, torch.Tensor]:
    """Return the shared values after the last round of a server's home."""
    return read_tensors(max((home / "state").glob("shared.value.*.safetensors")))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory, shards: list[Path]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function that simulates the federation of the first devices, and returns the shared values at its end."""

    def simulate(clients: int) -> dict[str, torch.Tensor]:
        home = tmp_path_factory.mktemp("simulated")
        devices = {shard.name: shard for shard in shards[:clients]}
        attune.simulate(devices, settings=load_settings(None, SETTINGS, {}), home=home / "home")
        return shared(home / "home" / "server")

    return simulate


def killed(process: Process) -> None:
    assert process.code() == -signal.SIGKILL, process.text


def test_a_server_that_is_killed_at_each_exchange_makes_the_same_sum(federation_at, shards, simulated):
    federation = federation_at("server")
    faults = [f"server:1:secure-{exchange}=kill" for exchange in EXCHANGES]
    server = federation.server(*flags(60, 3), fault=faults[0])
    devices = federation.devices(shards[:3])
    for fault in (*faults[1:], ""):
        killed(server)
        server = federation.server(*(() if fault else ("--exit-when-done",)), fault=fault)
    assert [process.code() for process in (*devices, server)] == [0, 0, 0, 0], server.text
    assert "3 of 3 updates are summed" in server.text
    for name, values in simulated(3).items():
        assert torch.equal(shared(federation.home)[name], values)
    # What unmasks is asked for once the survivors are fixed: three attempts, of which the third was never begun again.
    assert {path.name for path in federation.home.glob("inbox/*/*.safetensors")} == {"shared.3.safetensors"}


def test_a_device_that_is_killed_at_each_exchange_still_counts(federation_at, shards, simulated):
    federation = federation_at("device")
    server = federation.server(*flags(60, 3), "--exit-when-done")
    others = federation.devices(shards[:2])
    for exchange in EXCHANGES:
        killed(federation.device(shards[2], fault=f"*:1:secure-{exchange}=kill"))
    last = federation.device(shards[2])
    assert [process.code() for process in (*others, last, server)] == [0, 0, 0, 0], server.text
    assert "3 of 3 updates are summed" in server.text
    for name, values in simulated(3).items():
        assert torch.equal(shared(federation.home)[name], values)


@pytest.mark.parametrize(("exchange", "others"), [("masked", 4), ("survivors", 5)])
def test_a_device_that_never_returns_is_left_out_or_counts_without_it(federation_at, shards, simulated, exchange, others):
    """A device that shared its secrets is not needed any more: the others take its masks off the sum."""
    federation = federation_at(f"gone-{exchange}")
    server = federation.server(*flags(4, 5), "--exit-when-done")
    gone = federation.device(shards[4], fault=f"*:1:secure-{exchange}=kill")
    devices = federation.devices(shards[:4])
    killed(gone)
    assert [process.code() for process in devices] == [0, 0, 0, 0], server.text
    assert f"{others} of 5 updates are summed" in server.text
    # Weights are relative to the largest device of the plan: rounding differs, the mean does not.
    for name, values in simulated(others).items():
        torch.testing.assert_close(shared(federation.home)[name], values, atol=1e-5, rtol=0)


def test_devices_may_trust_an_authority_that_is_not_the_servers(federation_at, shards, tmp_path):
    org = Authority()
    (tmp_path / "org.pem").write_bytes(org.pem)
    federation = federation_at("authority")
    server = federation.server(*flags(60, 3), "--exit-when-done")
    devices = []
    for shard in shards[:3]:
        credential = org.credential(shard.name)
        (tmp_path / f"{shard.name}.pem").write_bytes(credential.key_pem + credential.certificate_pem)
        trust = ("--authority", str(tmp_path / "org.pem"), "--signer", str(tmp_path / f"{shard.name}.pem"))
        devices.append(federation.device(shard, *trust, "--min-devices", "3"))
    assert [process.code() for process in (*devices, server)] == [0, 0, 0, 0], server.text
    assert "3 of 3 updates are summed" in server.text


def test_devices_refuse_one_that_their_authority_has_not_certified(federation_at, shards, tmp_path):
    org = Authority()
    (tmp_path / "org.pem").write_bytes(org.pem)
    credential = org.credential(shards[0].name)
    (tmp_path / "one.pem").write_bytes(credential.key_pem + credential.certificate_pem)
    federation = federation_at("stranger")
    server = federation.server(*flags(2, 3), "--exit-when-done")
    trust = ("--authority", str(tmp_path / "org.pem"), "--signer", str(tmp_path / "one.pem"))
    devices = [federation.device(shards[0], *trust), *federation.devices(shards[1:3])]
    server.wait_for("counts for nothing: secure aggregation: .* devices have shared their secrets, and 3 must; no sum is made")
    assert "is not of this device's authority (--authority)" in devices[0].text
