"""From a method to working objects on real models, and the objectives by hand."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from common.aggregators.attention import Attention
from common.aggregators.base import MemoryVault, Update
from common.aggregators.hypernetwork import Hypernetwork
from common.aggregators.mean import Mean
from common.methods.algebra import assign
from common.methods.build import aggregators_for, objective_for, predictor_for
from common.methods.registry import get, names
from common.models.structure import tensors_of
from common.objectives.base import mean_cross_entropy


@pytest.mark.parametrize("name", [name for name in names() if name != "local"])
def test_every_method_plays_two_rounds_on_a_real_model(name, models):
    """Everything of a part comes back, with the model's own shapes and dtypes, and after training it has changed."""
    model, method = models["vit"](), get(name)
    kinds, initial = assign(method, model), tensors_of(model)
    vaults = {kind: MemoryVault() for kind in set(kinds.values())}
    options = {"hidden": 8} if "fedtp" in name else {}
    aggregators = aggregators_for(method, options, model, vaults.__getitem__, seed=1)
    assert set(aggregators) == set(kinds.values()) - {"private"}
    for kind, aggregator in aggregators.items():
        own = {tensor: initial[tensor] for tensor in initial if kinds[tensor] == kind}
        aggregator.start(own)
        changed = own
        for number in range(2):
            step = 0.01 * (number + 1)
            aggregator.admit("a")
            aggregator.close_round(
                [
                    Update(
                        client,
                        m,
                        {
                            n: t * 0 + step * m if aggregator.returns == "change" else changed[n] + step * m
                            for n, t in own.items()
                        },
                    )
                    for client, m in (("a", 1), ("b", 3))
                ]
            )
            slot = aggregator.slot("a")
            changed = dict(vaults[kind].read(slot)) if slot else dict(aggregator.generate(["a"]))["a"]
            assert {n: (t.shape, t.dtype) for n, t in changed.items()} == {n: (t.shape, t.dtype) for n, t in own.items()}
        assert all(not torch.equal(changed[n], own[n]) for n in own)


def test_kinds_get_their_aggregators(models):
    built = aggregators_for(get("fedtp+mcsa"), {}, models["vit"](), lambda kind: MemoryVault(), seed=0)
    assert isinstance(built["generated"], Hypernetwork) and isinstance(built["attended"], Attention)
    built = aggregators_for(get("fedavg"), {}, models["dnn"](), lambda kind: MemoryVault(), seed=0)
    assert isinstance(built["shared"], Mean)
    assert aggregators_for(get("local"), {}, models["dnn"](), lambda kind: MemoryVault(), seed=0) == {}


def linear_forward(params, x):
    return x @ params["w"].T


def test_proximal_by_hand():
    """Received 1 where theta is 3: the term is mu/2 * 2^2 = 0.5 * 4 * mu, its gradient mu * 2; the private tensor has none."""
    w = torch.tensor([[3.0], [0.0]], requires_grad=True)
    private = torch.tensor([9.0], requires_grad=True)
    x, y = torch.zeros(1, 1), torch.tensor([0])
    received = {"w": torch.tensor([[1.0], [0.0]])}
    objective = objective_for(get("fedprox"), {"mu": 0.25})
    loss = objective.loss(linear_forward, {"w": w, "private": private}, x, y, received)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(2.0)).item() + 0.25 / 2 * 4)
    loss.backward()
    assert w.grad.flatten().tolist() == pytest.approx([0.25 * 2, 0.0])
    assert private.grad is None


def test_proximal_without_mu_is_sgd():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, generator=generator)}
    x, y = torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1])
    prox = objective_for(get("fedprox"), {"mu": 0}).loss(linear_forward, params, x, y, {"w": torch.zeros(3, 4)})
    plain = objective_for(get("fedavg"), {}).loss(linear_forward, params, x, y, {})
    assert torch.equal(prox, plain)
    assert plain.item() == pytest.approx(cross_entropy(x @ params["w"].T, y).item())


def test_gradient_does_not_flow_into_what_was_received():
    centre = torch.zeros(2, 1, requires_grad=True)
    w = torch.ones(2, 1, requires_grad=True)
    loss = objective_for(get("fedmcsa"), {}).loss(linear_forward, {"w": w}, torch.zeros(1, 1), torch.tensor([0]), {"w": centre})
    loss.backward()
    assert centre.grad is None and w.grad.flatten().tolist() == [5.0, 5.0]


def test_loss_over_positions_counts_each_one():
    """Two positions with probabilities 1/2 and 1/4 for the right symbol: (ln 2 + ln 4) / 2."""
    logits_NTC = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]))
    assert mean_cross_entropy(logits_NTC, torch.tensor([[0, 1]])).item() == pytest.approx(1.5 * 0.6931472)


def test_the_model_predicts(models):
    model = models["dnn"]()
    x = torch.randn(4, 6)

    def forward(params, x):
        return functional_call(model, params, (x,))

    assert torch.equal(predictor_for(get("fedavg"), {}).logits(forward, tensors_of(model), x), model(x))
