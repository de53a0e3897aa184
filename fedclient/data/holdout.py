"""Which samples a device holds out of training, to choose between models or to test them.

N samples, G groups, C classes. Samples that overlap, such as windows of one recording, must not lie on both sides: what is held
out would have been trained on in part.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.plan import Kind
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array

FEWEST = 20  # with fewer training samples a choice would be noise, and each sample is needed
LONG_RUN = 4  # samples of one class in a row, on average
NEIGHBOURS: frozenset[Kind] = frozenset({"series", "tokens"})  # kinds whose samples are usually windows, in the order of time

Indices = npt.NDArray[np.intp]


def strata(y: Array, task: TaskName) -> Array:
    """What `hold_out` keeps in proportion: classes; in other tasks there are none, and all samples are alike."""
    return y if task == "classes" else np.zeros(len(y), dtype=np.int64)


def hold_out(labels: Array, share: float, seed: int, kind: Kind, groups: Array | None = None) -> tuple[Indices, Indices]:
    """(indices to train on, indices held out), each ascending; nothing is held out of fewer than FEWEST samples.

    labels: (N,), or (N, T) of which the last position counts. groups: (N,); whole groups are held out. Without groups the last
    samples are held out of kinds whose samples overlap, and of others random ones; of every class about the same share.
    """
    count = round(share * len(labels)) if len(labels) >= FEWEST else 0
    if groups is not None:
        held = by_group(labels, groups, count, seed)
    elif kind in NEIGHBOURS:
        held = last(labels, count)
    else:
        held = at_random(labels, count, seed)
    return np.flatnonzero(~held), np.flatnonzero(held)


def at_random(labels: Array, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """(N,): evenly spread over the classes."""
    held = np.zeros(len(labels), dtype=bool)
    if count:
        shuffled = np.random.default_rng(seed).permutation(len(labels))
        by_class = shuffled[np.argsort(_classes(labels)[shuffled], kind="stable")]
        held[by_class[(np.arange(count) * 2 + 1) * len(labels) // (2 * count)]] = True
    return held


def last(labels: Array, count: int) -> npt.NDArray[np.bool_]:
    """(N,): the last of each class, where classes come in long runs (a recording of activities); else the last of all.

    Few held-out samples then have a neighbour on the other side: those where a held-out run begins or ends.
    """
    if labels.ndim > 1 or (np.count_nonzero(labels[1:] != labels[:-1]) + 1) * LONG_RUN > len(labels):
        return np.arange(len(labels)) >= len(labels) - count
    held = np.zeros(len(labels), dtype=bool)
    for label, size in zip(*np.unique(labels, return_counts=True), strict=True):
        held[np.flatnonzero(labels == label)[size - round(count * size / len(labels)) :]] = True
    return held


def by_group(labels: Array, groups: Array, count: int, seed: int) -> npt.NDArray[np.bool_]:
    """(N,): whole groups, until at least `count` samples are held out; none that would leave less than half for training, or a
    class without any: a device cannot learn what it does not train on.

    Each time the group that brings the classes nearest to their share; of equally good ones the first of a random order.
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
    """(N,): the class of each sample, of labels for positions that of the last one."""
    return labels.reshape(len(labels), -1)[:, -1] if len(labels) else np.zeros(0, dtype=np.int64)
