"""Evaluation by the protocols of both papers, with every number by hand."""

import math

import pytest

from attune.common.config import RoundSettings
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import Report
from attune.fedserver.view.summary import CurvePoint, averages, clients, curves, fedmcsa, fedtp, summarise


def train(round_, client, before, after, size=10):
    return Report(round=round_, work="train", client=client, accuracy_before=before, accuracy_after=after, test_samples=size)


def evaluate(round_, client, value, size=10, common=None, local=None, kept=None):
    found = {"accuracy_before": value, "accuracy_common": common, "accuracy_local": local, "kept": kept}
    return Report(round=round_, work="evaluate", client=client, test_samples=size, accuracy_constant=0.25, **found)


def policy(**settings):
    return RoundSettings(**{"rounds": 2, **settings})


def point(round_, mean, pooled=0.0, *, whole=True, count=2):
    return CurvePoint(count, mean, pooled, round_, whole)


# Two clients with 10 and 30 test samples, both trained in both rounds, and evaluated at the end.
ROWS = [
    train(1, "a", 0.1, 0.5),
    train(1, "b", 0.3, 0.9, 30),
    train(2, "a", 0.4, 0.7),
    train(2, "b", 0.8, 0.9, 30),
    evaluate(2, "a", 0.6, common=0.2, local=0.5, kept="personalized"),
    evaluate(2, "b", 1.0, 30, common=0.4, kept="common"),
]


def test_a_served_method_is_judged_before_training_and_by_evaluations():
    found = curves(ROWS, "served", policy())
    assert found["before"] == [
        point(0, pytest.approx(0.2), pytest.approx((1 + 9) / 40)),
        point(1, pytest.approx(0.6), pytest.approx((4 + 24) / 40)),
        point(2, pytest.approx(0.8), pytest.approx((6 + 30) / 40)),
    ]
    assert found["after"] == [
        point(1, pytest.approx(0.7), pytest.approx((5 + 27) / 40)),
        point(2, pytest.approx(0.8), pytest.approx((7 + 27) / 40)),
    ]
    assert found["common"] == [point(2, pytest.approx(0.3), pytest.approx((2 + 12) / 40))]
    assert found["local"] == [point(2, 0.5, 0.5, count=1)]


def test_a_trained_method_is_judged_after_training_or_by_an_evaluation_of_it():
    found = curves(ROWS, "trained", policy())
    assert [(p.round, p.mean_over_clients) for p in found["after"]] == [(1, pytest.approx(0.7)), (2, pytest.approx(0.8))]
    assert found["after"][1].over_samples == pytest.approx((6 + 30) / 40), "0.6 and 1.0 of the evaluation, not 0.7 and 0.9"
    assert [p.round for p in found["before"]] == [0, 1], "an evaluation is of the trained model"


def test_where_cohorts_are_drawn_only_an_evaluation_asks_everyone():
    rows = [train(1, "a", 0.1, 0.5), train(2, "b", 0.3, 0.9), evaluate(2, "a", 0.6), evaluate(2, "b", 0.8)]
    found = curves(rows, "served", policy(clients=1))["before"]
    assert [(p.round, p.clients, p.whole) for p in found] == [(0, 1, False), (1, 1, False), (2, 2, True)]


def test_where_all_train_and_their_models_are_judged_a_round_asks_everyone():
    rows = [train(1, "a", 0.1, 0.5), train(1, "b", 0.3, 0.9)]
    assert curves(rows, "trained", policy(clients=1, train="all"))["after"][0].whole
    assert not curves(rows, "served", policy(clients=1, train="all"))["before"][0].whole, "some go on from their own state"


def test_a_state_is_not_whole_without_one_who_was_there_before_and_after():
    rows = [*(train(r, "a", 0.5, 0.5) for r in (1, 2, 3)), train(1, "b", 0.5, 0.5), train(3, "b", 0.5, 0.5)]
    found = curves(rows, "served", policy(rounds=3))["before"]
    assert [p.whole for p in found] == [True, False, True]


def test_one_who_comes_later_or_leaves_for_good_is_not_missed():
    rows = [*(train(r, "a", 0.5, 0.5) for r in (1, 2, 3)), train(1, "left", 0.5, 0.5), train(3, "came", 0.5, 0.5)]
    assert [p.whole for p in curves(rows, "served", policy(rounds=3))["before"]] == [True, True, True]


def test_who_has_no_test_part_is_in_no_figure():
    rows = [train(1, "a", 0.5, 0.5), train(1, "b", None, None), train(1, "c", 0.9, 0.9, 0)]
    found = curves(rows, "served", policy())
    assert [p.clients for p in found["before"]] == [1]
    assert averages(clients(rows, "served"))["accuracy"].mean_over_clients == 0.5


def test_rounds_after_the_last_are_in_no_curve():
    rows = [*ROWS, train(3, "new", 0.0, 0.1), evaluate(3, "new", 0.2)]
    assert curves(rows, "served", policy()) == curves(ROWS, "served", policy())


def test_fedtp_is_the_mean_and_deviation_of_every_kth_of_the_last_n_rounds():
    points = [point(r, 0.0, pooled) for r, pooled in ((8, 0.1), (10, 0.2), (11, 0.9), (12, 0.5), (14, 0.8))]
    found = fedtp(points, RoundSettings(rounds=14, evaluate_every=2, evaluate_last=5))
    assert found is not None
    assert (found.every, found.last, found.evaluations) == (2, 5, 3), "10, 12 and 14: 8 is too early, 11 not due"
    assert found.mean == pytest.approx(0.5)
    assert found.deviation == pytest.approx(math.sqrt((0.09 + 0 + 0.09) / 3))


@pytest.mark.parametrize(("rounds", "last", "due"), [(1500, 200, 40), (40, 6, 2), (1, 1, 1), (7, 1, 1)])
def test_fedtp_without_settings_takes_the_papers_share_of_the_rounds(rounds, last, due):
    found = fedtp([point(r, 0.5, 0.5) for r in range(rounds + 1)], RoundSettings(rounds=rounds))
    assert found is not None
    assert (found.every, found.last, found.evaluations, found.mean, found.deviation) == (5, last, due, 0.5, 0.0)


def test_fedtp_leaves_out_states_that_not_everyone_evaluated():
    points = [point(5, 0.0, 0.5), point(10, 0.0, 0.9, whole=False)]
    assert fedtp(points, RoundSettings(rounds=10, evaluate_last=10)).evaluations == 1
    assert fedtp(points[1:], RoundSettings(rounds=10)) is None


def test_bmta_is_the_best_mean_and_beside_it_the_last_twenty():
    points = [point(r, r / 100) for r in range(1, 31)] + [point(31, 0.95, whole=False), point(32, 0.2)]
    points[4] = point(5, 0.9)
    points[9] = point(10, 0.9)
    found = fedmcsa(points)
    assert found is not None
    assert (found.bmta, found.bmta_round, found.evaluations) == (0.9, 5, 20)
    assert found.mean_of_last == pytest.approx((sum(range(12, 31)) / 100 + 0.2) / 20)


def test_the_pooled_bmta_is_that_of_its_own_best_round():
    """Use three states and two clients: the best mean over clients is in state 1, the best over samples in state 3 (E7)."""
    found = fedmcsa([point(1, 0.8, 0.5), point(2, 0.6, 0.6), point(3, 0.7, 0.9), point(4, 0.1, 0.95, whole=False)])
    assert found is not None
    assert (found.bmta, found.bmta_round, found.mean_of_last) == (0.8, 1, pytest.approx(0.7))
    assert (found.bmta_over_samples, found.bmta_over_samples_round) == (0.9, 3)
    assert found.mean_of_last_over_samples == pytest.approx(2 / 3)


def test_fedtps_figure_is_given_over_clients_too():
    points = [point(r, 0.5 + r / 100, r / 100) for r in (1, 2, 5, 10)]
    found = fedtp(points, policy(rounds=10, evaluate_every=5, evaluate_last=6))
    assert found is not None
    assert (found.mean, found.mean_over_clients, found.evaluations) == (pytest.approx(0.075), pytest.approx(0.575), 2)


def test_bmta_of_few_evaluations_says_how_many():
    assert fedmcsa([point(0, 0.25), point(1, 0.75)]) == fedmcsa([point(0, 0.25), point(1, 0.75), point(2, 0.9, whole=False)])
    assert fedmcsa([point(0, 0.25), point(1, 0.75)]).evaluations == 2
    assert fedmcsa([]) is None


def test_each_clients_figures():
    a, b = clients(ROWS, "served")
    assert (a.name, a.accuracy, a.before, a.after, a.common, a.local, a.kept) == ("a", 0.6, 0.4, 0.7, 0.2, 0.5, "personalized")
    assert (b.test_samples, b.accuracy, b.before, b.after, b.local, b.kept) == (30, 1.0, 0.8, 0.9, None, "common")


def test_a_whole_summary():
    found = summarise(ROWS, resolve({"method": {"name": "fedavg"}, "round": {"rounds": 2}, "seed": 3}), "mlr", 2)
    assert (found.method, found.model, found.seed, found.closed, found.judged) == ("fedavg", "mlr", 3, 2, "before")
    assert found.fedtp is not None
    assert (found.fedtp.mean, found.fedtp.evaluations) == (pytest.approx(36 / 40), 1)
    assert found.fedmcsa is not None
    assert (found.fedmcsa.bmta, found.fedmcsa.bmta_round) == (pytest.approx(0.8), 2)
    assert found.kept == {"common": 1, "personalized": 1}
    assert found.latest["before"].mean_over_clients == pytest.approx(0.6)
    assert found.latest["common"].over_samples == pytest.approx((2 + 12) / 40)
    assert found.latest["local"].clients == 1
    assert found.latest["constant"].mean_over_clients == found.latest["constant"].over_samples == 0.25
    assert found.no_better_than_constant == []
    assert found.settings["round.rounds"] == 2


def test_a_federation_without_a_round_has_empty_figures():
    found = summarise([], resolve({}), None, 0)
    assert (found.fedtp, found.fedmcsa, found.latest, found.clients) == (None, None, {}, [])
