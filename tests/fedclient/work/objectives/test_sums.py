"""A device's side of the closed form, against an independent calculation in numpy."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from attune.common.methods.ridge import ERRORS, STRENGTHS, WEIGHT
from attune.common.methods.settings.objectives import SumsSettings
from attune.common.methods.settings.predictors import ClosedFormPredictorSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask
from attune.fedclient.work.objectives.sums import SampleSums
from attune.fedclient.work.predictors.closed_form import ClosedFormPredictor
from tests.fedclient.work.objectives.conftest import MakeTask

OBJECTIVE, PREDICTOR = SampleSums(SumsSettings()), ClosedFormPredictor(ClosedFormPredictorSettings())
N, D, C = 23, 9, 3  # 8 random features, and the constant
MANY = 41  # features: more than samples


def task_of(
    make_task: MakeTask, strength: float = 1.0, fold: torch.Tensor | None = None, served: bool = True, features: int = D
) -> LocalTask:
    options = {"features": features - 1, "sharpness": 4.0}
    model = build(default_spec("tabular", (4,), C, 0, "closed-form", options), seed=0)
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(N, 4, generator=draws), torch.randint(C, (N,), generator=draws)
    start = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    if served:
        start[WEIGHT] = torch.randn(C, features, generator=draws, dtype=torch.float64)
    start |= {"strength": torch.tensor(strength, dtype=torch.float64)}
    task = make_task(model, x, y, start | OBJECTIVE.extras(start, None))
    return LocalTask(**{**vars(task), "fold": fold})


def arrays(task: LocalTask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Z, one-hot T, and the served weights."""
    Z = task.network.model.features(task.x, torch.float64).numpy()
    return Z, np.eye(C)[task.y.numpy()], task.start[WEIGHT].numpy()


def test_the_sums_are_those_of_all_samples(make_task: MakeTask):
    task = task_of(make_task)
    Z, T, W = arrays(task)
    made = OBJECTIVE.run(task)
    G = Z.T @ Z
    np.testing.assert_allclose(made.tensors[PERSONAL + "gram"].numpy(), G[np.triu_indices(D)], atol=1e-12)
    np.testing.assert_allclose(made.tensors[PERSONAL + "cross"].numpy(), Z.T @ T, atol=1e-12)
    assert made.tensors[PERSONAL + "squares"].tolist() == T.sum(axis=0).tolist()
    assert made.tensors[PERSONAL + ERRORS].tolist() == [0] * len(STRENGTHS), "without folds nothing is known out of fold"
    np.testing.assert_allclose(made.loss, np.square(T - Z @ W.T).mean(), rtol=1e-12)
    assert torch.equal(made.tensors[WEIGHT], task.start[WEIGHT])


@pytest.mark.parametrize("features", [D, MANY])
def test_errors_are_those_of_models_without_each_fold(features: int, make_task: MakeTask):
    fold = torch.arange(N) % 5
    fold[3] = -1  # in no fold: always fitted, never scored
    task = task_of(make_task, fold=fold, features=features)
    Z, T, W = arrays(task)
    errors = OBJECTIVE.run(task).tensors[PERSONAL + ERRORS]
    for place, strength in enumerate(STRENGTHS):
        expected = 0.0
        for number in range(5):
            left = fold.numpy() == number
            A, B = Z[~left], T[~left]
            own = np.linalg.solve(A.T @ A + strength * np.eye(features), A.T @ B + strength * W.T)
            expected += np.square(T[left] - Z[left] @ own).sum()
        np.testing.assert_allclose(float(errors[place]), expected, rtol=1e-9)


def test_nothing_is_known_out_of_fold_before_weights_are_served(make_task: MakeTask):
    errors = OBJECTIVE.run(task_of(make_task, fold=torch.arange(N) % 5, served=False)).tensors[PERSONAL + ERRORS]
    assert errors.tolist() == [0] * len(STRENGTHS)


@pytest.mark.parametrize("features", [D, MANY])
def test_the_device_draws_its_own_weights_from_the_served_ones(features: int, make_task: MakeTask):
    task = task_of(make_task, strength=0.3, features=features)
    Z, T, W = arrays(task)
    made = PREDICTOR.prepare(task)
    expected = np.linalg.solve(Z.T @ Z + 0.3 * np.eye(features), Z.T @ T + 0.3 * W.T).T
    np.testing.assert_allclose(made[WEIGHT].numpy(), expected, atol=1e-10)
    assert set(made) == {WEIGHT, "strength"}
    scores = PREDICTOR.logits(task.network, made, task.x)
    np.testing.assert_allclose(scores.numpy(), 4 * Z @ expected.T, atol=1e-4)


def test_no_system_is_larger_than_the_samples_of_a_device(make_task: MakeTask):
    """Most devices have fewer samples than features: 30 systems of 500 equations took them most of their time."""
    task, sizes = task_of(make_task, fold=torch.arange(N) % 5, features=MANY), []
    solve = torch.linalg.cholesky
    with patch.object(torch.linalg, "cholesky", lambda matrix: sizes.append(len(matrix)) or solve(matrix)):
        OBJECTIVE.run(task), PREDICTOR.prepare(task), PREDICTOR.out_of_fold(task)
    assert sizes and max(sizes) <= N


def test_with_strength_0_it_keeps_what_is_served(make_task: MakeTask):
    task = task_of(make_task, strength=0.0)
    Z, _, W = arrays(task)
    assert torch.equal(PREDICTOR.prepare(task)[WEIGHT], task.start[WEIGHT])
    np.testing.assert_allclose(PREDICTOR.out_of_fold(task).numpy(), 4 * Z @ W.T, atol=1e-4)


def test_scores_out_of_fold_do_not_know_the_sample(make_task: MakeTask):
    fold = torch.arange(N) % 5
    task = task_of(make_task, fold=fold)
    before = PREDICTOR.out_of_fold(task)
    other = task.y.clone()
    other[7] = (other[7] + 1) % C
    after = PREDICTOR.out_of_fold(LocalTask(**{**vars(task), "y": other}))
    same = fold == fold[7]
    assert torch.equal(before[same], after[same])
    assert not torch.allclose(before[~same], after[~same])
    assert PREDICTOR.out_of_fold(task_of(make_task)).isnan().all(), "without folds"
