"""FedTP's server step against autograd, the scale of generated weights, and the embeddings that a round changes."""

import json
import math

import pytest
import torch
from torch.nn.functional import linear, normalize, relu

from attune.common.errors import SettingError
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.hypernetwork import features, heads_of
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.seeds import derive
from attune.fedserver.lab.aggregators import hypernetwork
from attune.fedserver.lab.aggregators.base import MemoryVault, Tensors
from attune.fedserver.lab.aggregators.hypernetwork import FORWARD_ROWS, Hypernetwork

COMPONENTS = {"blocks.0.qkv": ["blocks.0.qkv.weight"], "blocks.1.qkv": ["blocks.1.qkv.weight", "blocks.1.qkv.bias"]}
PLAIN = {"server_optimiser": "sgd", "server_momentum": 0.0, "server_weight_decay": 0.0}
SAMPLES = {"ann": 30, "bob": 10, "cyd": 60}


def initial(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "blocks.0.qkv.weight": torch.randn(6, 4, generator=generator, dtype=dtype),
        "blocks.1.qkv.weight": torch.randn(5, 6, generator=generator, dtype=dtype),
        "blocks.1.qkv.bias": torch.randn(5, generator=generator, dtype=dtype),
    }


def make(dtype: torch.dtype = torch.float64, **settings: object) -> tuple[Hypernetwork, MemoryVault]:
    vault = MemoryVault()
    network = Hypernetwork(HypernetworkSettings(embedding_dim=4, hidden=9, **settings), vault, 7, COMPONENTS)
    network.start(initial(dtype))
    return network, vault


def saved(vault: MemoryVault) -> Tensors:
    return {name: tensor.clone() for name, tensor in vault.read("network").items()}


def client_loss(client: str, W: Tensors) -> torch.Tensor:
    """Compute a smooth loss that is not linear in W: two layers with tanh on the client's own data, in float64."""
    generator = torch.Generator().manual_seed(sum(client.encode()))
    x = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    hidden = torch.tanh(linear(x, W["blocks.0.qkv.weight"]))
    return (linear(hidden, W["blocks.1.qkv.weight"], W["blocks.1.qkv.bias"]) - y).square().mean()


def one_full_batch_step(client: str, received: Tensors, eta: float) -> Tensors:
    """Return the client's change, trained minus received, after one SGD step of rate eta."""
    W = {name: tensor.clone().requires_grad_() for name, tensor in received.items()}
    client_loss(client, W).backward()
    return {name: -eta * tensor.grad for name, tensor in W.items()}


def generate_from(phi: Tensors, z_SE: torch.Tensor) -> list[Tensors]:
    """Compute the hypernetwork of methods.md section 2: four Linear with ReLU between them, a linear head for each block."""
    hidden = linear(z_SE, phi["mlp.0.weight"], phi["mlp.0.bias"])
    for k in (1, 2, 3):
        hidden = linear(relu(hidden), phi[f"mlp.{k}.weight"], phi[f"mlp.{k}.bias"])
    first = linear(hidden, phi["head.blocks.0.weight"], phi["head.blocks.0.bias"])
    second = linear(hidden, phi["head.blocks.1.weight"], phi["head.blocks.1.bias"])
    return [
        {
            "blocks.0.qkv.weight": first[i].view(6, 4),
            "blocks.1.qkv.weight": second[i, :30].view(5, 6),
            "blocks.1.qkv.bias": second[i, 30:],
        }
        for i in range(len(z_SE))
    ]


@pytest.mark.parametrize("block_rows", [7, hypernetwork.BLOCK_ROWS])
@pytest.mark.parametrize("gamma", [None, 0.4])
def test_server_step_is_gradient_descent_through_loss_and_hypernetwork(gamma, block_rows, monkeypatch):
    """Check that phi moves by -beta*eta times the gradient of sum_i (m_i/M) f_i, to 1e-9 in float64.

    z moves likewise, or by a rate of its own. Signs: errata E2.
    """
    monkeypatch.setattr(hypernetwork, "BLOCK_ROWS", block_rows)
    beta, eta = 0.05, 0.1
    network, vault = make(server_lr=beta, embedding_lr=gamma, **PLAIN)
    clients = sorted(SAMPLES)
    served = dict(network.generate(clients))
    changes = {client: one_full_batch_step(client, served[client], eta) for client in clients}
    network.close_round([])
    before = saved(vault)
    network.close_round([PartUpdate(client, SAMPLES[client], changes[client]) for client in clients])
    after = saved(vault)

    phi = {name: tensor.requires_grad_() for name, tensor in before.items() if name.startswith(("mlp.", "head."))}
    draws = [torch.Generator().manual_seed(derive(7, "embedding", client)) for client in clients]
    z_SE = torch.stack([torch.randn(4, generator=draw, dtype=torch.float64) for draw in draws]).requires_grad_()
    generated = generate_from(phi, z_SE)
    for client, W in zip(clients, generated, strict=True):
        assert all(torch.allclose(W[name], served[client][name], rtol=0, atol=1e-12) for name in W)
    total = sum(SAMPLES[client] / 100 * client_loss(client, W) for client, W in zip(clients, generated, strict=True))
    total.backward()
    for name, tensor in phi.items():
        expected = tensor.detach() - beta * eta * tensor.grad
        assert (after[name] - expected).abs().max() <= 1e-9
        assert (after[name] - tensor.detach()).abs().max() > 1e-9
    assert (after["embedding.value"] - (z_SE.detach() - (gamma or beta) * eta * z_SE.grad)).abs().max() <= 1e-9
    assert (after["embedding.value"] - z_SE.detach()).abs().max() > 1e-9


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_fitting_newcomers_moves_their_embeddings_by_the_chain_rule_and_nothing_else(optimiser):
    """Check z <- z - beta eta (m/M) (dW/dz)^T grad f(W) after a finished federation; phi and old z keep every bit."""
    beta, eta = 0.05, 0.1
    options = PLAIN if optimiser == "sgd" else {"server_optimiser": "adam", "server_weight_decay": 0.0}
    network, vault = make(embedding_lr=beta, **options)
    network.close_round([PartUpdate(client, m, initial(seed=m)) for client, m in SAMPLES.items()])
    before, newcomers = saved(vault), {"new": 30, "odd": 10}
    old = dict(network.generate(sorted(SAMPLES)))
    served, start_E = dict(network.generate(list(newcomers))), network._late()
    network.fit([PartUpdate(c, m, one_full_batch_step(c, served[c], eta)) for c, m in newcomers.items()])
    after = saved(vault)

    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert all(name.startswith("embedding.") for name in changed), changed
    assert all(torch.equal(old[c][name], W[name]) for c, W in network.generate(sorted(SAMPLES)) for name in W)
    kinds = ["value", "step", *(["moment1", "moment2"] if optimiser == "adam" else [])]
    for client in SAMPLES:
        assert all(torch.equal(at(before, client, kind), at(after, client, kind)) for kind in kinds)
    phi = {name: tensor for name, tensor in before.items() if name.startswith(("mlp.", "head."))}
    z_SE = torch.stack([start_E, start_E]).requires_grad_()
    loss = sum(m / 40 * client_loss(c, W) for (c, m), W in zip(newcomers.items(), generate_from(phi, z_SE), strict=True))
    loss.backward()
    if optimiser == "sgd":
        expected_SE = z_SE.detach() - beta * eta * z_SE.grad
    else:  # Adam's first step: beta in the direction of the sign, up to epsilon
        g_SE = eta * z_SE.grad
        expected_SE = z_SE.detach() - beta * g_SE / (g_SE.abs() + 1e-8)
    moved_SE = torch.stack([at(after, client, "value") for client in newcomers])
    assert (moved_SE - expected_SE).abs().max() <= 1e-9
    assert (moved_SE - start_E).abs().max() > 1e-5
    network.fit([PartUpdate("new", 0, initial())])
    assert all(torch.equal(tensor, saved(vault)[name]) for name, tensor in after.items())


def test_with_the_printed_sign_a_step_is_the_opposite_and_the_loss_climbs():
    """Errata E2, as an option: phi moves by the same amount as corrected, in the other direction."""
    moved, climbed = {}, {}
    for sign in ("corrected", "printed"):
        network, vault = make(server_lr=0.05, delta_sign=sign, **PLAIN)
        before, losses = saved(vault), []
        for _ in range(10):
            served = dict(network.generate(list(SAMPLES)))
            losses.append(sum(float(client_loss(client, W)) for client, W in served.items()))
            network.close_round([PartUpdate(c, 1, one_full_batch_step(c, W, 0.1)) for c, W in served.items()])
            phi = {name: tensor - before[name] for name, tensor in saved(vault).items() if name.startswith(("mlp.", "head."))}
            moved.setdefault(sign, phi)
        climbed[sign] = losses[-1] - losses[0]
    for name, change in moved["corrected"].items():
        assert torch.allclose(change, -moved["printed"][name], rtol=1e-9, atol=1e-12) and change.abs().max() > 0
    assert climbed["corrected"] < 0 < climbed["printed"]


def test_the_printed_sign_is_refused_where_devices_keep_their_embeddings():
    with pytest.raises(SettingError, match="embeddings on the server"):
        HypernetworkSettings(delta_sign="printed", embedding="device")


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_several_rounds_equal_torch_optim_on_the_whole_network(optimiser):
    """Compare momentum, decay and moments with torch.optim over all parameters; z too, with all clients in every cohort."""
    network, vault = make(server_optimiser=optimiser, server_weight_decay=1e-3)
    clients = sorted(SAMPLES)
    for client in clients:
        network.admit(client)
    phi = {n: torch.nn.Parameter(t.clone()) for n, t in saved(vault).items() if n.startswith(("mlp.", "head."))}
    draws = [torch.Generator().manual_seed(derive(7, "embedding", client)) for client in clients]
    z_SE = torch.nn.Parameter(torch.stack([torch.randn(4, generator=draw, dtype=torch.float64) for draw in draws]))
    reference: torch.optim.Optimizer = (
        torch.optim.Adam([{"params": list(phi.values())}, {"params": [z_SE], "lr": 0.1}], lr=1e-3, weight_decay=1e-3)
        if optimiser == "adam"
        else torch.optim.SGD([*phi.values(), z_SE], lr=0.01, momentum=0.9, weight_decay=1e-3)
    )
    for number in range(5):
        changes = {client: initial(seed=number + sum(client.encode())) for client in clients}
        network.close_round([PartUpdate(client, SAMPLES[client], changes[client]) for client in clients])
        reference.zero_grad()
        generated = generate_from(phi, z_SE)
        inner = sum(
            SAMPLES[client] / 100 * (W[name] * -changes[client][name]).sum()
            for client, W in zip(clients, generated, strict=True)
            for name in W
        )
        inner.backward()
        reference.step()
    after = saved(vault)
    assert all(torch.allclose(after[name], p.detach(), rtol=1e-9, atol=1e-11) for name, p in phi.items())
    assert torch.allclose(after["embedding.value"], z_SE.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("hidden", [20, 150])
def test_generated_weights_have_the_layers_own_scale_at_any_width(width, hidden):
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, 3 * width, bias=False).weight.detach()
    network = Hypernetwork(HypernetworkSettings(hidden=hidden), MemoryVault(), 0, {"blocks.0.qkv": ["blocks.0.qkv.weight"]})
    network.start({"blocks.0.qkv.weight": layer})
    for _, W in network.generate([f"c{i}" for i in range(8)]):
        generated = W["blocks.0.qkv.weight"]
        assert float(generated.std() / layer.std()) == pytest.approx(1, rel=0.03)
        assert 0.05 < float((generated - layer).std() / layer.std()) < 0.2


def layers(**settings: object) -> Tensors:
    """Return the layers of a fresh network below its heads."""
    vault = MemoryVault()
    network = Hypernetwork(HypernetworkSettings(**settings), vault, 0, COMPONENTS)
    network.start(initial())
    network.close_round([])
    return {name: tensor for name, tensor in saved(vault).items() if name.startswith("mlp.")}


def arc_cosine(c: float) -> float:
    """Return the cosine after a wide layer of N(0, 2 / in) and a ReLU, from the one before (Cho and Saul 2009, equation 6)."""
    return (math.sqrt(1 - c * c) + (math.pi - math.acos(c)) * c) / math.pi


def test_he_keeps_the_scale_of_an_embedding_and_tells_clients_apart():
    """Expect a scale of 1 per unit at any depth, and for orthogonal embeddings a cosine of 0.605 after three ReLUs."""
    network = layers(hidden=2000, embedding_dim=2000, initialisation="he")
    z_SE = torch.randn(24, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    f_SH = features(network, z_SE)
    assert float(f_SH.square().mean()) == pytest.approx(1, rel=0.1)
    cosine_SS = normalize(f_SH) @ normalize(f_SH).T
    expected = arc_cosine(arc_cosine(arc_cosine(0.0)))
    assert float((cosine_SS.sum() - 24) / (24 * 23)) == pytest.approx(expected, abs=0.03)
    assert not any(tensor.any() for name, tensor in network.items() if name.endswith("bias"))


def test_sgd_at_its_default_rate_moves_a_client_by_a_good_part_of_its_change():
    """Check that a client's own change moves it more than the changes of the four others do."""
    network = Hypernetwork(HypernetworkSettings(server_optimiser="sgd", server_weight_decay=0.0), MemoryVault(), 0, COMPONENTS)
    network.start(initial())
    names = [f"c{i}" for i in range(5)]
    before = dict(network.generate(names))
    changes = {name: initial(seed=10 + i) for i, name in enumerate(names)}
    network.close_round([PartUpdate(name, 1, change) for name, change in changes.items()])
    after = dict(network.generate(names))
    for name in names:
        moved = torch.cat([(after[name][key] - before[name][key]).flatten() for key in changes[name]])
        each = {other: torch.cat([change[key].flatten() for key in change]) for other, change in changes.items()}
        shares = torch.linalg.lstsq(torch.stack(list(each.values()), dim=1), moved.unsqueeze(1)).solution.flatten()
        own = float(shares[names.index(name)])
        assert 0.1 < own < 0.6
        assert own > 1.2 * (float(shares.sum()) - own) / 4


def test_constant_tensors_are_generated_as_they_are_and_can_learn():
    network = Hypernetwork(HypernetworkSettings(), MemoryVault(), 0, {"blocks.0.norm": ["blocks.0.norm.weight"]})
    network.start({"blocks.0.norm.weight": torch.ones(8)})
    assert torch.equal(dict(network.generate(["a"]))["a"]["blocks.0.norm.weight"], torch.ones(8))
    network.close_round([PartUpdate("a", 1, {"blocks.0.norm.weight": torch.full((8,), 0.5)})])
    assert (dict(network.generate(["a"]))["a"]["blocks.0.norm.weight"] > 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_a_client_do_not_depend_on_who_else_is_asked_for(dtype):
    network, _ = make(dtype)
    everyone = [f"c{i:02}" for i in range(2 * FORWARD_ROWS + 3)]
    together = dict(network.generate(everyone))
    assert list(together) == everyone
    for asked in ([everyone[5]], everyone[::-1], everyone[3:9]):
        for client, W in network.generate(asked):
            assert all(torch.equal(W[name], together[client][name]) for name in W)


def embedding_of(vault: MemoryVault, client: str, kind: str = "value") -> torch.Tensor:
    return at(saved(vault), client, kind)


def at(state: Tensors, client: str, kind: str = "value") -> torch.Tensor:
    names = json.loads(bytes(state["embedding.clients"].tolist()))
    return state[f"embedding.{kind}"][names.index(client)]


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_embeddings_of_clients_not_in_the_cohort_are_untouched(optimiser):
    network, vault = make(server_optimiser=optimiser, server_weight_decay=0.1)
    network.close_round([PartUpdate(client, m, initial(seed=m)) for client, m in SAMPLES.items()])
    kinds = ["value", "step", *(["momentum"] if optimiser == "sgd" else ["moment1", "moment2"])]
    before = {kind: embedding_of(vault, "bob", kind) for kind in kinds}
    network.close_round([PartUpdate("ann", 1, initial(seed=5))])
    assert all(torch.equal(before[kind], embedding_of(vault, "bob", kind)) for kind in kinds)
    assert embedding_of(vault, "ann", "step").item() == 2


def test_fixed_embeddings_never_move():
    network, vault = make(embedding="fixed")
    network.close_round([PartUpdate(client, m, initial(seed=m)) for client, m in SAMPLES.items()])
    before = embedding_of(vault, "ann")
    network.close_round([PartUpdate("ann", 1, initial(seed=5))])
    assert torch.equal(before, embedding_of(vault, "ann"))


def test_a_device_new_to_a_trained_network_starts_from_the_cold_start():
    network, vault = make()
    network.admit("idle")
    network.close_round([PartUpdate(client, m, initial(seed=m)) for client, m in SAMPLES.items()])
    common = network.cold_start()
    network.admit("zoe")
    served = dict(network.generate(["zoe", "idle"]))
    assert all(torch.equal(served["zoe"][name], common[name]) for name in common)
    network.close_round([PartUpdate("ann", 1, initial(seed=5))])
    assert not torch.allclose(embedding_of(vault, "idle"), embedding_of(vault, "zoe"))


def test_heads_follow_blocks_and_otherwise_components():
    names = [
        "encoder.layers.0.attn.q.weight", "encoder.layers.0.mlp.2.weight", "encoder.layers.1.attn.q.weight", "head.bias",
        "token",
    ]  # fmt: skip
    components = {name.rpartition(".")[0] or name: [name] for name in names}
    heads = heads_of({name: torch.zeros(2) for name in names}, components)
    assert [(head.group, len(head.names)) for head in heads] == [
        ("encoder.layers.0", 2),
        ("encoder.layers.1", 1),
        ("head", 1),
        ("token", 1),
    ]
