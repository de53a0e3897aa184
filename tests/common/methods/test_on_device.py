"""A device's own tensors under every built-in method: never handed in, kept over restarts, and saved as used."""

import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.exchange.messages import BlobRef, Order
from attune.common.methods.method import configure
from attune.common.methods.registry import get
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model import artifact
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.objectives.base import PERSONAL
from attune.fedclient.work.state import FolderOrders
from tests.common.methods.rows import OF_ANY_MODEL

SMALL = {"hidden": 8, "embedding_dim": 4}
KEEPS = {"apfl", "fedala", "feddbe", "mr-mtl", "pfedme", "pfedme+mcsa", "ditto", "fedrod", "fedtp+fedrod"}


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(1)
    (tmp_path / "images").mkdir()
    for part, size in (("train", 12), ("test", 9)):
        y = rng.integers(0, 2, size)
        x = rng.integers(0, 80, (size, 8, 8)).astype(np.uint8) + (y * 120).astype(np.uint8)[:, None, None]
        np.savez(tmp_path / "images" / f"{part}.npz", x=x, y=y)
    return load_shard(tmp_path / "images")


@pytest.fixture
def make(images, tmp_path):
    def learner(method, home="home", **options):
        if any(name == "hypernetwork" for name in (get(method).aggregators[k] for k in get(method).kinds if k != "private")):
            options |= SMALL
        spec = default_spec("images", (8, 8, 1), 3, 0, "vit", {"depth": 1, "width": 8, "heads": 2})
        spec = configure(get(method), options).spec_of(spec)
        plan = Plan("f", 3, spec, [0, 1, 2], method, options, TrainSettings(lr=0.05, batch_size=4, local_epochs=1))
        return Learner(plan, prepare(images, plan), "kiel", FolderOrders(tmp_path / home / "orders"), torch.device("cpu"))

    return learner


def order(learner, number, train=True, scale=None):
    """Carry out an order that serves every part, scaled from the device's tensors, or no part if `scale` is None."""
    parts = sorted({kind for kind in learner.part_of.values() if kind != "private"})
    refs, fetched = [], {}
    for part in parts if scale is not None else ():
        refs.append(BlobRef(part, f"{part}-{number}-{scale}", 1))
        own = [name for name, kind in learner.part_of.items() if kind == part]
        fetched[refs[-1].digest] = {name: learner.state.theta[name] * scale for name in own}
    work = "train" if train else "evaluate"
    return Order(f"{work}-{number}-kiel", number, work, tuple(refs), tuple(parts) if train else ()), fetched


def carry_out(learner, *args, **kwargs):
    made, fetched = order(learner, *args, **kwargs)
    return Work(learner, made, fetched).run()


@pytest.mark.parametrize("method", OF_ANY_MODEL)
def test_what_is_handed_in_is_the_models_own_and_a_restart_changes_nothing(make, method):
    one, two = make(method, "a"), make(method, "b")
    kept = {name for name in one.state.theta if name.startswith(PERSONAL)}
    assert bool(kept) == (method in KEEPS)
    for number, scale in ((1, 0.9), (2, 0.8)):
        result = carry_out(one, number, scale=scale)
        carry_out(two, number, scale=scale)
        two = make(method, "b")
        for part in result.parts:
            handed_in = read_tensors(one.orders.blob(result.order_id, part.part))
            assert set(handed_in) == {name for name, kind in one.part_of.items() if kind == part.part}
    assert one.state.theta.keys() == two.state.theta.keys() == one.part_of.keys() | kept
    assert all(one.state.theta[name].equal(two.state.theta[name]) for name in one.state.theta)
    assert carry_out(one, 3, train=False).accuracy == carry_out(two, 3, train=False).accuracy is not None


@pytest.mark.parametrize("method", sorted(KEEPS))
def test_what_a_device_keeps_goes_on_whatever_it_is_served(make, method):
    learner = make(method)
    carry_out(learner, 1, scale=0.9)
    kept = {name: tensor.clone() for name, tensor in learner.state.theta.items() if name.startswith(PERSONAL)}
    same = method in ("mr-mtl", "fedala", "feddbe")  # its own model is what it hands in, or it has none
    beside = {name: learner.state.theta.get(name.removeprefix(PERSONAL)) for name in kept}
    assert same or any(model is not None and not kept[name].equal(model) for name, model in beside.items())
    carry_out(learner, 1, train=False, scale=0.0)
    assert all(learner.state.theta[name].equal(tensor) for name, tensor in kept.items())


def test_a_second_model_starts_as_what_is_first_served(make):
    learner = make("ditto")
    carry_out(learner, 4, train=False, scale=0.5)
    for name in learner.part_of:
        assert learner.state.theta[PERSONAL + name].equal(learner.state.theta[name])
    again = make("ditto")
    carry_out(again, 5, train=False, scale=0.5)
    assert not again.state.theta[PERSONAL + "head.weight"].equal(again.state.theta["head.weight"]), "later ones leave it alone"


@pytest.mark.parametrize("method", OF_ANY_MODEL)
def test_the_finished_model_predicts_as_the_device_does_without_its_samples(make, method, images, tmp_path):
    learner = make(method)
    result = carry_out(learner, 1, scale=0.9)
    home = DeviceHome(tmp_path / "home")
    artifact.save(home.model, *artifact.finished_model(learner))
    model = artifact.Model.load(home.model)
    assert model.evaluate(images) == (result.accuracy, result.test_samples)
    assert not any(name.startswith(PERSONAL) for name in model.tensors)


@pytest.mark.parametrize("method", ["fedavg+ft", "per-fedavg"])
def test_what_is_trained_for_prediction_is_not_gone_on_from(make, method):
    learner = make(method)
    carry_out(learner, 1, train=False, scale=0.9)
    before = {name: tensor.clone() for name, tensor in learner.state.theta.items()}
    finished = learner.finished()["personalized"]
    assert finished.keys() == before.keys() and not finished["head.weight"].equal(before["head.weight"])
    assert all(learner.state.theta[name].equal(before[name]) for name in before)
    assert all(finished[name].equal(again) for name, again in learner.finished()["personalized"].items()), "the same bits again"
