"""The benchmark of the stacked step: the ways to compute it compute the same step."""

from __future__ import annotations

import pytest
import torch

from attune.fedclient.work.stacked import descend
from benchmarks.stacked import CASES, Device
from benchmarks.stacked_step import MODELS, OWN, Recorded, difference, measure, trained


@pytest.mark.parametrize("name", MODELS)
def test_what_was_recorded_gives_the_same_bits(name):
    made, traced = [Device(CASES[name], number) for number in range(3)], Recorded(compiled=False)
    own, found = trained(made, descend.gradients_of), trained(made, traced)
    assert traced.made_s > 0 and len(found) == len(made)
    assert difference(own, found) == 0.0
    for one, other in zip(own, found, strict=True):
        assert one.loss == other.loss


def test_the_difference_is_in_largest_weights():
    made = [Device(CASES["MLR 60 x 10"], number) for number in range(2)]
    own = trained(made, descend.gradients_of)
    changed = trained(made, lambda *given: (descend_with(*given), torch.zeros(2)))
    start = {name: tensor.double() for name, tensor in made[0].start.items()}
    expected = max(float((one.tensors[n] - start[n]).abs().max() / one.tensors[n].abs().max()) for one in own for n in start)
    assert difference(own, changed) == pytest.approx(expected, rel=1e-5)


def descend_with(job, tensors, beside, batch):
    """Return gradients of 0, with which no weight moves."""
    return {name: torch.zeros_like(tensors[name]) for name in job.moving}


def test_each_way_has_its_row():
    own, traced = measure(CASES["MLR 60 x 10"], {OWN: descend.gradients_of, "traced": Recorded(compiled=False)}, 2, 1)
    assert own["way"] == OWN and own["times_own"] == 1.0 and own["made_s"] == own["difference"] == 0.0
    assert traced["times_own"] == pytest.approx(traced["train_ms"] / own["train_ms"], abs=0.1)
