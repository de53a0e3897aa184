"""Secure sums from one start: a server that serves a value again gets no second sum over other devices, and none is locked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attune
from attune.common.exchange.transform import Cohort, RoundContext
from attune.common.secure.secure_sum import SecureSum
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.aggregators.mean import VALUE, Mean
from tests.simulation.test_simulate import QUICK, cloud

DEVICES = {f"site{n}": cloud(n, 40 + 15 * n) for n in range(8)}
DRAWN = QUICK | {"privacy.secure_aggregation": True, "round.clients": 5}
Sums = dict[bytes, list[frozenset[str]]]  # start -> devices of each sum from it


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Return what the server sees: the devices of each sum, by the value that they were served."""
    seen: Sums = defaultdict(list)
    on_cohort = SecureSum.on_cohort

    def spied(self: SecureSum, cohort: Cohort, context: RoundContext) -> Cohort:
        if cohort.updates:
            before = context.before(cohort.updates[0].client)
            assert before is not None
            start = b"".join(before[name].numpy().tobytes() for name in sorted(before))
            seen[start].append(frozenset(update.client for update in cohort.updates))
        return on_cohort(self, cohort, context)

    monkeypatch.setattr(SecureSum, "on_cohort", spied)
    return seen


def stands_still(self: Mean, block: Any, combined: Any, updates: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Take the place of Mean.apply: the value does not move, whatever devices hand in."""
    for name in block.names:
        yield VALUE, name, self._vault.read(VALUE)[name]


def check(sums: Sums) -> None:
    """Check that no device is in sums over different devices from one start."""
    for cohorts in sums.values():
        for one in cohorts:
            assert all(one == other or not one & other for other in cohorts)


def test_a_start_that_does_not_change_gives_one_sum_and_locks_nobody(
    monkeypatch: pytest.MonkeyPatch, sums: Sums, tmp_path: Path
) -> None:
    monkeypatch.setattr(Mean, "apply", stands_still)
    attune.simulate(DEVICES, "fedavg", rounds=8, settings=DRAWN, home=tmp_path)
    check(sums)
    assert sum(map(len, sums.values())) >= 4, "a round without a sum is followed by one from another start"
    assert ServerHome(tmp_path / "server").snapshot().record.round == 8
