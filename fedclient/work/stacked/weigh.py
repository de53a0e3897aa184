"""The weights of many devices' blends at once: `weights_of`, with the samples of each device padded.

D devices, K models, V validation samples, T labels of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from attune.common.metrics import Choice
from attune.fedclient.work.blend import ITERATIONS, Weighing, pseudo_counts
from attune.fedclient.work.calibration import FLOOR


def weigh(jobs: Sequence[Weighing]) -> list[dict[Choice, float]]:
    """What each of like jobs comes to, in their order. What is padded is explained by every model alike, and not counted."""
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


def _counts(job: Weighing) -> torch.Tensor:
    """(V,): how much each sample counts."""
    if job.weight is not None:
        return job.weight
    return torch.ones(len(next(iter(job.probability.values()))), dtype=torch.float64)


def _table(job: Weighing) -> torch.Tensor:
    """(V, K, T)."""
    each = [p.double().reshape(len(p), -1).clamp_min(FLOOR) for p in job.probability.values()]
    return torch.stack(each, dim=1)
