"""Every built-in method on sequences of tokens with a label for every position, in one process."""

import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import ShapeMismatch
from attune.common.exchange.messages import Order
from attune.common.methods.method import PartKind, configure
from attune.common.methods.registry import get
from attune.common.models.registry import build, default_spec
from attune.common.plan import ModelSpec, Plan
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model import artifact
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import FolderOrders
from tests.common.methods.rows import OF_ANY_MODEL

STEPS, LETTERS, SAMPLES = 4, 5, 24
HYPER = {"hidden": 8, "embedding_dim": 4}


def spec(name: str = "transformer", per_position: bool = True) -> ModelSpec:
    small = {"width": 12} if name == "lstm" else {"width": 8, "depth": 1, "heads": 2}
    return default_spec("tokens", (STEPS,), LETTERS, LETTERS, name, small, per_position)


def options(method: str) -> dict[str, int]:
    """Return options of a small model for methods with a hypernetwork."""
    parts: list[PartKind] = [kind for kind in get(method).kinds if kind != "private"]
    return HYPER if any(get(method).aggregators[kind] == "hypernetwork" for kind in parts) else {}


def text(step: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences in which each letter follows from the one before, so that a position's letter determines its label."""
    start = np.random.default_rng(seed).integers(0, LETTERS, SAMPLES)
    whole = (start[:, None] + step * np.arange(STEPS + 1)) % LETTERS
    return whole[:, :-1], whole[:, 1:]


def case(method: str, name: str = "transformer"):
    return pytest.param(method, name, id=f"{method} {name}")


@pytest.mark.parametrize(
    ("method", "model"),
    [*(case(method) for method in OF_ANY_MODEL), *(case(name, "lstm") for name in ("fedavg", "fedrod", "ditto"))],
)
def test_a_method_learns_what_follows_at_every_position(federation, method, model):
    """Let two devices count in different steps. At every position they are right half again as often as by a guess, 1/5.

    In two rounds a hypernetwork that makes the whole model hardly moves, so pFedHN's devices are judged after their training.
    """
    shards = {"a": text(1, 0), "b": text(2, 1)}
    train = TrainSettings(lr=0.1, batch_size=8, local_epochs=6)
    spec_of = configure(get(method), options(method)).spec_of
    every = federation(get(method), build(spec_of(spec(model)), 0), shards, options(method), train)
    for _ in range(2):
        every.round()
    served = get(method).evaluate == "served" and method != "pfedhn"
    right = np.zeros(STEPS)
    for client, (x, y) in shards.items():
        prepared = every.prepared(client, served=served)
        every.network.model.eval()
        with torch.no_grad():
            logits_NTC = every.predictor.logits(every.network, prepared, torch.from_numpy(x))
        assert logits_NTC.shape == (SAMPLES, STEPS, LETTERS) and logits_NTC.isfinite().all()
        right += (logits_NTC.argmax(-1).numpy() == y).mean(axis=0) / len(shards)
    assert all(np.isfinite(loss) for loss in every.losses.values())
    assert right.min() > 0.3


@pytest.fixture
def shard(tmp_path):
    x, y = text(1, 0)
    (tmp_path / "text").mkdir()
    np.savez(tmp_path / "text" / "train.npz", x=x[:16], y=y[:16])
    np.savez(tmp_path / "text" / "test.npz", x=x[16:], y=y[16:])
    return load_shard(tmp_path / "text")


@pytest.mark.parametrize("method", ["fedavg", "fedtp+knn", "fedrod", "per-fedavg", "pfedme"])
def test_a_finished_sequence_model_labels_every_position_as_in_training(method, shard, tmp_path):
    plan = Plan("f", 3, spec(), [4, 3, 2, 1, 0], method, options(method), TrainSettings(lr=0.1, batch_size=8, local_epochs=2))
    orders = FolderOrders(tmp_path / "home" / "orders")
    learner = Learner(plan, prepare(shard, plan), "kiel", orders, torch.device("cpu"))
    result = Work(learner, Order("train-1-kiel", 1, "train", (), ())).run()
    assert (result.samples, result.test_samples) == (16, 8)
    home = DeviceHome(tmp_path / "home")
    artifact.save(home.model, *artifact.finished_model(learner))
    model = artifact.Model.load(home.model)
    labels = np.array(model.predict(shard.test_x, "new"))
    assert labels.shape == (8, STEPS)
    assert model.evaluate(shard) == (result.accuracy, 8)
    assert float((labels == shard.test_y).mean()) == pytest.approx(result.accuracy)


def test_a_model_of_positions_is_not_judged_by_labels_of_sequences(shard, tmp_path):
    plan = Plan("f", 3, spec(), list(range(LETTERS)), "fedavg", {}, TrainSettings(local_epochs=1))
    learner = Learner(plan, prepare(shard, plan), "kiel", FolderOrders(tmp_path / "home" / "orders"), torch.device("cpu"))
    Work(learner, Order("train-1-kiel", 1, "train", (), ())).run()
    home = DeviceHome(tmp_path / "home")
    artifact.save(home.model, *artifact.finished_model(learner))
    np.savez(tmp_path / "text" / "train.npz", x=shard.train_x, y=shard.train_y[:, -1])
    np.savez(tmp_path / "text" / "test.npz", x=shard.test_x, y=shard.test_y[:, -1])
    (tmp_path / "text" / "meta.json").write_text('{"kind": "tokens"}')
    with pytest.raises(ShapeMismatch, match="has a label for every sample, but the model gives one for every position"):
        artifact.Model.load(home.model).evaluate(load_shard(tmp_path / "text"))
