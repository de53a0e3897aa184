"""The server's side of the closed form, against an independent calculation from the samples themselves."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from attune.common.exchange.transform import NotASum, PartUpdate
from attune.common.methods.ridge import (
    BLOCK,
    COUNTED,
    CROSS,
    ERRORS,
    GAMMA,
    GAMMAS,
    GRAM,
    SIZES,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    nothing_solved,
    sums_of,
    targets_of,
)
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.fedserver.lab.aggregators import closed_form
from attune.fedserver.lab.aggregators.base import MemoryVault, Tensors
from attune.fedserver.lab.aggregators.closed_form import FEWEST, OF, TOTAL, USUAL_STRENGTH, ClosedFormSums, left_out, worths

FEATURES, CLASSES = 6, 3
START = nothing_solved(CLASSES, [FEATURES])
Samples = tuple[torch.Tensor, torch.Tensor]


def samples(seed: int, number: int) -> Samples:
    draws = np.random.default_rng(seed)
    Z_ND = torch.from_numpy(np.hstack([draws.normal(size=(number, FEATURES - 1)), np.ones((number, 1))]))
    return Z_ND, targets_of(torch.from_numpy(draws.integers(CLASSES, size=number)), CLASSES)


def update(client: str, of: Samples, errors: list[float] | None = None, weight: float | None = None) -> PartUpdate:
    reported = torch.tensor([errors or [0.0] * len(STRENGTHS)], dtype=torch.float64)
    return PartUpdate(client, len(of[0]) if weight is None else weight, {**sums_of(*of, [FEATURES]), ERRORS: reported})


def aggregator(vault: MemoryVault | None = None) -> ClosedFormSums:
    made = ClosedFormSums(ClosedFormSettings(), vault or MemoryVault(), 0, {})
    if vault is None or not list(vault.keys()):
        made.start(START)
    return made


def served(made: ClosedFormSums, *clients: str) -> dict[str, Tensors]:
    return dict(made.generate(clients))


def pooled(of: list[Samples], gamma: float) -> np.ndarray:
    """Return the ridge regression of these samples, (C, D), by another library."""
    Z, T = (np.concatenate([one[place].numpy() for one in of]) for place in (0, 1))
    return np.linalg.solve(Z.T @ Z + gamma * np.eye(FEATURES), Z.T @ T).T


def best_gamma(groups: list[list[Samples]]) -> float:
    """Return the strength whose weights without each group have the least squared error on its samples."""
    errors = []
    for gamma in GAMMAS:
        error = 0.0
        for place, group in enumerate(groups):
            W = pooled([one for other, of in enumerate(groups) if other != place for one in of], gamma)
            error += sum(float(np.square(T.numpy() - Z.numpy() @ W.T).sum()) for Z, T in group)
        errors.append(error)
    return GAMMAS[int(np.argmin(errors))]


def test_before_any_sums_all_are_served_the_start():
    made = aggregator()
    assert (made.slot("ann"), made.slot(""), made.cold_start()) == ("start", None, "start")
    assert made.close_round([]) == {}


@given(seed=st.integers(0, 1 << 20), sizes=st.lists(st.integers(FEWEST, 20), min_size=2, max_size=13))
def test_each_client_is_served_the_regression_of_all_others(seed: int, sizes: list[int]):
    fleet = {f"c{place:02}": samples(seed + place, size) for place, size in enumerate(sizes)}
    made = aggregator()
    numbers = made.close_round([update(client, of, weight=1e9) for client, of in reversed(fleet.items())])
    groups = [[of for place, of in enumerate(fleet.values()) if place % 10 == group] for group in range(min(10, len(fleet)))]
    assert numbers == {"gamma": best_gamma(groups), "strength": USUAL_STRENGTH}
    common = made.cold_start()
    np.testing.assert_allclose(common[WEIGHT].numpy(), pooled(list(fleet.values()), numbers["gamma"]), rtol=0, atol=1e-10)
    assert made.slot("c00") is None
    for client, tensors in served(made, *fleet).items():
        others = [of for name, of in fleet.items() if name != client]
        np.testing.assert_allclose(tensors[WEIGHT].numpy(), pooled(others, numbers["gamma"]), rtol=0, atol=1e-9)
        assert float(tensors[STRENGTH]) == USUAL_STRENGTH


def test_a_client_with_few_samples_keeps_the_common_weights():
    made, few = aggregator(), samples(1, FEWEST - 1)
    numbers = made.close_round([update("ann", samples(0, 12)), update("bob", few, weight=12)])
    common = pooled([samples(0, 12), few], numbers["gamma"])
    of = served(made, "bob", "eve")
    assert (float(of["bob"][STRENGTH]), float(of["eve"][STRENGTH])) == (0, USUAL_STRENGTH)
    for client in ("bob", "eve"):
        np.testing.assert_allclose(of[client][WEIGHT].numpy(), common, rtol=0, atol=1e-10)


def test_a_client_alone_in_a_class_keeps_the_common_weights():
    """Others know nothing of the class. Before that it is served their weights, to report honest errors."""
    made, (Z, T) = aggregator(), samples(1, 12)
    fleet, errors = {"ann": (Z, targets_of(T[:, 0].long(), CLASSES)), "bob": samples(0, 12)}, [1.0] * len(STRENGTHS)
    made.close_round([update(client, of) for client, of in fleet.items()])
    before = served(made, *fleet)
    made.close_round([update(client, of, errors) for client, of in fleet.items()])
    after = served(made, *fleet)
    assert [float(of["bob"][STRENGTH]) > 0 for of in (before, after)] == [True, False]
    assert torch.equal(after["bob"][WEIGHT], made.cold_start()[WEIGHT])
    assert not torch.equal(before["bob"][WEIGHT], after["bob"][WEIGHT])
    assert float(after["ann"][STRENGTH]) and torch.equal(before["ann"][WEIGHT], after["ann"][WEIGHT])


def test_the_newest_sums_of_a_client_take_the_place_of_older_ones():
    """Partial cohorts, and new data: the state is that of all clients' newest sums, whichever rounds brought them."""
    one, two = aggregator(), aggregator()
    one.close_round([update("ann", samples(0, 10)), update("bob", samples(1, 11))])
    one.close_round([update("cid", samples(2, 12))])
    one.close_round([update("ann", samples(5, 10))])
    two.close_round(
        [update(name, samples(seed, size)) for name, seed, size in (("ann", 5, 10), ("bob", 1, 11), ("cid", 2, 12))]
    )
    for client in ("ann", "bob", "cid", "dora"):
        first, second = served(one, client)[client], served(two, client)[client]
        assert all(torch.equal(first[name], second[name]) for name in first), client


def test_sums_that_a_round_does_not_change_are_not_solved_again():
    """A new process solves them to the same bits. Two clients that exchange their samples change no bit of the total."""
    vault, fleet, errors = MemoryVault(), {"ann": samples(0, 12), "bob": samples(1, 13)}, [1.0] * len(STRENGTHS)
    made = aggregator(vault)
    made.close_round([update(client, of) for client, of in fleet.items()])
    first = served(made, *fleet)
    with patch.object(closed_form, "solved") as solving:
        made.close_round([update(client, of, errors) for client, of in fleet.items()])
        again = served(made, *fleet)
    assert not solving.called
    restarted = served(aggregator(vault), *fleet)
    assert all(torch.equal(again[client][name], restarted[client][name]) for client in fleet for name in (WEIGHT, STRENGTH))
    made.close_round([update("ann", fleet["bob"]), update("bob", fleet["ann"])])
    assert torch.equal(served(made, "ann")["ann"][WEIGHT], first["bob"][WEIGHT])


def test_the_vault_is_not_listed_for_each_client():
    """With 10,000 clients that took minutes: a vault sorts its keys."""
    vault = MemoryVault()
    made = aggregator(vault)
    made.close_round([update(f"c{n}", samples(n, 10)) for n in range(3)])
    with patch.object(vault, "keys", wraps=vault.keys) as listed:
        assert [made.slot(f"c{n}") for n in range(30)] == [None] * 30
        served(made, *(f"c{n}" for n in range(30)))
    assert listed.call_count <= 2


def test_a_weight_below_its_samples_makes_a_client_count_by_a_share():
    """`bound_samples` bounds the weight: of 40 samples with the weight 10 a quarter of the sums counts."""
    made, (Z, T) = aggregator(), samples(1, 40)
    numbers = made.close_round([update("ann", samples(0, 10)), update("big", (Z, T), weight=10)])
    A, B = samples(0, 10)
    G = A.T @ A + Z.T @ Z / 4 + numbers["gamma"] * torch.eye(FEATURES, dtype=torch.float64)
    expected = torch.linalg.solve(G, A.T @ B + Z.T @ T / 4).T
    torch.testing.assert_close(made.cold_start()[WEIGHT], expected, rtol=0, atol=1e-10)


def test_the_fleet_chooses_the_strength_and_no_client_alone():
    made = aggregator()
    honest = [0.9, 0.8, 0.4, 0.7, 0.8, 0.9]  # the third strength, 1.0, is best
    numbers = made.close_round([update(f"c{n}", samples(n, 10), honest) for n in range(12)])
    assert numbers["strength"] == STRENGTHS[2]
    liar = [1e300, 1e300, 1e300, 1e300, 1e300, 0.0]
    numbers = made.close_round([update("liar", samples(9, 10), liar)])
    assert numbers["strength"] == STRENGTHS[2]
    more = made.close_round([update(f"c{n}", samples(n, 10), [0.1, 0.8, 0.9, 0.9, 0.9, 0.9]) for n in range(12)])
    assert more["strength"] == STRENGTHS[0]
    assert float(served(made, "c0")["c0"][STRENGTH]) == STRENGTHS[0]


def test_a_misfit_is_the_error_of_all_others_weights():
    """Compare with scikit-learn on the samples themselves. c1 has its classes in another order."""
    fleet = {f"c{n}": samples(n, 12 + n) for n in range(4)}
    fleet["c1"] = (fleet["c1"][0], fleet["c1"][1].roll(1, dims=1))
    vault = MemoryVault()
    gamma = aggregator(vault).close_round([update(client, of, weight=1e9) for client, of in fleet.items()])["gamma"]
    rows = left_out(vault.read(TOTAL), ((client, vault.read(f"{OF}{client}")) for client in fleet))
    assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)
    for client, number, misfit in rows:
        Z, T = fleet[client]
        W = pooled([of for other, of in fleet.items() if other != client], gamma)
        assert number == len(Z)
        assert misfit == pytest.approx(np.square(T.numpy() - Z.numpy() @ W.T).sum() / np.square(T.numpy()).sum(), rel=1e-9)


def test_a_worth_is_what_the_others_lose_without_a_client():
    """Compare with scikit-learn on the samples themselves."""
    fleet = {f"c{n}": samples(n, 12 + n) for n in range(5)}
    vault = MemoryVault()
    gamma = aggregator(vault).close_round([update(client, of, weight=1e9) for client, of in fleet.items()])["gamma"]

    def misfit(at: str, *without: str) -> float:
        Z, T = fleet[at]
        W = pooled([of for other, of in fleet.items() if other not in (at, *without)], gamma)
        return float(np.square(T.numpy() - Z.numpy() @ W.T).sum() / np.square(T.numpy()).sum())

    rows = worths(vault.read(TOTAL), {client: vault.read(f"{OF}{client}") for client in fleet})
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)
    for client, worth, low, high in rows:
        gains = [misfit(other, client) - misfit(other) for other in fleet if other != client]
        half = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
        np.testing.assert_allclose(
            [worth, low, high], [np.mean(gains), np.mean(gains) - half, np.mean(gains) + half], rtol=1e-6
        )
    few = worths(vault.read(TOTAL), {client: vault.read(f"{OF}{client}") for client in ("c0", "c2", "c3")})
    assert all(np.isnan(row[2:]).all() and np.isfinite(row[1]) for row in few)


def test_newcomers_to_a_finished_federation_move_nothing():
    made = aggregator()
    made.close_round([update("ann", samples(0, 10)), update("bob", samples(1, 11))])
    before = made.cold_start()[WEIGHT]
    assert made.fit([update("new", samples(7, 30))]) == {}
    assert torch.equal(made.cold_start()[WEIGHT], before)


@pytest.mark.parametrize("number", [1, 2])
def test_one_or_two_clients(number: int):
    made = aggregator()
    numbers = made.close_round([update(f"c{n}", samples(n, 8)) for n in range(number)])
    of = served(made, "c0")["c0"]
    others = (
        pooled([samples(n, 8) for n in range(1, number)], numbers["gamma"]) if number > 1 else np.zeros((CLASSES, FEATURES))
    )
    np.testing.assert_allclose(of[WEIGHT].numpy(), others, rtol=0, atol=1e-8)


# --- one sum of several clients, of whom nothing else is known

FIVE = tuple(f"c{n}" for n in range(5))


def one_sum(errors: torch.Tensor | None = None, factor: float = 1.0, clients: tuple[str, ...] = FIVE) -> PartUpdate:
    """Return the sum of these clients' samples; with `errors` that of their errors alone."""
    of = [sums_of(*samples(int(client[1:]), 10 + int(client[1:])), [FEATURES]) for client in clients]
    sums = {name: sum(its[name] for its in of) * (errors is None) for name in of[0]}
    reported = torch.zeros(1, len(GAMMAS), 1 + len(STRENGTHS), dtype=torch.float64) if errors is None else errors[None]
    return PartUpdate("the sum", 3.0, {**sums, CROSS: factor * sums[CROSS], ERRORS: reported}, members=clients)


def test_members_are_told_to_take_their_own_out_of_the_sum_and_others_not():
    vault = MemoryVault()
    made = aggregator(vault)
    assert made.close_round([one_sum()]) == {"gamma": GAMMAS[2], "strength": USUAL_STRENGTH}
    assert (made.slot("c0"), made.slot("new"), made.slot("")) == ("members", "total", None), "no sum is moved a little"
    fleet = [samples(n, 10 + n) for n in range(5)]
    Z, T = (torch.cat([of[place] for of in fleet]) for place in (0, 1))
    for key, counted in (("members", 1.0), ("total", 0.0)):
        tensors = vault.read(key)
        assert (float(tensors[COUNTED]), float(tensors[GAMMA]), float(tensors[STRENGTH])) == (counted, GAMMAS[2], 1.0)
        torch.testing.assert_close(tensors[GRAM], (Z.T @ Z)[tuple(torch.triu_indices(FEATURES, FEATURES))])
        torch.testing.assert_close(tensors[CROSS], Z.T @ T)
        np.testing.assert_allclose(tensors[WEIGHT].numpy(), pooled(fleet, GAMMAS[2]), rtol=0, atol=1e-10)


def test_the_common_model_has_no_sums_in_it():
    """It is exported, and served to devices that come later."""
    vault = MemoryVault()
    made = aggregator(vault)
    made.close_round([one_sum()])
    common = made.cold_start()
    assert isinstance(common, dict) and torch.equal(common[WEIGHT], vault.read("total")[WEIGHT])
    assert common.keys() == vault.read("total").keys() and common[SIZES].tolist() == [FEATURES]
    assert not any(tensor.any() for name, tensor in common.items() if name not in (WEIGHT, SIZES)), "the sums stay"


def test_the_sum_of_errors_chooses_the_strengths():
    """Expect the last gamma, with which the weights of all others err least, and the second strength beside it."""
    made, errors = aggregator(), torch.full((len(GAMMAS), 1 + len(STRENGTHS)), 9.0, dtype=torch.float64)
    made.close_round([one_sum()])
    before = made.cold_start()[WEIGHT]
    errors[4, 0], errors[4, 2], errors[0, 1] = 5.0, 4.0, 1.0
    assert made.close_round([one_sum(errors)]) == {"gamma": GAMMAS[4], "strength": STRENGTHS[1]}
    assert not torch.equal(made.cold_start()[WEIGHT], before)
    assert made.close_round([one_sum(torch.zeros_like(errors))]) == {}, "no device knows anything out of fold"


def test_the_first_sum_stays():
    """Newcomers and new data come into no other sum: later rounds bring errors alone."""
    vault = MemoryVault()
    made = aggregator(vault)
    made.close_round([one_sum()])
    before = vault.read("total")[GRAM]
    errors = torch.ones(1, len(GAMMAS), 1 + len(STRENGTHS), dtype=torch.float64)
    later = one_sum(clients=("c3", "c4", "c5", "c6", "c7"))
    made.close_round([PartUpdate(later.client, 3.0, {**later.tensors, ERRORS: errors}, members=later.members)])
    assert torch.equal(vault.read("total")[GRAM], before)
    assert (made.slot("c0"), made.slot("c7")) == ("members", "total")


@pytest.mark.parametrize("factor", [-10.0, 100.0])
def test_a_sum_that_no_samples_have_is_none(factor: float):
    """Expect no weights: the sum does not tell who lied, and there is no second sum."""
    made = aggregator()
    with pytest.raises(NotASum, match=r"the sum of 5 devices .* nobody knows which"):
        made.close_round([one_sum(factor=factor)])
    assert made.slot("c0") == "start"


# --- features of two kinds

TWO = [FEATURES, 4]


def of_two(seed: int, number: int) -> Samples:
    """Return Z of two blocks and T, which follows from the second block alone."""
    draws = np.random.default_rng(seed)
    one, (x, few) = samples(seed, number)[0], (draws.normal(size=(number, 3)), np.ones((number, 1)))
    T_NC = targets_of(torch.from_numpy(x.argmax(axis=1)), CLASSES)
    return torch.cat([one, torch.from_numpy(np.hstack([x, few]))], dim=1), T_NC


def test_each_block_has_a_regression_and_a_gamma_of_its_own():
    fleet = {f"c{n}": of_two(n, 20 + n) for n in range(4)}
    made = ClosedFormSums(ClosedFormSettings(), MemoryVault(), 0, {})
    made.start(nothing_solved(CLASSES, TWO))
    nothing = torch.zeros(2, len(STRENGTHS), dtype=torch.float64)
    made.close_round([PartUpdate(name, 1e9, {**sums_of(*of, TWO), ERRORS: nothing}) for name, of in fleet.items()])
    for name, tensors in served(made, *fleet).items():
        for place in (slice(0, FEATURES), slice(FEATURES, FEATURES + 4)):
            blocks = {other: (Z[:, place].numpy(), T.numpy()) for other, (Z, T) in fleet.items()}

            def without(who: str, gamma: float, blocks: Any = blocks) -> np.ndarray:
                Z, T = (np.concatenate([of[kind] for other, of in blocks.items() if other != who]) for kind in (0, 1))
                return np.linalg.solve(Z.T @ Z + gamma * np.eye(Z.shape[1]), Z.T @ T)

            def error(gamma: float, blocks: Any = blocks, without: Any = without) -> float:
                return sum(float(np.square(T - Z @ without(who, gamma)).sum()) for who, (Z, T) in blocks.items())

            best = min(GAMMAS, key=error)
            np.testing.assert_allclose(tensors[WEIGHT][:, place].numpy(), without(name, best).T, rtol=0, atol=1e-9)
        assert (tensors[SIZES].tolist(), float(tensors[BLOCK])) == (TWO, 0)


@pytest.mark.parametrize(("gains", "block"), [([5.0, 4.0, 6.0, 5.0], 1), ([30.0, -4.0, -4.0, 2.0], 0)])
def test_another_block_than_the_first_must_be_clearly_better(gains: list[float], block: int):
    """The sum of the errors is 20 and 24 less; but the gain of one device alone may be luck."""
    made = ClosedFormSums(ClosedFormSettings(), MemoryVault(), 0, {})
    made.start(nothing_solved(CLASSES, TWO))
    updates, full = [], torch.full((2, len(STRENGTHS)), 90.0, dtype=torch.float64)
    for number, gain in enumerate(gains):
        errors = full.clone()
        errors[0, 1], errors[1, 3] = 80.0, 80.0 - gain
        updates.append(PartUpdate(f"c{number}", 20.0, {**sums_of(*of_two(number, 20), TWO), ERRORS: errors}))
    figures = made.close_round(updates)
    assert (figures["block"], figures["strength"]) == (block, STRENGTHS[3 if block else 1])
    assert float(made.cold_start()[BLOCK]) == float(served(made, "c0")["c0"][BLOCK]) == block
