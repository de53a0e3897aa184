"""The dial between the mean, the attended and the device's own values, against every possible choice."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.exchange.messages import BlobRef, Order
from attune.common.methods.method import configure
from attune.common.methods.registry import method_from_options
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.fedclient.data.prepare import HeldOut, prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.work.calibration import log_likelihood
from attune.fedclient.work.dial import dialled, price, searched
from attune.fedclient.work.executor import Work, alone
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import FolderOrders

VALUES = ("attended", "mean", "own")


def all_choices(components):
    return [dict(zip(components, each, strict=True)) for each in itertools.product(VALUES, repeat=len(components))]


def search(components, score, cost):
    def job(positions):
        yield from ()
        return score(positions)

    return alone(searched(components, VALUES, job, cost))


def objective(score, cost, components):
    """Compute the objective to be maximised, independently."""
    base = max(VALUES, key=lambda value: score(dict.fromkeys(components, value)))
    return lambda positions: score(positions) - cost * sum(value != base for value in positions.values())


@pytest.mark.parametrize("seed", range(40))
def test_components_that_do_not_interact_stand_where_an_exhaustive_search_puts_them(seed):
    rng = np.random.default_rng(seed)
    gains, cost = rng.integers(-40, 40, (1 + seed % 4, 3)).tolist(), float(rng.choice([0.0, 2.5, 11.25]))
    components = [f"c{i}" for i in range(len(gains))]
    table = {name: dict(zip(VALUES, each, strict=True)) for name, each in zip(components, gains, strict=True)}

    def score(positions):
        return float(sum(table[name][value] for name, value in positions.items()))

    worth = objective(score, cost, components)
    found = search(components, score, cost)
    if len(components) == 1:
        assert score(found) == max(score(each) for each in all_choices(components))
    else:
        assert worth(found) == max(map(worth, all_choices(components)))


def test_no_choice_is_worse_than_one_value_everywhere_and_a_small_gain_moves_none():
    generator = torch.Generator().manual_seed(5)
    components = ["a", "b", "c"]
    for _ in range(30):
        drawn = dict(
            zip(map(str, all_choices(components)), torch.randn(27, generator=generator, dtype=torch.float64), strict=True)
        )

        def score(positions, drawn=drawn):
            return float(drawn[str(positions)])

        uniform = max(score(dict.fromkeys(components, value)) for value in VALUES)
        assert score(search(components, score, 0.0)) >= uniform
        assert len(set(search(components, score, 100.0).values())) == 1


@pytest.mark.parametrize("truth", all_choices(["first", "second"]))
def test_a_network_whose_layers_come_from_different_places_is_put_together_again(truth):
    """Use labels of one mixture of three random networks; compare in float64 with all nine mixtures."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    candidates = {
        value: {
            "first.weight": 2 * torch.randn(8, 4, generator=generator, dtype=torch.float64),
            "second.weight": 3 * torch.randn(3, 8, generator=generator, dtype=torch.float64),
        }
        for value in VALUES
    }

    def logits(positions):
        hidden = torch.tanh(x @ candidates[positions["first"]]["first.weight"].T)
        return hidden @ candidates[positions["second"]]["second.weight"].T

    y = logits(truth).argmax(1)

    def probability(tensors):
        yield from ()
        hidden = torch.tanh(x @ tensors["first.weight"].T)
        return (hidden @ tensors["second.weight"].T).softmax(1)[torch.arange(len(x)), y]

    def posterior(positions):
        p = logits(positions).softmax(1)[torch.arange(len(x)), y]
        return float(p.log().sum())

    components = {"first": ["first.weight"], "second": ["second.weight"]}
    found = alone(dialled(components, candidates, probability, len(x)))
    assert posterior(found.positions) >= max(posterior(dict.fromkeys(components, value)) for value in VALUES)
    assert found.tensors.keys() == {"first.weight", "second.weight"}
    for name, tensor in found.tensors.items():
        assert tensor is candidates[found.positions[name.removesuffix(".weight")]][name]
    if len(set(truth.values())) == 1:
        assert found.positions == truth == max(all_choices(["first", "second"]), key=posterior)
    assert sum(found.share(value) for value in VALUES) == pytest.approx(1)


def test_likelihood_and_price_by_hand():
    assert log_likelihood(torch.tensor([0.5, 0.25])) == pytest.approx(math.log(0.125))
    assert log_likelihood(torch.tensor([[0.5, 0.125], [1.0, 1.0]])) == pytest.approx(0.5 * math.log(0.0625))
    assert log_likelihood(torch.tensor([0.0])) == pytest.approx(math.log(1e-6))
    assert price(1) == 0 and price(100) == pytest.approx(math.log(10))


def test_a_device_that_predicts_with_a_model_of_its_own_has_nothing_to_dial():
    for name in ("fedmcsa", "fedavg+mcsa", "fedtp+mcsa"):
        method = method_from_options({"name": name})
        assert configure(method, {"dial": True}).dial
        assert configure(method, {}).dial is None
    with pytest.raises(SettingError, match=r"method.dial: .*pfedme\+mcsa.* model of its own"):
        configure(method_from_options({"name": "pfedme+mcsa"}), {"dial": True})


@pytest.fixture
def shard(tmp_path):
    rng = np.random.default_rng(2)
    folder = tmp_path / "images"
    folder.mkdir()
    for part, size in (("train", 40), ("test", 12)):
        y = np.arange(size) % 2
        x = rng.integers(0, 80, (size, 8, 8)).astype(np.uint8) + (y * 120).astype(np.uint8)[:, None, None]
        np.savez(folder / f"{part}.npz", x=x, y=y)
    return load_shard(folder)


@pytest.fixture
def make(shard, tmp_path):
    def learner(method, home="home", baseline=None, held_out=None, alone=False, keep="best", **options):
        options = {"dial": True, **options}
        spec = default_spec("images", (8, 8, 1), 2, 0, "vit", {"width": 8, "heads": 2, "depth": 1})
        train = TrainSettings(lr=0.05, batch_size=8, local_epochs=4, validation=0.3)
        plan = Plan("f", 3, spec, [0, 1], method, options, train)
        data = prepare(shard, plan) if held_out is None else held_out(prepare(shard, plan))
        orders, cpu = FolderOrders(tmp_path / home), torch.device("cpu")
        return Learner(plan, data, "kiel", orders, cpu, keep, baseline == "local", fits_alone=alone)

    return learner


def ordered(learner, number, *, train=False, serves=(), common=None, parts=None):
    """Carry out an order that serves these parts with their tensors, and names this common model."""
    blobs = [(BlobRef(part, f"{part}-{number}-{at}", 1), tensors) for at, (part, tensors) in enumerate(serves)]
    compared = [] if common is None else [(BlobRef(part, f"c-{part}-{number}", 1), t) for part, t in by_part(learner, common)]
    work = "train" if train else "evaluate"
    order = Order(
        f"{work}-{number}-kiel", number, work, tuple(ref for ref, _ in blobs),
        ("attended",) if train else (), tuple(ref for ref, _ in compared),
    )  # fmt: skip
    fetched = {ref.digest: tensors for ref, tensors in (*blobs, *compared)}
    return Work(learner, order, fetched).run()


def by_part(learner, tensors):
    kinds = sorted(set(learner.part_of.values()))
    return [(kind, {name: tensors[name] for name, part in learner.part_of.items() if part == kind}) for kind in kinds]


def spoilt(tensors):
    """Return tensors with which right answers become wrong."""
    return {name: -tensor if name.startswith("head") else tensor for name, tensor in tensors.items()}


def test_each_device_moves_to_what_suits_it_and_goes_on_training_from_its_own(make):
    learner = make("fedmcsa", baseline="local")
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    good = dict(learner.baselines.local)
    for where, expected in (("theta", (0, 0)), ("common", (1, 0)), ("local", (0, 1))):
        values = {name: good if name == where else spoilt(good) for name in ("theta", "common", "local")}
        learner._take(changed(learner.state, theta=values["theta"], local=values["local"]))
        found = ordered(learner, 2 + list(values).index(where), common=values["common"])
        assert (found.dial_mean, found.dial_own) == expected, where
        assert found.accuracy_before == max(found.accuracy_common, found.accuracy_local, found.accuracy_before)
        assert all(tensor is values["theta"][name] for name, tensor in learner.state.theta.items()), (
            "what is dialled is not trained"
        )
        for each in (learner, make("fedmcsa", baseline="local")):
            assert all(tensor.equal(good[name]) for name, tensor in each.finished()["personalized"].items())


def with_a_large_group(prepared):
    """Give one held-out sample the wrong label, and 30 windows; all of them are one group."""
    place = [0] * 30
    weight = torch.cat([torch.full((30,), 1 / 30, dtype=torch.float64), torch.ones(len(prepared.validation_x) - 1).double()])
    x, y = prepared.validation_x, prepared.validation_y
    return replace(
        prepared,
        validation_x=torch.cat([x[place], x[1:]]),
        validation_y=torch.cat([1 - y[place], y[1:]]),
        validation_weight=weight,
    )


def test_a_group_of_held_out_samples_counts_once_for_the_dial(make):
    """Give one group 30 windows: counted singly they would outvote the eleven other samples, for the spoilt tensors."""
    learner = make("fedmcsa", baseline="local", held_out=with_a_large_group)
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    good = dict(learner.baselines.local)
    learner._take(changed(learner.state, theta=good))
    result = ordered(learner, 2, common=spoilt(good))
    assert (result.dial_mean, result.dial_own) == (0, 0)


def test_groups_are_priced_by_their_number():
    """Each of two samples stands for a group of four: the price is that of two samples, not of eight."""
    p = {"a": torch.tensor([0.5] * 8), "b": torch.tensor([0.5] * 4 + [0.5 * math.exp(0.5)] * 4)}
    components = {"first": ["first"], "second": ["second"]}
    candidates = {"mean": {"first": "a", "second": "a"}, "own": {"first": "spoilt", "second": "b"}}

    def probability(tensors):
        yield from ()
        return p[tensors["second"]] if tensors["first"] == "a" else torch.full((8,), 0.01)

    weight = torch.full((8,), 0.25, dtype=torch.float64)
    positions = alone(dialled(components, candidates, probability, 8, weight)).positions
    assert positions == {"first": "mean", "second": "own"}, "a gain of 0.5 pays log(2) / 2, and not log(8) / 2"


def test_the_last_trained_model_outlives_evaluations_that_serve_other_values(make):
    learner = make("fedtp+mcsa")
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    trained = dict(learner.state.theta)
    for number in (1, 2):
        served = {part: spoilt(t) if part == "attended" else t for part, t in by_part(learner, trained)}
        found = ordered(learner, number, serves=served.items(), common=spoilt(trained))
        assert found.dial_own == 1, f"after {number} evaluations"
        learner = make("fedtp+mcsa")
    finished = learner.finished()["personalized"]
    assert all(finished[name].equal(trained[name]) for name in trained)


@pytest.mark.parametrize(("dial", "apart", "silent"), [(True, False, True), (True, True, False), (False, False, False)])
def test_who_has_dialled_does_not_tell_the_fleet_how_good_the_result_is(make, dial, apart, silent):
    """Withhold the score if the same samples have chosen the result, which they flatter. The blend is weighted as before."""

    def held_out(data):
        return replace(data, dial=HeldOut(data.train_x[:8], data.train_y[:8], None)) if apart else data

    learner = make("fedmcsa", baseline="local", held_out=held_out, dial=dial)
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    found = ordered(learner, 2, common=spoilt(learner.state.theta))
    said = [getattr(found, f"likelihood_{name}") for name in ("personalized", "common", "local")]
    assert [each is None for each in said] == [silent] * 3
    assert found.weights["common"] < 0.2 and found.validation_samples == 12


def test_beside_fitted_models_the_blend_has_the_model_before_the_dial(make):
    """Set the dial to the local model. It is judged as the device's own model, and the blend has the one before the dial."""
    learner = make("fedmcsa", baseline="local", alone=True)
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    undialled = spoilt(learner.baselines.local)
    learner._take(changed(learner.state, theta=undialled))
    found = ordered(learner, 2, common=undialled)
    assert found.dial_own == 1 and found.accuracy_before == found.accuracy_local > found.accuracy_common
    assert found.likelihood_personalized == found.likelihood_common < found.likelihood_local
    for each in (learner, make("fedmcsa", baseline="local", alone=True)):
        assert all(tensor.equal(undialled[name]) for name, tensor in each.finished()["personalized"].items())


def test_without_samples_held_out_or_without_the_setting_nothing_is_dialled(make, shard):
    learner = make("fedmcsa", home="off", dial=False)
    ordered(learner, 1, train=True, serves=by_part(learner, learner.state.theta))
    found = ordered(learner, 1, common=spoilt(learner.state.theta))
    assert found.dial_own is None and found.dial_mean is None
