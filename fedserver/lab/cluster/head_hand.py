"""What lives in a worker for hypernetworks: some heads each, with the moments of their optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from attune.fedserver.lab.aggregators.base import PartUpdate
from attune.fedserver.lab.aggregators.hypernetwork import FEATURES, SLOPE, SQUARE, Hypernetwork
from attune.fedserver.lab.build import AggregatorSpec
from attune.fedserver.lab.cluster.columns import Columns, Portion
from attune.fedserver.lab.cluster.rows import Sent, received, sent

Heads = tuple[str, int]  # the part, and which of its groups of heads


@dataclass
class _Held:
    network: Hypernetwork
    updates: list[PartUpdate]


class HeadHand:
    """Everything that it is sent is copied to memory of its own, as a product's bits may depend on where its factors lie."""

    def __init__(self) -> None:
        self._heads: dict[Heads, _Held] = {}

    def hold(self, heads: Heads, job: AggregatorSpec, initial: Sent) -> None:
        """These heads, in place of what is held of them; their tensors follow. initial: what they generate."""
        network = Hypernetwork(job.settings, Portion(()), job.seed, job.components)  # type: ignore[arg-type]
        network.hold({name: tensor.clone() for name, tensor in received(initial).items()})
        self._heads[heads] = _Held(network, [])

    def fill(self, heads: Heads, saved: Sent) -> None:
        """Weights and moments of one head."""
        self._heads[heads].network.fill(received(saved))

    def take(self, heads: Heads, columns: Columns) -> None:
        """What the cohort hands in of what these heads generate, for this round."""
        self._heads[heads].updates = columns.updates()

    def pass_on(self, heads: Heads, features: Sent, gathered: Sent) -> Sent:
        """features: {FEATURES: (H, S)}; gathered: SLOPE and SQUARE, as the heads before left them. Returns the next ones."""
        held, before = self._heads[heads], {name: tensor.clone() for name, tensor in received(gathered).items()}
        F_HS = received(features)[FEATURES].clone()
        return sent(held.network.pass_on(held.updates, F_HS.T, before[SLOPE], before[SQUARE]))

    def step(self, heads: Heads, number: int) -> None:
        """After `pass_on`."""
        held = self._heads[heads]
        held.network.step_heads(held.updates, number)
        held.updates = []

    def forward(self, heads: Heads, features: Sent) -> Sent:
        """features: {FEATURES: (H, S)}. For each tensor that these heads generate its rows, (S, R)."""
        return sent(self._heads[heads].network.forward(received(features)[FEATURES].clone().T))

    def tensor(self, heads: Heads, name: str) -> Sent:
        """A weight or a moment, by the name under which it is saved."""
        return sent({name: self._heads[heads].network.tensor(name)})
