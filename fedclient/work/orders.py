"""What a learner needs of the place where the orders that it carried out are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from typing_extensions import Self

from attune.common.wire.blobs import Readable
from attune.fedclient.messages import Result

Tensors = dict[str, Tensor]


class OrderStore(Protocol):
    """Of the device `who`: the newest finished order, with its state. fedclient.work.state keeps it in a folder.

    damage: a line for each thing that was found damaged, and given up because there is an older order to go on from.
    """

    who: str
    damage: list[str]

    @property
    def where(self) -> str:
        """What errors call it."""

    def newest(self) -> Result | None:
        """The result of the order that was committed last. Errors: HomeMismatch, if there is none that is whole."""

    def state(self, result: Result) -> Tensors:
        """All tensors of the model after this order."""

    def beside(self, result: Result, what: str) -> Tensors | None:
        """The tensors committed under this name beside the model's, or None."""

    def blob(self, order_id: str, part: str) -> Path | Readable:
        """The bytes of one part of the update."""

    def commit(
        self,
        result: Result,
        state: Mapping[str, Tensor],
        beside: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
    ) -> Result:
        """Keeps all of it or nothing; returns `result` with its parts. Errors: DiskFull.

        beside: further sets of tensors that stay on the device, under names that no part has.
        """

    def adopt(self, other: Self) -> None:
        """Goes on from what another process has made of a copy of this."""
