"""Studies of methods: their variants by hand, what they hold out, and what a row of results says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attune.simulation.partition.datasets import load_dataset
from benchmarks import dial, mcsa_options, methods, newcomers, settings

COSINES = torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]], dtype=torch.float64)


def expected(sigma):
    """Return FedMCSA's attention, softmax of sigma times the cosines."""
    return (sigma * COSINES).softmax(dim=1)


def test_sigma_follows_the_spread_the_gap_or_the_nearest_client():
    close = {"rtol": 1e-9, "atol": 1e-12}
    spread = float(np.std(COSINES.numpy()))
    torch.testing.assert_close(mcsa_options.by_spread(2)(COSINES), expected(2 / spread), **close)
    gap = float(2 * (0.1 + 0.9 + 0.8)) / 6  # of 1 - cos over the six pairs
    torch.testing.assert_close(mcsa_options.by_gap(4)(COSINES), expected(4 / gap), **close)
    nearest = float(np.median([0.1, 0.1, 0.8]))
    torch.testing.assert_close(mcsa_options.by_nearest(2)(COSINES), expected(2 / nearest), **close)
    torch.testing.assert_close(mcsa_options.softened(2, sigma=1.0)(COSINES), expected(1.0), **close)
    torch.testing.assert_close(mcsa_options.softened(2, sigma=1e6)(COSINES), expected(2 / spread), **close)


def test_equal_clients_have_equal_weights():
    same = torch.ones(4, 4, dtype=torch.float64)
    for option in ("spread 2", "gap 4", "nearest 2"):
        weights, _ = mcsa_options.ATTENTION[option]
        torch.testing.assert_close(weights(same), torch.full((4, 4), 0.25, dtype=torch.float64))


def test_a_cap_takes_from_the_client_itself_and_leaves_the_others_proportions():
    own, found = expected(50.0), mcsa_options.capped(50.0, 0.8)(COSINES)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3, dtype=torch.float64))
    for row, before in zip(found[own.diagonal() > 0.8], own[own.diagonal() > 0.8], strict=True):
        at = int(before.argmax())
        others = [number for number in range(3) if number != at]
        assert float(row[at]) == pytest.approx(0.8)
        assert float(row[others[0]] / row[others[1]]) == pytest.approx(float(before[others[0]] / before[others[1]]))
    kept = own.diagonal() <= 0.8
    torch.testing.assert_close(found[kept], own[kept])
    assert (own.diagonal() > 0.8).any() and mcsa_options.capped(1.0, 0.8)(COSINES).equal(expected(1.0))


@pytest.mark.parametrize("name", mcsa_options.SCENARIOS)
def test_no_sample_of_a_scenario_is_used_twice(name):
    count, groups, samples = mcsa_options.SCENARIOS[name]
    clients = mcsa_options.scenario(name, seed=0)
    assert len(clients) == count
    if samples:
        assert {len(client.x) for client in clients} == {samples}
    if groups != 1:
        assert all(len(client.y.unique()) == 2 for client in clients)
    total = sum(len(client.x) + len(client.test_x) for client in clients)
    assert total <= len(load_dataset("digits", 0).train_y) + len(load_dataset("digits", 0).test_y)


def test_all_clients_train_at_once_as_each_would_alone():
    clients = mcsa_options.scenario("groups", seed=0)[:2]
    start = mcsa_options.initial("mlr", seed=0)
    together = mcsa_options.train(clients, {client.name: start for client in clients}, mu=5.0, seed=3)
    alone = mcsa_options.train(clients[1:], {clients[1].name: start}, mu=5.0, seed=4)  # client i draws with seed + i
    for name, tensor in alone[clients[1].name].items():
        torch.testing.assert_close(together[clients[1].name][name], tensor, rtol=1e-4, atol=1e-6)


def test_a_newcomers_course_begins_with_its_first_model():
    def row(client, work, before, after):
        return {"client": client, "work": work, "accuracy_before": str(before), "accuracy_after": str(after)}

    rows = [
        row("a", "train", 0.1, 0.2),
        row("b", "train", 0.9, 0.9),
        row("a", "train", 0.3, 0.4),
        row("a", "evaluate", 0.5, 0.5),
    ]
    assert newcomers.course(rows, "a", trained=True) == [0.1, 0.2, 0.4]
    assert newcomers.course(rows, "a", trained=False) == [0.1, 0.3, 0.5]


def test_a_row_of_a_method_has_means_over_its_clients(monkeypatch):
    def client(accuracy, common, kept):
        known = {"accuracy": accuracy, "accuracy_common": common, "accuracy_local": None, "accuracy_constant": 0.1}
        return known | {"kept": kept}

    monkeypatch.setattr(methods, "harmed", lambda status: 1)
    status = {
        "method": "fedper", "model": "mlr", "round": 3, "accuracy": {"over_samples": 0.71234}, "constant": None,
        "clients": [client(0.5, 0.4, "personalized"), client(0.9, None, "common"), client(0.8, 0.8, "personalized")],
    }  # fmt: skip
    row = methods.row_of(status)
    assert set(methods.COLUMNS) - set(row) == {"seed", "seconds"}
    assert (row["mean_over_clients"], row["over_samples"], row["lowest"], row["common"]) == (0.7333, 0.7123, 0.5, 0.6)
    assert row["local"] is row["constant_over_samples"] is None and row["harmed"] == 0.3333
    assert row["kept"] == "common:1 personalized:2"


def test_settings_are_judged_on_a_quarter_of_the_training_part(tmp_path, monkeypatch):
    dataset, cut = load_dataset("digits", 0), []
    monkeypatch.setattr(settings, "partition", lambda inner, *given, **options: cut.append(inner))
    monkeypatch.setattr(settings, "write_shards", lambda out, shards: [])
    settings.validation_shards(dataset, tmp_path, seed=1)
    [inner] = cut
    size = len(dataset.train_y)
    assert len(inner.test_y) == size // 4 and len(inner.train_y) == size - size // 4
    both = np.concatenate([inner.train_x, inner.test_x]).reshape(size, -1)
    assert np.array_equal(np.sort(both, axis=0), np.sort(dataset.train_x.reshape(size, -1), axis=0))


def test_the_dials_table_has_means_over_seeds():
    recipe = SimpleNamespace(
        axis="alpha", entries=(SimpleNamespace(label="Local"),), points=(SimpleNamespace(x=0.5), SimpleNamespace(x=1.0))
    )
    rows = [
        SimpleNamespace(x=x, method="Local", judged=judged, mean=mean)
        for x, judged, mean in ((0.5, 0.4, 0.5), (0.5, 0.6, 0.6), (1.0, 0.7, 0.8))
    ]
    assert list(dial.table(recipe, rows))[2:] == ["| 0.5 | 50.0 / 55.0 |", "| 1 | 70.0 / 80.0 |"]
