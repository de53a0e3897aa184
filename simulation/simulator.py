"""Whole runs in this process: the common arguments of several runs over the same shards, and the races of `--method auto`.

A race ends with the best method for these devices. `fedserver.choosing.racing` decides; here the candidates are trained from
rung to rung, each as a run of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attune.common.aio import Stopped, run_in_thread
from attune.common.errors import FederationFailed, SettingError
from attune.common.torch_state import plain_torch
from attune.fedclient.data.holdout import FEWEST_SAMPLES
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import Executor
from attune.fedclient.work.processes.remote_executor import RemoteExecutor
from attune.fedserver.choosing.candidates import check_race, entrants_of
from attune.fedserver.choosing.race_course import Course
from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM, KEPT, NOTHING_HELD_OUT, rungs_of
from attune.fedserver.consent import code_in
from attune.seams import Watch
from attune.simulation.arguments import overrides as arguments_of
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


def race(simulator: Simulator, overrides: Mapping[str, Any], folder: Path | None, shown: Watcher) -> SimulationResult:
    """Train the candidates from rung to rung, and return the winner's result with the course of the race.

    Args:
        simulator: Runs federations over the shards.
        overrides: The settings, in the shape of a federation.toml, with `auto` as the method's name.
        folder: Folder for all state, with a folder for each candidate. None: memory.
        shown: Shows the progress.

    Raises:
        SettingError: Settings do not fit together, or no device holds samples out by which a method could be chosen.
        AttuneError: As in `Simulator.run`, for training alone.
    """
    members = simulator.members
    rounds = check_race(overrides)
    if all(shard.profile.samples < FEWEST_SAMPLES for shard in members.values()):
        raise SettingError(NOTHING_HELD_OUT)
    entrants = entrants_of(
        overrides,
        {name: shard.profile for name, shard in members.items()},
        lambda _, settings: arguments_of(len(members), None, None, None, None, settings),
        list(members),  # all devices are the caller's own
    )
    course = Course(list(entrants.settings), rounds, entrants.left_out)
    places: dict[str, Path | MemoryState] = {
        name: folder / name if folder else MemoryState(members) for name in entrants.settings
    }
    legs, results, before = LegWatcher(shown, len(members)), dict[str, SimulationResult](), 0
    try:
        while (leg := course.leg) is not None:
            legs.rounds_left = _rounds_left(course, leg.until, before, rounds)
            until, stage = leg.until if leg.until < rounds else None, len(course.rungs)
            try:
                results[leg.name] = simulator.run(entrants.settings[leg.name], places[leg.name], legs, until)
            except (FederationFailed, SettingError) as error:
                if leg.name == ALONE:
                    raise
                course.failed(str(error))
            else:
                course.scored(*results[leg.name].scores(leg.until))
            if len(course.rungs) > stage:
                before = leg.until
                places = {name: places[name] for name in course.present}  # memory of the others is freed
    finally:
        shown.end()
    result = course.result
    winner = results[result.chosen]
    winner.auto = result
    winner.rivals = {name: results[name] for name in result.rungs[-1].scores if name != result.chosen}
    return winner


def _rounds_left(course: Course, until: int, before: int, rounds: int) -> int:
    """Return an upper bound of the rounds that are left after the present leg."""
    second = rungs_of(rounds)[1]
    last = KEPT + len({ALONE, CLOSED_FORM} & {*course.present})  # entrants that take part to the end
    after = len(course.present) * max(0, second - until) + last * (rounds - max(until, second))
    return (course.legs_of_stage - 1) * (until - before) + after


class LegWatcher:
    """Watcher that shows all runs of a race as one piece of work.

    The work that is left is an upper bound, so the share that is done never falls.
    """

    def __init__(self, inner: Watcher, devices: int) -> None:
        self._inner, self._per_round, self._done, self.rounds_left = inner, 2 * devices, 0, 0

    def begin(self, orders: int) -> None:
        self._inner.begin(self._done + orders + self._per_round * self.rounds_left)

    def order_done(self) -> None:
        self._done += 1
        self._inner.order_done()

    def end(self) -> None:
        """No-op: other runs follow."""
