"""Training of devices together against one by one, with every objective."""

import math

import pytest
import torch
from torch import nn

from attune.common.methods.settings import objectives as settings
from attune.fedclient.work.build import objective_class
from attune.fedclient.work.executor import FailedWork, alone
from attune.fedclient.work.objectives.descent import Cancelled, TrainingDiverged
from attune.fedclient.work.stacked import descend
from attune.fedclient.work.stacked.lockstep import Stacked
from tests.fedclient.work.stacked.conftest import dropping

GIVEN = {
    "proximal": settings.ProximalSettings(mu=0.3),
    "maml": settings.MamlSettings(alpha=0.1, beta=0.2),
    "moreau": settings.MoreauSettings(mu=0.5, inner_steps=3),
    "own-model": settings.OwnModelSettings(mu=0.2),
    "alternating": settings.AlternatingSettings(head_epochs=2, body_epochs=1),
}
WAYS = {
    "plain": {},
    "all at once": {"momentum": 0.9, "weight_decay": 0.05, "clip_norm": 0.3, "local_epochs": 3},
    "steps": {"momentum": 0.5, "clip_norm": 0.1, "local_steps": 9},
}
TOGETHER = [name for name in settings.OBJECTIVES if not objective_class(name).by_itself]


def objective(name):
    return objective_class(name)(GIVEN.get(name) or settings.OBJECTIVES[name]())


def compare(devices, tolerance, trains=()):
    """Compare every tensor and every loss. Return the largest change by training."""
    stacked = Stacked()
    together = stacked.run([each.training(trains) for each in devices])
    assert stacked.reasons == []
    moved = 0.0
    for each, found in zip(devices, together, strict=True):
        by_itself = alone(each.training(trains))
        assert list(found.tensors) == list(by_itself.tensors)
        for name, tensor in by_itself.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=tolerance, atol=tolerance)
            moved = max(moved, float((tensor - each.start[name]).abs().max()))
        assert found.loss == pytest.approx(by_itself.loss, rel=tolerance, nan_ok=True)
    return moved


def test_only_gaussian_processes_and_a_running_mean_go_one_by_one():
    assert set(settings.OBJECTIVES) - set(TOGETHER) == {"domain-bias", "gp", "sums"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TOGETHER)
def test_the_same_numbers_as_by_itself(name, way, make):
    """Allow for rounding: in float64 some 1e-16 times the steps, since the arithmetic is the same; in float32 its rounding."""
    assert compare(make(objective(name), dtype=torch.float64, **WAYS[way]), 1e-11) > 0.01
    assert compare(make(objective(name), **WAYS[way]), 2e-5) > 0.01


@pytest.mark.parametrize("name", TOGETHER)
def test_what_may_not_move_stays(name, make):
    devices = make(objective(name), momentum=0.9, weight_decay=0.1)
    compare(devices, 2e-5, trains=("private",))
    for each, found in zip(devices, Stacked().run([each.training(("private",)) for each in devices]), strict=True):
        assert all(found.tensors[name].equal(each.start[name]) for name in ("idle.weight", "body.weight", "body.bias"))


def test_where_nothing_may_move_nothing_is_done(make):
    devices = make(objective("sgd"))
    for each, found in zip(devices, Stacked().run([each.training(("generated",)) for each in devices]), strict=True):
        assert math.isnan(found.loss) and all(found.tensors[name] is tensor for name, tensor in each.start.items())


def test_results_share_no_memory(make):
    """Check that a waiting device does not hold the others' tensors in memory."""
    results = Stacked().run([each.training() for each in make(objective("moreau"))])
    for found in results:
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.tensors.values())


def test_no_device_is_disturbed_by_one_that_diverges(make):
    devices = make(objective("sgd"))
    devices[1].x = devices[1].x * math.inf
    found = Stacked().run([each.training() for each in devices])
    assert isinstance(found[1], FailedWork) and isinstance(found[1].error, TrainingDiverged)
    with pytest.raises(TrainingDiverged, match=r"lower train\.lr"):
        alone(devices[1].training())
    for at in (0, 2, 3, 4):
        torch.testing.assert_close(found[at].tensors, alone(devices[at].training()).tensors, rtol=2e-5, atol=2e-5)


def test_a_device_whose_order_was_replaced_is_left_out(make):
    devices = make(objective("sgd"))
    devices[2].cancelled = lambda: True
    found = Stacked().run([each.training() for each in devices])
    assert [isinstance(each, FailedWork) and isinstance(each.error, Cancelled) for each in found] == [
        at == 2 for at in range(5)
    ]


def test_when_all_were_replaced_no_step_is_taken(make):
    devices, taken = make(objective("sgd")), []
    for each in devices:
        each.cancelled = lambda: True
        each.trainer.network.model.forward = lambda x: taken.append(1)
    stacked = Stacked()
    stacked._reasons = {descend_key(devices): ""}
    found = stacked.run([each.training() for each in devices])
    assert all(isinstance(each.error, Cancelled) for each in found) and not taken


def descend_key(devices):
    from attune.fedclient.work.stacked.lockstep import _Run

    return _Run(devices[0].training()).key


def test_progress_is_told_to_every_device(make):
    devices, told = make(objective("own-model")), []
    Stacked().run(
        each.trainer.training(each.start, each.received, each.x, each.y, each.seeds, progress=lambda done: told.append(done))
        for each in devices
    )
    assert told[-5:] == [1.0] * 5 and told == sorted(told) and 0 < told[0] < 0.5


def test_stacks_no_larger_than_memory_allows(make, monkeypatch):
    devices = make(objective("proximal"), momentum=0.9)
    monkeypatch.setattr(descend, "STACK_BYTES", 2 * descend.COPIES * 2 * sum(t.nbytes for t in devices[0].start.values()))
    sizes = []
    monkeypatch.setattr(descend.Stack, "_step", counting(descend.Stack._step, sizes))
    compare(devices, 2e-5)
    assert max(sizes) == 2


def counting(step, sizes):
    def counted(self, k, *rest):
        sizes.append(k)
        return step(self, k, *rest)

    return counted


def test_samples_are_gathered_some_steps_at_a_time(make, monkeypatch):
    monkeypatch.setattr("attune.fedclient.work.stacked.descend.WINDOW_BYTES", 1)
    compare(make(objective("maml"), local_epochs=2), 2e-5)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_dropout_goes_one_by_one_when_it_is_on(share, make):
    """Check that dropout has the same bits one by one: it draws from one generator per device, which a stack has not."""
    devices, stacked = make(objective("sgd"), model=dropping(share)), Stacked()
    found = stacked.run([each.training() for each in devices])
    for each, one in zip(devices, found, strict=True):
        by_itself = alone(each.training())
        assert share == 0 or all(one.tensors[name].equal(tensor) for name, tensor in by_itself.tensors.items())
        torch.testing.assert_close(one.tensors, by_itself.tensors, rtol=2e-5, atol=2e-5)
    assert [reason.partition(" ")[0] for reason in stacked.reasons] == ([] if share == 0 else ["drop"])


class Functional(nn.Module):
    """Model with dropout that has no layer of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(x, 0.3, self.training))


class Centred(nn.Module):
    """Layer that subtracts the mean of the batch, and keeps no state."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x - x.mean(dim=0))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 2, 2))[0][:, -1])


ONE_BY_ONE = {
    "running statistics": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), "1.num_batches_tracked"),
    "dropout without a layer": (Functional, "random"),
    "batch statistics": (Centred, "depend on the other samples"),
    "an operator without a rule": (Recurrent, "lstm"),
}


@pytest.mark.parametrize("what", ONE_BY_ONE)
def test_what_cannot_be_stacked_says_so_and_gets_the_same_bits(what, make):
    model, said = ONE_BY_ONE[what]
    devices, stacked = make(objective("sgd"), model=model, sizes=(6, 12)), Stacked()
    for each, found in zip(devices, stacked.run([each.training() for each in devices]), strict=True):
        by_itself = alone(each.training())
        assert all(found.tensors[name].equal(tensor) for name, tensor in by_itself.tensors.items())
    assert len(stacked.reasons) == 1 and said in stacked.reasons[0]


def test_half_precision_and_gaussian_processes_go_one_by_one(make):
    for devices, said in (
        (make(objective("sgd"), mixed_precision="bf16"), "bf16"),
        (make(objective("gp"), sizes=(6, 9)), "Gaussian"),
    ):
        stacked = Stacked()
        stacked.run([each.training() for each in devices])
        assert len(stacked.reasons) == 1 and said in stacked.reasons[0]


def test_unlike_devices_are_not_mixed(make):
    """Use other settings, another model and other shapes: each kind is trained with its like."""
    some, others = make(objective("sgd"), sizes=(6, 9)), make(objective("sgd"), sizes=(6, 9), lr=0.7)
    for each, found in zip(some + others, Stacked().run([each.training() for each in some + others]), strict=True):
        torch.testing.assert_close(found.tensors, alone(each.training()).tensors, rtol=2e-5, atol=2e-5)
