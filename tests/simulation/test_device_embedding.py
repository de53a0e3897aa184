"""FedTP with the embedding on the device in whole federations: plain FedTP, of which the server sees a sum."""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attune
from attune.common.config import load_settings
from attune.common.errors import AttuneError, SettingError
from attune.common.methods.hypernetwork import generated, heads_of, off_wire
from attune.common.wire.files import read_tensors
from attune.fedserver.core.planning import resolve
from tests.forked import hosts
from tests.simulation.test_simulate import QUICK, cloud

DEVICES = {f"site{n}": cloud(n, 40 + 15 * n) for n in range(6)}
PLAIN = QUICK | {"method.bound_change": 0.0, "method.bound_samples": 0.0, "round.take_back": 0.0}
ON_DEVICE = QUICK | {"method.embedding": "device", "method.bound_change": 0.0}
SECURE = QUICK | {"method.embedding": "device", "privacy.secure_aggregation": True}
Tensors = Mapping[str, torch.Tensor]


def run(home: Path, settings: dict[str, Any], rounds: int = 3, **more: Any) -> Any:
    """Simulate pFedHN, which generates the whole model."""
    return attune.simulate(DEVICES, "pfedhn", rounds=rounds, settings=settings, home=home, progress=False, **more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs plain FedTP once for each optimiser, and returns its home."""

    @cache
    def ran(optimiser: str) -> Path:
        home = tmp_path_factory.mktemp("plain") / optimiser
        run(home, PLAIN | {"method.server_optimiser": optimiser})
        return home

    return ran


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Run with the embedding on the device. Return the home, which tests only read, and the result."""
    home = tmp_path_factory.mktemp("device") / "home"
    return home, run(home, ON_DEVICE, executor="sequential")


def newest(home: Path, what: str) -> Tensors:
    paths = home.glob(f"server/state/generated.{what}.*.safetensors")
    return read_tensors(max(paths, key=lambda path: int(path.name.split(".")[2])))


def embedding(home: Path, name: str) -> Tensors:
    [path] = home.glob(f"devices/{name}/orders/evaluate-3-*/embedding.safetensors")
    return read_tensors(path)


def weights(network: Tensors, initial: Tensors, z_E: torch.Tensor) -> torch.Tensor:
    heads = heads_of(initial, {"head": list(initial)})
    return torch.cat([tensor.reshape(-1) for tensor in generated(network, heads, initial, z_E[None])[0].values()])


@pytest.mark.parametrize(
    ("optimiser", "settings", "bound"),
    [
        ("adam", ON_DEVICE, 2e-6),
        ("sgd", ON_DEVICE, 2e-6),
        ("adam", SECURE | {"privacy.secure_clip": 0.1}, 1.3e-5),
        ("sgd", SECURE | {"privacy.secure_clip": 0.3}, 3e-6),
    ],
)
def test_three_rounds_give_the_weights_of_plain_fedtp(
    tmp_path: Path, plain: Callable[[str], Path], optimiser: str, settings: dict[str, Any], bound: float
) -> None:
    run(tmp_path / "device", settings | {"method.server_optimiser": optimiser})
    network, initial = newest(plain(optimiser), "network"), newest(plain(optimiser), "initial")
    sent = off_wire(newest(tmp_path / "device", "value"))
    names = json.loads(network["embedding.clients"].numpy().tobytes())
    assert sorted(names) == sorted(DEVICES)
    for name, z_E in zip(names, network["embedding.value"], strict=True):
        own = embedding(tmp_path / "device", name)
        assert own["numbers"].tolist() == [3, 0, 0], "three steps, and none waits"
        torch.testing.assert_close(weights(sent, initial, own["value"]), weights(network, initial, z_E), atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("optimiser", "clip", "share", "largest"),
    [("sgd", 1.0, 3e-5, 3e-7), ("adam", 0.1, 6e-3, 2 * 3 * 1e-3), ("adam", 1.0, 4e-2, 2 * 3 * 1e-3)],
)
def test_with_small_gradients_the_sum_is_exact_and_steps_of_adam_are_not(
    tmp_path: Path, optimiser: str, clip: float, share: float, largest: float
) -> None:
    """Adam divides each gradient by its own size, so where rounding is all of it, rounding decides the sign of a whole step.

    A number of the network differs by two steps a round at most (server_lr = 1e-3), and the change of W by a share.
    """
    small = {"model.name": "transformer", "method.server_optimiser": optimiser}
    for name, settings in (("plain", PLAIN), ("secure", SECURE | {"privacy.secure_clip": clip})):
        attune.simulate(DEVICES, "fedtp", rounds=3, settings=settings | small, home=tmp_path / name, progress=False)
    network, initial = newest(tmp_path / "plain", "network"), newest(tmp_path / "plain", "initial")
    sent = off_wire(newest(tmp_path / "secure", "value"))
    assert max(float((tensor - network[name]).abs().max()) for name, tensor in sent.items()) <= largest
    start, lost, moved = torch.cat([tensor.reshape(-1) for tensor in initial.values()]), 0.0, 0.0
    names = json.loads(network["embedding.clients"].numpy().tobytes())
    for name, z_E in zip(names, network["embedding.value"], strict=True):
        plain_W = weights(network, initial, z_E)
        secure_W = weights(sent, initial, embedding(tmp_path / "secure", name)["value"])
        lost += float((secure_W - plain_W).square().sum())
        moved += float((plain_W - start).square().sum())
    assert lost**0.5 <= share * moved**0.5


def test_executors_and_restarts_give_the_same_bits(tmp_path: Path, on_device: tuple[Path, Any]) -> None:
    _, whole = on_device
    broken = partial(run, tmp_path / "broken", ON_DEVICE, executor="sequential")
    with hosts():
        assert run(tmp_path / "processes", ON_DEVICE, executor="processes").digests == whole.digests
    assert broken().digests == whole.digests
    for path in (tmp_path / "broken").glob("server/state/generated.value.3.safetensors"):
        before = path.read_bytes()
        path.write_bytes(b"damaged")
        broken()
        assert path.read_bytes() == before


def test_no_order_and_no_file_of_the_server_has_an_embedding(on_device: tuple[Path, Any]) -> None:
    home, _ = on_device
    values = [embedding(home, name)["value"] for name in DEVICES]
    for path in (home / "server").rglob("*.safetensors"):
        numbers = torch.cat([tensor.double().reshape(-1) for tensor in read_tensors(path).values()])
        for value_E in values:
            assert not torch.isin(value_E.double(), numbers).all()


def test_bytes_each_way_are_those_of_the_network(on_device: tuple[Path, Any]) -> None:
    home, result = on_device
    size = sum(tensor.nbytes for tensor in newest(home, "value").values())
    rows = [row for row in result._outcome.snapshot.rows if row.work == "train"]
    assert len(rows) == 18
    for row in rows:
        assert size < row.bytes_up < size + 2_000
        # What was fetched for the evaluation before is not fetched again.
        assert row.bytes_down == 0 if row.round == 3 else size < row.bytes_down < size + 2_000


WRONG = {
    "method.robust=median": "method.robust",
    "method.robust=clip": "method.robust",
    "method.bound_samples=5.0": "method.bound_samples",
    "round.take_back=10.0": "round.take_back",
    "round.train=all": 'round.train = "all"',
    "round.adapt_rounds=2": "round.adapt_rounds",
    "privacy.unit=client": "generated parts",
}


@pytest.mark.parametrize("assignment", WRONG)
def test_what_it_cannot_be_combined_with_is_refused_by_name(assignment: str) -> None:
    with pytest.raises(SettingError, match=WRONG[assignment]):
        resolve(load_settings(None, ["method.name=fedtp", "method.embedding=device", assignment], {}))


def test_attended_parts_stay_refused_under_secure_aggregation() -> None:
    chosen = ["method.name=fedtp+mcsa", "method.embedding=device", "privacy.secure_aggregation=true"]
    with pytest.raises(SettingError, match="attended parts that are no means"):
        resolve(load_settings(None, chosen, {}))
    with pytest.raises(SettingError, match=r'or generated ones with method\.embedding = "device"'):
        resolve(load_settings(None, ["method.name=fedtp", "privacy.secure_aggregation=true"], {}))


def test_the_published_size_is_refused_with_its_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3)).astype(np.uint8)
    pictures = {name: (x, np.arange(4) % 2) for name in ("a", "b")}
    settings = {"model.name": "vit", "model.preset": "paper", "method.embedding": "device"}
    with pytest.raises(AttuneError, match=r"950,\d{3},\d{3} bytes each way in each round, for 1,572,864 generated numbers"):
        attune.simulate(pictures, "fedtp", rounds=1, settings=settings, progress=False)
