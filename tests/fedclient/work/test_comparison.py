"""A device compares its own model with the common one and with local training, blends them, and survives a restart."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attune.common.config import TrainSettings
from attune.common.exchange.messages import BlobRef, Order
from attune.common.metrics import RIVALS
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.model.artifact import Model, finished_model, save
from attune.fedclient.work.comparison import compared, comparisons_of
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.measures import mean_score
from attune.fedclient.work.predictors.base import FineTune
from attune.fedclient.work.state import FolderOrders


@pytest.fixture
def shard_of(tmp_path):
    """Return a function that writes shards of two classes that a linear model separates."""

    def made(size):
        rng = np.random.default_rng(1)
        folder = tmp_path / f"shard{size}"
        folder.mkdir(exist_ok=True)
        for part, samples in (("train", size), ("test", 30)):
            y = rng.integers(0, 2, samples)
            np.savez(folder / f"{part}.npz", x=rng.normal(0, 1, (samples, 4)) + 3 * y[:, None], y=y)
        return load_shard(folder)

    return made


@pytest.fixture
def shard(shard_of):
    return shard_of(60)


@pytest.fixture
def make(shard_of, tmp_path):
    def learner(method="fedper", home="home", keep="best", baseline=None, validation=0.2, model="mlr", size=60, **settings):
        spec = default_spec("tabular", (4,), 2, 0, model, {})
        train = TrainSettings(lr=0.1, batch_size=8, local_epochs=1, validation=validation, clip_norm=0.05, **settings)
        plan = Plan("f", 3, spec, [0, 1], method, {}, train)
        return Learner(
            plan, prepare(shard_of(size), plan), "kiel", FolderOrders(tmp_path / home), torch.device("cpu"), keep,
            baseline == "local",
        )  # fmt: skip

    return learner


def test_a_rival_that_diverged_is_compared_by_the_score_that_it_reports():
    """Squared errors of 10 and 20 have the mean score -14. They shrink to 2 * 10 / 15 and 2 * 20 / 15, with the mean score -1.

    The gains are 5/6 and 71/30. Their mean is 1.6 and their deviation 46/30 / sqrt(2), so the error of the mean is 23/30.
    """
    own, rival = torch.tensor([0.5, 0.7]), torch.tensor([-9.0, -19.0])
    found = compared(own, rival, RIVALS["local"])
    assert found["gain_local"] == pytest.approx(mean_score(own) - mean_score(rival)) == pytest.approx(1.6)
    assert found["error_local"] == pytest.approx(23 / 30)
    assert (found["better_than_local"], found["worse_than_local"], found["p_local"]) == (2, 0, 0.5)
    assert compared(rival, own, RIVALS["local"])["gain_local"] == pytest.approx(-1.6)


@given(st.lists(st.tuples(st.floats(-1e30, 1), st.floats(-1e30, 1)), min_size=1, max_size=9), st.integers(1, 3))
def test_any_gain_is_the_difference_of_the_reported_scores(scores, groups):
    own, rival = (torch.tensor(column, dtype=torch.float64) for column in zip(*scores, strict=True))
    numbered = np.unique(np.arange(len(own)) % groups, return_inverse=True)[1]
    found = compared(own, rival, RIVALS["common"], numbered)
    assert found["gain_common"] == pytest.approx(mean_score(own) - mean_score(rival), abs=1e-6)
    assert abs(found["gain_common"]) <= 2 + 1e-6
    assert 0 <= found["error_common"] <= 2 * len(own)


def rule(learner, sign):
    """Return the model that separates the classes or, with the other sign, always confuses them."""
    weight = torch.tensor([[-1.0] * 4, [1.0] * 4]) * sign
    tensors = {name: torch.zeros_like(tensor) for name, tensor in learner.state.theta.items()}
    return {name: weight if tensor.shape == weight.shape else tensor for name, tensor in tensors.items()}


def evaluate(learner, own, common, number=1, prior=None):
    refs = BlobRef("shared", f"own{number}", 1), BlobRef("shared", f"common{number}", 1)
    order = Order(f"evaluate-{number}-kiel", number, "evaluate", (refs[0],), (), (refs[1],), prior=prior or {})
    assert [ref.digest for ref, _ in learner.missing(order)][-1] == f"own{number}"
    fetched = {refs[0].digest: rule(learner, own), refs[1].digest: rule(learner, common)}
    return Work(learner, order, fetched).run()


def train(learner, number):
    return Work(learner, Order(f"train-{number}-kiel", number, "train")).run()


def test_a_device_can_leave_out_the_scores_of_training_orders_and_what_they_cost(make, monkeypatch):
    usual, quick = make("fedavg+ft", "a"), make("fedavg+ft", "b", evaluate=False)
    tuned, work = [], FineTune.work
    monkeypatch.setattr(FineTune, "work", lambda self, task: (tuned.append(self), work(self, task))[1])
    result = train(usual, 1)
    assert None not in (result.accuracy_before, result.accuracy_after) and len(tuned) == 2
    found = train(quick, 1)
    assert (found.accuracy_before, found.accuracy_after, found.loss) == (None, None, result.loss) and len(tuned) == 2
    assert all(quick.state.theta[name].equal(tensor) for name, tensor in usual.state.theta.items()), "trained alike, to the bit"
    assert evaluate(quick, own=1, common=-1, number=2).accuracy_before == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("prior", "weights"),
    [
        ({}, {"personalized": 1 / 3, "common": 1 / 3, "local": 1 / 3}),
        ({"personalized": 0.2, "common": 0.3, "local": 0.5}, {"personalized": 0.8 / 3, "common": 1.2 / 3, "local": 1 / 3}),
    ],
)
def test_with_too_few_samples_to_choose_by_the_federations_models_count_two_thirds(make, prior, weights):
    """Use 12 samples, of which none is held out. Others' weights decide, and the model trained alone is made less sure."""
    learner = make("fedavg+ft", baseline="local", size=12)
    train(learner, 1)
    result = evaluate(learner, own=1, common=1, number=2, prior=prior)
    assert result.weights == pytest.approx(weights)
    assert result.validation_samples == 0 and result.sharpness["local"] != 1
    assert result.sharpness["personalized"] == result.sharpness["common"] == 1
    assert result.accuracy_local is not None and result.likelihood_common is None
    told = make("fedavg+ft", "b", "personalized", "local", size=12)
    useless = make("fedavg+ft", "c", size=12)
    for each, common in ((told, 1), (make("fedavg+ft", "d", validation=0, size=12), 1), (useless, -1)):
        found = evaluate(each, own=1, common=common)
        assert (found.kept, found.weights) == (found.own_choice, {}), (
            "it was said so; no blend is asked for; the other is of no use"
        )


@pytest.mark.parametrize("size", [60, 12])
def test_a_model_whose_scores_are_no_numbers_is_in_no_blend(make, size):
    """Leave it out: with any weight it would make every answer of the blend NaN."""
    result = evaluate(make("fedavg+ft", size=size), own=1, common=math.nan)
    assert result.weights == {} and result.kept == "personalized" and result.accuracy_kept == result.accuracy_before > 0.9


def test_the_better_model_counts_more_also_after_a_restart(make):
    learner = make("fedavg+ft")
    result = evaluate(learner, own=-1, common=1)
    assert (result.accuracy_before, result.accuracy_common, result.accuracy_local) == pytest.approx((0.0, 1.0, None), abs=0.05)
    assert (result.kept, result.validation_samples, result.samples) == ("common", 12, 48)
    assert (result.better_than_common, result.worse_than_common, result.better_than_local) == (0, 30, None)
    # Twelve samples and one said beforehand for it, one said beforehand for the other one, which has been made unsure of itself
    # and so explains a little more than nothing.
    assert 12 / 14 < result.weights["common"] < 13 / 14 and sum(result.weights.values()) == pytest.approx(1)
    assert result.sharpness["personalized"] < 0.5 and result.sharpness["common"] >= 1
    assert result.accuracy == result.accuracy_kept == result.accuracy_common
    good = rule(learner, 1)
    for each in (learner, make("fedavg+ft")):
        finished = each.finished()
        assert finished.keys() == {"personalized", "common"}
        assert all(finished["common"][name].equal(good[name]) for name in good)
    assert all(learner.state.theta[name].equal(rule(learner, -1)[name]) for name in good), "its own model goes on as it was"


def test_the_own_model_stays_alone_where_that_is_wanted_or_nothing_was_held_out(make):
    wanted = evaluate(make("fedavg+ft", "a", keep="personalized"), own=-1, common=1)
    assert (wanted.kept, wanted.weights, wanted.accuracy) == ("personalized", {}, wanted.accuracy_before)
    learner = make("fedavg+ft", "b", validation=0.0)
    result = evaluate(learner, own=-1, common=1)
    assert (result.kept, result.validation_samples, len(learner.data.train_x)) == ("personalized", 0, 60)
    assert learner.finished().keys() == {"personalized"}


def test_the_saved_blend_predicts_as_the_device_does(make, shard, tmp_path):
    learner = make("fedavg+ft", baseline="local")
    for number in (1, 2):
        train(learner, number)
    result = evaluate(learner, own=-1, common=1, number=3)
    assert result.weights.keys() == {"personalized", "common", "local"}
    model = Model.load(save(tmp_path / "model", *finished_model(learner)))
    assert model.evaluate(shard) == (result.accuracy, 30)
    assert (model.info.title, model.info.kept, model.info.accuracy) == ("fedavg+ft, blend", result.kept, result.accuracy)
    probabilities = [
        (result.weights[name], each.trainer.logits(each.tensors, learner.data.test_x)) for name, each in model.members.items()
    ]
    mixed = sum(weight * torch.cat([logits for _, logits in found]).softmax(-1) for weight, found in probabilities)
    assert model.answers_of(learner.data.test_x).tolist() == mixed.argmax(-1).tolist()


def test_nothing_is_personalized_where_nothing_tells_devices_apart(make):
    """Use FedAvg, whose model is the common one and not its own rival, and training alone, whose model is the local one."""
    common = evaluate(make("fedavg", "a", baseline="local"), own=1, common=1)
    assert (common.own_choice, common.kept, {each.rival for each in comparisons_of(common)}) == ("common", "common", {"local"})
    assert {name for name, value in common.accuracies.items() if value is not None} == {"common", "local"}
    alone = make("local", "b", baseline="local")
    train(alone, 1)
    result = Work(alone, Order("evaluate-1-kiel", 1, "evaluate")).run()
    assert (result.own_choice, result.kept, comparisons_of(result), result.weights) == ("local", "local", [], {})
    assert result.accuracy == result.accuracy_local == result.accuracy_before


@pytest.mark.parametrize(
    ("method", "has"),
    [("fedavg+ft", True), ("fedrod", True), ("ditto", True), ("fedamp", True)]
    + [(method, False) for method in ("fedper", "fedrep", "pfedgp", "fedavg", "local")],
)
def test_a_model_with_a_part_that_no_round_trains_is_no_rival(make, method, has):
    """Use a head that never leaves a device, so that a newcomer's head is untrained."""
    learner = make(method, method, model="dnn")
    ref = BlobRef("attended" if method == "fedamp" else "shared", "stranger", 1)
    order = Order("evaluate-1-kiel", 1, "evaluate", cold_start=() if method == "local" else (ref,))
    assert [found.digest for found, _ in learner.missing(order)] == (["stranger"] if has else [])
    fetched = {"stranger": {name: learner.state.theta[name] for name in learner.part_of}}
    result = Work(learner, order, fetched).run()
    rivals = {each.rival for each in comparisons_of(result)}
    assert ("common" in rivals, result.accuracy_common is not None) == (has, has or method == "fedavg")


def test_a_blob_that_is_served_and_common_is_fetched_once(make):
    learner = make("ditto")
    ref = BlobRef("shared", "same", 1)
    order = Order("evaluate-1-kiel", 1, "evaluate", (ref,), (), (ref,))
    assert [missing for missing, _ in learner.missing(order)] == [ref]
    result = Work(learner, order, {"same": rule(learner, 1)}).run()
    assert result.accuracy_common == 1.0
    again = Order("evaluate-2-kiel", 2, "evaluate", (), (), (ref,))
    assert learner.missing(again) == []
    assert Work(learner, again).run().accuracy_common == result.accuracy_common


def test_a_constant_answer_is_the_most_frequent_label_of_the_training_part(make, shard):
    expected = float((shard.test_y == np.bincount(shard.train_y).argmax()).mean())
    assert 0 < expected < 1
    learner = make("fedavg+ft")
    for result in (evaluate(learner, 1, 1, 1), train(learner, 2)):
        assert result.accuracy_constant == pytest.approx(expected, abs=1e-12)


def test_the_local_baseline_is_bit_by_bit_the_method_local_also_over_a_restart(make):
    """Use many tensors: the norm that clips a step is a sum over them, so their order counts."""
    for model in ("mlr", "transformer"):
        alone = make("local", f"alone-{model}", model=model)
        compared = make("fedavg", f"compared-{model}", baseline="local", model=model)
        for number in (1, 2, 3):
            train(alone, number)
            train(compared, number)
            compared = make("fedavg", f"compared-{model}", baseline="local", model=model)
        assert all(compared.baselines.local[name].equal(alone.state.theta[name]) for name in alone.state.theta), model
    alone, compared = make("local", "alone-mlr"), make("fedavg", "compared-mlr", baseline="local")
    result = evaluate(compared, own=-1, common=-1, number=3)
    assert result.kept == "local"
    assert result.accuracy_local == alone.newest.accuracy_after
    local = make("fedavg", "compared-mlr").finished()["local"]
    assert all(local[name].equal(alone.state.theta[name]) for name in alone.state.theta)
