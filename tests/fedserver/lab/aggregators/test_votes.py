"""Robust rules: against loops in float64, against numbers by hand, and against attackers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings, HeurAmpSettings, HypernetworkSettings, MeanSettings
from attune.fedserver.lab.aggregators import votes
from attune.fedserver.lab.aggregators.attention import HeurAmp, Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.mean import VALUE, Mean
from attune.fedserver.lab.aggregators.stored import MATRICES, UNIT

ROWS = st.integers(1, 9).flatmap(lambda size: arrays(np.float64, (size, 5), elements=st.floats(-50, 50, width=32)))
SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.49])


def closed(settings, X_SN, samples=None):
    """Return the mean under these settings."""
    vault = MemoryVault()
    mean = Mean(settings, vault, 0, {"x": ["x", "y"]})
    mean.start({"x": torch.zeros(X_SN.shape[1] - 1), "y": torch.zeros(1)})
    rows = torch.as_tensor(X_SN, dtype=torch.float32)
    counts = samples or [1.0] * len(rows)
    mean.close_round(
        [PartUpdate(f"c{i}", m, {"x": row[:-1], "y": row[-1:]}) for i, (row, m) in enumerate(zip(rows, counts, strict=True))]
    )
    value = vault.read(VALUE)
    return torch.cat([value["x"], value["y"]]).double().numpy()


def attackers_of(size, share):
    return math.ceil(round(share * size, 9))


@given(ROWS)
def test_the_median_is_that_of_every_number(rows):
    expected = [
        sorted(column)[len(rows) // 2] if len(rows) % 2 else np.mean(sorted(column)[len(rows) // 2 - 1 :][:2])
        for column in rows.T.tolist()
    ]
    assert np.allclose(closed(MeanSettings(robust="median"), rows), expected, rtol=1e-6, atol=1e-5)


@given(ROWS, SHARES)
def test_the_trimmed_mean_leaves_out_both_ends_of_every_number(rows, share):
    cut = min(attackers_of(len(rows), share), (len(rows) - 1) // 2)
    expected = [np.mean(sorted(column)[cut : len(rows) - cut]) for column in rows.T.tolist()]
    assert np.allclose(closed(MeanSettings(robust="trimmed-mean", attackers=share), rows), expected, rtol=1e-6, atol=1e-5)


@given(st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.randoms(use_true_random=False))), SHARES)
def test_multi_krum_keeps_those_that_are_near_others(drawn, share):
    """Use rows that are whole numbers apart, so that no rounding decides between two scores."""
    size, random = drawn
    rows = np.array([[float(2**k), 0.0, 0.0] for k in random.sample(range(12), size)])
    faulty = attackers_of(size, share)
    while faulty and size <= 2 * faulty + 2:
        faulty -= 1
    kept = list(range(size))
    if faulty:
        scores = []
        for i in range(size):
            distances = sorted(float(((rows[i] - rows[k]) ** 2).sum()) for k in range(size) if k != i)
            scores.append((sum(distances[: size - faulty - 2]), i))
        kept = sorted(i for _, i in sorted(scores)[: size - faulty])
    expected = rows[kept].mean(axis=0)
    assert np.allclose(closed(MeanSettings(robust="multi-krum", attackers=share), rows), expected, rtol=1e-6)


def test_multi_krum_leaves_out_two_of_seven_by_hand():
    rows = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5], [90.0, 0.0], [0.0, -80.0]])
    assert np.allclose(closed(MeanSettings(robust="multi-krum", attackers=0.2), rows), [0.5, 0.5])


@pytest.mark.parametrize("robust", ["median", "trimmed-mean", "multi-krum"])
@pytest.mark.parametrize("extreme", [1e30, -1e30])
def test_a_fifth_of_a_cohort_cannot_leave_the_range_of_the_honest(robust, extreme):
    draw = np.random.default_rng(3)
    rows = draw.normal(size=(10, 6))
    rows[7:9] = extreme
    value = closed(MeanSettings(robust=robust, attackers=0.2), rows, [1.0] * 7 + [1e6] * 2 + [1.0])
    honest = np.delete(rows, [7, 8], axis=0)
    assert (value >= honest.min(axis=0) - 1e-6).all()
    assert (value <= honest.max(axis=0) + 1e-6).all()


def test_who_has_no_vote_is_one_of_the_attackers_reckoned_with():
    """Test ten clients with a share of 0.3: one is left out already, so two more are."""
    row = torch.arange(9.0)[:, None]
    distances = row @ row.T
    assert votes.trimmed(9, 0.3, absent=1) == 2
    assert votes.trimmed(9, 0.3) == 3
    assert votes.trimmed_mean(row, 0.3, absent=1).tolist() == [4.0]
    assert votes.multi_krum(distances, 0.3, absent=1) == [1, 2, 3, 4, 5, 6, 7]
    assert votes.multi_krum(distances, 0.3, absent=4) == list(range(9))
    assert votes.multi_krum(distances, 0.3, absent=9) == list(range(9))


def test_integers_are_voted_on_too_and_stay_integers():
    vault = MemoryVault()
    mean = Mean(MeanSettings(robust="median"), vault, 0, {"n": ["n"]})
    mean.start({"n": torch.tensor(0)})
    mean.close_round(
        [PartUpdate(name, 1.0, {"n": torch.tensor(count)}) for name, count in (("a", 7), ("b", 8), ("x", 1 << 40))]
    )
    assert vault.read(VALUE)["n"].dtype == torch.int64
    assert int(vault.read(VALUE)["n"]) == 8


def limited_by_loops(A, cap, floor):
    result = [list(map(float, row)) for row in A]
    for i, row in enumerate(result):
        for k in range(len(row)):
            if k != i and row[k] > cap:
                row[k] = cap
        row[i] = 1 - sum(value for k, value in enumerate(row) if k != i)
        if row[i] < floor:
            others = 1 - row[i]
            for k in range(len(row)):
                if k != i:
                    row[k] *= (1 - floor) / others
            row[i] = floor
    return result


@given(
    st.integers(1, 6).flatmap(lambda size: arrays(np.float64, (size, size), elements=st.floats(0.01, 10))),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_weights_stay_below_the_cap_and_above_the_floor(drawn, cap, floor):
    A = drawn / drawn.sum(axis=1, keepdims=True)
    found = votes.limited(torch.as_tensor(A), cap, floor).numpy()
    assert np.allclose(found, limited_by_loops(A, cap, floor), atol=1e-12)
    assert np.allclose(found.sum(axis=1), 1)
    others = found - np.diag(found.diagonal())
    assert (others <= cap + 1e-12).all()
    assert (found.diagonal() >= floor - 1e-12).all()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Mcsa, AttentionSettings(attention_cap=0.2, self_floor=0.5)),
        (HeurAmp, HeurAmpSettings(attention_cap=0.2, self_floor=0.5)),
    ],
)
def test_attended_parts_are_mixed_by_the_limited_weights(kind, settings, updates_of):
    vault = MemoryVault()
    aggregator = kind(settings, vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.zeros(4)})
    draw = torch.Generator().manual_seed(1)
    X = torch.ones(5, 4) + 0.01 * torch.randn(5, 4, generator=draw)
    aggregator.close_round(updates_of(X, [1.0] * 5))
    [A] = [A for name, A in vault.read(MATRICES).items() if name.startswith(UNIT)]
    assert float(A.diagonal().min()) >= 0.5 - 1e-6
    assert float((A - A.diagonal().diag()).max()) <= 0.2 + 1e-6
    mixed = torch.stack([vault.read(aggregator.slot(f"c{i:03}"))["x"] for i in range(5)])
    assert torch.allclose(mixed, A @ X, atol=1e-6)


def test_any_robust_rule_clips_generated_parts():
    assert HypernetworkSettings().bound == 3.0
    assert HypernetworkSettings(robust="median").bound == 1.0
    assert MeanSettings(robust="median").bound == 3.0
    assert MeanSettings(robust="clip", clip=0.5).bound == 0.5
    assert MeanSettings(robust="clip", bound_change=0.0).bound == 1.0
