"""A user's own training loop and scores: their arguments, their results, and the methods that cannot use them."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import attune
from attune.common.errors import AttuneError
from attune.common.methods.method import configure
from attune.common.methods.registry import get, names
from attune.common.wire.files import read_tensors
from tests.common.methods.rows import OF_ANY_MODEL

PLAIN = {"train.lr": 0.1, "train.momentum": 0.0, "train.clip_norm": 0.0, "train.local_epochs": 2, "train.validation": 0.0}
FOREIGN = {"analytic", "apfl", "fedala", "feddbe", "per-fedavg", "pfedgp", "pfedme", "pfedme+mcsa"}


def shards(samples: int = 24) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, samples, 4)).astype(np.float32)
    return {name: (x[at], (x[at, :, at] > 0).astype(int)) for at, name in enumerate(("kiel", "lund"))}


def by_the_method(model: Any, data: Any, context: Any) -> float:
    """Train as the built-in loop does, written by hand with what the context offers."""
    settings = context.settings
    optimizer = torch.optim.SGD(list(context.parameters()), lr=settings.lr, momentum=settings.momentum)
    generator = torch.Generator().manual_seed(data.seed)
    losses: list[float] = []
    for epoch in range(settings.local_epochs):
        losses = []
        for index in torch.split(torch.randperm(len(data), generator=generator), settings.batch_size):
            optimizer.zero_grad()
            loss = context.loss(data.x[index], data.y[index])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()) * len(index))
        context.progress((epoch + 1) / settings.local_epochs)
    return sum(losses) / len(data)


@pytest.mark.parametrize("method", sorted(set(OF_ANY_MODEL) - FOREIGN))
def test_the_built_in_loop_written_by_hand_has_the_same_bits(method: str) -> None:
    given = PLAIN | {"train.batch_size": 8, "train.local_steps": 0, "train.weight_decay": 0.0}
    model = "transformer" if "tp" in method or method in ("vanilla-personalized", "fedbn") else "dnn"
    if model == "transformer":
        given |= {"model.width": 8, "model.heads": 2, "model.depth": 1}
    if "tp" in method:
        given |= {"method.hidden": 16}
    own = attune.simulate(shards(), method, model, rounds=2, settings=given, train=by_the_method)
    built_in = attune.simulate(shards(), method, model, rounds=2, settings=given)
    assert own.digests == built_in.digests
    assert [row.accuracy for row in own.table()] == [row.accuracy for row in built_in.table()]


@pytest.mark.parametrize("method", sorted(FOREIGN))
def test_a_method_that_cannot_live_with_it_says_so_before_it_starts(method: str) -> None:
    def train(model: Any, data: Any, context: Any) -> None:
        raise AssertionError("never called")

    with pytest.raises(
        AttuneError, match=f"method {method.replace('+', '.')} cannot be trained by a loop of your own: .*Leave train"
    ):
        data = {name: (x.reshape(-1, 2, 2, 1), y) for name, (x, y) in shards().items()} if method == "analytic" else shards()
        attune.simulate(data, method, None if method == "analytic" else "dnn", rounds=1, train=train)


def test_every_method_was_looked_at() -> None:
    assert {name for name in names() if configure(get(name), {}).objective.own_loop} == FOREIGN


def test_the_prox_term_is_half_mu_times_the_squared_distance() -> None:
    seen: list[float] = []

    def train(model: Any, data: Any, context: Any) -> None:
        assert float(context.penalty().detach()) == 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.5
        count = sum(parameter.numel() for parameter in model.parameters())
        seen.append(float(context.penalty().detach()) / count)
        with torch.no_grad():
            plain = cross_entropy(model(data.x), data.y)
            assert float(context.loss(data.x, data.y)) == pytest.approx(float(plain) + float(context.penalty()), rel=1e-5)

    attune.simulate(shards(), "fedprox", "mlr", rounds=1, train=train, settings={"method.mu": 4.0})
    assert seen[:2] == [pytest.approx(4.0 / 2 * 0.25)] * 2


def test_the_parts_of_fedrep_are_frozen_in_turn_and_come_back_as_they_were() -> None:
    stages: list[tuple[str, tuple[str, ...], int]] = []

    def train(model: Any, data: Any, context: Any) -> float:
        stages.append((context.stage, tuple(context.frozen), context.settings.local_epochs))
        with torch.no_grad():
            for parameter in model.parameters():  # including frozen ones
                parameter += 1
        return 1.0

    result = attune.simulate(shards(), "fedrep", "dnn", rounds=1, train=train)
    still = attune.simulate(shards(), "fedrep", "dnn", rounds=1, train=lambda model, data, context: None)
    body, head = ("hidden0.weight", "hidden0.bias"), ("head.weight", "head.bias")
    assert stages[:2] == [("head", body, 4), ("", head, 1)]
    before, after = (run.model("kiel").tensors for run in (still, result))
    assert all(torch.allclose(after[name], before[name] + 1) for name in (*body, *head)), "each moved in its own stage alone"


def test_data_have_classes_loaders_and_a_dataset() -> None:
    def train(model: Any, data: Any, context: Any) -> dict[str, float]:
        assert list(data.classes) == ["no", "yes"] and len(data.dataset) == len(data) == 18
        batches = list(data.batches(5))
        assert [len(y) for _, y in batches] == [5, 5, 5, 3]
        assert sorted(torch.cat([x for x, _ in batches])[:, 0].tolist()) == sorted(data.x[:, 0].tolist())
        assert (context.round, context.device.type) == (1, "cpu") and set(context.received) == set(
            dict(model.named_parameters())
        )
        return {"loss": 0.25}

    given = {name: (x, np.where(y == 1, "yes", "no")) for name, (x, y) in shards().items()}
    result = attune.simulate(given, "fedavg", "mlr", rounds=1, train=train)
    assert {client["loss"] for client in result.status["clients"]} == {0.25}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda model, data, context: 1 / 0, r"your train\(\) failed: ZeroDivisionError"),
        (lambda model, data, context: "good", r"your train\(\) returned a str"),
        (lambda model, data, context: math.inf, r"returned the loss inf"),
        (
            lambda model, data, context: [p.data.fill_(math.nan) for p in model.parameters()] and 1.0,
            "values that are not finite",
        ),
    ],
)
def test_what_goes_wrong_in_a_loop_is_said(train: Any, message: str) -> None:
    with pytest.raises(AttuneError, match=message):
        attune.simulate(shards(), "fedavg", "mlr", rounds=1, train=train)


# --- scores of one's own


def half(model: Any, data: Any) -> torch.Tensor:
    """Return the probability of the right label."""
    return model(data.x).softmax(-1).gather(1, data.y[:, None])[:, 0]


def test_own_scores_are_what_is_reported_and_compared() -> None:
    result = attune.simulate(shards(80), "fedmcsa", "mlr", rounds=3, evaluate=half, baseline="local")
    plain = attune.simulate(shards(80), "fedmcsa", "mlr", rounds=3, baseline="local")
    for row, usual in zip(result.table(), plain.table(), strict=True):
        assert row.personalized != usual.personalized and 0.5 < row.personalized < 1
        assert row.verdict in ("better", "worse", "unclear")
    for client in result.status["clients"]:
        assert client["better_than_common"] + client["worse_than_common"] == client["test_samples"], (
            "probabilities are never equal"
        )


def test_accuracy_as_a_score_of_ones_own_is_the_accuracy() -> None:
    def right(model: Any, data: Any) -> torch.Tensor:
        return (model(data.x).argmax(-1) == data.y).double()

    own = attune.simulate(shards(80), "fedrod", "dnn", rounds=2, evaluate=right)
    plain = attune.simulate(shards(80), "fedrod", "dnn", rounds=2)
    assert [row.accuracy for row in own.table()] == [row.accuracy for row in plain.table()]
    kept = [[(each["accuracy_kept"], each["better_than_common"]) for each in run.status["clients"]] for run in (own, plain)]
    assert kept[0] == kept[1]


def windows() -> dict[str, Any]:
    """Return sequences of two speakers who count, one by ones and one by twos. Every position's label is the next number."""
    starts = np.arange(40)[:, None]
    counted = {name: (starts + step * np.arange(9)) % 8 for name, step in (("kiel", 1), ("lund", 2))}
    return {name: (text[:, :-1], text[:, 1:]) for name, text in counted.items()}


SMALL = {"model.width": 16, "model.depth": 1, "model.heads": 2}


def test_a_language_model_is_judged_by_a_score_of_each_sequence() -> None:
    asked: list[tuple[int, ...]] = []

    def likelihood(model: Any, data: Any) -> torch.Tensor:
        """Return the geometric mean of the probabilities of the right characters of a sequence: one over its perplexity."""
        logits = model(data.x)
        asked.append((*logits.shape[:2], *data.y.shape))
        return -cross_entropy(logits.transpose(1, 2), data.y, reduction="none").mean(dim=1)

    def score(model: Any, data: Any) -> torch.Tensor:
        return likelihood(model, data).exp()

    result = attune.simulate(windows(), "fedper", "transformer", rounds=2, evaluate=score, settings=SMALL, baseline="local")
    assert set(asked) == {(10, 8, 10, 8)}, "a quarter of forty sequences, each with eight labels"
    for row in result.table():
        assert row.accuracy is not None and 0 < row.accuracy < 1
        assert row.accuracy * 10 != round(row.accuracy * 10), "a mean of likelihoods, not a share of sequences"


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda model, data: 0.5, "a score for each of the"),
        (lambda model, data: torch.full((len(data),), 2.0), "scores outside 0 to 1"),
        (lambda model, data: 1 / 0, r"your evaluate\(\) failed: ZeroDivisionError"),
    ],
)
def test_scores_that_cannot_be_are_said(evaluate: Any, message: str) -> None:
    with pytest.raises(AttuneError, match=message):
        attune.simulate(shards(), "fedavg", "mlr", rounds=1, evaluate=evaluate)


def test_hooks_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    from attune.fedclient.options import Hooks

    module = types.ModuleType("own_hooks")
    monkeypatch.setitem(sys.modules, "own_hooks", module)
    with pytest.raises(AttuneError, match="neither a function train nor"):
        Hooks.of_module("own_hooks")
    module.evaluate = half
    assert Hooks.of_module("own_hooks") == Hooks(None, half)
    with pytest.raises(AttuneError, match="cannot be imported"):
        Hooks.of_module("no_such_hooks")


# --- what a loop keeps from order to order


def counting(model: Any, data: Any, context: Any) -> float:
    """Count the orders of this device, and keep a tensor and a number."""
    context.state["orders"] = context.state.get("orders", 0) + 1
    context.state.setdefault("names", torch.zeros(8))[len(context.name)] += 1
    SEEN.append((context.name, context.stage, int(context.state["orders"])))
    return 0.5


SEEN: list[tuple[str, str, int]] = []


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_a_loop_has_the_devices_name_and_a_state_from_round_to_round(executor: Any) -> None:
    SEEN.clear()
    attune.simulate(shards(), "fedavg", "dnn", rounds=4, train=counting, settings=PLAIN, executor=executor)
    for name in ("kiel", "lund"):
        assert [orders for device, _, orders in SEEN if device == name] == [1, 2, 3, 4]


def test_the_baseline_and_the_stages_have_the_state_that_is_theirs() -> None:
    SEEN.clear()
    attune.simulate(shards(), "fedavg+ft", "dnn", rounds=2, train=counting, settings=PLAIN, baseline="local")
    of_kiel = [(stage, orders) for device, stage, orders in SEEN if device == "kiel"]
    assert [orders for stage, orders in of_kiel if stage != "tune"] == [1, 1, 2, 2], "the method's and the baseline's, in turn"
    assert max(orders for stage, orders in of_kiel if stage == "tune") == 3, "fine-tuning reads the state, and keeps no change"


def test_an_order_that_fails_or_dies_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    SEEN.clear()

    def failing(model: Any, data: Any, context: Any) -> float:
        counting(model, data, context)
        if context.round == 2:
            raise OSError("the power is out")
        return 0.5

    given = {"home": tmp_path / "home", "settings": PLAIN}
    with pytest.raises(AttuneError, match="the power is out"):
        attune.simulate(shards(), "fedavg", "dnn", rounds=2, train=failing, **given)
    attune.simulate(shards(), "fedavg", "dnn", rounds=2, train=counting, **given)
    assert [orders for device, _, orders in SEEN if device == "kiel"] == [1, 2, 2]
    [file] = (tmp_path / "home" / "devices" / "kiel" / "orders").glob("evaluate-2-*/loop.safetensors")
    assert read_tensors(file)["orders"].item() == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a object, which cannot be kept: tensors, arrays and numbers can"),
        ("text", "a str, which cannot be kept"),
        (torch.zeros(1 << 25), "bytes, more than"),
        (torch.zeros(3).to_sparse(), "cannot be kept"),
    ],
)
def test_a_state_that_cannot_be_kept_is_said(value: Any, message: str) -> None:
    def train(model: Any, data: Any, context: Any) -> float:
        context.state["mine"] = value
        return 0.5

    with pytest.raises(AttuneError, match=message):
        attune.simulate(shards(), "fedavg", "dnn", rounds=1, settings=PLAIN, train=train)


def copied(model: Any, data: Any, context: Any) -> float:
    return by_the_method(copy.deepcopy(model), data, Elsewhere(context))


class Elsewhere:
    """Context that hands the optimizer copies of the parameters."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def parameters(self) -> Any:
        return [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._context.parameters()]


def put_back(model: Any, data: Any, context: Any) -> float:
    before = copy.deepcopy(model.state_dict())
    loss = by_the_method(model, data, context)
    model.load_state_dict(before)
    return loss


def without_gradients(model: Any, data: Any, context: Any) -> float:
    with torch.no_grad():
        return float(context.loss(data.x, data.y))


def head_alone(model: Any, data: Any, context: Any) -> float:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    return 0.5


@pytest.mark.parametrize(
    ("loop", "silent"),
    [(by_the_method, True), (head_alone, True), (copied, False), (put_back, False), (without_gradients, False)],
)
def test_a_loop_that_changes_no_weight_is_said_once(loop: Any, silent: bool) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        attune.simulate(shards(), "fedavg", "dnn", rounds=2, settings=PLAIN, train=loop, progress=False)
    said = [str(one.message) for one in heard if "train()" in str(one.message)]
    assert len(said) == (not silent) and all("changed no weight" in text and "in place" in text for text in said)
