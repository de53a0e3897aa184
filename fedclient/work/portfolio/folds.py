"""Folds of a device's training samples, in which each sample is predicted by models that were fitted without it.

N samples, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attune.common.plan import Kind, Plan
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.holdout import NEIGHBOURS, in_long_runs
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.light_blobs import as_tensor

if TYPE_CHECKING:
    from torch import Tensor

FOLDS = 5
FEWEST = 5  # samples, or groups; with fewer, folds would say nothing
MOST_SAMPLES = 5_000  # in all folds; of more samples some are in none

Folds = npt.NDArray[np.intp]  # of each sample, (N,), from 0 on; -1: in none


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
