"""Orders and batches that are computed together come to what they come to one by one."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from attune.common.config import TrainSettings
from attune.common.exchange.messages import BlobRef, Order
from attune.common.methods.settings.objectives import (
    FineTuneSettings,
    KnnSettings,
    SgdSettings,
    TwoHeadsPredictorSettings,
    TwoHeadsSettings,
)
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.contrib.gp.method import GpPredictorSettings
from attune.contrib.gp.objective import GpPredictor
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.work.blend import Weighing, weights_of
from attune.fedclient.work.comparison import comparisons_of
from attune.fedclient.work.executor import Work, alone
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.measures import MEASURES
from attune.fedclient.work.objectives.descent import Sgd, batches
from attune.fedclient.work.objectives.two_heads import TwoHeads
from attune.fedclient.work.predictors.base import FineTune, TwoHeadsPredictor
from attune.fedclient.work.predictors.knn import Knn
from attune.fedclient.work.stacked import descend, scoring
from attune.fedclient.work.stacked.descend import batch_plan
from attune.fedclient.work.stacked.lockstep import Stacked
from attune.fedclient.work.state import FolderOrders
from tests.fedclient.work.stacked.conftest import SIZES

TESTED = (3, 700, 41, 1, 90)  # test samples: none, one and two batches of an evaluation; padding in all but one
PREDICTORS = {
    "fine-tune": FineTune(FineTuneSettings(tune_epochs=2)),
    "two-heads": TwoHeadsPredictor(TwoHeadsPredictorSettings()),
}
BY_ITSELF = {"knn": Knn(KnnSettings()), "gp": GpPredictor(GpPredictorSettings())}


def evaluation(device, samples):
    """Return a device's probabilities for `samples` labels, with its prepared model."""
    generator = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, 4, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    prepared = yield from device.trainer.preparing(device.start, device.received, device.x, device.y, device.seeds)
    return (yield from device.trainer.calibrated(prepared, x, y)).probability


@pytest.mark.parametrize("name", [*PREDICTORS, *BY_ITSELF])
def test_the_same_probabilities_as_by_itself(name, make):
    objective = TwoHeads(TwoHeadsSettings()) if name == "two-heads" else Sgd(SgdSettings())
    devices = make(objective, predictor=(PREDICTORS | BY_ITSELF)[name], momentum=0.5)
    stacked = Stacked()
    found = stacked.run([evaluation(each, size) for each, size in zip(devices, TESTED, strict=True)])
    for each, size, together in zip(devices, TESTED, found, strict=True):
        by_itself = alone(evaluation(each, size))
        assert together.shape == (size,) and (size == 1 or by_itself.std() > 0)
        torch.testing.assert_close(together, by_itself, rtol=1e-4, atol=1e-5)
    assert [said in stacked.reasons[0] for said in ("own training samples",) if stacked.reasons] == [True] * (name in BY_ITSELF)


@pytest.mark.parametrize("task", sorted(task for task, measure in MEASURES.items() if not measure.one_score))
def test_the_same_accuracy_as_by_itself(task, make):
    devices, samples = make(Sgd(SgdSettings())), []
    for device, size in zip(devices, TESTED, strict=True):
        draw = torch.Generator().manual_seed(size)
        x, y = torch.randn(size, 4, generator=draw), torch.randint(0, 2, (size, 3), generator=draw).float()
        device.trainer.measure = MEASURES[task]
        samples.append((x, y[:, 0].long() if task == "classes" else y))
    rated = [partial(device.trainer.accuracy, device.start, x, y) for device, (x, y) in zip(devices, samples, strict=True)]
    stacked = Stacked()
    together, by_itself = stacked.run([job() for job in rated]), [alone(job()) for job in rated]
    assert len(set(by_itself)) > 2 and not stacked.reasons
    assert together == by_itself if task != "regression" else together == pytest.approx(by_itself, rel=1e-6)


def test_models_are_stacked_no_further_than_memory_allows(make, monkeypatch):
    devices, sizes = make(Sgd(SgdSettings())), []
    one = sum(tensor.nbytes for tensor in devices[0].start.values())
    monkeypatch.setattr(descend, "STACK_BYTES", 2 * one)
    score = scoring._score
    monkeypatch.setattr(scoring, "_score", lambda jobs, padded: sizes.append(len(jobs)) or score(jobs, padded))
    found = Stacked().run([evaluation(each, size) for each, size in zip(devices, TESTED, strict=True)])
    assert sizes == [2, 2, 1] and [len(each) for each in found] == list(TESTED)


def test_padded_samples_are_kept_for_the_same_tensors_alone(monkeypatch):
    padded, sizes = scoring.PaddedSamples(), [3, 2]
    samples = [torch.arange(3.0), torch.arange(2.0) + 7]
    first = padded.rows(samples, sizes, 0, 3)
    assert first.tolist() == [[0, 1, 2], [7, 8, 7]], "the first sample fills up"
    assert padded.rows(samples, sizes, 0, 3) is first
    assert padded.rows(samples, sizes, 2, 1).tolist() == [[2], [7]] and padded.rows(samples[:1], sizes, 0, 3) is not first
    monkeypatch.setattr(scoring, "id", lambda tensor: 1, raising=False)  # as when a tensor has the address of one that is gone
    others = [torch.arange(3.0) + 1, torch.arange(2.0)]
    assert padded.rows(others, sizes, 0, 3).tolist() == [[1, 2, 3], [0, 1, 0]]
    assert padded.rows(samples, sizes, 0, 3).tolist() == first.tolist()


def test_padded_samples_take_no_more_than_their_bytes(monkeypatch):
    monkeypatch.setattr(scoring, "KEPT_BYTES", 2 * 12)
    padded, devices = scoring.PaddedSamples(), [torch.arange(3.0) + number for number in range(4)]
    made = [padded.rows([device], [3], 0, 3) for device in devices]
    assert [padded.rows([device], [3], 0, 3) is kept for device, kept in zip(devices[2:], made[2:], strict=True)] == [True] * 2
    assert padded.rows(devices[:1], [3], 0, 3) is not made[0]


def test_a_model_that_normalises_with_what_it_has_kept_is_evaluated_together(make):
    """Use batch normalisation, whose training cannot be stacked, but whose prediction can."""
    devices = make(Sgd(SgdSettings()), model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    stacked = Stacked()
    found = stacked.run([evaluation(each, size) for each, size in zip(devices, TESTED, strict=True)])
    assert stacked.reasons == []
    for each, size, together in zip(devices, TESTED, found, strict=True):
        torch.testing.assert_close(together, alone(evaluation(each, size)), rtol=1e-4, atol=1e-5)


@pytest.fixture
def learners(tmp_path):
    """Make a fleet with shards of different sizes twice: stacked, and one by one."""
    shards = []
    for number, size in enumerate(SIZES):
        rng, folder = np.random.default_rng(number), tmp_path / f"shard{number}"
        folder.mkdir()
        for part, count in (("train", 3 * size), ("test", size)):
            y = rng.integers(0, 3, count)
            np.savez(folder / f"{part}.npz", x=rng.normal(0, 1, (count, 4)) + y[:, None], y=y)
        shards.append(load_shard(folder))

    def made(home, method, model):
        train = TrainSettings(lr=0.03, batch_size=8, local_epochs=2, validation=0.2)
        plan = Plan("f", 3, default_spec("tabular", (4,), 3, 0, model, {}), [0, 1, 2], method, {}, train)
        device, path = torch.device("cpu"), tmp_path / home
        return [
            Learner(plan, prepare(shard, plan), shard.name, FolderOrders(path / shard.name), device, trains_local=True)
            for shard in shards
        ]

    return made


def orders(learner, number, train):
    """Return an order that serves all parts, a little smaller than the device's, with the start of all as the common model."""
    served, fetched = [], {}
    for part in sorted(set(learner.part_of.values()) - {"private"}):
        ref = BlobRef(part, f"{part}-{number}", 1)
        served.append(ref)
        fetched[ref.digest] = {name: 0.9 * learner.state.theta[name] for name, kind in learner.part_of.items() if kind == part}
    common = () if train else tuple(served)
    parts = tuple(ref.part for ref in served) if train else ()
    order = Order(f"order-{number}-{learner.name}", number, "train" if train else "evaluate", tuple(served), parts, common)
    return Work(learner, order, fetched)


METHODS = dict.fromkeys(("fedavg", "fedprox", "pfedme", "per-fedavg", "ditto", "local"), "mlr") | {"fedper": "dnn"}


@pytest.mark.parametrize("method", METHODS)
def test_orders_carried_out_together_come_to_what_they_come_to_one_by_one(method, learners):
    """Use smooth models and small steps, which do not amplify rounding: pFedMe with lr 0.1 swings about its centre."""
    model, stacked = METHODS[method], Stacked()
    together, one_by_one = learners("together", method, model), learners("apart", method, model)
    for number, train in ((1, True), (2, True), (3, False)):
        results = stacked.run([each.jobs(orders(each, number, train)) for each in together])
        expected = [orders(each, number, train).run() for each in one_by_one]
        for each, other, result, by_itself in zip(together, one_by_one, results, expected, strict=True):
            assert result is each.newest and result.order_id == by_itself.order_id
            assert result.accuracies == pytest.approx(by_itself.accuracies) and comparisons_of(result) == comparisons_of(
                by_itself
            )
            assert not train or result.loss == pytest.approx(by_itself.loss, rel=1e-4)
            assert result.weights == pytest.approx(by_itself.weights, rel=1e-4)
            torch.testing.assert_close(each.state.theta, other.state.theta, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(each.baselines.local or {}, other.baselines.local or {}, rtol=1e-4, atol=1e-5)
            assert [part.part for part in result.parts] == [part.part for part in by_itself.parts]
    assert stacked.reasons == []


def weighing(probability, prior):
    return (yield Weighing(probability, prior))


def test_the_weights_of_blends_are_those_of_each_by_itself():
    """Use 1 to 40 validation samples, three models, one of which gives some samples probability 0, and sequences."""
    draw, names = torch.Generator().manual_seed(3), ("personalized", "common", "local")
    for positions in ((), (5,)):
        each = [{n: (torch.rand(size, *positions, generator=draw) - 0.2).clamp_min(0) for n in names} for size in (1, 7, 40)]
        priors = [{}, {"personalized": 0.1, "common": 0.7, "local": 0.2}, {"common": 1.0}]
        found = Stacked().run([weighing(*job) for job in zip(each, priors, strict=True)])
        for weights, *job in zip(found, each, priors, strict=True):
            assert weights == pytest.approx(weights_of(*job), rel=1e-9) and sum(weights.values()) == pytest.approx(1)
        assert len({round(weight, 6) for weight in found[2].values()}) == 3


@given(
    samples=st.integers(1, 60), batch_size=st.integers(1, 25), local_epochs=st.integers(1, 4),
    local_steps=st.integers(0, 30), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_the_same_samples_in_the_same_order(samples, batch_size, local_epochs, local_steps, seed):
    settings = TrainSettings(batch_size=batch_size, local_epochs=local_epochs, local_steps=local_steps)
    expected, found = list(batches(samples, settings, seed)), batch_plan(samples, settings, seed)
    assert found.size.tolist() == [len(index_B) for index_B in expected]
    for index_B, padded_B, weight_B in zip(expected, found.index, found.weight, strict=True):
        assert padded_B[: len(index_B)].equal(index_B)
        assert weight_B[: len(index_B)].equal(torch.full((len(index_B),), 1 / len(index_B), dtype=torch.float64))
        assert (padded_B[len(index_B) :] == index_B[0]).all() and (weight_B[len(index_B) :] == 0).all()
