"""Scores and accuracies of many devices' models on each device's own samples, and many devices' blends, at once.

D devices, N samples, K models, V validation samples, T labels of a sample.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from attune.fedclient.work.blend import ITERATIONS, Weighing, pseudo_counts
from attune.fedclient.work.calibration import FLOOR
from attune.fedclient.work.comparison import LOWEST
from attune.fedclient.work.stacked.descend import first_devices, in_stacks, stacked
from attune.fedclient.work.trainer import EVALUATION_BATCH, Accuracy, Scores

ROWS = 16  # fewest samples of a device at a time, so that small devices need few steps
AT_ONCE = 16 * EVALUATION_BATCH  # most samples of all devices at a time
CHEAP_BYTES = 8 << 20  # of weights times samples: padding that costs less than one more call of torch
KEPT_BYTES = 64 << 20  # of padded samples that are kept for the next evaluation


def score(jobs: Sequence[Scores], padded: PaddedSamples) -> list[list[tuple[int, Tensor]] | Exception]:
    """Return the result of each of similar jobs, in order, in one piece: [(0, logits (N, ...))]. Each has a sample."""
    device_bytes = sum(tensor.nbytes for tensor in jobs[0].prepared.values())
    scored = in_stacks(jobs, device_bytes, lambda job: job.x.shape[0], lambda some: _score(some, padded))
    return [[(0, logits)] for logits in scored]


def rate(jobs: Sequence[Accuracy], padded: PaddedSamples) -> list[float]:
    """Return the result of each of similar jobs, in order. Each has a sample."""
    device_bytes = sum(tensor.nbytes for tensor in jobs[0].prepared.values())
    return in_stacks(jobs, device_bytes, lambda job: job.x.shape[0], lambda some: _rate(some, padded))


def _score(jobs: Sequence[Scores], padded: PaddedSamples) -> list[Tensor]:
    """Score the jobs, those with the most samples first."""
    pieces: list[list[Tensor]] = [[] for _ in jobs]
    for at, logits in _passes(jobs, padded):
        for piece, scored, job in zip(pieces, logits.unbind(), jobs, strict=False):
            piece.append(scored[: job.x.shape[0] - at])
    return [torch.cat(piece) if len(piece) > 1 else piece[0] for piece in pieces]


def _rate(jobs: Sequence[Accuracy], padded: PaddedSamples) -> list[float]:
    """Return the mean score of each job, those with the most samples first."""
    measure, sizes = jobs[0].trainer.measure, [job.y.shape[0] for job in jobs]
    size_D = torch.tensor(sizes)
    total_D, labels = torch.zeros(len(jobs), dtype=torch.float64), 1
    for at, logits in _passes(jobs, padded):
        k, rows = logits.shape[:2]
        y = padded.rows([job.y for job in jobs[:k]], sizes, at, rows).to(logits.device)
        scores, y = logits.flatten(0, 1), y.flatten(0, 1)
        measure.check(scores, y)
        right_DBT = measure.right(measure.of_scores(scores), y).double().cpu().reshape(k, rows, -1)
        real_DB = at + torch.arange(rows) < size_D[:k, None]
        total_D[:k] += (right_DBT.sum(dim=2) * real_DB).sum(dim=1)
        labels = right_DBT.shape[2]
    return [max(LOWEST, mean) for mean in (total_D / (size_D * labels)).tolist()]


def _passes(jobs: Sequence[Scores | Accuracy], padded: PaddedSamples) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first row, logits (k, rows, ...)) of the k first devices, which have such rows.

    Devices with the most samples come first. All take equally many rows at a time.
    """
    trainer, sizes = jobs[0].trainer, [job.x.shape[0] for job in jobs]
    tensors = {name: tensor.to(trainer.device) for name, tensor in stacked([job.prepared for job in jobs]).items()}
    weights = sum(tensor.nbytes for tensor in jobs[0].prepared.values())
    trainer.network.model.eval()
    at = 0
    with torch.no_grad():
        while at < sizes[0]:
            k = sum(size > at for size in sizes)
            fewest = max(ROWS, CHEAP_BYTES // max(1, k * weights))
            rows = max(1, min(AT_ONCE // k, max(fewest, sizes[k // 2] - at), sizes[0] - at))
            x = padded.rows([job.x for job in jobs[:k]], sizes, at, rows).to(trainer.device)
            yield at, vmap(partial(trainer.predictor.logits, trainer.network))(first_devices(tensors, k), x)
            at += rows


class PaddedSamples:
    """Padded samples of the last evaluations, KEPT_BYTES at most.

    A device is scored on the same tensors before and after training, and in every round. Nothing writes into them.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[list[ref[Tensor]], Tensor]] = {}  # what was made last at the end
        self._bytes = 0

    def rows(self, samples: Sequence[Tensor], sizes: Sequence[int], at: int, rows: int) -> Tensor:
        """Return (k, rows, ...): so many samples from `at` on of each tensor. Its first sample fills up the rest."""
        key = (at, rows, *map(id, samples))
        entry = self._kept.get(key)
        if entry is not None and False not in [kept() is tensor for kept, tensor in zip(entry[0], samples, strict=True)]:
            return entry[1]
        made = _rows(samples, sizes, at, rows)
        self._bytes += made.nbytes - (entry[1].nbytes if entry else 0)  # an id may be that of a tensor that is gone
        self._kept[key] = ([ref(tensor) for tensor in samples], made)
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.pop(next(iter(self._kept)))[1].nbytes
        return made


def _rows(samples: Sequence[Tensor], sizes: Sequence[int], at: int, rows: int) -> Tensor:
    """Return (k, rows, ...): so many samples from `at` on of each tensor. Its first sample fills up the rest."""
    padded = samples[0].new_empty((len(samples), rows, *samples[0].shape[1:]))
    for place, x, size in zip(padded.unbind(), samples, sizes, strict=False):
        if size >= at + rows:
            place.copy_(x[at : at + rows])
        else:
            place[: size - at] = x[at:]
            place[size - at :] = x[0]
    return padded


def weigh(jobs: Sequence[Weighing]) -> list[dict[str, float]]:
    """Return the weights of each of like jobs, as `weights_of`, in their order.

    Padding is explained by every model alike, and not counted.
    """
    names = list(jobs[0].probability)
    p_DVKT = pad_sequence([_table(job) for job in jobs], batch_first=True, padding_value=1.0)
    real_DV = pad_sequence([_counts(job) for job in jobs], batch_first=True)
    before_DK = torch.tensor([pseudo_counts(names, job.prior) for job in jobs], dtype=torch.float64)
    w_DK = torch.full((len(jobs), len(names)), 1.0 / len(names), dtype=torch.float64)
    for _ in range(ITERATIONS):
        share_DVKT = w_DK[:, None, :, None] * p_DVKT
        share_DVK = (share_DVKT / share_DVKT.sum(dim=2, keepdim=True)).mean(dim=3)
        count_DK = torch.einsum("dvk,dv->dk", share_DVK, real_DV) + before_DK
        w_DK = count_DK / count_DK.sum(dim=1, keepdim=True)
    return [dict(zip(names, w_K, strict=True)) for w_K in w_DK.tolist()]


def _counts(job: Weighing) -> Tensor:
    """Return how much each sample counts, (V,)."""
    if job.weight is not None:
        return job.weight
    return torch.ones(len(next(iter(job.probability.values()))), dtype=torch.float64)


def _table(job: Weighing) -> Tensor:
    """Return the probabilities of the right labels, (V, K, T)."""
    return torch.stack([p.double().reshape(len(p), -1).clamp_min(FLOOR) for p in job.probability.values()], dim=1)
