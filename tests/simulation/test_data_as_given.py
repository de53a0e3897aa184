"""Data and models as people hand them over: models that change their input, batches of one sample, and arrays of any type."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attune
from attune.common.errors import AttuneError, SettingError, ShapeMismatch, ShardError
from attune.fedclient.data.lazy_shard import shard_of
from tests.forked import hosts

FEW = {"train.local_epochs": 1}


def data(samples: int = 60, seed: int = 0, x_of: Any = lambda x: x, y_of: Any = lambda y: y) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3)).astype("f4")
    return x_of(x), y_of((x[:, 0] - x[:, 1] > 0).astype(int))


def digests(given: Mapping[Any, Any], model: Any = None, method: str = "fedavg", **more: Any) -> dict[str, str]:
    return attune.simulate(given, method, model=model, rounds=1, progress=False, settings=FEW, **more).digests


# --- a model that changes its input


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x - 1.0).relu())


class Subtracts(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 1.0
        return self.head(x.relu_())


class ByData(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.sub_(1.0)
        return self.head(nn.functional.relu(x, inplace=True))


class ByView(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:] = (x - 1.0).relu()
        return self.head(x)


class ByNumpy(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        array = x.numpy()
        array[:] = np.maximum(array - np.float32(1), 0)
        return self.head(x)


@pytest.mark.parametrize("model", [Subtracts, ByData, ByView, ByNumpy])
@pytest.mark.parametrize("method", ["fedavg", "pfedme", "per-fedavg", "fedtp+knn"])
def test_a_model_that_changes_its_input_has_the_bits_of_one_that_copies(model: type[Copies], method: str) -> None:
    if method == "fedtp+knn":
        method = "fedavg+ft"
    given = {"a": data(60, 1), "b": data(50, 2)}
    before = {name: x.copy() for name, (x, _) in given.items()}
    assert digests(given, lambda spec: model(), method) == digests(given, lambda spec: Copies(), method)
    assert all(np.array_equal(given[name][0], x) for name, x in before.items())


def test_the_stacked_executor_keeps_the_data_too() -> None:
    given = {"a": data(60, 1), "b": data(50, 2)}
    one, other = (digests(given, lambda spec, m=m: m(), executor="stacked") for m in (Subtracts, Copies))
    assert one == other


def test_processes_keep_the_data_too() -> None:
    given = {"a": data(60, 1), "b": data(50, 2)}
    with hosts():
        changed = digests(given, f"{__name__}:subtracts", executor="processes", workers=2)
    assert changed == digests(given, f"{__name__}:copies")


def subtracts(spec: Any) -> nn.Module:
    return Subtracts()


def copies(spec: Any) -> nn.Module:
    return Copies()


def test_own_loops_and_scores_cannot_change_the_data() -> None:
    def train(model: nn.Module, data: Any, context: Any) -> float:
        data.x.zero_()
        data.y.zero_()
        return 0.0

    def evaluate(model: nn.Module, data: Any) -> torch.Tensor:
        right = (model(data.x).argmax(dim=1) == data.y).double()
        data.x.zero_()
        data.y.fill_(1)
        return right

    given = {"a": data(60, 1), "b": data(50, 2)}
    plain = attune.simulate(given, "fedavg", model=lambda spec: Copies(), rounds=2, progress=False, train=lambda m, d, c: 0.0)
    same = attune.simulate(
        given, "fedavg", model=lambda spec: Copies(), rounds=2, progress=False, train=train, evaluate=evaluate
    )
    assert [row.accuracy for row in plain.table()] == [row.accuracy for row in same.table()]


# --- a last batch of one sample


def normalised(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def without_statistics(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("model", [normalised, without_statistics])
@pytest.mark.parametrize("executor", ["sequential", "stacked"])
@pytest.mark.parametrize("settings", [{"train.local_epochs": 1}, {"train.local_steps": 5}], ids=str)
def test_a_last_batch_of_one_sample_joins_the_batch_before(model: Any, executor: Any, settings: dict[str, Any]) -> None:
    given = {"a": data(80, 1), "c": data(49, 3)}  # c trains on 33 samples
    result = attune.simulate(given, "fedavg", model=model, rounds=1, progress=False, executor=executor, settings=settings)
    assert len(result.table()) == 2


def test_a_loop_of_ones_own_gets_no_batch_of_one_sample_either() -> None:
    sizes: list[int] = []

    def train(model: nn.Module, data: Any, context: Any) -> float:
        for shuffle in (True, False):
            sizes.append(sum(len(x) for x, _ in data.batches(shuffle=shuffle)))
            for x, y in data.batches(shuffle=shuffle):
                assert len(x) > 1
                nn.functional.cross_entropy(model(x), y).backward()
        return 0.0

    attune.simulate({"a": data(80), "c": data(49)}, "fedavg", model=normalised, rounds=1, progress=False, train=train)
    assert set(sizes) == {54, 33}


@pytest.mark.parametrize(("samples", "settings"), [(80, {"train.batch_size": 1}), (1, {})])
def test_where_one_sample_is_all_that_there_is_the_message_says_what_to_do(samples: int, settings: dict[str, Any]) -> None:
    x, y = data(80)
    given = dict.fromkeys("ab", (x[:samples], y[:samples], x, y))
    with pytest.raises(AttuneError, match=r"batch normalisation: set train\.batch_size to 2 or more"):
        attune.simulate(given, "fedavg", model=normalised, rounds=1, progress=False, settings=settings)


# --- modules that cannot be used


class Sparse(nn.Module):
    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, sparse=True) if bag else nn.Embedding(9, 4, sparse=True)
        self.out = nn.Linear(4 if bag else 12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((2 * x).long().clamp(-4, 4) + 4).flatten(1))


class Complex(Copies):
    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Detached(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.head(x).detach().numpy())


class Overwritten(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).sigmoid()
        scores.mul_(2)
        return scores


class NeedsLabels(Copies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("labels are needed\nsee below")
        return self.head(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "embedding": (lambda: Sparse(False), "layer table .* Embedding with sparse gradients.* leave sparse=True out"),
    "bag": (lambda: Sparse(True), "layer table .* EmbeddingBag with sparse gradients"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)), "layer 0 .* LazyLinear without sizes"),
    "lazy inside": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.LazyBatchNorm1d())),
        r"layer 1\.0 .* without sizes",
    ),
    "parallel": (lambda: nn.DataParallel(nn.Linear(3, 2)), "is a DataParallel: return the module inside it"),
    "parallel inside": (lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 2))), "layer 0 .* is a DataParallel"),
    "script": (lambda: torch.jit.script(nn.Linear(3, 2)), "is compiled TorchScript: return the plain module"),
    "trace": (lambda: torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3)), "is compiled TorchScript"),
    "script inside": (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 2))), "layer 0 .* is compiled TorchScript"),
    "compiled": (lambda: torch.compile(nn.Linear(3, 2)), r"is compiled by torch\.compile"),
    "complex": (Complex, "complex numbers"),
    "half": (lambda: nn.Linear(3, 2).half(), "cannot score a batch"),
    "detached": (Detached, "cannot be trained on a batch of shape .*: RuntimeError: element 0"),
    "overwritten": (Overwritten, "cannot be trained .* modified by an inplace operation"),
    "needs labels": (NeedsLabels, "cannot be trained .*: ValueError: labels are needed$"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_modules_that_cannot_be_used_are_refused_in_one_line(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(SettingError, match=message) as refused:
        digests({"a": data(), "b": data()}, lambda spec: make())
    assert "\n" not in str(refused.value)


# --- arrays


Y = np.array(["no", "yes"], dtype=object)
WORKS: dict[str, dict[Any, Any]] = {
    "object labels": {k: data(y_of=lambda y: Y[y]) for k in "ab"},
    "object integers": {k: data(y_of=lambda y: y.astype(object)) for k in "ab"},
    "object features": {k: data(x_of=lambda x: x.astype(object)) for k in "ab"},
    "bytes": {k: data(y_of=lambda y: np.array([b"no", b"yes"])[y]) for k in "ab"},
    "whole numbers as names": {n: data() for n in (0, 1)},
    "numpy integers as names": {n: data() for n in np.arange(2)},
    "a gradient": {k: data(x_of=lambda x: torch.tensor(x, requires_grad=True)) for k in "ab"},
    "bfloat16": {k: data(x_of=lambda x: torch.tensor(x).bfloat16()) for k in "ab"},
    "float16": {k: data(x_of=lambda x: x.astype("f2")) for k in "ab"},
    "long double": {k: data(x_of=lambda x: x.astype(np.longdouble)) for k in "ab"},
    "big endian": {k: data(x_of=lambda x: x.astype(">f8"), y_of=lambda y: y.astype(">i4")) for k in "ab"},
    "sparse": {k: data(x_of=lambda x: torch.tensor(x).to_sparse()) for k in "ab"},
    "negated view": {k: data(x_of=lambda x: torch._neg_view(torch.tensor(x))) for k in "ab"},
    "list of tensors": {k: data(x_of=lambda x: [torch.tensor(row, requires_grad=True) for row in x], y_of=list) for k in "ab"},
    "backwards": {k: data(x_of=lambda x: x[::-1], y_of=lambda y: y[::-1]) for k in "ab"},
    "masked, with nothing hidden": {k: data(x_of=np.ma.masked_array) for k in "ab"},
}


@pytest.mark.parametrize("name", WORKS)
def test_arrays_as_people_have_them(name: str) -> None:
    assert digests(WORKS[name])


def masked(x: np.ndarray) -> Any:
    return np.ma.masked_array(x, mask=np.arange(x.size).reshape(x.shape) == 4)


REFUSED: dict[str, tuple[tuple[Any, Any], str]] = {
    "complex": (data(x_of=lambda x: x.astype("c8")), "x of a is of type complex64; give real and imaginary parts"),
    "dates": (data(x_of=lambda x: x.astype("M8[D]")), "x of a is of type datetime64.*give dates as numbers"),
    "text and numbers": (
        data(x_of=lambda x: np.array([[1, "yes", 2]] * len(x), dtype=object)),
        "x of a holds values of the types int, str",
    ),
    "a label is missing": (data(y_of=lambda y: np.array([None, "yes"], dtype=object)[y]), "labels that mean a missing value"),
    "rows of several lengths": (([[1.0], [2.0, 3.0]], [0, 1]), "x of a cannot be made an array"),
    "hidden values": (data(x_of=masked), "x of a is a masked array that hides 1 of 180 values.*missing.*median"),
    "hidden labels": (data(y_of=masked), "y of a is a masked array that hides 1 of 60 values: leave these samples out"),
    "a masked tensor": (
        data(x_of=lambda x: torch.masked.masked_tensor(torch.tensor(x), torch.tensor(x) < 1e9)),
        "x of .*a is a masked tensor: leave",
    ),
    "records": (data(x_of=lambda x: x.view([("p", "f4"), ("q", "f4"), ("r", "f4")])), "x of a is of type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_cannot_be_used_are_refused_by_name(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ShardError, match=message):
        digests({"a": given})


def test_frames_and_series() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data()
    frame, text = pandas.DataFrame(x), pandas.Series(np.array(["no", "yes"])[y])
    assert digests({"a": (frame, text), "b": (frame.convert_dtypes(), text.astype("category"))})


def test_columns_of_frames_are_known_by_their_names() -> None:
    """Frames whose columns have another order would be learned from as if age were dose."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frames = [pandas.DataFrame(rng.normal(size=(40, 2)), columns=["age", "dose"]) for _ in "ab"]
    y = np.arange(40) % 2
    shard = shard_of("kiel", (frames[0], y))
    assert shard.profile.column_names == ["age", "dose"]
    with pytest.raises(ShapeMismatch, match="another order"):
        attune.simulate({"kiel": (frames[0], y), "lund": (frames[1][["dose", "age"]], y)}, "fedavg", rounds=1)
    with pytest.raises(ShardError, match="columns in another order"):
        shard_of("kiel", (frames[0], y, frames[1][["dose", "age"]], y))
    assert shard_of("kiel", (pandas.DataFrame(rng.normal(size=(40, 2))), y)).profile.column_names == []


@pytest.mark.parametrize("names", [(1, "1"), (None,), (True,), ((1, 2),), (1.5,)])
def test_names_that_cannot_be(names: tuple[Any, ...]) -> None:
    with pytest.raises(SettingError, match="called"):
        digests({name: data() for name in names})


def test_whole_numbers_are_features_unless_tokens_are_declared(capsys: pytest.CaptureFixture[str]) -> None:
    floats = {k: data(seed=s, x_of=lambda x: (10 * x + 60).round()) for s, k in enumerate("ab")}
    integers = {k: (x.astype(int), y) for k, (x, y) in floats.items()}
    as_floats, as_integers = digests(floats), digests(integers)
    said = capsys.readouterr().err
    assert as_floats == as_integers
    assert said.count("taken as F features") == 1, "it is said once"
    result = attune.simulate(integers, "fedavg", rounds=1, progress=False, settings={**FEW, "data.kind": "tokens"})
    assert result._plan.model.kind == "tokens" and "features" not in capsys.readouterr().err
