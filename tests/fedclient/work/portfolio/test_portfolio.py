"""A device's portfolio: which samples each prediction out of fold has seen, the choice among models, and the cache."""

import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.fedclient.data.holdout import folds_of
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.prepare import prepare
from attune.fedclient.read_options import ReadOptions
from attune.fedclient.work.orders import FittedInMemory, MemoryOrders
from attune.fedclient.work.portfolio import portfolio as module
from attune.fedclient.work.portfolio.fitting import Samples
from attune.fedclient.work.portfolio.portfolio import FittedModel, Portfolio, fitted_on, portfolio_of
from attune.fedclient.work.state import FolderOrders

CPU = torch.device("cpu")
NONE = np.zeros(0, np.intp)


def table(rows=40, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(rows, 4)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] > 0).astype(np.int64)


def prepared(rows=40, seed=0, validation=0.2):
    x, y = table(rows, seed)
    plan = Plan(
        "f", 3, default_spec("tabular", (4,), 2, 0, "mlr", {}), [0, 1], "fedavg", {}, TrainSettings(validation=validation)
    )
    shard = shard_of("kiel", (x, y, x[:6], y[:6]), ReadOptions())
    return prepare(shard.load_for(plan), plan), plan


def test_a_sample_is_predicted_by_models_that_have_not_seen_it():
    """One nearest neighbour that had seen a sample would always be right about random labels."""
    draws = np.random.default_rng(1)
    samples = Samples(draws.normal(size=(60, 3)).astype(np.float32), draws.integers(0, 2, 60), "classes", "tabular")
    models = fitted_on(samples, 2, NONE)
    fold = folds_of(samples.y, "tabular", None, NONE)
    for row in range(60):
        rest = np.flatnonzero(fold != fold[row])
        nearest = rest[np.square(samples.x[rest] - samples.x[row]).sum(axis=1).argmin()]
        assert int(models["nearest-1"].scores[row].argmax()) == samples.y[nearest]
    assert all(model.scores.isfinite().all() for model in models.values()) and next(iter(models)) == "logistic"


def test_bags_do_not_respect_groups_so_forests_are_fitted_without_each_group():
    """Each group has a label and a feature of its own, which a forest that has seen the group knows."""
    group = np.repeat(np.arange(10), 6)
    x = np.eye(10, dtype=np.float32)[group]
    samples = Samples(x, np.arange(10)[group] % 2, "classes", "tabular", group)
    right = (fitted_on(samples, 2, NONE)["forest"].scores.argmax(1).numpy() == samples.y).mean()
    assert (
        right < 0.7 < (fitted_on(samples._replace(groups=None), 2, NONE)["forest"].scores.argmax(1).numpy() == samples.y).mean()
    )


def made(scores, y, held=(0,)):
    """Return a portfolio of models with these predictions out of fold; each always answers class 0 of new samples."""
    tensors = {
        "weight": torch.zeros(1, 2).double(),
        "bias": torch.zeros(1).double(),
        "classes": torch.zeros(1, dtype=torch.int64),
    }
    models = {name: FittedModel(tensors, torch.tensor(each)) for name, each in scores.items()}
    samples = Samples(np.zeros((len(y), 2), np.float32), np.array(y), "classes", "tabular")
    return Portfolio(models, samples, np.array(held, np.intp), 2, CPU)


SURE, UNSURE = [4.0, -4.0], [0.2, -0.2]


def test_the_least_squared_error_chooses_without_sole_samples_of_a_class():
    y = [0, 0, 0, 0, 1]
    portfolio = made({"logistic": [UNSURE] * 4 + [SURE], "forest": [SURE] * 4 + [SURE]}, y)
    assert portfolio.chosen == "forest"
    assert all(len(fit.probability) == 4 for fit in portfolio.fits.values()), "no fold without the last sample knows its class"
    wrong = made({"logistic": [UNSURE] * 5, "forest": [[-4.0, 4.0]] * 4 + [SURE]}, y)
    assert wrong.chosen == "logistic"


def test_without_predictions_out_of_fold_the_simplest_model_is_chosen():
    nothing = made({"logistic": [[np.nan, np.nan]] * 3, "forest": [[np.nan, np.nan]] * 3}, [0, 1, 1])
    assert nothing.fits == {} and nothing.chosen == "logistic"


def test_the_probability_of_held_out_labels_is_that_of_the_mixture_by_hand():
    even = made({"logistic": [[1.0, 0.0]] * 4, "forest": [[0.0, 1.0]] * 4}, [0, 0, 1, 1], held=(1, 2))
    sharp = {name: fit.sharpness for name, fit in even.fits.items()}
    first, second = (
        (torch.tensor([1.0, 0.0]) * sharp["logistic"]).softmax(0),
        (torch.tensor([0.0, 1.0]) * sharp["forest"]).softmax(0),
    )
    mixture = 0.75 * first + 0.25 * second
    found = even.held_out({"logistic": 0.75, "forest": 0.25})
    assert found == pytest.approx(torch.stack([mixture[0], mixture[1]]))


def test_samples_keep_the_order_of_the_shard_and_the_held_out_ones_their_places():
    data, plan = prepared()
    portfolio = portfolio_of(data, plan, MemoryOrders("kiel"), CPU)
    first = len(data.train_x)
    assert portfolio._y.tolist() == table()[1].tolist()
    assert portfolio._y[portfolio._held].tolist() == data.validation_y.tolist()
    assert portfolio._held.tolist() == data.places[first : first + len(data.validation_x)].tolist()


@pytest.fixture
def counted(monkeypatch):
    """Count what is fitted."""
    calls, fit = [], fitted_on
    monkeypatch.setattr(module, "fitted_on", lambda *given: calls.append(1) or fit(*given))
    return calls


def test_models_are_fitted_once_for_the_same_data_and_again_if_the_file_is_damaged(tmp_path, counted):
    data, plan = prepared()
    first = portfolio_of(data, plan, FolderOrders(tmp_path / "orders"), CPU)
    again = portfolio_of(data, plan, FolderOrders(tmp_path / "orders"), CPU)
    assert len(counted) == 1 and list(again.candidates) == list(first.candidates)
    for name, (_, tensors) in first.candidates.items():
        assert all(tensors[key].equal(again.candidates[name][1][key]) for key in tensors), name
    assert again.chosen == first.chosen and {n: f.sharpness for n, f in again.fits.items()} == {
        n: f.sharpness for n, f in first.fits.items()
    }
    [file] = (tmp_path / "fitted").glob("*/*.safetensors")
    written = file.read_bytes()
    file.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    portfolio_of(data, plan, FolderOrders(tmp_path / "orders"), CPU)
    assert len(counted) == 2
    other, _ = prepared(seed=5)
    portfolio_of(other, plan, FolderOrders(tmp_path / "orders"), CPU)
    assert len(counted) == 3 and len(list((tmp_path / "fitted").glob("*/*"))) == 1, "models of other data are gone"


def test_methods_and_seeds_with_the_same_samples_share_what_is_fitted(counted):
    """Images are not standardised, so a seed changes only which of them are held out from networks."""
    x = np.random.default_rng(0).integers(0, 256, (30, 3, 3, 1), np.uint8)
    y = np.arange(30) % 2
    spec = default_spec("images", (3, 3, 1), 2, 0, "mlr", {})
    for seed, method in ((3, "fedavg"), (8, "fedper")):
        plan = Plan("f", seed, spec, [0, 1], method, {}, TrainSettings(validation=0.2))
        shard = shard_of("kiel", (x, y, x[:4], y[:4]), ReadOptions())
        portfolio_of(prepare(shard.load_for(plan), plan), plan, MemoryOrders("kiel"), CPU)
    assert len(counted) == 1


def test_memory_forgets_what_was_not_used_for_longest(monkeypatch):
    monkeypatch.setattr("attune.fedclient.work.orders.FITTED_BYTES", 100)
    kept = FittedInMemory()
    for name in "abc":
        kept.keep(name, {"w": torch.zeros(10)})  # 40 bytes
        kept.get("a")
    assert kept.get("a") is not None and kept.get("b") is None and kept.get("c") is not None
