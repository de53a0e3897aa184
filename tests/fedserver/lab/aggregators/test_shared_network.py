"""The hypernetwork that devices are sent: its rounds are those of the hypernetwork that has the embeddings itself."""

from typing import Any

import pytest
import torch

from attune.common.exchange.messages import BlobRef, Order
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.hypernetwork import off_wire, travelling
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.wire.tensors import manifest_of
from attune.fedclient.work.embedding import PART, Embedding, Generator
from attune.fedserver.lab.aggregators.base import MemoryVault, Tensors
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from attune.fedserver.lab.aggregators.shared_network import SharedNetwork
from tests.fedserver.lab.aggregators.conftest import COMPONENTS, SHAPES, draw

SAMPLES = {"ada": 30.0, "ben": 10.0, "cara": 60.0, "dan": 25.0}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam with decay": {"server_weight_decay": 0.01},
    "sgd": {"server_optimiser": "sgd"},
    "plain sgd": {"server_optimiser": "sgd", "server_momentum": 0.0},
}


def wide(seed: int, scale: float = 1.0) -> Tensors:
    return {name: tensor.double() for name, tensor in draw(seed, scale).items()}


class Devices:
    """Both forms side by side: embeddings on the server, and on the devices, with the same draws."""

    def __init__(self, options: dict[str, Any]) -> None:
        initial = wide(1)
        plain, self.settings = (HypernetworkSettings(embedding_dim=5, hidden=7, **options, embedding=kind) for kind in PLACES)  # type: ignore[arg-type]
        self.plain = Hypernetwork(plain, MemoryVault(), 3, COMPONENTS)
        self.vault = MemoryVault()
        self.shared = SharedNetwork(self.settings, self.vault, 3, COMPONENTS)
        for aggregator in (self.plain, self.shared):
            aggregator.start(initial)
        for name in SAMPLES:
            self.plain.admit(name, founder=True)
        self.embeddings: dict[str, Embedding] = {}
        for name, samples in SAMPLES.items():
            generator = Generator(self.settings, initial, COMPONENTS, samples)
            self.embeddings[name] = generator.started(self.plain._load().embeddings.values([name])[0].clone())
        self.counted: dict[str, dict[int, float]] = {name: {} for name in SAMPLES}

    def served(self) -> Tensors:
        slot = self.shared.slot("ada")
        assert slot is not None
        return dict(self.vault.read(slot))

    def begin(self, name: str, number: int) -> Tensors:
        """Return what a device generates with the order of this round."""
        order = Order(f"train-{number}-{name}", number, "train", (BlobRef(PART, "phi", 1),), counted=self.counted[name])
        self.embeddings[name] = self.embeddings[name].after(order, {"phi": self.served()})
        return self.embeddings[name].weights()

    def round(self, number: int, cohort: list[str], lost: str = "") -> None:
        """Train a cohort by both forms; the update of `lost` does not count."""
        generated, changes, gradients = dict(self.plain.generate(cohort)), [], []
        for k, name in enumerate(cohort):
            received, change = self.begin(name, number), wide(10 * number + k, 0.01)
            for tensor, values in generated[name].items():
                torch.testing.assert_close(received[tensor], values, atol=1e-9, rtol=0)
            theta = {tensor: received[tensor] + change[tensor] for tensor in SHAPES}
            gradient, self.embeddings[name] = self.embeddings[name].handed_in(theta, received, number)
            assert manifest_of(gradient) == travelling(self.settings, received, COMPONENTS) == manifest_of(self.served())
            if name != lost:
                changes.append(PartUpdate(name, SAMPLES[name], change))
                gradients.append(PartUpdate(name, SAMPLES[name], gradient))
        self.plain.close_round(changes)
        metrics = self.shared.close_round(gradients)
        for update in gradients:
            self.counted[update.client] = {number: metrics["weight"]}


PLACES = ("trained", "device")


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_rounds_are_those_of_plain_fedtp_in_float64(optimiser: str) -> None:
    both = Devices(OPTIMISERS[optimiser])
    both.round(1, ["ada", "ben", "cara"])
    both.round(2, ["ben", "cara", "dan"], lost="cara")
    both.round(3, ["ada", "cara", "dan"])
    for name in SAMPLES:
        both.begin(name, 4)
    state = both.plain._load()
    network = off_wire(both.served())
    for name, tensor in state.network.items():
        torch.testing.assert_close(network[name], tensor, atol=1e-9, rtol=0)
    for name, embedding in both.embeddings.items():
        torch.testing.assert_close(embedding.value, state.embeddings.values([name])[0], atol=1e-9, rtol=0)
        assert embedding.steps == {"ada": 2, "ben": 2, "cara": 2, "dan": 2}[name]
        assert embedding.waiting.round == 0


def test_an_update_that_did_not_count_does_not_step_the_embedding() -> None:
    both = Devices({})
    both.round(1, ["ada", "ben"], lost="ben")
    before = {name: both.embeddings[name].value for name in ("ada", "ben")}
    for name in before:
        both.begin(name, 2)
    assert not torch.equal(both.embeddings["ada"].value, before["ada"])
    assert torch.equal(both.embeddings["ben"].value, before["ben"])
    both.counted["ben"] = {1: 30.0}  # told too late: that step is gone
    both.begin("ben", 3)
    assert torch.equal(both.embeddings["ben"].value, before["ben"])


def test_the_common_model_is_that_of_the_embedding_zero() -> None:
    both = Devices({})
    both.round(1, ["ada", "ben"])
    both.begin("ada", 2)
    ada = both.embeddings["ada"]
    zero = ada.generator.started(torch.zeros(5, dtype=torch.float64))
    order = Order("train-2-ada", 2, "train", (BlobRef(PART, "phi", 1),))
    common = ada.common(both.served())
    for name, values in zero.after(order, {"phi": both.served()}).weights().items():
        assert torch.equal(common[name], values)
        assert not torch.equal(ada.weights()[name], values)


def test_a_restart_continues_bit_for_bit() -> None:
    whole, broken = Devices({}), Devices({})
    for number, cohort in ((1, ["ada", "ben"]), (2, ["cara", "ben"])):
        whole.round(number, cohort)
        broken.round(number, cohort)
        broken.shared = SharedNetwork(broken.settings, broken.vault, 3, COMPONENTS)
    assert all(torch.equal(tensor, broken.served()[name]) for name, tensor in whole.served().items())
    assert broken.shared.close_round([]) == {}
    assert all(torch.equal(tensor, broken.served()[name]) for name, tensor in whole.served().items())
