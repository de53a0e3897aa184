"""A hypernetwork whose heads are spread over workers, with their moments; the rest, which is small, is in the server.

The bits are those of one process. Only the sums that lead back to the rest depend on an order, so dF goes through the heads in
their order, from worker to worker. Generating and stepping is done by all workers at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from attune.common.wire.header import Manifest, TensorSpec, layout_of
from attune.common.wire.tensors import manifest_of
from attune.fedserver.lab.aggregators.base import PartUpdate, Tensors, Vault, manifest_in
from attune.fedserver.lab.aggregators.hypernetwork import FEATURES, HEAD, SLOPE, SQUARE, Hypernetwork, State
from attune.fedserver.lab.aggregators.network import Head
from attune.fedserver.lab.aggregators.stored import NETWORK
from attune.fedserver.lab.build import AggregatorSpec
from attune.fedserver.lab.cluster.columns import Columns, columns_of
from attune.fedserver.lab.cluster.crew import Unavailable
from attune.fedserver.lab.cluster.groups import Group, Message, Told, cut
from attune.fedserver.lab.cluster.rows import Sent, received, row_of, sent
from attune.fedserver.lab.cluster.team import Team

T = TypeVar("T")
AHEAD = 2  # tensors on their way from workers while one is written


class SpreadHypernetwork(Hypernetwork):
    """If the team is gone, what is asked for is done again here, from what the vault has."""

    def __init__(self, team: Team, job: AggregatorSpec, vault: Vault) -> None:
        super().__init__(job.settings, vault, job.seed, job.components)  # type: ignore[arg-type]
        self._team, self._job = team, job
        self._groups: list[Group] = []
        self._admitted: dict[str, bool] = {}  # since the state was saved: client -> whether it is a founder

    def start(self, initial: Mapping[str, torch.Tensor]) -> None:
        super().start(initial)
        self._state = None  # all of it was here: from now on the heads are with the workers

    def admit(self, client: str, founder: bool = False) -> None:
        super().admit(client, founder)
        self._admitted[client] = founder

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        done = 0
        if self._team.present:
            try:
                for each in super().generate(clients):
                    done += 1
                    yield each
            except Unavailable as why:
                self._team.give_up(why)
        yield from super().generate(clients[done:])

    def cold_start(self) -> Tensors:
        return self._surely(super().cold_start)

    def _close(self, updates: Sequence[PartUpdate], phi: bool) -> dict[str, float]:
        metrics = self._surely(partial(super()._close, updates, phi))
        self._admitted = {}
        return metrics

    def _surely(self, work: Callable[[], T]) -> T:
        if self._team.present:
            try:
                return work()
            except Unavailable as why:
                self._team.give_up(why)
        return work()

    def _in_memory(self, name: str) -> bool:
        return not (self._team.present and name.rpartition("/")[2].startswith(HEAD))

    def _load(self) -> State:
        lost = bool(self._groups) and (self._state is None or not self._team.present)
        if lost:
            self._state, self._groups = None, []
        state = super()._load()
        if lost:
            for client, founder in self._admitted.items():
                state.embeddings.admit(client, founder)
        if self._team.present and not self._groups:
            seats = self._team.seats
            cuts = cut(state.heads, len(seats))
            self._groups = [Group(seats[number], self._job, number, heads) for number, heads in enumerate(cuts)]
            for group in self._groups:
                for method, message in self._making(state, group):
                    group.tell(method, message)
        return state

    def _making(self, state: State, group: Group) -> list[tuple[str, Message]]:
        """What a worker is told to have these heads as the vault has them."""
        initial = {name: state.initial[name] for head in group.heads for name in head.names}
        fills = [("fill", partial(self._head_in_vault, head)) for head in group.heads]
        return [("hold", lambda: (group.job, sent(initial))), *fills]

    def _head_in_vault(self, head: Head) -> tuple[Sent]:
        """A head's weights and moments."""
        saved, own = self._vault.read(NETWORK), (head.weight, head.bias)
        manifest = {name: spec for name, spec in manifest_in(saved).items() if name.rpartition("/")[2] in own}
        return ((manifest, row_of(saved, manifest)),)

    def _descend_heads(self, updates: Sequence[PartUpdate], phi: bool) -> None:
        if not self._team.present:
            super()._descend_heads(updates, phi)
            return
        state, gathered = self._load(), self._gathered()
        part, features = manifest_in(updates[0].tensors), sent({FEATURES: gathered.F_SH.T})
        for group in self._groups:
            manifest = {name: part[name] for head in group.heads for name in head.names}
            group.tell("take", partial(_columns, updates, manifest))
        for group in self._groups:
            before = sent({SLOPE: gathered.slope, SQUARE: gathered.square})
            after = received(group.tell("pass_on", partial(_both, features, before)).answer())
            gathered.slope, gathered.square = after[SLOPE].clone(), after[SQUARE].clone()
            if phi:
                group.tell("step", partial(_one, state.step))

    def _forward(self, state: State, F_SH: torch.Tensor) -> Tensors:
        if not self._team.present:
            return super()._forward(state, F_SH)
        features = sent({FEATURES: F_SH.T})
        asked = [group.ask("forward", features) for group in self._groups]
        return {name: rows for each in asked for name, rows in received(each.answer()).items()}

    def _save(self, state: State) -> None:
        """The heads come to the vault from the workers, a tensor at a time and the next one on its way."""
        if not self._groups:
            super()._save(state)
            return
        for group in self._groups:
            group.settle()
        own, heads = self._tensors(state), self._saved_of_heads(state)
        manifest = manifest_of(own) | {name: spec for name, (_, spec) in heads.items()}
        order = list(layout_of(manifest).manifest)
        coming = deque(name for name in order if name in heads)
        asked: deque[Told] = deque()
        with self._vault.writer(NETWORK, manifest) as writer:
            for name in order:
                while coming and len(asked) < AHEAD:
                    asked.append(heads[coming[0]][0].ask("tensor", coming.popleft()))
                writer.put(name, received(asked.popleft().answer())[name] if name in heads else own[name])
        for group in self._groups:
            group.saved(self._making(state, group))

    def _saved_of_heads(self, state: State) -> dict[str, tuple[Group, TensorSpec]]:
        """Who has a head's weight, bias or moment, by the name under which it is saved, and its dtype and shape."""
        bias = manifest_of({"bias": state.network["mlp.0.bias"]})["bias"]
        found = {}
        for group in self._groups:
            for head in group.heads:
                rows = sum(head.sizes)
                for prefix in ("", *(f"{kind}/" for kind in state.moments)):
                    found[prefix + head.weight] = group, TensorSpec(bias.dtype, (rows, *bias.shape))
                    found[prefix + head.bias] = group, TensorSpec(bias.dtype, (rows,))
        return found


def _columns(updates: Sequence[PartUpdate], manifest: Manifest) -> tuple[Columns]:
    return (columns_of(updates, manifest),)


def _both(*messages: Sent) -> Sequence[Sent]:
    return messages


def _one(number: int) -> tuple[int]:
    return (number,)
