"""The plain loss and the proximal term by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attune.common.methods.settings.objectives import ProximalSettings, SgdSettings
from attune.fedclient.work.measures import mean_cross_entropy
from attune.fedclient.work.objectives.proximal import Proximal, pulled
from attune.fedclient.work.objectives.sgd import Sgd


def test_the_term_by_hand():
    """Expect mu/2 * 2^2 and the gradient mu * 2 for received 1 and theta 3; tensors without a centre have no term."""
    w = torch.tensor([[3.0], [0.0]], requires_grad=True)
    private = torch.tensor([9.0], requires_grad=True)
    centre = torch.tensor([[1.0], [0.0]], requires_grad=True)
    loss = pulled(torch.tensor(2.0), {"w": w, "private": private}, {"w": centre}, 0.25)
    assert loss.item() == pytest.approx(2 + 0.25 / 2 * 4)
    loss.backward()
    assert w.grad.flatten().tolist() == pytest.approx([0.25 * 2, 0.0])
    assert private.grad is None and centre.grad is None


def test_running_statistics_are_not_pulled(make_task):
    """Receive running statistics, which are not trained: the term is that of the weights."""
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 2, bias=False))
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    received = {name: tensor + 1 for name, tensor in start.items()}
    x, y = torch.zeros(2, 1), torch.tensor([0, 1])
    trained = Proximal(ProximalSettings(mu=0.5)).run(make_task(model, x, y, start, received))
    assert trained.loss == pytest.approx(0.6931472 + 0.25 * 2)
    assert trained.tensors["1.weight"].flatten().tolist() == pytest.approx((start["1.weight"] + 0.25).flatten().tolist())


def test_without_mu_it_is_sgd_bit_by_bit(make_task):
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3)
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    x, y = torch.randn(5, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1])
    task = make_task(model, x, y, start, {name: tensor * 0 for name, tensor in start.items()}, batch_size=2, momentum=0.9)
    prox, plain = Proximal(ProximalSettings(mu=0)).run(task), Sgd(SgdSettings()).run(task)
    assert prox.loss == plain.loss
    assert all(prox.tensors[name].equal(plain.tensors[name]) for name in start)
    assert not plain.tensors["weight"].equal(start["weight"]) and task.start["weight"].equal(model.weight)


def test_loss_over_positions_counts_each_one():
    """Use two positions with probabilities 1/2 and 1/4 for the right symbol: (ln 2 + ln 4) / 2."""
    logits_NTC = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]))
    assert mean_cross_entropy(logits_NTC, torch.tensor([[0, 1]])).item() == pytest.approx(1.5 * 0.6931472)
