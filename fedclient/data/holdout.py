"""Choice of the samples that a device holds out of training, to choose between models or to test them.

A table's rows for testing are chosen such that a row stays held out when other rows come or go. In folds of the training
samples each is predicted by models that were fitted without it.

N samples, G groups, C classes. Samples that overlap, such as windows of one recording, must not lie on both sides: the model
would have been trained on parts of the samples that are held out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attune.common.plan import Kind, Plan
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array
from attune.fedclient.light_blobs import as_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from attune.fedclient.data.prepare import Prepared

FEWEST_SAMPLES = 20  # training samples. With fewer, a choice between models would be noise, and training needs every sample
LONG_RUN = 4  # classes come in long runs if this many samples of one class follow each other, on average
NEIGHBOURS: frozenset[Kind] = frozenset({"series", "tokens"})  # kinds whose samples are usually windows, in the order of time

FOLDS = 5
FEWEST = 5  # samples, or groups; with fewer, folds would say nothing
MOST_SAMPLES = 5_000  # in all folds; of more samples some are in none

Indices = npt.NDArray[np.intp]
Folds = npt.NDArray[np.intp]  # of each sample, (N,), from 0 on; -1: in none


def strata(y: Array, task: TaskName) -> Array:
    """Return the labels whose proportions `hold_out` keeps: the classes, or zeros, (N,), in tasks without classes.

    With labels for pixels, (N, H, W), it is whether an image shows more than background, the first label.
    """
    if y.ndim > 2 and task == "classes":
        return np.asarray((y != np.unique(y)[:1]).any(axis=(1, 2)), dtype=np.int64)
    return y if task == "classes" else np.zeros(len(y), dtype=np.int64)


def hold_out(labels: Array, share: float, seed: int, kind: Kind, groups: Array | None = None) -> tuple[Indices, Indices]:
    """Return the indices to train on and the indices held out, both ascending.

    About the same share of every class is held out. With groups, whole groups are held out. Without groups, the last samples
    are held out if samples of this kind usually overlap, and random samples otherwise.

    Args:
        labels: Shape (N,), or (N, T), of which the last position counts.
        share: Share of the samples to hold out. With fewer than FEWEST_SAMPLES samples none is held out.
        seed: Seed of the random choice.
        kind: Kind of the samples.
        groups: Group of each sample, (N,).
    """
    count = round(share * len(labels)) if len(labels) >= FEWEST_SAMPLES else 0
    if groups is not None:
        held = by_group(labels, groups, count, seed)
    elif kind in NEIGHBOURS:
        held = last(labels, count)
    else:
        held = at_random(labels, count, seed)
    return np.flatnonzero(~held), np.flatnonzero(held)


def at_random(labels: Array, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask, (N,), of `count` random samples that are spread evenly over the classes."""
    held = np.zeros(len(labels), dtype=bool)
    if count:
        shuffled = np.random.default_rng(seed).permutation(len(labels))
        by_class = shuffled[np.argsort(_classes(labels)[shuffled], kind="stable")]
        held[by_class[(np.arange(count) * 2 + 1) * len(labels) // (2 * count)]] = True
    return held


def last(labels: Array, count: int) -> npt.NDArray[np.bool_]:
    """Return a mask, (N,), of the last samples.

    These are the last samples of each class if classes come in long runs, as in a recording of activities; otherwise the last
    samples of all. Either way, only samples at the ends of a held-out run have a neighbour that is trained on.
    """
    if labels.ndim > 1 or not in_long_runs(labels):
        return np.arange(len(labels)) >= len(labels) - count
    held = np.zeros(len(labels), dtype=bool)
    for label, size in zip(*np.unique(labels, return_counts=True), strict=True):
        held[np.flatnonzero(labels == label)[size - round(count * size / len(labels)) :]] = True
    return held


def in_long_runs(labels: Array) -> bool:
    """Return whether classes (N,) come in long runs, as in a recording of activities."""
    return int(np.count_nonzero(labels[1:] != labels[:-1]) + 1) * LONG_RUN <= len(labels)


def by_group(labels: Array, groups: Array, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask, (N,), of whole groups with at least `count` samples together, if such groups exist.

    Groups are taken one by one: each time the one that brings the held-out classes nearest to their share. Ties are broken by
    a random order. A group is not taken if training would keep less than half of the samples, or none of some class.
    """
    held = np.zeros(len(labels), dtype=bool)
    names, group_N = np.unique(groups, return_inverse=True)
    class_N = np.unique(_classes(labels), return_inverse=True)[1]
    sizes_GC = np.zeros((len(names), class_N.max(initial=0) + 1))
    np.add.at(sizes_GC, (group_N, class_N), 1)
    kept_C = sizes_GC.sum(axis=0)
    missing_C = kept_C * count / max(1, len(labels))
    left = np.random.default_rng(seed).permutation(len(names)).tolist()
    while held.sum() < count:
        left = [group for group in left if held.sum() + sizes_GC[group].sum() <= len(labels) / 2]
        left = [group for group in left if not ((sizes_GC[group] > 0) & (sizes_GC[group] == kept_C)).any()]
        if not left:
            break
        chosen = min(left, key=lambda group: float(np.square(missing_C - sizes_GC[group]).sum()))
        left.remove(chosen)
        missing_C, kept_C = missing_C - sizes_GC[chosen], kept_C - sizes_GC[chosen]
        held[group_N == chosen] = True
    return held


def _classes(labels: Array) -> Array:
    """Return the class of each sample, (N,). With labels for positions this is the label of the last position."""
    return labels.reshape(len(labels), -1)[:, -1] if len(labels) else np.zeros(0, dtype=np.int64)


_SIZE = 8  # bytes of a hash
_QUARTER = 1 << (8 * _SIZE - 2)


@dataclass(frozen=True)
class Hashed:
    """Hashes of a table's rows, (N,), and those that were held out before."""

    rows: list[str]
    held_before: Collection[str]


def row_hashes(x: Array, y: Array, seed: int, groups: Array | None = None, keys: Array | None = None) -> list[str]:
    """Return a keyed hash of each row, (N,): of its group, else of its key, else of its content.

    Args:
        x: Features, (N, F) float32; missing values are NaN.
        y: Labels or targets, (N,) or (N, K).
        seed: Key of the hash.
        groups: Group of each sample, (N,).
        keys: Keys that tell rows apart, (N,).
    """
    names = groups if groups is not None else keys
    if names is not None:
        contents = [str(name).encode() for name in names.tolist()]
    else:
        plain = np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0))  # one NaN, and no -0
        contents = [row.tobytes() + repr(label).encode() for row, label in zip(plain, y.tolist(), strict=True)]
    key = f"held out {seed}".encode()
    return [blake2b(content, digest_size=_SIZE, key=key).hexdigest() for content in contents]


def held_out(hashes: list[str], stored: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return which rows are for testing, (N,): those whose hash lies below a quarter of all, and those that were before.

    If that is no row, the rows with the lowest hash are held out; if that is every row, those with the highest are trained on.
    Neither happens if all rows have one hash.
    """
    places = np.array([int(value, 16) for value in hashes], dtype=np.uint64)
    held = (places < _QUARTER) | np.isin(hashes, list(stored))
    if len(set(hashes)) < 2:
        return np.zeros(len(hashes), dtype=bool)
    if not held.any():
        lowest = places == places.min()
        return lowest if 2 * lowest.sum() <= len(hashes) else held
    return places != places.max() if held.all() else held


def folds_of(label_N: Array, kind: Kind, group_N: Array | None, first: npt.NDArray[np.intp]) -> Folds | None:
    """Return the fold of each sample, (N,): whole groups, blocks of neighbours, or at random; evenly over the classes.

    Args:
        label_N: Classes, (N,); zeros in tasks without classes.
        kind: Kind of the samples. Neighbours in a series usually overlap, so blocks of them lie in one fold.
        group_N: Group of each sample, (N,). None: without groups.
        first: Samples that are in a fold before others.

    Returns:
        None for fewer than FEWEST samples or groups: then nothing is known out of fold.
    """
    if len(label_N) > MOST_SAMPLES:
        others = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(len(label_N)), first))
        some = np.sort(np.concatenate([first, others])[:MOST_SAMPLES])
        fold_N = np.full(len(label_N), -1, dtype=np.intp)
        among = _all_folds(label_N[some], kind, None if group_N is None else group_N[some])
        fold_N[some] = -1 if among is None else among
        return fold_N
    return _all_folds(label_N, kind, group_N)


def fold_of(data: Prepared, plan: Plan) -> Tensor | None:
    """Return the fold of each sample that networks train on, (N,), as `folds_of`; None for too few."""
    places, number = data.places[: len(data.train_x)], len(data.train_x)
    labels = data.train_y.cpu().numpy() if plan.task == "classes" else np.zeros(number)
    groups = None if data.groups is None else data.groups[places]
    folds = folds_of(labels, plan.model.kind, groups, np.zeros(0, dtype=np.intp))
    return None if folds is None else as_tensor(folds)


def _all_folds(label_N: Array, kind: Kind, group_N: Array | None) -> Folds | None:
    """Return the fold of each of at most MOST_SAMPLES samples."""
    if group_N is not None:
        return _of_groups(label_N, group_N)
    if len(label_N) < FEWEST:
        return None
    if kind not in NEIGHBOURS:
        return _dealt(label_N, np.random.default_rng(0).permutation(len(label_N)))
    if not in_long_runs(label_N):
        return np.arange(len(label_N)) * FOLDS // len(label_N)
    fold_N = np.empty(len(label_N), dtype=np.intp)
    for label in np.unique(label_N):
        places = np.flatnonzero(label_N == label)
        fold_N[places] = np.arange(len(places)) * FOLDS // len(places)
    return fold_N


def _dealt(label_N: Array, order_N: npt.NDArray[np.intp]) -> Folds:
    """Deal samples in this order to the folds in turn, class by class."""
    by_class = order_N[np.argsort(label_N[order_N], kind="stable")]
    fold_N = np.empty(len(label_N), dtype=np.intp)
    fold_N[by_class] = np.arange(len(label_N)) % FOLDS
    return fold_N


def _of_groups(label_N: Array, group_N: Array) -> Folds | None:
    """Return folds of whole groups: large groups first, each into the fold that has the fewest samples of its classes.

    Of folds that are equal in this it goes into the smallest one, so none stays empty.
    """
    names, place_N = np.unique(group_N, return_inverse=True)
    if len(names) < FEWEST:
        return None
    class_N = np.unique(label_N, return_inverse=True)[1]
    size_GC = np.zeros((len(names), class_N.max() + 1))
    np.add.at(size_GC, (place_N, class_N), 1)
    held_FC, fold_G = np.zeros((FOLDS, size_GC.shape[1])), np.empty(len(names), dtype=np.intp)
    for group in np.argsort(-size_GC.sum(axis=1), kind="stable"):
        more_F = np.square(held_FC + size_GC[group]).sum(axis=1) - np.square(held_FC).sum(axis=1)
        fold_G[group] = np.lexsort((held_FC.sum(axis=1), more_F))[0]
        held_FC[fold_G[group]] += size_GC[group]
    return np.asarray(fold_G[place_N])
