"""Secure sums from one start: a server that serves a value again gets no second sum over other devices, and none is locked."""

import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import attune
from attune.common.exchange.transform import Cohort, NotASum, RoundContext
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


def stands_still(self: Mean, name: str, mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """Take the place of Mean.apply: the value does not move, whatever devices hand in."""
    return {VALUE: self._vault.read(VALUE)[name]}


def check(sums: Sums) -> None:
    """Check that no device is in sums over different devices from one start."""
    for cohorts in sums.values():
        for one in cohorts:
            assert all(one == other or not one & other for other in cohorts)


def test_a_start_that_does_not_change_gives_one_sum_and_locks_nobody(monkeypatch, sums: Sums, tmp_path) -> None:
    monkeypatch.setattr(Mean, "apply", stands_still)
    attune.simulate(DEVICES, "fedavg", rounds=6, settings=DRAWN, home=tmp_path)
    check(sums)
    assert sum(map(len, sums.values())) >= 3, "a round without a sum is followed by one from another start"
    assert ServerHome(tmp_path / "server").snapshot().record.round == 6


def fails_until(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Let the server find that no sum is one, as after a device has spoiled it, up to this round."""
    on_cohort = SecureSum.on_cohort

    def spoiled(self: SecureSum, cohort: Cohort, context: RoundContext) -> Cohort:
        done = on_cohort(self, cohort, context)
        if cohort.updates and context.round <= last:
            raise NotASum("numbers that are no sum")
        return done

    monkeypatch.setattr(SecureSum, "on_cohort", spoiled)


def test_rounds_that_fail_after_their_sum_go_on_from_other_starts(monkeypatch, sums: Sums, tmp_path) -> None:
    fails_until(monkeypatch, 2)
    attune.simulate(DEVICES, "fedavg", rounds=4, settings=DRAWN, home=tmp_path)
    check(sums)
    assert [len(cohorts) for cohorts in sums.values()] == [1, 1, 1, 1]
    assert ServerHome(tmp_path / "server").snapshot().record.setback.startswith("round 2: ")


class Interrupted(Exception):
    """The end of a server whose home is lost."""


def test_after_a_restore_no_start_gives_another_sum_and_the_next_rounds_go_on(monkeypatch, sums: Sums, tmp_path) -> None:
    server, backup, on_cohort = tmp_path / "server", tmp_path / "backup", SecureSum.on_cohort

    def watched(self: SecureSum, cohort: Cohort, context: RoundContext) -> Cohort:
        if context.round == 3 and not backup.exists():
            shutil.copytree(server, backup)
        if context.round == 5:
            raise Interrupted("the disk is gone")
        return on_cohort(self, cohort, context)

    monkeypatch.setattr(SecureSum, "on_cohort", watched)
    with pytest.raises(Exception, match="the disk is gone"):
        attune.simulate(DEVICES, "fedavg", rounds=9, settings=DRAWN, home=tmp_path)
    shutil.rmtree(server)
    backup.rename(server)
    monkeypatch.setattr(SecureSum, "on_cohort", on_cohort)
    before = sum(map(len, sums.values()))
    attune.simulate(DEVICES, "fedavg", rounds=9, settings=DRAWN, home=tmp_path)
    check(sums)
    record = ServerHome(server).snapshot().record
    assert (record.round, len(record.last_cohort)) == (9, 5)
    assert sum(map(len, sums.values())) >= before + 3


def with_books(first: Path, second: Path, cohort: frozenset[str]) -> None:
    """Let the devices' homes live on in a second simulation, with what they remember of sums."""
    for name in DEVICES:
        kept = first / "devices" / name / "sums.json"
        assert kept.exists() is (name in cohort)
        if kept.exists():
            (second / "devices" / name).mkdir(parents=True)
            shutil.copy(kept, second / "devices" / name)


def test_two_runs_over_one_start_give_one_sum_from_it(sums: Sums, tmp_path: Path) -> None:
    attune.simulate(DEVICES, "fedavg", rounds=1, settings=DRAWN, home=tmp_path / "first")
    [(start, [cohort])] = sums.items()
    with_books(tmp_path / "first", tmp_path / "second", cohort)
    attune.simulate(DEVICES, "fedavg", rounds=3, settings=DRAWN | {"round.clients": 7}, home=tmp_path / "second")
    check(sums)
    assert sums[start] == [cohort]
    assert [len(cohorts[0]) for cohorts in sums.values()] == [5, 7, 7], "round 1 has no sum"


def test_the_same_devices_may_be_summed_again_from_one_start(monkeypatch: pytest.MonkeyPatch, sums: Sums) -> None:
    monkeypatch.setattr(Mean, "apply", stands_still)
    attune.simulate(DEVICES, "fedavg", rounds=4, settings=QUICK | {"privacy.secure_aggregation": True})
    assert list(map(len, sums.values())) == [4]


def test_under_same_cohort_all_sums_are_over_the_devices_of_the_first_one(sums: Sums, tmp_path: Path) -> None:
    attune.simulate(DEVICES, "fedavg", rounds=5, settings=DRAWN | {"privacy.same_cohort": True}, home=tmp_path)
    [cohort] = {cohort for cohorts in sums.values() for cohort in cohorts}
    record = ServerHome(tmp_path / "server").snapshot().record
    assert len(cohort) == 5 and record.same_cohort == tuple(sorted(cohort))
    assert len(sums) == 5


def test_a_later_run_under_same_cohort_hears_from_devices_which_cohort_is_theirs(sums: Sums, tmp_path: Path) -> None:
    settings = DRAWN | {"privacy.same_cohort": True}
    attune.simulate(DEVICES, "fedavg", rounds=2, settings=settings, home=tmp_path / "first")
    [cohort] = {cohort for cohorts in sums.values() for cohort in cohorts}
    with_books(tmp_path / "first", tmp_path / "second", cohort)
    attune.simulate(DEVICES, "fedavg", rounds=3, settings=settings | {"round.clients": 7}, home=tmp_path / "second")
    assert {cohort for cohorts in sums.values() for cohort in cohorts} == {cohort}
    record = ServerHome(tmp_path / "second" / "server").snapshot().record
    assert record.same_cohort == record.last_cohort == tuple(sorted(cohort))
    assert record.setback.startswith("round 1: "), "only the first round is lost"


def test_a_run_under_same_cohort_goes_on_without_a_majority_of_it(monkeypatch, sums: Sums, tmp_path) -> None:
    settings, on_cohort = DRAWN | {"privacy.same_cohort": True, "round.min_clients": 5}, SecureSum.on_cohort

    def interrupted(self: SecureSum, cohort: Cohort, context: RoundContext) -> Cohort:
        if context.round == 2:
            raise Interrupted("the operator restarts it")
        return on_cohort(self, cohort, context)

    monkeypatch.setattr(SecureSum, "on_cohort", interrupted)
    with pytest.raises(Exception, match="the operator restarts it"):
        attune.simulate(DEVICES, "fedavg", rounds=4, settings=settings, home=tmp_path)
    monkeypatch.setattr(SecureSum, "on_cohort", on_cohort)
    [first] = {cohort for cohorts in sums.values() for cohort in cohorts}
    left_out = sorted(first)[:3]
    attune.simulate(DEVICES, "fedavg", rounds=4, settings=settings | {"round.left_out": left_out}, home=tmp_path)
    second = frozenset(DEVICES) - frozenset(left_out)
    assert [cohort for cohorts in sums.values() for cohort in cohorts] == [first, first, second, second]
