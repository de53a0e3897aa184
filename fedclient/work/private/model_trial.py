"""Trial of a model before it trains with noise: whether it scores each sample by itself, and how gradients can be computed.

Samples and weights of the trial are drawn. So what it finds follows from the model alone: it tells nothing of a device's
samples, and a server cannot hide a difference behind the weights that it serves. What the trial cannot show is computed sample
by sample, and there no sample can influence another one.

B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from attune.common.errors import AttuneError, SettingError
from attune.common.models.body import training_mode
from attune.common.torch_state import random_state, seeded
from attune.fedclient.work.objectives.base import Batch, Loss, Network, Tensors
from attune.fedclient.work.private.unit_gradients import OtherRows, Split, by_sample, passed, single_gradients

ROWS = 6  # samples of the trial's first batch
SIZES = (10.0, 1.0, 0.1)  # of the numbers in a drawn sample
SEED = 0

# What belongs to each sample of a batch: the scores under "", and what enters and what drives each linear layer. (B, ...)
Rows: TypeAlias = dict[str, tuple[Tensor, ...]]

_splits: WeakKeyDictionary[Network, dict[tuple[str, ...], Split]] = WeakKeyDictionary()


def split_of(
    network: Network, loss: Loss, tensors: Tensors, beside: Tensors, moving: Sequence[str], like: Batch, rows: int = ROWS
) -> Split:
    """Find out by a trial how the gradients are computed; it is remembered for the network.

    Args:
        network: The network.
        loss: A sum over samples, by their weights.
        tensors: The model's tensors, of which the trial takes names, shapes and place.
        beside: What else the loss needs.
        moving: The tensors that are trained.
        like: Samples, of which the trial takes shapes, types and place.
        rows: Samples of a step on average.

    Raises:
        SettingError: The scores of a sample depend on more than the sample.
    """
    known = _splits.setdefault(network, {})
    if tuple(moving) not in known:
        drawn = _drawn_weights(network, tensors, moving)
        known[tuple(moving)] = _Trial(network, loss, drawn, beside, tuple(moving)).split(like, max(2 * ROWS, rows + 1))
    return known[tuple(moving)]


def drawn_batch(network: Network, tensors: Mapping[str, Tensor], like: Batch, rows: int, seed: int) -> Batch:
    """Return drawn samples and labels of the shapes and types of others: small and large ones, and some that end in zeros.

    Numbers of a model that looks indices up are at least 0 and below 1, which are indices of any table.
    """
    draws = torch.Generator().manual_seed(seed)
    shape = (rows, *like.x.shape[1:])
    if not like.x.is_floating_point():
        x = torch.randint(max(2, network.vocabulary), shape, generator=draws).to(like.x.dtype)
    elif any(isinstance(module, nn.Embedding) for module in network.model.modules()):
        x = torch.rand(shape, generator=draws).to(like.x.dtype)
    else:
        x = torch.randn(shape, generator=draws).to(like.x.dtype)
        for at, row in enumerate(x):
            row *= SIZES[(at + seed) % len(SIZES)]
    for at in range(1, rows, 2):
        if shape[1:] and shape[1] > 1:
            x[at, 1 + (at // 2 + seed) % (shape[1] - 1) :] = 0
    x = x.to(like.x.device)
    with torch.no_grad(), seeded(x.device, SEED, everything=True):
        classes = network(tensors, x).shape[-1]
    numbers = 2 if like.y.is_floating_point() else classes
    y = torch.randint(numbers, (rows, *like.y.shape[1:]), generator=draws).to(like.y)
    return Batch(x, y)


def _drawn_weights(network: Network, tensors: Tensors, moving: Sequence[str]) -> Tensors:
    """Return the model's first tensors, with those that move changed at random, and the others of `tensors`."""
    draws = torch.Generator().manual_seed(SEED)
    model = network.model
    first = {name: tensor.detach().to(tensors[name], copy=True)
             for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in tensors}  # fmt: skip
    drawn = {**tensors, **first}
    for name in moving:
        noise = torch.randn(tensors[name].shape, generator=draws, dtype=torch.float32)
        drawn[name] = drawn[name].detach() + 0.1 * noise.to(tensors[name])
    return drawn


@dataclass
class _Trial:
    """One model with drawn weights. Arguments are those of `split_of`."""

    network: Network
    loss: Loss
    tensors: Tensors
    beside: Tensors
    moving: tuple[str, ...]

    def split(self, like: Batch, rows: int) -> Split:
        """Return how the gradients are computed, and leave the modes of the model as they are."""
        was_training = {module: module.training for module in self.network.model.modules()}
        training_mode(self.network.model)
        try:
            return self._split(like, rows)
        except AttuneError:
            raise
        except Exception:  # whatever a user's code raises for samples that nobody has
            return by_sample(self.moving)
        finally:
            for module, training in was_training.items():
                module.training = training

    def _split(self, like: Batch, rows: int) -> Split:
        batch, other = (drawn_batch(self.network, self.tensors, like, ROWS, seed) for seed in (0, 1))
        many = _joined(batch, drawn_batch(self.network, self.tensors, like, rows - ROWS, 2))
        used, right = self._totals(batch)
        base = self._rows(batch, right)
        if not all(tensor.isfinite().all() for tensors in base.values() for tensor in tensors):
            return by_sample(used)  # such numbers hide differences
        paths = right
        for at in range(ROWS):
            others = [row for row in range(ROWS) if row != at]
            changed = self._rows(_replaced(batch, at, other), paths)
            paths = _alike_in(_at(base, others), _at(changed, others), self.network)
        others = list(range(1, rows))
        changed = self._rows(_replaced(many, 0, other), paths)
        paths = _alike_in(_at(self._rows(many, paths), others), _at(changed, others), self.network)
        paths = self._by_length(batch, paths)
        is_drawn = self._draws(batch.x)
        paths = self._by_place(batch, many, paths)
        covered = {f"{path}.{what}" for path in paths for what in ("weight", "bias")}
        rest = tuple(name for name in used if name not in covered)
        if rest and is_drawn:
            paths, rest = [], used  # one pass for all: two would drop other units
        self.network.model.eval()
        return Split(tuple(paths), rest, not rest or self._can_map(batch, rest))

    def _by_length(self, batch: Batch, paths: list[str]) -> list[str]:
        """Return the layers in which a long sample changes nothing for short ones, which are zero but for the beginning."""
        short, others = Batch(batch.x.clone(), batch.y), list(range(1, ROWS))
        short.x[:, 1:] = 0
        beside = self._rows(_replaced(short, 0, batch), paths)
        return _alike_in(_at(self._rows(short, paths), others), _at(beside, others), self.network)

    def _by_place(self, batch: Batch, many: Batch, paths: list[str]) -> list[str]:
        """Return the layers in which neither the place of a sample nor the size of its batch counts.

        Draws belong to places, so layers that drop units are switched off. No layer is left where a model draws in another way.
        """
        model = self.network.model
        for module in model.modules():
            module.training = module.training and not isinstance(module, _DropoutNd)
        if self._draws(batch.x):
            model.eval()
            paths = []
        if self._draws(batch.x):
            return paths
        base, order = self._rows(batch, paths), torch.arange(ROWS).roll(2).tolist()
        rows = _at(self._rows(many, paths), slice(ROWS))
        paths = _alike_in(base, rows, self.network)
        for places in (order, [0]):
            rows = self._rows(Batch(batch.x[places], batch.y[places]), paths)
            paths = _alike_in(_at(base, places), rows, self.network)
        return paths

    def _rows(self, batch: Batch, paths: Iterable[str]) -> Rows:
        """Return what belongs to each sample, of those of these layers that see one row for each sample."""
        with torch.no_grad(), self._seeded(batch):
            scores = self.network(self.tensors, batch.x)
        left = list(paths)
        while left:
            try:
                with self._seeded(batch):
                    layers, _ = passed(self.network, self.loss, self.tensors, self.beside, batch, left)
                return {"": (scores,), **layers}
            except OtherRows as error:
                left = [path for path in left if path not in error.paths]
        return {"": (scores,)}

    def _totals(self, batch: Batch) -> tuple[tuple[str, ...], list[str]]:
        """Return the moving tensors on which the loss depends, and the linear layers that have their whole gradient."""
        leaves = {name: tensor.detach().clone().requires_grad_(name in self.moving) for name, tensor in self.tensors.items()}
        with self._seeded(batch):
            value = self.loss(leaves, self.beside, batch) * len(batch.x)
        gradients = torch.autograd.grad(value, [leaves[name] for name in self.moving], allow_unused=True)
        totals = {name: total for name, total in zip(self.moving, gradients, strict=True) if total is not None}
        linear = [name for name, module in self.network.model.named_modules() if isinstance(module, nn.Linear)]
        rows, right = self._rows(batch, (path for path in linear if f"{path}.weight" in totals)), []
        for path in rows.keys() - {""}:
            a, delta = rows[path]
            sums = {f"{path}.weight": (delta.transpose(-1, -2) @ a).sum(dim=0), f"{path}.bias": delta.sum(dim=(0, 1))}
            if all(name not in totals or _alike(sums[name][None], totals[name][None]) for name in sums):
                right.append(path)
        return tuple(totals), [path for path in linear if path in right]

    def _can_map(self, batch: Batch, rest: tuple[str, ...]) -> bool:
        try:
            gradients, exact = (
                single_gradients(self.loss, self.tensors, self.beside, batch, Split((), rest, mapped))[0]
                for mapped in (True, False)
            )
        except Exception:
            return False  # torch.func has no rule for some layer, and says so in many ways: such samples go one by one
        return all(_alike(gradients[name], exact[name]) for name in rest)

    def _draws(self, x: Tensor) -> bool:
        """Return whether the model takes random numbers of torch in its present mode."""
        with torch.no_grad(), seeded(x.device, SEED, everything=True):
            before = random_state(x.device)
            self.network(self.tensors, x)
            return not torch.equal(before, random_state(x.device))

    def _seeded(self, batch: Batch) -> AbstractContextManager[None]:
        return seeded(batch.x.device, SEED, everything=True)


def _alike_in(wanted: Rows, rows: Rows, network: Network) -> list[str]:
    """Return the layers that have the same rows in both.

    Raises:
        SettingError: The scores are not the same.
    """
    if not all(_alike(one, other) for one, other in zip(wanted[""], rows[""], strict=True)):
        raise SettingError(
            f"the scores of a sample by the model {type(network.model).__name__} depend on the other samples of its batch, on "
            "its place among them, or on earlier batches: with privacy.unit each sample must be scored by itself; take another "
            "model"
        )
    return [path for path in wanted if path and path in rows and all(map(_alike, wanted[path], rows[path]))]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Compare (B, ...) row by row, by each row's largest number."""
    if one.shape != other.shape:
        return False
    one, other = one.reshape(len(one), -1), other.reshape(len(one), -1)
    close = (one - other).abs() <= 1e-5 + 1e-3 * other.abs().amax(dim=1, keepdim=True)
    return bool((close | (one == other) | (one.isnan() & other.isnan())).all())


def _at(rows: Rows, places: list[int] | slice) -> Rows:
    return {path: tuple(tensor[places] for tensor in tensors) for path, tensors in rows.items()}


def _joined(one: Batch, other: Batch) -> Batch:
    return Batch(torch.cat([one.x, other.x]), torch.cat([one.y, other.y]))


def _replaced(batch: Batch, at: int, other: Batch) -> Batch:
    """Return the batch with one sample of another one in the place of its own."""
    changed = Batch(batch.x.clone(), batch.y.clone())
    changed.x[at], changed.y[at] = other.x[at], other.y[at]
    return changed
