"""The score of what a device would keep: held-out likelihood, each sample under blend weights that are found without it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attune
from attune.fedclient.work import blend
from attune.fedclient.work.blend import leave_one_out
from attune.fedclient.work.calibration import FLOOR

SETTINGS: dict[str, Any] = {"train.local_epochs": 1, "train.lr": 0.05, "train.score_after": [1, 3]}


def cloud(seed: int, samples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return three clouds of four features that overlap, turned by a different angle for each device."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    return (np.roll(np.eye(4), seed % 3, axis=1)[y] * 2 + rng.normal(size=(samples, 4))).astype(np.float32), y


CLOUDS = {f"site{n}": cloud(n) for n in range(3)}


def likeliest_share(p: list[float], q: list[float], value: list[float], before: tuple[float, float]) -> float:
    """Return the most probable share of the first of two models: the zero of the posterior's slope, by bisection in float64."""
    low, high = 0.0, 1.0
    for _ in range(200):
        share = (low + high) / 2
        slope = sum(v * (a - b) / (share * a + (1 - share) * b) for a, b, v in zip(p, q, value, strict=True))
        slope += before[0] / share - before[1] / (1 - share)
        low, high = (share, high) if slope > 0 else (low, share)
    return low


def by_hand(p: list[float], q: list[float], groups: list[int], value: list[float], before: tuple[float, float]) -> float:
    p, q = ([max(FLOOR, x) for x in model] for model in (p, q))
    score = 0.0
    for n in range(len(p)):
        rest = [m for m in range(len(p)) if groups[m] != groups[n]]
        share = likeliest_share([p[m] for m in rest], [q[m] for m in rest], [value[m] for m in rest], before)
        score += value[n] * math.log(share * p[n] + (1 - share) * q[n])
    return score


@pytest.mark.parametrize("seed", range(10))
def test_each_sample_is_scored_without_its_own_voice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.beta(0.5, 0.5, (2, 2 + seed)).tolist()
    models = {"personalized": torch.tensor(p), "common": torch.tensor(q)}
    prior = {"personalized": 0.8, "common": 0.2} if seed % 2 else {}
    before = (1.6, 0.4) if seed % 2 else (1.0, 1.0)
    expected = by_hand(torch.tensor(p).tolist(), torch.tensor(q).tolist(), list(range(len(p))), [1.0] * len(p), before)
    assert leave_one_out(models, prior).sum() == pytest.approx(expected, abs=1e-4)


def test_a_group_is_left_out_as_a_whole_and_counts_once() -> None:
    p, q = [0.9, 0.8, 0.1, 0.6, 0.3], [0.2, 0.5, 0.7, 0.5, 0.9]
    groups, value = [0, 0, 1, 2, 2], [0.5, 0.5, 1.0, 0.5, 0.5]
    models = {"personalized": torch.tensor(p, dtype=torch.float64), "common": torch.tensor(q, dtype=torch.float64)}
    score = leave_one_out(models, {}, torch.tensor(value, dtype=torch.float64), np.array(groups)) @ value
    assert score == pytest.approx(by_hand(p, q, groups, value, (1.0, 1.0)), abs=1e-4)


def test_one_model_alone_has_its_plain_likelihood_and_an_impossible_label_the_floor() -> None:
    expected = [math.log(0.5), math.log(0.25), math.log(FLOOR)]
    assert leave_one_out({"local": torch.tensor([0.5, 0.25, 0.0])}) == pytest.approx(expected, abs=1e-6)


def test_labels_of_a_sequence_count_as_one_sample() -> None:
    once = {"personalized": torch.tensor([0.5, 0.25]), "common": torch.tensor([0.1, 0.75])}
    twice = {name: p[:, None].expand(2, 7) for name, p in once.items()}
    assert leave_one_out(twice) == pytest.approx(leave_one_out(once))


def test_many_samples_are_left_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    p_KV = torch.rand(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    models: dict[Any, torch.Tensor] = dict(zip(("personalized", "common", "local"), p_KV, strict=True))
    at_once = leave_one_out(models)
    monkeypatch.setattr(blend, "LEFT_OUT_AT_ONCE", 7)
    assert leave_one_out(models) == pytest.approx(at_once, abs=1e-9)
    share = blend.weights_of(models)
    assert at_once.sum() < float(torch.stack([share[name] * p for name, p in models.items()]).sum(0).log().sum())


def test_of_many_samples_several_are_left_out_together() -> None:
    p_KV = torch.rand(2, 2 * blend.MOST_TURNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    models: dict[Any, torch.Tensor] = {"personalized": p_KV[0], "common": p_KV[1]}
    pairs = np.arange(2 * blend.MOST_TURNS) % blend.MOST_TURNS
    assert (leave_one_out(models) == leave_one_out(models, groups=pairs)).all()
    few = {name: p[:9] for name, p in models.items()}
    assert (leave_one_out(few) != leave_one_out(few, groups=pairs[:9] % 3)).any()


def scores(result: attune.SimulationResult) -> dict[tuple[str, int], float | None]:
    return {(row.client, row.round): row.likelihood_kept for row in result._outcome.snapshot.rows if row.work == "evaluate"}


def test_devices_report_it_after_these_rounds_alone() -> None:
    result = attune.simulate(CLOUDS, "fedper", rounds=3, settings=SETTINGS, progress=False)
    reported = scores(result)
    assert {at for at, score in reported.items() if score is not None} == {(name, at) for name in CLOUDS for at in (1, 3)}
    assert {at for _, at in reported} == {1, 2, 3}  # round 2 is evaluated anyway, as one of the last two
    plain = attune.simulate(CLOUDS, "fedper", rounds=3, settings={**SETTINGS, "train.score_after": []}, progress=False)
    assert plain.digests == result.digests, "a score changes nothing that is trained"
    assert all(score is None for score in scores(plain).values())


def test_the_method_local_scores_its_only_model() -> None:
    result = attune.simulate(CLOUDS, "local", rounds=3, settings=SETTINGS, progress=False)
    assert all(score is not None and score < 0 for (_, at), score in scores(result).items() if at != 2)


def test_a_dial_is_set_by_other_samples_than_those_that_score_it() -> None:
    settings = {**SETTINGS, "method.dial": True}
    result = attune.simulate(CLOUDS, "fedmcsa", rounds=3, settings=settings, progress=False)
    plain = attune.simulate(CLOUDS, "fedmcsa", rounds=3, settings={**settings, "train.score_after": []}, progress=False)
    assert all(scores(result)[name, 3] is not None for name in CLOUDS)
    assert {row.samples for row in plain.table()} == {41} and {row.samples for row in result.table()} == {37}
