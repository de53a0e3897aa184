"""Task of one's own for tests: where two points lie in an image, with its network and its measure."""

from math import prod

import torch
from torch import Tensor, nn

from attune.common.plan import ModelSpec

POINTS = 2


def points(spec: ModelSpec) -> nn.Module:
    """Return a network that gives places (B, POINTS, 2), whatever the number of classes is."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(prod(spec.shape), 16), nn.ReLU())
    return nn.Sequential(body, nn.Linear(16, 2 * POINTS), nn.Unflatten(1, (POINTS, 2)))


class Measure:
    """Distance of points, without a likelihood."""

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return (scores - y).square().sum(dim=(1, 2))

    def predict(self, scores: Tensor) -> Tensor:
        return scores.clamp(0, 1)

    def score(self, answers: Tensor, y: Tensor) -> Tensor:
        return 1 - (answers - y).norm(dim=2).mean(dim=1)


class LikelyMeasure(Measure):
    """The same with Gaussian noise about each point."""

    def likelihood(self, scores: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-self.loss(scores, y) / 0.02)
