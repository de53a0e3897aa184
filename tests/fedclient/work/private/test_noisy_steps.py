"""Training with noise: what it is without noise, what noise it has, and what it may take."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import (
    AlternatingSettings,
    MeanRegularisedSettings,
    OwnModelSettings,
    ProximalSettings,
    SgdSettings,
)
from attune.common.seeds import derive
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask, Network, Objective, Tensors, Trained, personal
from attune.fedclient.work.objectives.descent import Alternating, Descent, Sgd, TrainingDiverged, optimiser_for
from attune.fedclient.work.objectives.proximal import MeanRegularised, OwnModel, Proximal
from attune.fedclient.work.private.lattice import LatticeStream, lattice_step
from attune.fedclient.work.private.noisy_steps import OrderNoise, with_noise

N, STEPS = 40, 20
KEY = b"k" * 32


def noise(multiplier: float = 0.0, clip: float = math.inf, key: bytes = KEY, **more: Any) -> OrderNoise:
    return OrderNoise(clip=clip, noise=multiplier, key=key, charged=more.pop("charged", 10 * STEPS), **more)


def task(model: nn.Module | None = None, **settings: Any) -> LocalTask:
    torch.manual_seed(0)
    module = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module.double()
    start = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    usual: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "batch_size": 8, "local_steps": STEPS, "clip_norm": 1e-9}
    return LocalTask(
        network=Network(module),
        start=start,
        received={name: tensor + 0.1 for name, tensor in start.items()},
        x=torch.randn(N, 4, dtype=torch.float64),
        y=torch.arange(N) % 3,
        settings=TrainSettings(**(usual | settings)),
        seeds=lambda purpose: derive(7, purpose),
        device=torch.device("cpu"),
        kinds={name: "private" if name.startswith("2.") else "shared" for name in start},
    )


def by_hand(given: LocalTask, batches: Sequence[Tensor], mu: float = 0.0) -> Tensors:
    """Return what plain SGD reaches on these batches, each divided by the expected size, without clipping."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.start.items()}
    optimiser = optimiser_for(leaves, given.settings, lambda name: given.settings.weight_decay)
    for index_B in batches:
        optimiser.zero_grad()
        scores = given.network(leaves, given.x[index_B])
        loss = nn.functional.cross_entropy(scores, given.y[index_B], reduction="sum") / given.settings.batch_size
        for name, leaf in leaves.items():
            loss = loss + mu / 2 * (leaf - given.received[name]).square().sum()
        loss.backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize(("objective", "mu"), [(Sgd(SgdSettings()), 0.0), (Proximal(ProximalSettings(mu=0.7)), 0.7)])
def test_without_noise_and_clipping_it_is_plain_training_on_the_same_batches(objective: Objective, mu: float) -> None:
    given = task(weight_decay=0.01)
    batches = list(noise().batches(N, 8, STEPS, ""))
    assert len({len(index_B) for index_B in batches}) > 3  # drawn, not cut
    trained = objective.run(replace(given, noise=noise()))
    wanted = by_hand(given, batches, mu)
    assert all(torch.allclose(trained.tensors[name], wanted[name], rtol=1e-9) for name in wanted)


def test_every_sample_is_drawn_alone_with_the_same_chance() -> None:
    drawn = torch.zeros(2000, N)
    for step, index_B in enumerate(noise(charged=2000).batches(N, 8, 2000, "")):
        drawn[step, index_B] = 1
    assert torch.allclose(drawn.mean(dim=0), torch.full((N,), 0.2), atol=0.04)
    assert drawn.sum(dim=1).var().item() == pytest.approx(N * 0.2 * 0.8, rel=0.15)
    together = torch.corrcoef(drawn.T) - torch.eye(N)
    assert together.abs().max() < 0.12
    assert all(len(index_B) == N for index_B in noise().batches(N, N + 5, 3, ""))  # all samples are in each step


def test_samples_of_one_group_are_drawn_together() -> None:
    groups = torch.arange(N) // 4
    for index_B in noise(groups=groups).batches(N, 8, STEPS, ""):
        assert set(torch.bincount(groups[index_B], minlength=10).tolist()) <= {0, 4}


class Flat(nn.Module):
    """Model whose loss has no gradient for its large layer, so that a step of SGD shows the noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head = nn.Linear(100, 100, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def released(key: bytes, steps: int = 1, purpose: str = "") -> Tensor:
    given = replace(task(Flat(), lr=1.0, momentum=0.0, local_steps=steps), noise=noise(2.0, 0.5, key))
    descent = Descent(given, given.settings, given.start, given.plain, purpose=purpose)
    return (given.start["idle.weight"] - descent.alone().tensors["idle.weight"]).flatten()


def test_the_noise_has_the_deviation_that_the_ledger_charges() -> None:
    one, four = released(KEY), released(KEY, steps=4)
    assert one.std().item() == pytest.approx(2.0 * 0.5 / 8, rel=0.03)
    assert four.std().item() == pytest.approx(2 * 2.0 * 0.5 / 8, rel=0.03)
    assert abs(one.mean().item()) < 4 * (2.0 * 0.5 / 8) / 100
    assert one.pow(4).mean().item() / one.var().item() ** 2 == pytest.approx(3, rel=0.1)


def test_what_a_step_releases_are_whole_steps_of_the_lattice_whatever_the_sums_are() -> None:
    """Otherwise the fraction of a released number would be that of the sum behind it (Mironov, CCS 2012)."""
    given, draws = noise(2.0, 0.5), torch.Generator().manual_seed(0)
    sums = {"a": torch.randn(7, 3, generator=draws, dtype=torch.float64), "b": torch.randn(4, generator=draws).double()}
    step = lattice_step(0.5, 2.0, 25)
    copies = {name: tensor.clone() for name, tensor in sums.items()}
    noisy = with_noise(copies, ["a", "b"], given, LatticeStream(given.stream("noise")), 8.0)
    numbers = LatticeStream(given.stream("noise")).numbers(25).double().split([21, 4])
    for name, drawn in zip(sums, numbers, strict=True):
        steps = noisy[name] * 8.0 / step
        assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-6)
        # within half a step of the sum before it is rounded, and with the noise of this stream
        assert ((steps.round() - drawn.view_as(steps)) * step - sums[name]).abs().max() <= 0.5 * step * (1 + 1e-9)


def test_other_keys_and_purposes_have_independent_noise_and_the_same_key_the_same() -> None:
    one = released(KEY)
    assert one.equal(released(KEY))
    for other in (released(b"l" * 32), released(KEY, purpose="head")):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.04


def test_private_parts_get_noise_and_the_model_that_stays_on_the_device_needs_none() -> None:
    given = task(local_epochs=1, local_steps=0)
    head = Alternating(AlternatingSettings(head_epochs=2, body_epochs=1))
    loud, quiet = (head.run(replace(given, noise=noise(multiplier, 1.0))) for multiplier in (5.0, 0.0))
    assert all(not torch.allclose(loud.tensors[name], quiet.tensors[name], atol=1e-3) for name in given.start)
    used = noise(5.0, 1.0)
    head.run(replace(given, noise=used))
    assert used.taken == 15  # 3 epochs of 5 steps
    own = OwnModel(OwnModelSettings())
    both = replace(given, start=given.start | personal(given.start))
    plain, private = own.run(both), own.run(replace(both, noise=noise(5.0, 1.0)))
    for name in given.start:
        assert torch.equal(plain.tensors[PERSONAL + name], private.tensors[PERSONAL + name])
        assert not torch.allclose(plain.tensors[name], private.tensors[name], atol=1e-3)


def test_what_mr_mtl_hands_in_is_its_own_model_with_noise_and_the_pull_has_none() -> None:
    objective = MeanRegularised(MeanRegularisedSettings(mu=0.7))
    given = task()
    both = replace(given, start=given.start | personal(given.start))
    quiet, loud = (objective.run(replace(both, noise=noise(level, clip))) for level, clip in ((0.0, math.inf), (5.0, 1.0)))
    wanted = by_hand(given, list(noise().batches(N, 8, STEPS, "")), 0.7)
    for name in given.start:
        assert torch.allclose(quiet.tensors[name], wanted[name], rtol=1e-9)
        assert torch.equal(loud.tensors[name], loud.tensors[PERSONAL + name])
        assert not torch.allclose(loud.tensors[name], wanted[name], atol=1e-3)


def test_steps_that_were_not_charged_are_not_taken() -> None:
    with pytest.raises(RuntimeError, match="20 steps with noise were begun, and 19 are charged"):
        Sgd(SgdSettings()).run(replace(task(), noise=noise(charged=19)))


def test_an_empty_draw_releases_noise_alone() -> None:
    given = replace(task(batch_size=1, local_steps=30), noise=noise(1.0, 1.0))
    sizes = [len(index_B) for index_B in noise().batches(N, 1, 30, "")]
    assert 0 in sizes
    trained: Trained = Sgd(SgdSettings()).run(given)
    assert all(tensor.isfinite().all() for tensor in trained.tensors.values()) and math.isfinite(trained.loss)


def test_no_sample_makes_an_order_with_noise_fail() -> None:
    """A server may serve weights with which only samples above a threshold overflow: a failure would tell that there is one."""
    given = task(local_steps=5)
    given.x[3] = 1e308
    loud = replace(given, noise=noise(1.0, 1.0), start={name: 10 * tensor for name, tensor in given.start.items()})
    trained = Sgd(SgdSettings()).run(loud)
    assert all(tensor.isfinite().all() for tensor in trained.tensors.values())
    both = replace(loud, start=loud.start | personal(loud.start))
    kept = OwnModel(OwnModelSettings()).run(replace(both, noise=noise(1.0, 1.0)))
    for name in given.start:  # the own model, which trains without noise, stays as it was
        assert kept.tensors[name].equal(trained.tensors[name])
        assert kept.tensors[PERSONAL + name].equal(both.start[PERSONAL + name])
    with pytest.raises(TrainingDiverged):
        OwnModel(OwnModelSettings()).run(replace(both, noise=None))
