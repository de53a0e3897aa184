"""The dial: for each component of an attended part the mean, the attended or the device's own value, by held-out likelihood.

MCSA lies between the mean (sigma 0) and each device alone (sigma large) with one sigma for all. Here each device chooses for
each component: attended is the method's model as it would be without a dial, mean the common one, own what was trained here
alone (the local baseline; without one what the device trained last). V held-out samples, T labels of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attune.common.methods.settings.aggregators import AttentionSettings
from attune.fedclient.work.calibration import log_likelihood
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.base import Tensors

Position = Literal["attended", "mean", "own"]
Positions = Mapping[str, Position]  # of each component
SWEEPS = 3  # over all components at most; most searches end with the second, which changes nothing


@dataclass(frozen=True)
class Dialled:
    """Values that a dial has chosen for a part.

    Attributes:
        tensors: The tensors of the part.
        positions: Which value each component has.
    """

    tensors: Tensors
    positions: Positions

    def share(self, position: Position) -> float:
        """Return the share of components in this position."""
        return sum(chosen == position for chosen in self.positions.values()) / len(self.positions)


def price(samples: float) -> float:
    """Return the price of each component that differs from the base, in nats: half a logarithm, as BIC's price of a parameter.

    Without it, many components could be set to suit a few samples.
    """
    return 0.5 * math.log(max(samples, 1))


def searched(
    components: Sequence[str], values: Sequence[Position], score: Callable[[Positions], Jobs[float]], cost: float
) -> Jobs[Positions]:
    """Find positions with a high score(positions) - cost * (components that differ from the base).

    The base is the value with the highest score for all components; of equal ones the first. Then one component after another
    moves while that gains. If components do not interact, the result is the best of all.
    """
    alike: dict[Position, float] = {}
    for value in values:
        alike[value] = yield from score(dict.fromkeys(components, value))
    base = max(alike, key=lambda value: alike[value])
    chosen, best = dict.fromkeys(components, base), alike[base]
    for _ in range(SWEEPS if len(components) > 1 else 0):
        before = dict(chosen)
        for component in components:
            for value in values:
                if value == chosen[component]:
                    continue
                tried = chosen | {component: value}
                moved = sum(tried_value != base for tried_value in tried.values())
                reached = (yield from score(tried)) - cost * moved
                if reached > best:
                    chosen, best = tried, reached
        if chosen == before:
            break
    return chosen


def dialled(
    components: Mapping[str, Sequence[str]],
    candidates: Mapping[Position, Mapping[str, Tensor]],
    probability: Callable[[Tensors], Jobs[Tensor]],
    samples: int,
    weight: Tensor | None = None,
) -> Jobs[Dialled]:
    """Combine the candidates' values (by tensor), component by component (by its tensors).

    Args:
        components: The tensors of each component.
        candidates: The values.
        probability: Probability that the combined tensors give to the labels of the held-out samples.
        samples: How many samples are held out.
        weight: Weight of each of them, (V,) float64; None: 1.
    """

    def tensors_at(positions: Positions) -> Tensors:
        return {name: candidates[positions[component]][name] for component, names in components.items() for name in names}

    def score(positions: Positions) -> Jobs[float]:
        return log_likelihood((yield from probability(tensors_at(positions))), weight)

    counted = samples if weight is None else float(weight.sum())
    positions = yield from searched(list(components), list(candidates), score, price(counted))
    return Dialled(tensors_at(positions), positions)


def dial_of(
    settings: AttentionSettings | None, part_of: Mapping[str, str], layers: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return for each component the names of its tensors, as the attended part's aggregator has them; empty without a dial."""
    if settings is None:
        return {}
    if settings.components == "tensor":
        return {name: [name] for name, part in part_of.items() if part == "attended"}
    attended = {layer: [name for name in names if part_of[name] == "attended"] for layer, names in layers.items()}
    return {layer: names for layer, names in attended.items() if names}
