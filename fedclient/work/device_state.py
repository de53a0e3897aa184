"""State of a device between two orders: the tensors of its models, and what it keeps beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import msgspec
from msgspec.structs import replace
from torch import Tensor

from attune.common.errors import HomeMismatch
from attune.common.exchange.messages import BlobRef, Order
from attune.common.methods.method import SOLVED
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import manifest_of
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.embedding import PART, Embedding
from attune.fedclient.work.orders import OrderStore

Tensors = dict[str, Tensor]

# The names under which sets of tensors are committed beside the model's.
RECEIVED, LOCAL, TRAINED, OWED, EMBEDDING = "received", "local", "trained", "owed", "embedding"
LOOP, LOOP_LOCAL, GIVEN = "loop", "loop-local", "given"


class DeviceState(msgspec.Struct, frozen=True):
    """State of a device after an order. It is never changed in place, so an order that is given up leaves no trace.

    Attributes:
        theta: All tensors of the model, and those that the objective keeps beside it, which are in no part and never handed in.
        received: The values that the server served last, of the tensors that are not private; at first the initial ones.
        embedding: The device's embedding, if it keeps one.
        trained: The dialled tensors after the last training, if evaluation replaces them; None: those of theta.
        owed: Errors of the last update's encoding, which the next update makes up for.
        local: The local model; None without one.
        solved: What the server served last of the closed form that joins blends; empty: nothing since the start.
        given: What the device gave to the one sum over samples behind masks; empty: nothing.
        loop: State that a user's training loop keeps for the method's model.
        loop_local: The same for the local model.
    """

    theta: Tensors
    received: Tensors
    embedding: Embedding | None = None
    trained: Tensors | None = None
    owed: Tensors = {}
    local: Tensors | None = None
    solved: Tensors = {}
    given: Tensors = {}
    loop: Mapping[str, Tensor] = {}
    loop_local: Mapping[str, Tensor] = {}

    def restored(self, orders: OrderStore, newest: OrderResult) -> tuple[DeviceState, bool]:
        """Return the state after a committed order, and whether the store has the values that were served last.

        Args:
            orders: The store.
            newest: The result of the order.

        Raises:
            HomeMismatch: The stored tensors are of another model.
        """
        stored = orders.state(newest)
        if manifest_of(stored) != manifest_of(self.theta):
            raise HomeMismatch(f"the state under {orders.where} is not of this federation's model; use another --home")
        theta, received = {name: stored[name] for name in self.theta}, orders.beside(newest, RECEIVED)
        saved = orders.beside(newest, EMBEDDING) if self.embedding else None
        state = replace(
            self,
            theta=theta,
            received={name: (received or theta)[name] for name in self.received},
            embedding=self.embedding.restored(saved) if self.embedding and saved else self.embedding,
            trained=orders.beside(newest, TRAINED),
            owed=orders.beside(newest, OWED) or {},
            local=orders.beside(newest, LOCAL),
            given=orders.beside(newest, GIVEN) or {},
            loop=orders.beside(newest, LOOP) or {},
            loop_local=orders.beside(newest, LOOP_LOCAL) or {},
        )
        return state, received is not None

    def served(self, order: Order, fetched: Mapping[str, Tensors], parts: Mapping[str, Manifest]) -> DeviceState:
        """Return the state with what an order serves.

        Args:
            order: The order.
            fetched: The values that the device lacked, by digest.
            parts: The tensors of each part.
        """
        embedding = self.embedding.after(order, fetched) if self.embedding else None
        theta, received, solved = dict(self.theta), dict(self.received), self.solved
        for ref in order.downloads:
            if embedding and ref.part == PART:
                tensors = embedding.weights()
            else:
                tensors = dict(fetched.get(ref.digest) or self.held(ref.part, parts[ref.part]))
            if ref.part == SOLVED:
                solved = tensors
            else:
                theta.update(tensors)
                received.update(tensors)
        return replace(self, theta=theta, received=received, embedding=embedding, solved=solved)

    def held(self, part: str, names: Iterable[str]) -> Tensors:
        """Return the value of a part, with tensors of these names, as it was served last."""
        if self.embedding and part == PART:
            return self.embedding.network
        return self.solved if part == SOLVED else {name: self.received[name] for name in names}

    def common(self, refs: Iterable[BlobRef], fetched: Mapping[str, Tensors], parts: Mapping[str, Manifest]) -> Tensors:
        """Return the cold-start model with these references; empty without any."""
        common: Tensors = {}
        for ref in refs:
            tensors = fetched[ref.digest] if ref.digest in fetched else self.held(ref.part, parts[ref.part])
            common |= self.embedding.common(tensors) if self.embedding and ref.part == PART else tensors
        return common

    def beside(self, keeps_received: bool) -> dict[str, Tensors]:
        """Return the sets of tensors to commit beside theta, by name.

        Args:
            keeps_received: Whether the served values are needed after a restart.
        """
        sets: dict[str, Mapping[str, Tensor] | None] = {
            EMBEDDING: self.embedding.tensors() if self.embedding else None,
            LOCAL: self.local,
            GIVEN: self.given,
            TRAINED: self.trained,
            OWED: self.owed,
            LOOP: self.loop,
            LOOP_LOCAL: self.loop_local,
        }
        return ({RECEIVED: self.received} if keeps_received else {}) | {
            name: dict(tensors) for name, tensors in sets.items() if tensors
        }

    def all_tensors(self) -> Iterator[Tensor]:
        """Return every tensor that the device holds in memory."""
        network = self.embedding.network if self.embedding else {}
        sets = (self.theta, self.received, network, self.local or {}, self.trained or {}, self.owed)
        return chain.from_iterable([tensors.values() for tensors in sets if tensors])
