"""Closed form: numbers worked out by hand, an independent calculation in numpy, and sums that no samples can have."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import SettingError, UpdateRefused
from attune.common.methods.ridge import (
    CROSS,
    ERRORS,
    GRAM,
    SQUARES,
    STRENGTHS,
    blocks_of,
    check_sums,
    lower,
    solved,
    squared_error,
    sums_manifest,
    sums_of,
    targets_of,
)
from attune.common.models.registry import build, default_spec
from attune.common.wire.tensors import manifest_of

WHO = "kiel's attended update"


def sums(Z_ND: torch.Tensor, T_NC: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**sums_of(Z_ND, T_NC, [Z_ND.shape[1]]), ERRORS: torch.zeros(1, len(STRENGTHS), dtype=torch.float64)}


def drawn(seed: int, samples: int, features: int = 4, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Z with a constant last feature, and one-hot T."""
    draws = np.random.default_rng(seed)
    Z_ND = np.hstack([draws.normal(size=(samples, features - 1)), np.ones((samples, 1))])
    return torch.from_numpy(Z_ND), targets_of(torch.from_numpy(draws.integers(classes, size=samples)), classes)


def test_weights_of_two_samples_by_hand():
    """Z = (1, 1), (-1, 1); T = 3, 1. G = diag(2, 2), B = (2, 4). With strength 2: W = (2/4, 4/4)."""
    Z_ND = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    made = sums(Z_ND, torch.tensor([[3.0], [1.0]], dtype=torch.float64))
    assert made[GRAM].tolist() == [2, 0, 2]
    assert made[CROSS].tolist() == [[2], [4]]
    assert made[SQUARES].tolist() == [10]
    G_DD = lower(made[GRAM], 2)
    assert G_DD.tolist() == [[2, 0], [0, 2]]
    W_CD = solved(G_DD, made[CROSS], 2.0)
    assert W_CD.tolist() == [[0.5, 1.0]]
    assert squared_error(W_CD, G_DD, made[CROSS], made[SQUARES]) == 1.5**2 + 0.5**2
    # About the centre (1, 0): (2 + 2 * 1) / 4 and (4 + 0) / 4.
    assert solved(G_DD, made[CROSS], 2.0, torch.tensor([[1.0, 0.0]], dtype=torch.float64)).tolist() == [[1.0, 1.0]]


def test_targets_of_each_task():
    assert targets_of(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert targets_of(torch.tensor([[1.0, 0.0]]), 2, labels=True).tolist() == [[1, -1]]
    assert targets_of(torch.tensor([[0.25]]), 1).tolist() == [[0.25]]


@given(seed=st.integers(0, 1 << 20), samples=st.integers(3, 40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_any_split_of_the_samples_has_the_pooled_weights(seed: int, samples: int, cuts: list[int]):
    Z_ND, T_NC = drawn(seed, samples)
    parts = np.split(np.arange(samples), sorted(cut for cut in cuts if cut < samples))
    total = {name: sum(sums(Z_ND[part], T_NC[part])[name] for part in parts) for name in (GRAM, CROSS, SQUARES)}
    Z, T = Z_ND.numpy(), T_NC.numpy()
    pooled = np.linalg.solve(Z.T @ Z + 0.1 * np.eye(4), Z.T @ T).T  # another library, from the samples
    W_CD = solved(lower(total[GRAM], 4), total[CROSS], 0.1)
    np.testing.assert_allclose(W_CD.numpy(), pooled, rtol=0, atol=1e-10)
    error = squared_error(W_CD, lower(total[GRAM], 4), total[CROSS], total[SQUARES])
    assert error == pytest.approx(np.square(T - Z @ pooled.T).sum(), abs=1e-8)


@given(seed=st.integers(0, 1 << 20), samples=st.integers(1, 30), classes=st.integers(1, 4), copies=st.integers(1, 3))
def test_sums_of_samples_are_never_refused(seed: int, samples: int, classes: int, copies: int):
    """Even where G is singular: fewer samples than features, and each of them several times."""
    Z_ND, T_NC = drawn(seed, samples, features=12, classes=classes)
    check_sums(sums(Z_ND.repeat(copies, 1), T_NC.repeat(copies, 1)), [12], True, WHO)
    numbers_NC = torch.from_numpy(np.random.default_rng(seed).normal(scale=1e3, size=(samples, classes)))
    check_sums(sums(Z_ND, numbers_NC), [12], False, WHO)


def altered(name: str, change) -> dict[str, torch.Tensor]:
    made = sums(*drawn(3, 20))
    made[name] = change(made[name].clone())
    return made


def flipped(B_DC: torch.Tensor) -> torch.Tensor:
    """Return B with its classes in another order where features are not constant."""
    B_DC[:-1] = B_DC[:-1].flip(1) * 3
    return B_DC


@pytest.mark.parametrize(
    "wrong",
    [
        altered(CROSS, lambda B: -10 * B),  # three liars of ten with it took a common model from 97.1 to 32.0
        altered(CROSS, flipped),
        altered(GRAM, lambda G: -G),
        altered(GRAM, lambda G: G * 0.5),
        altered(SQUARES, lambda s: s + 1),
        altered(SQUARES, lambda s: s - s.max() - 1),
        altered(ERRORS, lambda e: e - 1),
        altered(GRAM, lambda G: torch.cat([G[:-1], G[-1:] + 0.5])),
    ],
)
def test_sums_that_no_samples_can_have_are_refused(wrong: dict[str, torch.Tensor]):
    with pytest.raises(UpdateRefused, match=f"^{WHO} has sums that no samples can have"):
        check_sums(wrong, [4], True, WHO)


def test_numbers_that_do_not_fit_their_squares_are_refused():
    Z_ND, T_NC = drawn(3, 20)
    made = sums(Z_ND, T_NC * 2.5)
    check_sums(made, [4], False, WHO)
    made[CROSS] = -10 * made[CROSS]
    with pytest.raises(UpdateRefused, match="positive semi-definite"):
        check_sums(made, [4], False, WHO)


@pytest.mark.parametrize(
    ("shape", "classes", "said"), [((200, 200, 1), 2, "16,384 numbers of a sample"), ((4, 4, 1), 1001, "1,000 outputs")]
)
def test_a_model_that_is_too_large_is_refused(shape: tuple[int, ...], classes: int, said: str):
    with pytest.raises(SettingError, match=said):
        build(default_spec("images", shape, classes, 0, "closed-form", {}), seed=0)


def test_features_are_an_independent_calculation():
    """Compare cos(F x + p) sqrt(2 / R) of two widths, and the numbers of a table themselves, each with the constant."""
    spec = default_spec("tabular", (3,), 2, 0, "closed-form", {"features": 5, "seed": 7, "widths": [0.5, 2.0], "linear": True})
    model = build(spec, seed=99)
    draws = np.random.RandomState(7)
    x = np.array([[0.5, -1.0, 2.0]])
    narrow, wide = (
        np.sqrt(2 / 5) * np.cos(x @ draws.standard_normal((3, 5)) * width / np.sqrt(3) + draws.uniform(0, 2 * np.pi, 5))
        for width in (0.5, 2.0)
    )
    expected = np.hstack([narrow, [[1.0]], wide, [[1.0]], x / np.sqrt(3), [[1.0]]])
    assert model.sizes.tolist() == [6, 6, 4]
    np.testing.assert_allclose(model.features(torch.from_numpy(x), torch.float64).numpy(), expected, atol=1e-6)
    again = build(spec, seed=1)
    assert torch.equal(again.frequency, model.frequency), "they follow from the spec alone"


@given(seed=st.integers(0, 1 << 20), samples=st.integers(3, 20), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_sums_of_several_blocks_are_those_of_each_block(seed: int, samples: int, sizes: list[int]):
    parts = [drawn(seed + place, samples, features=size) for place, size in enumerate(sizes)]
    T_NC = parts[0][1]
    together = sums_of(torch.cat([Z_ND for Z_ND, _ in parts], dim=1), T_NC, sizes)
    for (_, G_DD, B_DC), (Z_ND, _) in zip(blocks_of(together, sizes), parts, strict=True):
        alone = sums_of(Z_ND, T_NC, [Z_ND.shape[1]])
        torch.testing.assert_close(G_DD, lower(alone[GRAM], Z_ND.shape[1]))
        torch.testing.assert_close(B_DC, alone[CROSS])
    errors = torch.zeros(len(sizes), len(STRENGTHS), dtype=torch.float64)
    check_sums({**together, ERRORS: errors}, sizes, True, WHO)
    assert manifest_of({**together, ERRORS: errors}) == sums_manifest(3, sizes)


@pytest.mark.parametrize("block", [0, 1])
def test_a_lie_in_one_block_is_refused(block: int):
    (Z, T_NC), (other_Z, _) = drawn(3, 20), drawn(4, 20)
    made = {**sums_of(torch.cat([Z, other_Z], dim=1), T_NC, [4, 4]), ERRORS: torch.zeros(2, len(STRENGTHS)).double()}
    made[CROSS][4 * block : 4 * block + 3] *= -10
    with pytest.raises(UpdateRefused, match="positive semi-definite"):
        check_sums(made, [4, 4], True, WHO)


def test_blocks_of_other_numbers_of_samples_are_refused():
    (Z, T), (other_Z, other_T) = drawn(3, 20), drawn(4, 30)
    one, two = sums_of(Z, 2 * T, [4]), sums_of(other_Z, other_T, [4])
    made = {name: torch.cat([one[name], two[name]]) for name in (GRAM, CROSS)}
    made |= {SQUARES: one[SQUARES] + two[SQUARES], ERRORS: torch.zeros(2, len(STRENGTHS)).double()}
    with pytest.raises(UpdateRefused, match="not of as many samples"):
        check_sums(made, [4, 4], False, WHO)


def test_sums_keep_their_bits_where_a_light_device_solves_or_cannot() -> None:
    """On a light device G is changed in place while it is solved. The second G is singular with this strength."""
    for G, strength in ((np.array([[2.0, 1.0], [1.0, 3.0]]), 0.1), (np.ones((2, 2)), 0.0)):
        before = G.copy()
        with contextlib.suppress(np.linalg.LinAlgError):
            solved(G, np.ones((2, 1)), strength)
        assert np.array_equal(G, before)
