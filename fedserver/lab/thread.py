"""The lab on one thread of this process. torch is imported there, by the first job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from attune.common.methods.method import PartKind
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller
from attune.fedserver.executors import Executors
from attune.fedserver.ports.blobs import Blobs
from attune.fedserver.ports.lab import NO_VARIANTS, Arrived, RoundOutcome, Served, Started

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Unmasking
    from attune.fedserver.lab.engine import Engine


class ThreadLab:
    """Lab of one federation, on one thread of this process.

    Every job may raise AttuneError, among them Damaged, which names the blob.

    Args:
        blobs: The blobs of the federation.
        executors: Its threads.
        threads: How many threads one job's computations use; 0: all cores but one.
        max_model_bytes: The largest model of a new federation; 0: no limit.
        device: The processor of large products (server.device).
    """

    def __init__(
        self,
        blobs: Blobs,
        executors: Executors,
        threads: int = 0,
        max_model_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        self._blobs, self._executors, self._max_model_bytes = blobs, executors, max_model_bytes
        self._threads = threads or max(1, (os.cpu_count() or 2) - 1)
        self._device = device
        self._engine: Engine | None = None

    async def start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str] = NO_VARIANTS) -> Started:
        """Take up the state after `closed` rounds, or make the state of a new federation (no slots).

        `variants` has the variant of the model of each client that has one, as for `vary`. Blobs of the state that belong to no
        slot are removed. Damaged ones are made again where that gives the same bits.

        Raises:
            SettingError: The model or method cannot be built.
            Damaged: A blob cannot be made again; it must be restored.
        """
        return await self._executors.worker(self._start, plan, slots, closed, variants)

    def _start(self, plan: Plan, slots: Sequence[Slot], closed: int, variants: Mapping[str, str]) -> Started:
        import torch

        from attune.fedserver.lab import accelerator
        from attune.fedserver.lab.recovery import take_up

        torch.set_num_threads(self._threads)
        accelerator.use(self._device)
        if not slots:
            from attune.common.methods.fit import NO_PRIVACY, check_model
            from attune.common.methods.registry import configured_in
            from attune.fedserver.lab.declared import check_size

            for spec in (plan.model, *plan.variants.values()):
                if self._max_model_bytes:
                    check_size(spec, self._max_model_bytes)
                check_model(spec, configured_in(plan), plan.seed, plan.privacy or NO_PRIVACY, plan.task)
        self._engine, remade = take_up(plan, slots, self._blobs, closed, variants)
        return Started(self._engine.max_bytes(), self._engine.staged_slots(), remade, self._engine.body_digest)

    async def serve(
        self, clients: Sequence[str], founders: Sequence[str] = (), version: int | None = None, solved: bool = True
    ) -> Served:
        """Return what each client is served now, by client and part.

        Args:
            clients: The clients that are served.
            founders: Those of them that enrolled before the first round was closed.
            version: The round after which the state was made that they are served once more; None: the present state.
            solved: Whether they are served the closed form that joins blends, too.
        """
        if version is not None:
            return await self._executors.worker(self._started.serve_again, clients, founders, solved, version)
        return await self._executors.worker(self._started.serve, clients, founders, solved)

    async def describe(self, client: str, description: Sequence[float]) -> bool:
        """Note what a client says of its data (common.models.feature_mean), for embeddings that start from descriptions.

        It is kept in memory until the client's update is in a committed state. Return whether it has the form of the model's
        descriptions; if not, it is ignored.
        """
        return await self._executors.worker(self._started.told.take, {client: description})

    async def vary(self, variants: Mapping[str, str]) -> None:
        """Note the variants of the model that clients have, before they are served. One without a variant has the plan's."""
        await self._executors.worker(self._started.vary, variants)

    async def cold_start(self, clients: Sequence[str]) -> Served:
        """Return for each client and part what an unknown device of its variant is served."""
        return await self._executors.worker(self._started.cold_start, clients)

    async def pack(self, blobs: Sequence[Blob]) -> dict[str, Blob]:
        """Return, by the digest of what is served, the same without loss in fewer bytes (PACKED), where they are fewer."""
        return await self._executors.worker(self._started.pack, blobs)

    async def changes(self, clients: Sequence[str], parts: Sequence[str]) -> dict[str, Smaller]:
        """Return, by the digest of what these clients are served of these parts, its change from what the last commit replaced.

        A change is left out where the older value is gone or is the same, or where it makes no fewer bytes. Older values are
        kept from the first such call on.
        """
        return await self._executors.worker(self._started.changes, clients, cast(Sequence[PartKind], parts))

    async def arrive(self, client: str, part: str, blob: Blob, encoding: str, served: bool, max_norm: float) -> Arrived:
        """Decode and check an update's part that has just come in.

        Args:
            client: The device.
            part: The part of the update.
            blob: Its bytes as they came.
            encoding: The encoding that the device's order asked for.
            served: Whether that order served a value from which the blob may be the change.
            max_norm: The largest L2 norm of the change; 0: no limit.

        Raises:
            WireError: It cannot be read, or does not fit; names device and tensor.
            UpdateRefused: It could harm the state; names the device.
        """
        return await self._executors.worker(
            self._started.arrive, client, cast(PartKind, part), blob, encoding, served, max_norm
        )

    async def aggregate(
        self,
        entries: Mapping[str, AcceptedUpdate],
        founders: Sequence[str] = (),
        adaptation: AdaptationSpec | None = None,
        unmasking: Unmasking | None = None,
    ) -> RoundOutcome:
        """Make the next state of a cohort's accepted updates.

        Args:
            entries: The updates, by client.
            founders: Same as for `serve`.
            adaptation: Parts that move, if the cohort are newcomers to a finished federation.
            unmasking: Secrets that take the masks off the sum of the updates, under secure aggregation.
        """
        return await self._executors.worker(self._started.aggregate, entries, founders, adaptation, unmasking)

    async def go_back(self, to: int) -> RoundOutcome:
        """Make the state after the round `to` the next one.

        If that state is not known any more, or damaged, the outcome has no slot, and `refused` says so.
        """
        return await self._executors.worker(self._started.go_back, to)

    async def another_start(self) -> RoundOutcome:
        """Make a state that is near the present one the next one, from which a secure sum may be made again."""
        return await self._executors.worker(self._started.another_start)

    async def settle(self, holders: Sequence[str] = ()) -> None:
        """Make the outcome the present state, after its commit. What was generated for `holders` stays for their orders."""
        await self._executors.worker(self._started.settle, holders)

    async def worths(self) -> dict[str, str]:
        """Return what each site is told of its worth to the others, by name; empty where nothing can be said."""
        return await self._executors.worker(self._worths)

    def _worths(self) -> dict[str, str]:
        from attune.fedserver.lab.worth import words_for_sites

        return words_for_sites(self._started.slots(), self._blobs)

    async def forget(self, oldest: int) -> None:
        """Remove the states before that after the round `oldest`, to which the federation does not go back any more.

        The state before the present one always stays.
        """
        await self._executors.worker(self._started.forget, oldest)

    @property
    def _started(self) -> Engine:
        assert self._engine is not None  # noqa: S101 (`start` comes first)
        return self._engine
