"""A device's side of the closed form, against an independent calculation in numpy."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from attune.common.methods.ridge import (
    COUNTED,
    CROSS,
    ERRORS,
    FEWEST,
    GAMMA,
    GAMMAS,
    GRAM,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    sums_of,
)
from attune.common.methods.settings.objectives import ClosedFormPredictorSettings, SumsSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.fedclient.work.objectives.base import PERSONAL, LocalTask
from attune.fedclient.work.objectives.descent import TrainingDiverged
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
    model = build(default_spec("images", (2, 2, 1), C, 0, "closed-form", options), seed=0)
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
    assert made.tensors[PERSONAL + ERRORS].tolist() == [[0] * len(STRENGTHS)], "without folds nothing is known out of fold"
    np.testing.assert_allclose(made.loss, np.square(T - Z @ W.T).mean(), rtol=1e-12)
    assert torch.equal(made.tensors[WEIGHT], task.start[WEIGHT])


def surprise(T: np.ndarray, predicted: np.ndarray) -> float:
    """Return minus the log-likelihood of classes, by the sharpness 4 of the models here."""
    return float((np.log(np.exp(4 * predicted).sum(axis=1)) - 4 * (predicted * T).sum(axis=1)).sum())


@pytest.mark.parametrize("features", [D, MANY])
def test_errors_are_those_of_models_without_each_fold(features: int, make_task: MakeTask):
    fold = torch.arange(N) % 5
    fold[3] = -1  # in no fold: always fitted, never scored
    task = task_of(make_task, fold=fold, features=features)
    Z, T, W = arrays(task)
    errors = OBJECTIVE.run(task).tensors[PERSONAL + ERRORS][0]
    for place, strength in enumerate(STRENGTHS):
        expected = 0.0
        for number in range(5):
            left = fold.numpy() == number
            A, B = Z[~left], T[~left]
            own = np.linalg.solve(A.T @ A + strength * np.eye(features), A.T @ B + strength * W.T)
            expected += surprise(T[left], Z[left] @ own)
        np.testing.assert_allclose(float(errors[place]), expected, rtol=1e-9)


def test_nothing_is_known_out_of_fold_before_weights_are_served(make_task: MakeTask):
    errors = OBJECTIVE.run(task_of(make_task, fold=torch.arange(N) % 5, served=False)).tensors[PERSONAL + ERRORS]
    assert errors.tolist() == [[0] * len(STRENGTHS)]


@pytest.mark.parametrize("features", [D, MANY])
def test_the_device_draws_its_own_weights_from_the_served_ones(features: int, make_task: MakeTask):
    task = task_of(make_task, strength=0.3, features=features)
    Z, T, W = arrays(task)
    made = PREDICTOR.prepare(task)
    expected = np.linalg.solve(Z.T @ Z + 0.3 * np.eye(features), Z.T @ T + 0.3 * W.T).T
    np.testing.assert_allclose(made[WEIGHT].numpy(), expected, atol=1e-10)
    assert set(made) == {WEIGHT, "strength", "block", "sizes"}
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


# --- one sum of all devices is served, and the device takes its own out of it

GAMMA_SERVED = GAMMAS[1]


def one_sum_task(
    make_task: MakeTask, counted: float = 1.0, of: int = N, fold: torch.Tensor | None = None, given: bool = True
) -> tuple[LocalTask, dict[str, np.ndarray]]:
    """Return the task of a device with `of` samples, and what others gave: G and B over 40 samples."""
    options = {"features": 8, "sharpness": 4.0, "one_sum": True}
    model = build(default_spec("images", (2, 2, 1), C, 0, "closed-form", options), seed=0)
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(of, 4, generator=draws), torch.randint(C, (of,), generator=draws)
    A, B = torch.randn(40, D, generator=draws, dtype=torch.float64), torch.randn(40, C, generator=draws, dtype=torch.float64)
    of_others = sums_of(A, B, [D])
    start = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    own = OBJECTIVE.run(make_task(model, x, y, start | OBJECTIVE.extras(start, None))).tensors
    if given:
        start |= {name: of_others[name] + counted * own[PERSONAL + name] for name in (GRAM, CROSS)}
        start |= {STRENGTH: torch.tensor(0.3, dtype=torch.float64), GAMMA: torch.tensor([GAMMA_SERVED], dtype=torch.float64)}
        start |= {
            COUNTED: torch.tensor(counted, dtype=torch.float64),
            WEIGHT: torch.randn(C, D, generator=draws, dtype=torch.float64),
        }
    task = make_task(model, x, y, start | {name: own[name] for name in own if name.startswith(PERSONAL)})
    return LocalTask(**{**vars(task), "fold": fold}), {"A": A.numpy(), "B": B.numpy()}


def of_all_others(others: dict[str, np.ndarray], gamma: float) -> np.ndarray:
    A, B = others["A"], others["B"]
    return np.linalg.solve(A.T @ A + gamma * np.eye(D), A.T @ B).T


def test_before_the_sum_the_device_hands_in_its_sums_and_after_it_errors_alone(make_task: MakeTask):
    fold = torch.arange(N) % 5
    for given in (False, True):
        task, others = one_sum_task(make_task, fold=fold, given=given)
        made = OBJECTIVE.run(task)
        handed_in, of_samples = OBJECTIVE.handed_in(made.tensors)
        assert of_samples is not given
        assert any(handed_in[name].any() for name in (GRAM, CROSS, "squares")) is not given
        assert bool(handed_in[ERRORS].any()) is given
    Z, T, _ = arrays(task)
    for gamma, errors in zip(GAMMAS, handed_in[ERRORS][0], strict=True):
        W = of_all_others(others, gamma)
        np.testing.assert_allclose(float(errors[0]), surprise(T, Z @ W.T), rtol=1e-8)
        own = 0.0
        for number in range(5):
            left = fold.numpy() == number
            A, B = Z[~left], T[~left]
            own += surprise(T[left], Z[left] @ np.linalg.solve(A.T @ A + np.eye(D), A.T @ B + W.T))
        np.testing.assert_allclose(float(errors[1 + STRENGTHS.index(1.0)]), own, rtol=1e-8)


@pytest.mark.parametrize("counted", [0.0, 1.0])
def test_the_device_draws_its_own_weights_from_those_of_all_others(make_task: MakeTask, counted: float):
    """A device that is not in the sum takes nothing out of it."""
    task, others = one_sum_task(make_task, counted)
    Z, T, _ = arrays(task)
    made, W = PREDICTOR.prepare(task), of_all_others(others, GAMMA_SERVED)
    expected = np.linalg.solve(Z.T @ Z + 0.3 * np.eye(D), Z.T @ T + 0.3 * W.T).T
    np.testing.assert_allclose(made[WEIGHT].numpy(), expected, atol=1e-9)
    assert not made[GRAM].any() and not made[CROSS].any(), "a model that is saved or passed on has no sums in it"


def test_what_the_device_gave_is_taken_out_whatever_its_data_are_now(make_task: MakeTask):
    """New data come into no new sum: so what is taken out is kept from the sum."""
    task, others = one_sum_task(make_task)
    x, y = task.x[:12] + 1, task.y[:12]
    later = LocalTask(**{**vars(task), "x": x, "y": y})
    kept = OBJECTIVE.run(later).tensors
    assert torch.equal(kept[PERSONAL + GRAM], task.start[PERSONAL + GRAM])
    Z, T, _ = arrays(later)
    expected = np.linalg.solve(Z.T @ Z + 0.3 * np.eye(D), Z.T @ T + 0.3 * of_all_others(others, GAMMA_SERVED).T).T
    np.testing.assert_allclose(
        PREDICTOR.prepare(LocalTask(**{**vars(later), "start": kept}))[WEIGHT].numpy(), expected, atol=1e-9
    )


@pytest.mark.parametrize(("counted", "of", "keeps"), [(1.0, N, True), (0.0, N, False), (0.0, FEWEST - 1, True)])
def test_a_device_alone_in_a_class_or_with_few_samples_keeps_the_common_weights(
    make_task: MakeTask, counted: float, of: int, keeps: bool
):
    """Others gave nothing to the last class. A device that is in no sum draws weights of its own."""
    task, _ = one_sum_task(make_task, counted, of)
    cross = task.start[CROSS].clone()
    cross[-1] = torch.tensor([9.0, 8.0, 0.0]) + counted * task.start[PERSONAL + CROSS][-1]
    made = PREDICTOR.prepare(LocalTask(**{**vars(task), "start": task.start | {CROSS: cross}}))
    assert torch.equal(made[WEIGHT], task.start[WEIGHT]) is keeps


def test_a_served_sum_without_the_device_in_it_is_told(make_task: MakeTask):
    """A server could say that a device is in a sum in which it is not."""
    task, _ = one_sum_task(make_task)
    start = task.start | {name: 0.5 * task.start[PERSONAL + name] for name in (GRAM, CROSS)}
    with pytest.raises(TrainingDiverged, match="is that of no samples"):
        PREDICTOR.prepare(LocalTask(**{**vars(task), "start": start}))


def test_there_are_errors_of_both_blocks_and_one_predicts(make_task: MakeTask):
    """Draw weights of the block of the numbers themselves, which the fleet has chosen, and keep those of the other."""
    options = {"features": D - 1, "sharpness": 4.0}
    model = build(default_spec("tabular", (4,), C, 0, "closed-form", {**options, "linear": True}), seed=0)
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(N, 4, generator=draws), torch.randint(C, (N,), generator=draws)
    start = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    start |= {WEIGHT: torch.randn(C, D + 5, generator=draws).double(), STRENGTH: torch.tensor(0.3).double()}
    start |= {"block": torch.ones((), dtype=torch.float64)}
    task = make_task(model, x, y, start | OBJECTIVE.extras(start, None))
    task = LocalTask(**{**vars(task), "fold": torch.arange(N) % 5})
    Z, T, W = arrays(task)
    A, centre = Z[:, D:], W[:, D:]
    np.testing.assert_allclose(A, np.hstack([x.double().numpy() / 2, np.ones((N, 1))]), atol=1e-12)
    own = np.linalg.solve(A.T @ A + 0.3 * np.eye(5), A.T @ T + 0.3 * centre.T).T
    made = PREDICTOR.prepare(task)
    np.testing.assert_allclose(made[WEIGHT].numpy(), np.hstack([W[:, :D], own]), atol=1e-10)
    np.testing.assert_allclose(PREDICTOR.logits(task.network, made, x).numpy(), 4 * A @ own.T, atol=1e-4)
    errors = OBJECTIVE.run(task).tensors[PERSONAL + ERRORS]
    for block, place in enumerate((slice(0, D), slice(D, D + 5))):
        expected = 0.0
        for number in range(5):
            left = np.arange(N) % 5 == number
            B, drawn = Z[~left][:, place], T[~left]
            weights = np.linalg.solve(B.T @ B + np.eye(B.shape[1]), B.T @ drawn + W[:, place].T)
            expected += surprise(T[left], Z[left][:, place] @ weights)
        np.testing.assert_allclose(float(errors[block, STRENGTHS.index(1.0)]), expected, rtol=1e-9)
