"""The batches of a stack are those that each device draws by itself, for any numbers of samples."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.config import TrainSettings
from attune.fedclient.work.objectives.descent import batches
from attune.fedclient.work.stacked.descend import batch_plan


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    local_epochs=st.integers(1, 4),
    local_steps=st.integers(0, 30),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_same_samples_in_the_same_order(samples, batch_size, local_epochs, local_steps, seed):
    settings = TrainSettings(batch_size=batch_size, local_epochs=local_epochs, local_steps=local_steps)
    expected, found = list(batches(samples, settings, seed)), batch_plan(samples, settings, seed)
    assert found.size.tolist() == [len(index_B) for index_B in expected]
    for index_B, padded_B, weight_B in zip(expected, found.index, found.weight, strict=True):
        assert padded_B[: len(index_B)].equal(index_B)
        assert weight_B[: len(index_B)].equal(torch.full((len(index_B),), 1 / len(index_B), dtype=torch.float64))
        assert (padded_B[len(index_B) :] == index_B[0]).all() and (weight_B[len(index_B) :] == 0).all()
