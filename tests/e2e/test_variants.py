"""Variants of a model in real processes: kills and newcomers change no bit, and a device cannot change its variant."""

import json
from pathlib import Path

import numpy as np
import pytest

import attune
from attune.common.config import load_settings
from attune.fedclient.model.artifact import Model
from tests.e2e.harness import IN_AGGREGATION, IN_TRAINING, Federation, FederationAt, tabular_shard

SETTINGS = (
    "method.name=fedmcsa", "model.name=dnn", "model.hidden=[8]", "model.variant=[{name='small', hidden=[4]}]",
    "round.rounds=2", "round.min_clients=4", "round.quorum=4", "round.replace_after_s=-1", "round.adapt_rounds=1",
    "train.local_epochs=1", "server.threads=1",
)  # fmt: skip
SMALL = ("--variant", "small")
FLAGS = [word for setting in SETTINGS for word in ("--set", setting)]
OF = {"one": (), "two": (), "three": SMALL, "four": SMALL, "late": (), "later": SMALL}  # by device, its options


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sites")
    return {name: tabular_shard(folder / name, seed=seed) for seed, name in enumerate(OF)}


def tensors_of(exported: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in exported.items() if name.endswith(".safetensors")}


def whole_run(federation: Federation, sites: dict[str, Path], killed: bool) -> list[dict[str, bytes]]:
    """Run four founders, then a newcomer of each variant. Return what is exported after each, and the devices' models."""
    server = federation.server(*FLAGS, fault=IN_AGGREGATION if killed else "")
    founders = ["one", "two", "three", "four"]
    devices = {name: federation.device(sites[name], *OF[name], "--disclose", "statistics") for name in founders[:3]}
    fallen = federation.device(sites["four"], *SMALL, "--disclose", "statistics", fault=IN_TRAINING if killed else "")
    devices["four"] = fallen
    if killed:
        fallen.await_fault()
        fallen.kill()
        devices["four"] = federation.device(sites["four"], *SMALL, "--disclose", "statistics")
        server.await_fault()
        server.kill()
        devices["three"].kill()
        server = federation.server()  # it closes the round while one of its devices is away
        server.wait_for("round 1/2 closed")
        devices["three"] = federation.device(sites["three"], *SMALL, "--disclose", "statistics")
    assert [device.code() for device in devices.values()] == [0] * 4, [device.text for device in devices.values()]
    federation.await_status(lambda status: status["state"] == "done")
    states = [tensors_of(federation.export())]
    for name in ("late", "later"):
        newcomer = federation.device(sites[name], *OF[name], fault=IN_TRAINING if killed else "")
        if killed:
            newcomer.await_fault()
            server.kill()
            newcomer.kill()
            server, newcomer = federation.server(), federation.device(sites[name], *OF[name])
        assert newcomer.code() == 0, newcomer.text
        federation.await_status(lambda status: status["state"] == "done")
        states.append(tensors_of(federation.export()))
    told = {client["name"]: client["variant"] for client in federation.status()["clients"]}
    assert told == {name: "small" if OF[name] else "main" for name in OF}
    assert server.stop() == 0
    return [*states, {name: (federation.model(sites[name]) / "model.safetensors").read_bytes() for name in OF}]


def test_kills_of_the_server_and_of_devices_change_no_bit(federation_at: FederationAt, sites: dict[str, Path]) -> None:
    calm, killed = federation_at("calm"), federation_at("killed")
    expected = whole_run(calm, sites, killed=False)
    assert whole_run(killed, sites, killed=True) == expected
    assert expected[0].keys() >= {f"clients/{name}.safetensors" for name in ("one", "two", "three", "four")}
    assert expected[2].keys() - expected[0].keys() == {"clients/late.safetensors", "clients/later.safetensors"}
    others = [name for name in expected[0] if not name.startswith("attention")]
    assert all(expected[2][name] == expected[0][name] for name in others), "newcomers change nothing of others"
    sizes = {name: json.loads((calm.model(sites[name]) / "model.json").read_bytes())["model"]["options"] for name in OF}
    assert {name: options["hidden"] for name, options in sizes.items()} == {name: [4] if OF[name] else [8] for name in OF}
    later = Model.load(calm.model(sites["later"]))
    assert len(later.predict(np.load(sites["later"] / "test.npz")["x"])) == 20


def test_a_simulation_has_the_bits_of_the_network(federation_at: FederationAt, sites: dict[str, Path], tmp_path: Path) -> None:
    federation, members = federation_at("network"), {name: sites[name] for name in ("one", "two", "three", "four")}
    server = federation.server("--exit-when-done", *FLAGS, "--set", "round.adapt_rounds=0")
    devices = [federation.device(sites[name], *OF[name], "--disclose", "statistics", "--disclose", "sums") for name in members]
    assert [process.code() for process in (*devices, server)] == [0] * 5
    settings = load_settings(None, (*SETTINGS, "round.adapt_rounds=0"), {})
    variants = {name: "small" for name in members if OF[name]}
    for executor in ("sequential", "processes"):
        result = attune.simulate(members, settings=settings, variants=variants, executor=executor, progress=False)  # type: ignore[call-overload]
        result.save(tmp_path / executor)
        files = [path for path in (tmp_path / executor).rglob("*.safetensors") if "models" not in path.parts]
        saved = {str(path.relative_to(tmp_path / executor)): path.read_bytes() for path in files}
        assert saved == tensors_of(federation.export())


def test_a_variant_is_fixed_in_a_run_and_must_be_one_of_the_plans(federation_at: FederationAt, sites: dict[str, Path]) -> None:
    federation = federation_at("fixed")
    server = federation.server(*FLAGS)
    wrong = federation.device(sites["one"], "--variant", "tiny\x1b[31m")
    assert wrong.code() != 0
    assert "no variant 'tiny [31m' of its model: it has small, main (fedclient --variant)" in wrong.text
    devices = [federation.device(sites[name], *OF[name]) for name in ("two", "three", "four")]
    first = federation.device(sites["one"], fault=IN_TRAINING)
    first.await_fault()
    first.kill()
    changed = federation.device(sites["one"], *SMALL)
    assert changed.code() != 0
    assert "one has the variant 'main' of the model in this run, not 'small': start it with --variant main" in changed.text
    assert "one has the variant 'main'" in federation.client("one")["note"]
    back = federation.device(sites["one"], "--variant", "main")
    assert [device.code() for device in (*devices, back)] == [0] * 4
    assert server.stop() == 0


def test_a_plan_without_variants_refuses_one_and_a_later_run_may_add_it(
    federation_at: FederationAt, sites: dict[str, Path]
) -> None:
    federation = federation_at("later")
    plain = ("--method", "fedavg", "--model", "mlr", "--rounds", "1", "--min-clients", "2")
    server = federation.server(*plain)
    small = federation.device(sites["one"], *SMALL)
    assert small.code() != 0 and "no variant 'small' of its model: its model has no variants (model.variant)" in small.text
    names = ("one", "two")
    devices = [federation.device(sites[name]) for name in names]
    assert [device.code() for device in devices] == [0, 0], [device.text for device in devices]
    assert server.stop() == 0
    config = federation.folder / "second.toml"
    config.write_text(
        '[method]\nname = "fedavg"\n[model]\nname = "dnn"\nhidden = [8]\n[[model.variant]]\nname = "small"\nhidden = [4]\n'
        "[round]\nrounds = 1\nmin_clients = 2\n"
    )
    federation.command("fedserver", "run", "new", "second", "--config", str(config), "--home", str(federation.home))
    server = federation.server()
    devices = [federation.device(sites["one"], *SMALL), federation.device(sites["two"])]
    assert [device.code() for device in devices] == [0, 0], [device.text for device in devices]
    assert federation.export().keys() >= {"shared.safetensors", "shared@small.safetensors"}
    assert federation.client("one")["variant"] == "small"
    assert server.stop() == 0
    federation.command("fedserver", "verify", "--home", str(federation.home))
