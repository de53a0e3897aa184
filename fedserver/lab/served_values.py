"""Values that are made to be served: generated weights, common models for unknown devices, and smaller lossless forms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

from attune.common.exchange.encodings import encode
from attune.common.protocol import PACKED
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import file_name
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import Tensors
from attune.fedserver.core.records import Smaller
from attune.fedserver.lab.aggregators.base import Aggregator
from attune.fedserver.lab.groups import Group
from attune.fedserver.ports.blobs import SERVED, Blobs, Damaged


class Packing:
    """Maker of smaller forms. Each is made once; `write` stores its tensors under a name."""

    def __init__(self, blobs: Blobs, write: Callable[[str, Tensors], Blob]) -> None:
        self._blobs, self._write = blobs, write
        self._made: dict[tuple[str, str], Blob] = {}  # by the digests of the value and of its base

    def whole(self, blobs: Iterable[Blob]) -> dict[str, Blob]:
        """Return the compressed form of blobs, by digest, if it is smaller.

        Raises:
            Damaged: A blob's bytes are not the written ones.
        """
        return {blob.digest: packed for blob in blobs if (packed := self._packed(blob, None)).size < blob.size}

    def changes(self, renewed: Iterable[tuple[Blob, Blob]]) -> dict[str, Smaller]:
        """Return the deltas of pairs (a value, what it was before), if they are smaller. An unreadable value is no base."""
        smaller: dict[str, Smaller] = {}
        for blob, base in renewed:
            if blob.digest not in smaller and blob.digest != base.digest:
                with contextlib.suppress(Damaged):
                    packed = self._packed(blob, base)
                    if packed.size < blob.size:
                        smaller[blob.digest] = Smaller(packed, base.digest)
        return smaller

    def take(self) -> list[Blob]:
        """Return all blobs that were made. The caller removes them."""
        made, self._made = list(self._made.values()), {}
        return made

    def _packed(self, blob: Blob, base: Blob | None) -> Blob:
        key = blob.digest, base.digest if base else ""
        if key not in self._made:
            with ExitStack() as stack:
                older = stack.enter_context(TensorFile(self._blobs.open(base))) if base else None
                packed = encode(stack.enter_context(TensorFile(self._blobs.open(blob))), PACKED, older).tensors
            self._made[key] = self._write(".".join([*map(file_name, filter(None, key)), PACKED]), packed)
        return self._made[key]


class ServedValues:
    """Values that are made to be served in the present state, and those of the state before that devices still hold.

    Args:
        blobs: The store of state and of updates.
        store: The store of what is made to be served.

    Attributes:
        generated: Generated weights, by part and client.
        before: The same from the state before, once deltas from it are served.
        cold_start: The common model, by group.
        packing: Smaller forms.
    """

    def __init__(self, blobs: Blobs, store: Blobs) -> None:
        self.store, self.packing = store, Packing(blobs, self.write)
        self.generated: dict[tuple[str, str], Blob] = {}
        self.before: dict[tuple[str, str], Blob] = {}
        self.cold_start: dict[str, Blob] = {}
        self._lent: dict[tuple[str, str], Blob] = {}  # from older states, for orders that are still open
        self._keeps = False  # whether deltas from generated values are served

    def write(self, name: str, tensors: Tensors) -> Blob:
        return write_tensors(partial(self.store.create, f"{SERVED}{name}.safetensors", durable=False), tensors)

    def generate(self, part: str, aggregator: Aggregator, clients: Sequence[str], closed: int) -> None:
        """Generate what is missing of a part. What was generated from an earlier state may still be there."""
        missing = [client for client in clients if (part, client) not in self.generated]
        if missing:
            for client, tensors in aggregator.generate(missing):
                self.generated[part, client] = self.write(f"{part}.{client}.{closed}", tensors)

    def changes(self, groups: Iterable[tuple[Group, Sequence[str]]]) -> dict[str, Smaller]:
        """Return the deltas of what clients are served from what they were served before the last commit, where that exists.

        `groups` come with the clients that are served of them.
        """
        self._keeps, renewed = True, []
        for group, clients in groups:
            for client in clients:
                slot, key = group.aggregator.slot(client), (group.part, client)
                base = self.before.get(key) if slot is None else group.vault.before(slot)
                if base is not None:
                    renewed.append((self.generated[key] if slot is None else group.vault.blob(slot), base))
        return self.packing.changes(renewed)

    def lend(self, earlier: ServedValues) -> None:
        """Keep what was generated from an older state until the orders with it are closed."""
        self._lent |= earlier.generated

    def settle(self, holders: Collection[str]) -> None:
        """Remove what was made for the state before; what `holders` have stays."""
        kept = self.generated if self._keeps else {}
        old = (*self.before.values(), *self.generated.values(), *self.cold_start.values(), *self.packing.take())
        lent, self._lent = self._lent, {key: blob for key, blob in (self._lent | self.generated).items() if key[1] in holders}
        gone = {blob.name for blob in (*old, *lent.values())} - {blob.name for blob in (*kept.values(), *self._lent.values())}
        self.store.remove([name for name in sorted(gone) if name.startswith(SERVED)])
        self.generated, self.before, self.cold_start = {}, kept, {}
