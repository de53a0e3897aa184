"""Every registered method over the network, and as a simulation with the same bits.

Two rounds run over gRPC and mutual TLS, with a server and a hosted fleet of three devices. `make conformance` runs them; they
are not part of `make test`, because they take some minutes on a busy machine.
"""

from pathlib import Path

import pytest

import attune
from attune.common.methods.registry import names
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.artifact import Model, read_info
from attune.fedserver.view.homes import status_of
from tests.common.methods.rows import ADAPTED
from tests.e2e.harness import digit_shards
from tests.e2e.hosted import host

EARLY = {"rounds": 30, "patience": 5}
LORA = "attune.tests.e2e.adapted:lora"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.name: path for path in digit_shards(tmp_path_factory.mktemp("shards"), 3, 30, 20)}


@pytest.mark.parametrize("method", names())
def test_a_method_runs_to_the_end_and_every_device_can_use_its_model(
    method: str, shards: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    settings = {
        "method": {"name": method},
        "round": {"rounds": 2},
        "train": {"local_epochs": 1},
        "model": {"name": LORA} if method in ADAPTED else {} if method == "analytic" else {"width": 8, "depth": 1, "heads": 2},
    }
    network = host(tmp_path, shards, settings, keep="personalized", allow_models=(LORA,))
    status = status_of(network.home)
    assert (status["state"], status["round"], status["method"]) == ("done", 2, method)
    served = {client["name"]: client["accuracy"] for client in status["clients"]}
    assert len(served) == 3 and all(0.0 <= accuracy <= 1.0 for accuracy in served.values())
    offline = {
        name: Model.load(network.model(name), allow_models=[LORA]).evaluate(load_shard(path))[0]
        for name, path in shards.items()
    }
    assert offline == pytest.approx(served), "the model that a device keeps is the one that was evaluated"
    simulated = attune.simulate(shards, settings=settings, keep="personalized")
    assert simulated.digests == network.digests
    saved = simulated.save(tmp_path / "saved") / "models"
    assert all(read_info(saved / name).files == read_info(network.model(name)).files for name in shards)
    assert {client["name"]: client["accuracy"] for client in simulated.status["clients"]} == served


def test_blends_with_the_closed_form_are_the_same_over_the_network(shards: dict[str, Path], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    settings = {"method": {"name": "fedper"}, "round": {"rounds": 2}, "train": {"local_epochs": 1}, "model": {"name": "dnn"}}
    network = host(tmp_path, shards, settings, baseline="alone")
    simulated = attune.simulate(shards, settings=settings, baseline="alone")
    assert simulated.digests == network.digests and "solved/total" in network.digests
    saved = simulated.save(tmp_path / "saved") / "models"
    for name in shards:
        info = read_info(network.model(name))
        assert info.files == read_info(saved / name).files and info.weights["closed-form"] > 0


def test_an_early_end_is_the_same_over_the_network_and_simulated(shards: dict[str, Path], tmp_path, monkeypatch) -> None:
    """The rate is too large, so that held-out samples do not become likelier from round to round."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    settings = {
        "method": {"name": "fedavg"},
        "model": {"name": "mlr"},
        "round": EARLY,
        "train": {"local_epochs": 5, "lr": 1000.0},
    }
    network, simulated = host(tmp_path, shards, settings), attune.simulate(shards, settings=settings)
    ends = [(status["state"], status["round"], status["rounds"]) for status in (status_of(network.home), simulated.status)]
    _, last, _ = ends[0]
    assert ends == [("done", last, last)] * 2 and last < EARLY["rounds"]
    assert simulated.digests == network.digests
