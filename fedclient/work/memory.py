"""The newest order of a device that lives in memory: nothing is written, and only what is handed in becomes bytes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from attune.common.wire.blobs import Blob, Buffer
from attune.common.wire.files import write_tensors
from attune.fedclient.messages import Part, Result
from attune.fedclient.work.orders import Tensors


class MemoryOrders:
    """Implements fedclient.work.orders.OrderStore. Tensors are kept as they are: nobody changes them in place."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.damage: list[str] = []
        self._newest: Result | None = None
        self._state: Tensors = {}
        self._beside: dict[str, Tensors] = {}
        self._blobs: dict[str, bytearray] = {}

    def __repr__(self) -> str:
        return f"<MemoryOrders of {self.who}, newest {self._newest.order_id if self._newest else None}>"

    @property
    def where(self) -> str:
        return f"the memory of {self.who}"

    def newest(self) -> Result | None:
        return self._newest

    def state(self, result: Result) -> Tensors:
        return dict(self._state)

    def beside(self, result: Result, what: str) -> Tensors | None:
        found = self._beside.get(what)
        return None if found is None else dict(found)

    def blob(self, order_id: str, part: str) -> Buffer:
        return Buffer(f"{self.who}'s {part}", self._blobs[part])

    def commit(
        self,
        result: Result,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> Result:
        blobs, handed_in = {}, []
        for name, tensors in parts.items():
            made = _Made(name)
            blob = write_tensors(made.begin, tensors)
            blobs[name] = made.data
            handed_in.append(Part(name, blob.digest, blob.size, result.versions.get(name, 0)))
        bytes_up = sum(part.size for part in handed_in)
        self._newest = msgspec.structs.replace(result, parts=tuple(handed_in), bytes_up=bytes_up)
        self._state, self._beside = dict(state), {what: dict(tensors) for what, tensors in beside.items()}
        self._blobs = blobs
        return self._newest

    def adopt(self, other: MemoryOrders) -> None:
        """As OrderStore."""
        self._newest, self._state, self._beside, self._blobs = other._newest, other._state, other._beside, other._blobs


class _Made:
    """A blob in the making, as common.wire.files writes one."""

    def __init__(self, name: str) -> None:
        self.name, self.data = name, bytearray()

    def begin(self, size: int) -> _Made:
        self.data = bytearray(size)
        return self

    def write(self, data: memoryview, offset: int) -> None:
        self.data[offset : offset + len(data)] = data

    def read_into(self, target: memoryview, offset: int) -> None:
        Buffer(self.name, self.data).read_into(target, offset)

    def finish(self, digest: str, size: int) -> Blob:
        return Blob(self.name, digest, size)

    def abort(self) -> None:
        self.data = bytearray()
