"""Light devices, without torch and scikit-learn, in real processes: beside networks of two sizes, and by themselves."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attune.fedclient.model.artifact import Model
from tests.e2e.harness import (
    IN_AGGREGATION,
    IN_TRAINING,
    WITHOUT_TORCH,
    Federation,
    FederationAt,
    Process,
    digit_shards,
    tabular_shard,
)  # fmt: skip

SETTINGS = (
    "method.name=fedmcsa", "model.name=dnn", "model.hidden=[8]", "model.variant=[{name='small', hidden=[4]}]",
    "round.rounds=2", "round.min_clients=4", "round.quorum=4", "round.replace_after_s=-1", "round.adapt_rounds=1",
    "train.local_epochs=1", "server.threads=1",
)  # fmt: skip
FLAGS = [word for setting in SETTINGS for word in ("--set", setting)]
OF = {"one": "main", "two": "small", "three": "light", "four": "light", "late": "main", "later": "small", "latest": "light"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sites")
    places = {name: tabular_shard(folder / name, seed=seed, classes=(0, 1)) for seed, name in enumerate(OF)}
    for place in places.values():
        (place / "meta.json").write_text(json.dumps({"classes": [0, 1], "standardise": "federation"}))
    return places


def start(federation: Federation, shard: Path, fault: str = "") -> Process:
    if OF[shard.name] == "light":
        return federation.light(shard, fault=fault)
    return federation.device(
        shard, "--variant", OF[shard.name], "--disclose", "statistics", "--disclose", "sums", "--baseline", "none", fault=fault
    )


def whole_run(federation: Federation, sites: dict[str, Path], killed: bool) -> list[dict[str, bytes]]:
    """Run four founders, then a newcomer of each kind. Return what is exported after each, and the devices' models."""
    server = federation.server(*FLAGS, fault=IN_AGGREGATION if killed else "")
    devices = {name: start(federation, sites[name]) for name in ("one", "two", "three")}
    devices["four"] = start(federation, sites["four"], IN_TRAINING if killed else "")
    if killed:
        devices["four"].await_fault()
        devices["four"].kill()
        devices["four"] = start(federation, sites["four"])
        server.await_fault()
        server.kill()
        devices["three"].kill()
        server = federation.server()
        devices["three"] = start(federation, sites["three"])
    assert [device.code() for device in devices.values()] == [0] * 4, [device.text for device in devices.values()]
    federation.await_status(lambda status: status["state"] == "done")
    states = [federation.export()]
    for name in ("late", "later", "latest"):
        newcomer = start(federation, sites[name], IN_TRAINING if killed else "")
        if killed:
            newcomer.await_fault()
            server.kill()
            newcomer.kill()
            server, newcomer = federation.server(), start(federation, sites[name])
        assert newcomer.code() == 0, newcomer.text
        federation.await_status(lambda status: status["state"] == "done")
        states.append(federation.export())
    assert {client["name"]: client["variant"] for client in federation.status()["clients"]} == OF
    assert server.stop() == 0
    tensors = [{name: data for name, data in state.items() if name.endswith(".safetensors")} for state in states]
    return [*tensors, {name: (federation.model(sites[name]) / "model.safetensors").read_bytes() for name in OF}]


def test_kills_change_no_bit_of_a_federation_with_light_devices(federation_at: FederationAt, sites: dict[str, Path]) -> None:
    calm = federation_at("calm")
    expected = whole_run(calm, sites, killed=False)
    assert whole_run(federation_at("killed"), sites, killed=True) == expected
    assert {name for name in expected[0] if name.startswith("clients/")} == {
        "clients/one.safetensors",
        "clients/two.safetensors",
    }
    assert {row["client"] for row in calm.metrics() if row["work"] == "evaluate" and row["accuracy_kept"]} == set(OF)
    for name in ("three", "latest"):
        folder, x = calm.model(sites[name]), np.load(sites[name] / "test.npz")["x"]
        whole = Model.load(folder)
        assert whole.info.method == "analytic" and not whole.info.contains_samples
        out = calm.folder / f"{name}.csv"
        told = without_torch("predict", "--data", str(sites[name] / "test.npz"), "--out", str(out), "--model", str(folder))
        assert told.returncode == 0, told.stderr
        assert [int(line.split(",")[1]) for line in out.read_text().split()[1:]] == whole.predict(x)
        told = without_torch("evaluate", "--data", str(sites[name]), "--model", str(folder))
        assert f"accuracy {whole.info.accuracy:.4f} on 20 test samples; other scores need scikit-learn" in told.stdout
        told = without_torch("export", "--out", str(calm.folder / "a.onnx"), "--model", str(folder))
        assert (told.returncode, told.stderr) == (
            2,
            "fedclient: this needs torch, and the installation is a light one: pip install 'attune-fl[train]'\n",
        )


def test_a_light_device_says_what_it_cannot_do(federation_at: FederationAt, tmp_path: Path) -> None:
    federation, [shard] = federation_at("images"), digit_shards(tmp_path, 1, 20, 10)
    server = federation.server("--method", "fedavg", "--min-clients", "1")
    device = federation.light(shard)
    assert device.code() == 2
    why = "a light device takes part by the closed form of tables alone, and in this federation here they are images"
    assert f"fedclient: {why}: install torch on it (pip install 'attune-fl[train]')" in device.text
    assert why in federation.client(shard.name)["note"]
    assert server.stop() == 0
    told = without_torch("--data", str(shard), "--server", "localhost:1", "--variant", "small")
    assert told.returncode == 2 and "the variant small of a model needs torch, which is not installed" in told.stderr


def test_a_device_that_had_a_network_is_not_light_in_the_same_run(federation_at: FederationAt, sites: dict[str, Path]) -> None:
    federation = federation_at("changed")
    flags = ("--method", "fedavg", "--model", "mlr", "--rounds", "2", "--min-clients", "2", "--set", "round.replace_after_s=-1")
    server = federation.server(*flags)
    first = federation.device(sites["one"], "--disclose", "statistics", "--disclose", "sums", fault=IN_TRAINING)
    other = federation.light(sites["three"])
    first.await_fault()
    first.kill()
    changed = federation.light(sites["one"])
    assert changed.code() == 2
    assert "one has the variant 'main' of the model in this run, not 'light'" in changed.text
    back = federation.device(sites["one"], "--disclose", "statistics", "--disclose", "sums")
    assert [device.code() for device in (back, other)] == [0, 0], back.text + other.text
    assert server.stop() == 0


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=120)
