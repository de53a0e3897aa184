"""Founders keep their own embeddings until their first update, whoever is sampled before. Later devices begin with the mean."""

from collections.abc import Sequence

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.seeds import derive
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.hypernetwork import Embeddings, Hypernetwork
from tests.fedserver.bench import Bench, plan

SGD = {"server_optimiser": "sgd", "server_momentum": 0.0, "server_weight_decay": 0.0}
SEED = 1


class Minus:
    """Optimiser z <- z - gradient."""

    moments = ()

    def dense_(self, value: torch.Tensor, gradient: torch.Tensor, moments: object, step: int) -> None:
        value -= gradient


def drawn(client: str, dim: int, seed: int = SEED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derive(seed, "embedding", client))
    return torch.randn(dim, generator=generator, dtype=torch.float64)


def step(embeddings: Embeddings, **gradients: list[float]) -> None:
    rows = torch.tensor(list(gradients.values()), dtype=torch.float64)
    embeddings.step(list(gradients), rows, Minus())  # type: ignore[arg-type]


def value(embeddings: Embeddings, client: str) -> torch.Tensor:
    return embeddings.values([client])[0].clone()


def test_by_hand_over_rounds_with_samples_of_the_founders() -> None:
    """Train a and b, but not c. A late device z has what it was given last, until it is trained itself."""
    embeddings = Embeddings(SEED, 2, torch.float64, [])
    late = torch.tensor([0.5, -2.0]).double()
    for name in "abc":
        embeddings.admit(name, None)
    step(embeddings, a=[1.0, 2.0])
    for name in "bc":
        embeddings.admit(name, None)
    a = drawn("a", 2) - torch.tensor([1.0, 2.0]).double()
    assert torch.equal(value(embeddings, "a"), a) and embeddings.trained() == ["a"]
    embeddings.admit("z", late)
    embeddings.admit("y", late)
    step(embeddings, b=[0.5, 0.0], z=[1.0, 0.0])
    b = drawn("b", 2) - torch.tensor([0.5, 0.0]).double()
    assert torch.equal(value(embeddings, "b"), b), "b's first step starts from b's own draw"
    assert value(embeddings, "z").tolist() == [-0.5, -2.0]
    assert value(embeddings, "y").tolist() == late.tolist() == [0.5, -2.0], "z's step leaves what y was given"
    embeddings.admit("y", -late)
    for name, given in (("a", None), ("c", None), ("z", late)):
        embeddings.admit(name, given)
    assert torch.equal(value(embeddings, "c"), drawn("c", 2)), "never trained"
    assert value(embeddings, "y").tolist() == [-0.5, 2.0], "never trained: what was given last counts"
    assert value(embeddings, "z").tolist() == [-0.5, -2.0] and torch.equal(value(embeddings, "a"), a)


def test_while_none_is_trained_everybody_has_a_draw() -> None:
    made = network(vault := MemoryVault())
    made.start({"x": torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))})
    for name, founder in (("early", True), ("late", False)):
        made.admit(name, founder)
        assert torch.allclose(dict(made.generate([name]))[name]["x"], by_hand(dict(vault.read("network")), drawn(name, 4)))


def network(vault: MemoryVault) -> Hypernetwork:
    settings = HypernetworkSettings(embedding_dim=4, hidden=6, layers=2, server_lr=0.05, embedding_lr=0.5, **SGD)
    return Hypernetwork(settings, vault, SEED, {"x": ["x"]})


def by_hand(saved: dict[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    hidden = saved["mlp.1.weight"] @ (saved["mlp.0.weight"] @ z + saved["mlp.0.bias"]).clamp(min=0) + saved["mlp.1.bias"]
    return (saved["head.x.weight"] @ hidden + saved["head.x.bias"]).view(3, 2)


def close(made: Hypernetwork, number: int, names: Sequence[str]) -> None:
    """Close a round in which these founders are sampled."""
    for name in names:
        made.admit(name, founder=True)
    draw = torch.Generator().manual_seed(number)
    made.close_round([PartUpdate(n, 1, {"x": torch.randn(3, 2, generator=draw, dtype=torch.float64)}) for n in names])


@pytest.mark.parametrize("restarts", [False, True])
def test_what_founders_and_late_devices_are_served_and_step_from(restarts: bool) -> None:
    vault = MemoryVault()
    made = network(vault)
    made.start({"x": torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))})
    for number, names in enumerate((["a", "b"], ["a"], ["b"])):
        close(made, number, names)
        made = network(vault) if restarts else made
    saved = dict(vault.read("network"))
    for name, founder in (("c", True), ("d", True), ("late", False)):
        made.admit(name, founder)
    served = dict(made.generate(["c", "d", "late"]))
    z = {"c": drawn("c", 4), "d": drawn("d", 4)}
    for name, embedding in z.items():
        assert torch.allclose(served[name]["x"], by_hand(saved, embedding), atol=1e-12), name
    assert torch.equal(served["late"]["x"], made.cold_start()["x"])

    change = torch.full((3, 2), 0.25, dtype=torch.float64)
    start = z["c"].clone().requires_grad_()
    (by_hand(saved, start) * -change).sum().backward()
    made = network(vault) if restarts else made
    made.admit("c", founder=True)
    made.close_round([PartUpdate("c", 1, {"x": change})])
    after = dict(vault.read("network"))["embedding.value"][2]
    assert start.grad is not None and torch.allclose(after, drawn("c", 4) - 0.5 * start.grad, atol=1e-12)


def test_founders_stay_apart_when_few_are_sampled() -> None:
    """Sample two of twelve founders per round: the mean distance of pairs must not shrink to that of copies of one mean."""
    vault = MemoryVault()
    made = network(vault)
    made.start({"x": torch.zeros(3, 2, dtype=torch.float64)})
    names = [f"c{i:02}" for i in range(12)]
    at_first = torch.pdist(torch.stack([drawn(name, 4) for name in names])).mean()
    order = torch.Generator().manual_seed(3)
    for number in range(20):
        close(made, number, [names[i] for i in torch.randperm(12, generator=order)[:2].tolist()])
    for name in names:
        made.admit(name, founder=True)
    made.close_round([PartUpdate("c00", 1, {"x": torch.zeros(3, 2, dtype=torch.float64)})])
    assert torch.pdist(dict(vault.read("network"))["embedding.value"]).mean() > 0.8 * at_first


def test_the_engine_keeps_founders_through_restarts_and_rebuilds_damaged_state(tmp_path) -> None:
    """Kill the engine in aggregation, so that the engine that closes the round has not served these clients."""

    def play(folder, restarted: bool) -> tuple[dict[str, dict[str, str]], Bench]:
        bench = Bench(folder, plan("fedtp", "vit", embedding_dim=3))
        for number, names in enumerate((["a"], ["b"], ["late"])):
            founders = set(names) - {"late"}
            bench.engine.serve(names, founders)
            if restarted:
                bench.restart()
            bench.take({name: bench.entry(name, 0.01 * number, 3) for name in names}, founders)
        served = bench.engine.serve(["a", "b", "c", "late"], ["a", "b", "c"])
        return {name: {part: blob.digest for part, blob in parts.items()} for name, parts in served.items()}, bench

    expected, _ = play(tmp_path / "one", restarted=False)
    found, bench = play(tmp_path / "two", restarted=True)
    assert found == expected and len({parts["generated"] for parts in found.values()}) == 4
    path, whole = bench.damage("generated.network.3.safetensors")
    bench.restart()
    assert path.read_bytes() == whole and bench.remade == [f"state/{path.name}"]


def test_a_founders_first_round_is_made_again_from_its_draw(tmp_path) -> None:
    """Rebuild a damaged state from its recipe, which names the founders."""
    bench = Bench(tmp_path, plan("fedtp", "vit", embedding_dim=3))
    for name in "ab":
        bench.engine.serve([name], [name])
        bench.take({name: bench.entry(name, 0.01, 3)}, [name])
    path, whole = bench.damage("generated.network.2.safetensors")
    bench.restart()
    assert path.read_bytes() == whole
