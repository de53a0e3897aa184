"""The scores of many devices' models on samples of each device's own, at once.

D devices, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from attune.fedclient.work.stacked.descend import STACK_BYTES, stacked
from attune.fedclient.work.trainer import EVALUATION_BATCH, Scores

ROWS = 16  # samples of a device at a time, at least, so that few steps are for few samples
AT_ONCE = 16 * EVALUATION_BATCH  # samples of all devices at a time, at most


def score(jobs: Sequence[Scores]) -> list[list[tuple[int, Tensor]] | Exception]:
    """What each of like jobs comes to, in their order, in one piece: [(0, logits (N, ...))]. Each has a sample."""
    each = sum(tensor.nbytes for tensor in jobs[0].prepared.values())
    most = max(1, STACK_BYTES // max(1, each))
    order = sorted(range(len(jobs)), key=lambda at: -jobs[at].x.shape[0])
    found: dict[int, Tensor] = {}
    for first in range(0, len(order), most):
        some = order[first : first + most]
        found |= zip(some, _score([jobs[at] for at in some]), strict=True)
    return [[(0, found[at])] for at in range(len(jobs))]


def _score(jobs: Sequence[Scores]) -> list[Tensor]:
    """Those with the most samples first. All take the same number of rows at a time; who has none left is left out."""
    trainer, sizes = jobs[0].trainer, [job.x.shape[0] for job in jobs]
    tensors = {name: tensor.to(trainer.device) for name, tensor in stacked([job.prepared for job in jobs]).items()}
    pieces: list[list[Tensor]] = [[] for _ in jobs]
    trainer.network.model.eval()
    at = 0
    with torch.no_grad():
        while at < sizes[0]:
            k = sum(size > at for size in sizes)
            rows = max(1, min(AT_ONCE // k, max(ROWS, sizes[k // 2] - at), sizes[0] - at))
            x = _rows([job.x for job in jobs[:k]], sizes, at, rows).to(trainer.device)
            logits = vmap(lambda own, some_x: trainer.predictor.logits(trainer.network, own, some_x))(
                {name: tensor[:k] for name, tensor in tensors.items()}, x
            )
            for piece, scored, size in zip(pieces, logits, sizes, strict=False):
                piece.append(scored[: size - at])
            at += rows
    return [torch.cat(piece) if len(piece) > 1 else piece[0] for piece in pieces]


def _rows(each: Sequence[Tensor], sizes: Sequence[int], at: int, rows: int) -> Tensor:
    """(k, rows, ...): of each tensor so many samples from `at` on; its first one stands behind them where it has fewer."""
    found = each[0].new_empty((len(each), rows, *each[0].shape[1:]))
    for place, x, size in zip(found.unbind(), each, sizes, strict=False):
        if size >= at + rows:
            place.copy_(x[at : at + rows])
        else:
            place[: size - at] = x[at:]
            place[size - at :] = x[0]
    return found
