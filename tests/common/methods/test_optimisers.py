"""The in-place optimisers against torch.optim, step by step."""

import pytest
import torch

from attune.common.methods.hypernetwork import ServerAdam, ServerSgd

CASES = [
    (ServerSgd(0.01, 0.9, 1e-3), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3)),
    (ServerSgd(0.05, 0.0, 1e-2), lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2)),
    (ServerSgd(0.05, 0.5, 0.0), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5)),
    (ServerAdam(1e-3, 0.0), lambda p: torch.optim.Adam(p, lr=1e-3)),
    (ServerAdam(1e-2, 1e-2), lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2)),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
@pytest.mark.parametrize("form", ["dense", "outer", "outer in blocks"])
def test_equals_torch_over_several_steps(ours, theirs, form):
    generator = torch.Generator().manual_seed(0)
    W_RH = torch.randn(23, 6, dtype=torch.float64, generator=generator)
    reference = torch.nn.Parameter(W_RH.clone())
    optimiser = theirs([reference])
    moments = [torch.zeros_like(W_RH) for _ in ours.moments]
    for step in range(1, 7):
        G_SR = torch.randn(3, 23, dtype=torch.float64, generator=generator)
        F_SH = torch.randn(3, 6, dtype=torch.float64, generator=generator)
        reference.grad = G_SR.T @ F_SH
        optimiser.step()
        if form == "dense":
            ours.dense_(W_RH, G_SR.T @ F_SH, moments, step)
        else:
            size = 8 if form == "outer in blocks" else 23
            for start in range(0, 23, size):
                rows = slice(start, start + size)
                ours.outer_(W_RH[rows], G_SR[:, rows], F_SH, [moment[rows] for moment in moments], step)
        assert torch.allclose(W_RH, reference.detach(), rtol=1e-12, atol=1e-14)


def test_by_hand():
    """Start from v = 1 with g = 2: m = 2 + 0.1 * 1 = 2.1, v = 1 - 0.5 * 2.1 = -0.05.

    Then with g = 0: m = 0.9 * 2.1 - 0.1 * 0.05 = 1.885, v = -0.05 - 0.5 * 1.885 = -0.9925.
    """
    sgd, value, moment = ServerSgd(0.5, 0.9, 0.1), torch.tensor([1.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    sgd.dense_(value, torch.tensor([2.0], dtype=torch.float64), [moment], 1)
    assert value.item() == pytest.approx(-0.05)
    sgd.dense_(value, torch.tensor([0.0], dtype=torch.float64), [moment], 2)
    assert value.item() == pytest.approx(-0.9925)


def test_the_gradient_given_is_not_changed():
    gradient = torch.ones(3)
    ServerAdam(1e-3, 0.1).dense_(torch.ones(3), gradient, [torch.zeros(3), torch.zeros(3)], 1)
    assert torch.equal(gradient, torch.ones(3))
