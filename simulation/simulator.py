"""Whole runs in this process: the common arguments of several runs over the same shards, and their garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attune.common.aio import Stopped, run_in_thread
from attune.common.torch_state import plain_torch
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import Executor
from attune.fedclient.work.processes.remote_executor import RemoteExecutor
from attune.fedserver.consent import code_in
from attune.seams import Watch
from attune.simulation.federation import Federation
from attune.simulation.progress import Watcher
from attune.simulation.result import SimulationResult
from attune.simulation.simulated_clock import SimulatedClock
from attune.simulation.simulation_state import MemoryState, SimulationState, executor_of, open_state

COLLECTED_OBJECTS = 50_000  # new objects before a collection of the youngest generation; Python's default is 700


@dataclass(frozen=True)
class Simulator:
    """Runner of federations over the same shards.

    Attributes:
        members: Data of each device, by its name.
        options: Options of all devices.
        executor: Same as in `attune.simulate`.
        workers: Same as in `attune.simulate`.
        awake_bytes: Same as in `attune.simulate`.
        page: The dashboard, if it is served.
        digest: Digest of the data.
        clock: As in `attune.simulate`.
        variants: Same as in `attune.simulate`.
    """

    members: Mapping[str, LazyShard]
    options: DeviceOptions
    executor: str | Executor | None
    workers: int | None
    awake_bytes: int
    page: Watch | None
    digest: str
    clock: SimulatedClock | None = None
    variants: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, overrides: Mapping[str, Any], place: Path | MemoryState, shown: Watcher, until: int | None = None
    ) -> SimulationResult:
        """Run a federation to its end, or until a round is closed and evaluated. Rounds that are closed are not repeated.

        Args:
            overrides: The settings, in the shape of a federation.toml.
            place: The folder or the state of the run, maybe with rounds that are closed.
            shown: Shows the progress.
            until: The round after which to stop; None: the last one.

        Raises:
            AttuneError: The federation cannot go on.
            KeyboardInterrupt: The user has stopped it. All state is safe.
        """
        # The caller of the simulation chose the models.
        options = replace(self.options, allow_models=tuple(sorted(code_in(overrides))))
        folder = place if isinstance(place, Path) else None
        opened: AbstractContextManager[SimulationState]
        opened = open_state(self.members, place) if isinstance(place, Path) else nullcontext(place)
        with opened as state:
            chosen = executor_of(self.executor, folder, self.workers)

            async def run(stopped: Stopped) -> SimulationResult:
                outcome = await Federation(
                    self.members,
                    overrides,
                    options,
                    state,
                    shown,
                    stopped,
                    chosen,
                    self.awake_bytes,
                    self.page,
                    until,
                    self.clock,
                    self.variants,
                ).run()
                return SimulationResult(outcome, state, chosen, self.digest)

            with chosen if isinstance(chosen, RemoteExecutor) else nullcontext(), _rare_collection(), plain_torch():
                return run_in_thread(run)


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Make garbage collection rare during the block, and skip the objects that exist at its beginning.

    A round makes some hundred objects for each device, and few of them are in cycles. With Python's defaults, looking at all
    objects of torch and Python again and again took a fifth of a round of small models.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if before[0]:
        gc.set_threshold(max(COLLECTED_OBJECTS, before[0]), *before[1:])
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
