"""`--method auto`: a race of methods over the same shards, which ends with the best one for these devices.

`fedserver.choosing.racing` decides. Here the candidates are trained from rung to rung, each as a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attune.common.errors import FederationFailed, SettingError
from attune.fedclient.data.holdout import FEWEST_SAMPLES
from attune.fedserver.choosing.candidates import check_race, entrants_of
from attune.fedserver.choosing.race_course import Course
from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM, KEPT, NOTHING_HELD_OUT, rungs_of
from attune.simulation.arguments import overrides as arguments_of
from attune.simulation.progress import Watcher
from attune.simulation.result import SimulationResult
from attune.simulation.simulation_state import MemoryState
from attune.simulation.simulator import Simulator


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
