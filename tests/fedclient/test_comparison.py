"""A device compares its own model with the common one and with local training, keeps the best, and survives a restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.messages import BlobRef, Order
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import Orders


@pytest.fixture
def shard(tmp_path):
    """Two classes that a linear model separates."""
    rng = np.random.default_rng(1)
    folder = tmp_path / "shard"
    folder.mkdir()
    for part, size in (("train", 60), ("test", 30)):
        y = rng.integers(0, 2, size)
        np.savez(folder / f"{part}.npz", x=rng.normal(0, 1, (size, 4)) + 3 * y[:, None], y=y)
    return load_shard(folder)


@pytest.fixture
def make(shard, tmp_path):
    def learner(method="fedper", home="home", keep="best", baseline=None, validation=0.2, model="mlr"):
        spec = default_spec("tabular", (4,), 2, 0, model, {})
        train = TrainSettings(lr=0.1, batch_size=8, local_epochs=1, validation=validation, clip_norm=0.05)
        plan = Plan("f", 3, spec, [0, 1], method, {}, train)
        return Learner(plan, prepare(shard, plan), "kiel", Orders(tmp_path / home), torch.device("cpu"), keep, baseline)

    return learner


def rule(learner, sign):
    """The model that tells the classes apart, or always takes the one for the other."""
    weight = torch.tensor([[-1.0] * 4, [1.0] * 4]) * sign
    tensors = {name: torch.zeros_like(tensor) for name, tensor in learner.theta.items()}
    return {name: weight if tensor.shape == weight.shape else tensor for name, tensor in tensors.items()}


def evaluate(learner, own, common, number=1):
    refs = BlobRef("shared", f"own{number}", 1), BlobRef("shared", f"common{number}", 1)
    order = Order(f"evaluate-{number}-kiel", number, False, (refs[0],), (), (refs[1],))
    assert [ref.digest for ref, _ in learner.missing(order)] == [f"common{number}", f"own{number}"]
    fetched = {refs[0].digest: rule(learner, own), refs[1].digest: rule(learner, common)}
    return learner.carry_out(order, fetched, 0, lambda done: None, lambda: False)


def train(learner, number):
    return learner.carry_out(Order(f"train-{number}-kiel", number, True), {}, 0, lambda done: None, lambda: False)


def test_the_best_model_is_kept_also_after_a_restart(make):
    learner = make("fedavg")
    result = evaluate(learner, own=-1, common=1)
    assert (result.accuracy_before, result.accuracy_common, result.accuracy_local) == pytest.approx((0.0, 1.0, None), abs=0.05)
    assert (result.kept, result.validation_samples, result.samples) == ("common", 12, 48)
    assert result.accuracy == result.accuracy_common
    good = rule(learner, 1)
    for each in (learner, make("fedavg")):
        assert all(each.finished()[name].equal(good[name]) for name in good)
    assert all(learner.theta[name].equal(rule(learner, -1)[name]) for name in good), "its own model goes on as it was"


def test_the_personalized_model_stays_where_it_is_as_good_or_wanted_or_nothing_was_held_out(make):
    assert evaluate(make("fedavg", "a"), own=1, common=1).kept == "personalized"
    assert evaluate(make("fedavg", "b"), own=1, common=-1).kept == "personalized"
    wanted = evaluate(make("fedavg", "c", keep="personalized"), own=-1, common=1)
    assert (wanted.kept, wanted.validation_samples, wanted.accuracy) == ("personalized", 0, wanted.accuracy_before)
    learner = make("fedavg", "d", validation=0.0)
    assert (evaluate(learner, own=-1, common=1).kept, len(learner.data.train_x)) == ("personalized", 60)


def test_a_blob_that_is_served_and_common_is_fetched_once(make):
    learner = make("fedavg")
    ref = BlobRef("shared", "same", 1)
    order = Order("evaluate-1-kiel", 1, False, (ref,), (), (ref,))
    assert [missing for missing, _ in learner.missing(order)] == [ref]
    result = learner.carry_out(order, {"same": rule(learner, 1)}, 0, lambda done: None, lambda: False)
    assert result.accuracy_common == result.accuracy_before
    again = Order("evaluate-2-kiel", 2, False, (), (), (ref,))
    assert learner.missing(again) == []
    assert learner.carry_out(again, {}, 0, lambda done: None, lambda: False).accuracy_common == result.accuracy_common


def test_the_local_baseline_is_bit_by_bit_the_method_local_also_over_a_restart(make):
    """Of many tensors: the norm that clips a step is a sum over them, so their order counts."""
    for model in ("mlr", "transformer"):
        alone = make("local", f"alone-{model}", model=model)
        compared = make("fedavg", f"compared-{model}", baseline="local", model=model)
        for number in (1, 2, 3):
            train(alone, number)
            train(compared, number)
            compared = make("fedavg", f"compared-{model}", baseline="local", model=model)
        assert all(compared.baselines.local[name].equal(alone.theta[name]) for name in alone.theta), model
    alone, compared = make("local", "alone-mlr"), make("fedavg", "compared-mlr", baseline="local")
    result = evaluate(compared, own=-1, common=-1, number=3)
    assert result.kept == "local"
    assert result.accuracy == result.accuracy_local == alone.newest.accuracy_after
    assert all(make("fedavg", "compared-mlr").finished()[name].equal(alone.theta[name]) for name in alone.theta)


def test_parts_that_never_leave_a_device_are_to_a_stranger_as_they_began(make):
    learner = make("local")
    train(learner, 1)
    candidates = learner.baselines.candidates({"weight": torch.ones(2)})
    initial = tensors_of(build(learner.plan.model, learner.plan.seed))
    common = candidates["common"][1]
    assert common["weight"].equal(torch.ones(2))
    assert all(common[name].equal(initial[name]) for name in initial)
    assert "local" not in candidates
