"""Models whose samples are not by themselves: refused, or clipped right, and never by what the device's samples are."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from attune.common.errors import SettingError
from attune.common.torch_state import seeded
from attune.fedclient.work.objectives.base import Batch, Network
from attune.fedclient.work.private.model_trial import split_of
from attune.fedclient.work.private.unit_gradients import Split, clipped_sum
from tests.fedclient.work.private.test_unit_gradients import mean_loss

CLIP = 1.0
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Two linear layers, between which a model of a test does something."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x), x))


class TrainCentre(Layers):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h - h.mean(0, keepdim=True) if self.training else h)


class TrainLargest(Layers):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h / h.abs().max() if self.training else h


class CentreWithDropout(Layers):
    """The module's own dropout is functional, so draws differ from pass to pass."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return dropout(h - h.mean(0) if self.training else h, 0.5, self.training)


class ManyCentred(Layers):
    """Centres large batches alone, as normalisation over parts of a batch does."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h - h.mean(0) if self.training and len(h) > 12 else h


class Trimmed(Layers):
    """Leaves out columns that are zero in each sample of a batch, as padding is."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h * (x != 0).any(dim=0).sum())


class ByPlace(Layers):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.arange(1, len(h) + 1, dtype=h.dtype)[:, None] if self.training else h


class ByCount(Layers):
    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return h / len(h) if self.training else h


class DroppedByCount(Layers):
    """Dropout by a layer, beside which a batch's size is in the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return self.drop(h / len(h) if self.training else h)


class Remembers(Layers):
    """Centres by a running mean that is no buffer."""

    mean: Tensor | float = 0.0

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return torch.tanh(h - self.mean)


class BackwardCentre(Layers):
    """Scores are each sample's own, and gradients are not."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h) + (h.mean(0) - h.mean(0).detach() if self.training else 0.0)


class Sorted(Layers):
    """Sorts the samples of a batch by a number of theirs, and back, as packed sequences do."""

    def key(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        order = torch.argsort(self.key(x), stable=True)
        return self.head(torch.tanh(self.body(x[order]))[torch.argsort(order)])


class SortedByLength(Sorted):
    def key(self, x: Tensor) -> Tensor:
        return (x != 0).sum(dim=1)


class Shuffled(Layers):
    """Shuffles the samples of a batch in training, and back."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x)) if self.training else torch.arange(len(x))
        return self.head(torch.tanh(self.body(x[order]))[torch.argsort(order)])


class SomeRows(Layers):
    """A layer that is called for some samples, and for more or fewer of them the larger a threshold is."""

    above = 0.0

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > self.above).flatten()
        h = x.new_zeros(len(x), 5)
        return self.head(h.index_put((rows,), torch.tanh(self.body(x[rows]))) if len(rows) else h)


class FewRows(SomeRows):
    above = 60.0


class MostRows(SomeRows):
    above = -60.0


class TokenLengths(nn.Module):
    """Sorts token sequences by their length: zeros fill them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(30, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.argsort((x != 0).sum(dim=1), stable=True)
        return self.head(torch.tanh(self.body(self.embed(x[order]).mean(dim=1)))[torch.argsort(order)])


class Clipped:
    """Clipped sums of a model in training mode."""

    def __init__(self, model: nn.Module, tokens: int = 0) -> None:
        torch.manual_seed(2)
        self.network = Network(model.double(), tokens)
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.moving, self.loss = tuple(self.tensors), mean_loss(self.network)

    def split(self, like: Batch, rows: int = 14) -> Split:
        return split_of(self.network, self.loss, self.tensors, {}, self.moving, like, rows)

    def sum(self, x: Tensor, y: Tensor, split: Split) -> Tensor:
        self.network.model.train()
        with seeded(CPU, 0, everything=True):
            sums, _ = clipped_sum(self.network, self.loss, self.tensors, {}, self.moving, Batch(x, y), CLIP, None, split)
        return torch.cat([sums[name].flatten() for name in self.moving])

    def moved(self, x: Tensor, y: Tensor, rows: Iterable[int] | None = None) -> float:
        """Return by how much one sample less moves the clipped sum at most."""
        split = self.split(Batch(x[:1], y[:1]))
        whole = self.sum(x, y, split)
        without = [[other for other in range(len(x)) if other != at] for at in (rows or range(len(x)))]
        return max(float((whole - self.sum(x[left], y[left], split)).norm()) for left in without)


def samples(count: int = 14, first_in_order: bool = False) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    x, y = 4 * torch.randn(count, 6, dtype=torch.float64, generator=draws), torch.randint(0, 4, (count,), generator=draws)
    if first_in_order:
        x[:, 0] = x[:, 0].sort().values
    return x, y


@pytest.mark.parametrize(
    "model",
    [TrainCentre, TrainLargest, CentreWithDropout, ManyCentred, Trimmed, ByPlace, ByCount, DroppedByCount, Remembers],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_couples_samples_in_training_is_refused(model: type[Layers], dtype: torch.dtype) -> None:
    x, y = samples()
    clipped = Clipped(model())
    clipped.network.model.to(dtype)
    clipped.tensors = {name: tensor.to(dtype) for name, tensor in clipped.tensors.items()}
    with pytest.raises(SettingError, match=f"{model.__name__} depend on the other samples of its batch"):
        clipped.split(Batch(x[:1].to(dtype), y[:1]))


@pytest.mark.parametrize("first_in_order", [False, True])
@pytest.mark.parametrize("model", [Layers, Sorted, SortedByLength, BackwardCentre, SomeRows, FewRows, MostRows])
def test_one_sample_moves_the_sum_by_the_clip_at_most_whatever_the_samples_are(
    model: type[Layers], first_in_order: bool
) -> None:
    x, y = samples(first_in_order=first_in_order)
    x[:4, 0], x[4:11, 2:] = torch.tensor([100.0, -100.0, 70.0, 50.0], dtype=x.dtype), 0.0
    for some in (slice(0, 14), slice(0, 2)):
        assert 0 < Clipped(model()).moved(x[some], y[some]) <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 6, 12])
def test_sequences_that_are_sorted_by_their_length_are_clipped_right(count: int) -> None:
    """The first sequences have one length: of them nothing would be learned."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randint(1, 30, (12, 8), generator=draws), torch.randint(0, 4, (12,), generator=draws)
    for at in range(4, 12):
        x[at, 1 + at % 7 :] = 0
    assert Clipped(TokenLengths(), 30).moved(x[:count], y[:count]) <= CLIP * (1 + 1e-9)


def test_a_model_that_shuffles_in_training_is_clipped_sample_by_sample() -> None:
    x, y = samples(1)
    assert Clipped(Shuffled()).split(Batch(x, y)).linear == ()


def test_dropout_by_a_function_is_allowed_and_clipped() -> None:
    class Dropping(Layers):
        def between(self, h: Tensor, x: Tensor) -> Tensor:
            return dropout(torch.tanh(h), 0.5, self.training)

    x, y = samples()
    clipped = Clipped(Dropping())
    split = clipped.split(Batch(x[:1], y[:1]))
    assert set(split.rest) == set(clipped.moving) and split.mapped
    assert clipped.sum(x[:1], y[:1], split).norm() <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("model", [Layers, Sorted, SomeRows])
def test_how_a_run_is_private_follows_from_no_sample(model: type[Layers]) -> None:
    """Neither the samples nor how many of them there are, but only their shape."""
    x, y = samples()
    splits = {
        Clipped(model()).split(Batch(some, y[: len(some)]))
        for some in (x, x[:1], torch.zeros_like(x), torch.full_like(x, 1e300), x.sort(dim=0).values)
    }
    assert len(splits) == 1


def test_the_trial_leaves_the_models_own_tensors_as_they_are() -> None:
    class Counting(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("batches", torch.zeros(()))

        def between(self, h: Tensor, x: Tensor) -> Tensor:
            self.batches += 1
            return torch.tanh(h)

    x, y = samples()
    clipped = Clipped(model := Counting())
    clipped.tensors["batches"] = torch.zeros((), dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clipped.split(Batch(x[:1], y[:1]))
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert clipped.tensors["batches"] == 0


def test_a_step_in_which_a_layer_sees_some_samples_only_has_their_own_gradients() -> None:
    """The trial cannot know of every threshold: the rows are counted at each step."""
    x, y = samples()
    clipped = Clipped(MostRows())
    split = clipped.split(Batch(x[:1], y[:1]))
    assert split.linear == ("body", "head")
    x[3, 0], x[5, 0] = 100.0, -100.0
    alone = sum(clipped.sum(x[at : at + 1], y[at : at + 1], Split((), clipped.moving, mapped=False)) for at in range(len(x)))
    assert torch.allclose(clipped.sum(x, y, split), torch.as_tensor(alone), rtol=1e-9, atol=1e-12)


def test_a_model_without_gradients_for_a_sample_fails_no_step() -> None:
    x, y = samples(3)
    clipped = Clipped(FewRows())
    clipped.moving = ("body.weight", "body.bias")
    x[1, 0] = 100.0
    assert 0 < clipped.moved(x, y, [1]) <= CLIP * (1 + 1e-9)
