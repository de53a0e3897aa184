"""Rounds on workers have the bits of one process, for any number of workers, if workers die, and if the cluster ends."""

import logging

import pytest
import torch
from attune_example.settings import FedAdamSettings
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common import plugins
from attune.common.errors import SettingError
from attune.common.exchange.transform import PartUpdate
from attune.features.cluster.worker_pool import WorkerPool
from tests.features.cluster.conftest import SHAPES, Played, rounds, update
from tests.features.cluster.inline_cluster import InlineCluster
from tests.fedserver.lab.aggregators.test_attention import close, matrices, oracle, rows_of


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_workers_gives_the_bits_of_one_process(kind, new_pool, workers):
    alone, spread = Played(*kind), Played(*kind, new_pool(workers)[0])
    for number, samples in enumerate(rounds()):
        assert spread.play(number, samples) == alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert spread.pool.usable


@given(matrices, st.integers(1, 4), st.integers(4, 200))
@settings(deadline=None, max_examples=40)
def test_mcsa_on_workers_is_what_a_float64_oracle_says(size, workers, parcel_bytes):
    S, D, seed, alike = size
    X_SD = rows_of(S, D, seed, alike)
    spans = {name: (start, end) for name, start, end in [("a", 0, D // 3), ("b", D // 3, D // 2), ("c", D // 2, D)]}
    components = {name: [name] for name in spans}
    initial = {name: torch.zeros(end - start) for name, (start, end) in spans.items()}
    played = Played("attention", {"sigma": 20.0}, WorkerPool(InlineCluster(workers)), parcel_bytes, components, initial)
    clients = [f"c{i}" for i in range(S)]
    rows = [{name: row_D[start:end] for name, (start, end) in spans.items()} for row_D in X_SD]
    played.aggregator.close_round([PartUpdate(client, 1, row) for client, row in zip(clients, rows, strict=True)])
    for name, (start, end) in spans.items():
        if start < end:
            expected = torch.tensor(oracle(X_SD[:, start:end].tolist(), 20.0)[1], dtype=torch.float64)
            assert close(torch.stack([played.served(client)[name] for client in clients]), expected, X_SD[:, start:end])


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), st.integers(1, 4), st.integers(4, 10_000))
@settings(deadline=None, max_examples=25)
def test_a_mean_on_workers_is_what_float64_says(samples, workers, parcel_bytes):
    played = Played("mean", {}, WorkerPool(InlineCluster(workers)), parcel_bytes)
    updates = [update(1, f"c{i}", m) for i, m in enumerate(samples)]
    played.aggregator.close_round(updates)
    for name in ("a.weight", "c.weight"):
        exact = sum(each.weight * each.tensors[name].double() for each in updates) / sum(samples)
        assert torch.allclose(played.served("c0")[name].double(), exact, atol=1e-5)


def test_a_round_that_was_not_committed_leaves_no_trace_in_workers(new_pool):
    alone, spread = Played("attention", {}), Played("attention", {}, new_pool(2)[0])
    for each in (alone, spread):
        each.play(1, {"ann": 1, "bob": 2})
        each.commit()
        each.play(2, {"ann": 1, "cyd": 2})
        each.vault.take_back()
        each.reopen()
    alone.play(3, {"ann": 4, "cyd": 2})
    spread.play(3, {"ann": 4, "cyd": 2})
    assert spread.commit() == alone.commit()


@pytest.mark.parametrize(("workers", "every"), [(1, 3), (1, 5), (2, 4), (2, 7), (4, 3), (4, 5)])
def test_a_worker_that_dies_is_replaced_and_its_step_done_again(kind, new_pool, workers, every, caplog):
    calls = 0

    def dies(call) -> bool:
        nonlocal calls
        calls += call[1] != "versions"
        return call[1] != "versions" and calls % every == 0

    alone = Played(*kind)
    pool, cluster = new_pool(workers, dies=dies)
    spread = Played(*kind, pool)
    for number, samples in enumerate(rounds()):
        assert spread.play(number, samples) == alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert pool.usable and len(cluster.workers) > workers
    assert "is replaced, and its step done again" in caplog.text


@pytest.mark.parametrize("last", [2, 3, 5, 8])
def test_where_the_cluster_ends_the_server_goes_on_by_itself(kind, new_pool, last, caplog):
    alone = Played(*kind)
    pool, cluster = new_pool(2, starts=2)
    spread = Played(*kind, pool)
    cluster.dies = lambda call: len(cluster.calls) > 2 + last
    with caplog.at_level(logging.WARNING):
        for number, samples in enumerate(rounds()):
            assert spread.play(number, samples) == alone.play(number, samples)
            assert spread.commit() == alone.commit()
    assert not pool.usable and cluster.closed
    assert caplog.text.count("is not used any more") == 1 and "nothing is lost" in caplog.text


def test_a_step_that_kills_every_worker_is_done_here(new_pool, caplog):
    pool, cluster = new_pool(2, dies=lambda call: call[1] == "apply")
    spread, alone = Played("attention", {}, pool), Played("attention", {})
    spread.play(1, {"ann": 1, "bob": 1})
    alone.play(1, {"ann": 1, "bob": 1})
    assert spread.commit() == alone.commit()
    assert len(cluster.workers) == 5 and "3 workers in a row have ended at the same step" in caplog.text


def test_columns_travel_once_where_a_unit_has_one_parcel(new_pool):
    """Use FedAMP too, whose unit has several parcels: its columns travel again, so that no machine holds a whole cohort."""
    for aggregator, times in [("attention", 1), ("amp", 2), ("mean", 1)]:
        pool, cluster = new_pool(2)
        Played(aggregator, {}, pool).play(1, {"ann": 1, "bob": 1})
        names = [name for updates in cluster.shared for name in updates[0].tensors.manifest]
        assert sorted(names) == sorted(times * list(SHAPES))


def test_an_aggregator_of_another_package_has_the_same_bits_on_workers(new_pool, monkeypatch):
    monkeypatch.setitem(plugins._registered["aggregators"], "fedadam", FedAdamSettings)
    alone, spread = Played("fedadam", {}), Played("fedadam", {}, new_pool(3)[0])
    for number, samples in enumerate(rounds()):
        assert spread.play(number, samples) == alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert spread.pool.usable


def test_calls_go_to_all_workers(new_pool):
    pool, cluster = new_pool(3)
    Played("attention", {}, pool).play(1, {"ann": 1, "bob": 1})
    assert {number for number, method, _ in cluster.calls if method == "apply"} == {0, 1, 2}


def test_workers_of_another_version_are_refused(monkeypatch):
    from attune.features.cluster import workers

    monkeypatch.setattr(workers, "version", lambda package: "0.0.7")
    cluster = InlineCluster(2)
    with pytest.raises(SettingError, match=r"the cluster has attune-fl 0\.0\.7 .* install the same there"):
        WorkerPool(cluster)
    assert cluster.closed


def test_a_cluster_whose_workers_cannot_begin_is_an_error_at_the_start():
    with pytest.raises(SettingError, match="workers cannot begin: no more workers are to be had"):
        WorkerPool(InlineCluster(3, starts=2))
    with pytest.raises(SettingError, match="3 workers in a row have ended"):
        WorkerPool(InlineCluster(1, dies=lambda call: True))
