"""k nearest neighbours among the device's own training samples, interpolated with the model (FedTP + KNN).

N samples of the memory, Q queries, K neighbours, D features, C classes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from attune.common.methods.settings.objectives import KnnSettings
from attune.fedclient.work.objectives.base import LocalTask, Network, Tensors, split
from attune.fedclient.work.orders import FEATURES
from attune.fedclient.work.predictors.base import BATCH, LABELS, Predictor, remember

TINY = 1e-30  # probability of a class that neither the neighbours nor the model expect


class Knn(Predictor[KnnSettings]):
    """p = w * p_neighbours + (1 - w) * softmax of the model, p_neighbours proportional to exp(-d^2 / D) over the k nearest.

    Marfoq et al., ICML 2022, as FedTP takes it. Features are what enters the head; where every position has a label, each
    position is a sample. The memory is on the device alone, beside the tensors that it predicts with.
    """

    by_itself = "each device looks for neighbours among its own training samples"

    def prepare(self, task: LocalTask) -> Tensors:
        """Return the model's tensors with features (N, D) float32 and labels (N,) of `capacity` of the training samples."""
        model, _ = split(task.start)
        order = torch.randperm(len(task.x), generator=torch.Generator().manual_seed(task.seeds("memory")))
        memory = remember(task, model, order[: max(1, round(self._settings.capacity * len(order)))].sort().values)
        return model | {FEATURES: memory[0], LABELS: memory[1]} if memory else model

    def logits(self, network: Network, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Log probabilities; the model's own logits where there was no sample to remember."""
        logits, features = network.with_features(tensors, x)
        if FEATURES not in tensors:
            return logits
        classes = logits.shape[-1]
        votes_QC = votes(
            tensors[FEATURES], tensors[LABELS], features.flatten(end_dim=-2).float(), self._settings.neighbours, classes
        )
        weight = self._settings.knn_weight
        mixed_QC = weight * votes_QC + (1 - weight) * logits.float().softmax(dim=-1).view(-1, classes)
        return mixed_QC.clamp(min=TINY).log().view(logits.shape)


def votes(
    memory_ND: torch.Tensor, labels_N: torch.Tensor, queries_QD: torch.Tensor, neighbours: int, classes: int
) -> torch.Tensor:
    """Return votes (Q, C) with rows that sum to one: similarities exp(-d^2 / D) of the nearest, added up by label."""
    index_QK = nearest(memory_ND, queries_QD, min(neighbours, len(memory_ND)))
    square_QK = (memory_ND[index_QK] - queries_QD[:, None]).square().sum(dim=-1)
    similar_QK = (-square_QK / memory_ND.shape[1]).softmax(dim=1)  # as a softmax, the same ratios without underflow
    votes_QC = torch.zeros(len(queries_QD), classes, device=queries_QD.device)
    return votes_QC.scatter_add_(1, labels_N[index_QK], similar_QK)


def nearest(memory_ND: torch.Tensor, queries_QD: torch.Tensor, k: int) -> torch.Tensor:
    """Return which rows of the memory are nearest by Euclidean distance, (Q, k); exact, by faiss on a CPU that has it."""
    faiss = library()
    if faiss is not None and memory_ND.device.type == "cpu":
        return nearest_faiss(faiss, memory_ND, queries_QD, k)
    return nearest_torch(memory_ND, queries_QD, k)


def nearest_torch(memory_ND: torch.Tensor, queries_QD: torch.Tensor, k: int) -> torch.Tensor:
    """Find the nearest rows by all distances, BATCH queries at a time."""
    pieces = [
        torch.cdist(some_QD, memory_ND, compute_mode="donot_use_mm_for_euclid_dist").topk(k, dim=1, largest=False).indices
        for some_QD in torch.split(queries_QD, BATCH)
    ]
    return torch.cat(pieces)


def nearest_faiss(faiss: Any, memory_ND: torch.Tensor, queries_QD: torch.Tensor, k: int) -> torch.Tensor:
    """Find the nearest rows by a flat index, with torch's number of threads.

    Distances are taken about the mean, so that rounding does not lose small ones.
    """
    faiss.omp_set_num_threads(torch.get_num_threads())
    centre_D = memory_ND.mean(dim=0)
    index = faiss.IndexFlatL2(memory_ND.shape[1])
    index.add((memory_ND - centre_D).numpy())
    _, index_QK = index.search((queries_QD - centre_D).numpy(), k)
    return torch.from_numpy(index_QK)


@cache
def library() -> Any | None:
    """Return faiss if it is installed (the extra `knn`), else None."""
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None
